//! Parses durations in options of the lab.

use std::time::Duration;

/// A whole number of seconds, minutes or hours: 90s, 10m, 2h.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let unit = |unit| text.strip_suffix(unit).and_then(|number| number.parse::<u64>().ok());
    let seconds = unit('s').or_else(|| unit('m').map(|m| m * 60)).or_else(|| unit('h').map(|h| h * 3600));
    seconds.map(Duration::from_secs).ok_or_else(|| "write 90s, 10m or 2h".to_owned())
}
