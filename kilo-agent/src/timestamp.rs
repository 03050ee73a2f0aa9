//! Points in time for the status.

use std::{
    fmt,
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

/// Unix seconds; RFC 3339 in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// The present time.
    pub fn now() -> Self {
        SystemTime::now().into()
    }

    /// The time `age` before this one.
    #[must_use]
    pub fn before(self, age: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(age.as_secs()).unwrap_or(i64::MAX)))
    }

    /// The time since `earlier`, in whole seconds.
    pub fn since(self, earlier: Self) -> humantime::FormattedDuration {
        let seconds = u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0);
        humantime::format_duration(Duration::from_secs(seconds))
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self(i64::try_from(seconds).unwrap_or(i64::MAX))
    }
}

/// The last second that RFC 3339 can represent (year 9999).
const LATEST: u64 = 253_402_300_799;

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = u64::try_from(self.0).unwrap_or(0).min(LATEST);
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).fmt(f)
    }
}

impl FromStr for Timestamp {
    type Err = humantime::TimestampError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        humantime::parse_rfc3339(text).map(Self::from)
    }
}

impl TryFrom<String> for Timestamp {
    type Error = humantime::TimestampError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Timestamp> for String {
    fn from(time: Timestamp) -> Self {
        time.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_written_as_kubernetes_does_and_read_back() {
        let time = Timestamp(1_780_000_000);
        assert_eq!(time.to_string(), "2026-05-28T20:26:40Z");
        assert_eq!(time.to_string().parse(), Ok(time));
        for absurd in [i64::MIN, i64::MAX] {
            assert!(!Timestamp(absurd).to_string().is_empty());
        }
    }
}
