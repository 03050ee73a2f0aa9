//! Waiting: the one place in the lab and in the tests that sleeps, so that every pause says what it is for.
//! What can be awaited is awaited by [`until`] or [`settled`]; the others are for time that has to pass.

use std::{
    fmt::Display,
    ops::ControlFlow,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, ensure};

/// Bounds of the pause between two looks, which is a sixteenth of the time waited so far: short waits end
/// promptly, and long ones cost little.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));

/// What one look at something awaited returns.
pub trait Awaited {
    /// What is returned when it has come.
    type Found;
    /// What is there instead; shown when the time is over, unless it is empty.
    type Instead: Display;

    /// What has come after this time, or what is there instead.
    fn found(self, waited: Duration) -> Result<Self::Found, Self::Instead>;
}

/// A condition; returns how long it took to become true.
impl Awaited for bool {
    type Found = Duration;
    type Instead = &'static str;

    fn found(self, waited: Duration) -> Result<Duration, &'static str> {
        if self { Ok(waited) } else { Err("") }
    }
}

/// A value, once there is one.
impl<T> Awaited for Option<T> {
    type Found = T;
    type Instead = &'static str;

    fn found(self, _: Duration) -> Result<T, &'static str> {
        self.ok_or("")
    }
}

/// A value, or what the message is to show of the last look.
impl<T, E: Display> Awaited for Result<T, E> {
    type Found = T;
    type Instead = E;

    fn found(self, _: Duration) -> Self {
        self
    }
}

/// A wait with a limit, for callers that sleep in their own way.
pub struct Patience<'a> {
    what: &'a str,
    limit: Duration,
    began: Instant,
}

impl<'a> Patience<'a> {
    /// Starts the wait.
    pub fn new(what: &'a str, limit: Duration) -> Self {
        Self { what, limit, began: Instant::now() }
    }

    /// What has come, or how long to sleep until the next look.
    ///
    /// # Errors
    /// With a sentence, when the time is over.
    pub fn after<L: Awaited>(&self, look: L) -> Result<ControlFlow<L::Found, Duration>> {
        let waited = self.began.elapsed();
        match look.found(waited) {
            Ok(found) => Ok(ControlFlow::Break(found)),
            Err(_) if waited < self.limit => {
                Ok(ControlFlow::Continue((waited / 16).clamp(PAUSES.0, PAUSES.1)))
            }
            Err(instead) => {
                let instead = Some(instead.to_string()).filter(|text| !text.is_empty());
                let shown = instead.map(|text| format!("\nat last: {text}")).unwrap_or_default();
                Err(anyhow!("waited {:?} in vain: {}{shown}", self.limit, self.what))
            }
        }
    }
}

/// Waits until a look finds it; returns what it found.
///
/// # Errors
/// When it is not found within the limit, or a look fails.
pub fn until<L: Awaited>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> Result<L>,
) -> Result<L::Found> {
    let patience = Patience::new(what, limit);
    loop {
        match patience.after(look()?)? {
            ControlFlow::Break(found) => return Ok(found),
            ControlFlow::Continue(pause) => sleep(pause),
        }
    }
}

/// Waits until a value has been the same for some time; returns it.
///
/// # Errors
/// When it still changes after the limit, or a look fails.
pub fn settled<T: PartialEq>(
    what: &str,
    limit: Duration,
    quiet: Duration,
    mut look: impl FnMut() -> Result<T>,
) -> Result<T> {
    let (mut last, mut since) = (look()?, Instant::now());
    until(&format!("{what} stays the same for {quiet:?}"), limit, || {
        let now = look()?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
        Ok(since.elapsed() >= quiet)
    })?;
    Ok(last)
}

/// Checks a condition for so long, and fails as soon as it does not hold.
///
/// # Errors
/// When it does not hold, or a check fails.
pub fn stays(what: &str, time: Duration, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    loop {
        let waited = began.elapsed();
        ensure!(is_so()?, "no longer so after {waited:?} of {time:?}: {what}");
        if waited >= time {
            return Ok(());
        }
        sleep(PAUSES.1.min(time.saturating_sub(waited)));
    }
}

/// Lets a fault last for so long before it is mended.
pub fn fault_lasts(time: Duration) {
    sleep(time);
}

/// Waits where time itself is needed, because a clock is read, traffic is counted or others give no sign.
pub fn time_passes(time: Duration, _why: &str) {
    sleep(time);
}

/// Pauses between repeated actions, such as sending packets.
pub fn pace(pause: Duration) {
    sleep(pause);
}

#[expect(
    clippy::disallowed_methods,
    reason = "all waiting of the lab and the tests goes through this module"
)]
fn sleep(time: Duration) {
    std::thread::sleep(time);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(30);

    #[test]
    fn what_comes_is_returned() {
        let mut looks = 0;
        let found = until("the third look", SOON * 100, || {
            looks += 1;
            Ok((looks == 3).then_some("it"))
        });
        assert_eq!((found.unwrap(), looks), ("it", 3));
        assert!(until("at once", Duration::ZERO, || Ok(true)).unwrap() < SOON);
    }

    #[test]
    fn what_does_not_come_is_named_with_the_time_and_the_last_look() {
        let error = |ended: Result<Duration>| ended.unwrap_err().to_string();
        assert_eq!(error(until("the moon", SOON, || Ok(false))), "waited 30ms in vain: the moon");
        let said = until("the moon", SOON, || Ok(Err::<(), _>("clouds"))).unwrap_err().to_string();
        assert_eq!(said, "waited 30ms in vain: the moon\nat last: clouds");
        assert_eq!(error(until("the moon", SOON * 100, || Err::<bool, _>(anyhow!("no sky")))), "no sky");
    }

    #[test]
    fn what_changes_is_not_settled() {
        let mut values = [1, 2, 3].into_iter();
        let settles = settled("it", SOON * 100, SOON, || Ok(values.next().unwrap_or(4)));
        assert_eq!(settles.unwrap(), 4);
        let mut counts = 0..;
        let said = settled("it", SOON * 2, SOON, || Ok(counts.next())).unwrap_err().to_string();
        assert_eq!(said, "waited 60ms in vain: it stays the same for 30ms");
    }

    #[test]
    fn what_stays_is_looked_at_to_the_end() {
        let began = Instant::now();
        stays("it", SOON * 2, || Ok(true)).unwrap();
        assert!(began.elapsed() >= SOON * 2);
        let said = stays("it", SOON * 100, || Ok(began.elapsed() < SOON * 3)).unwrap_err().to_string();
        assert!(said.starts_with("no longer so after ") && said.ends_with(" of 3s: it"), "{said}");
        let said = stays("it", SOON, || Ok(began.elapsed() < SOON)).unwrap_err().to_string();
        assert!(said.starts_with("no longer so after "), "{said}");
    }
}
