//! Waits for wake-ups by the ring, the agent, links, and the next deadline.

use std::{
    os::fd::{AsFd, AsRawFd as _},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use kilo_failover::Micros;
use kilo_host::net::link_down::LinkEvents;
use nix::{
    errno::Errno,
    libc,
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};

/// Sources with something to read, besides signals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub agent: bool,
    pub links: bool,
}

/// Everything that is waited for.
#[derive(Debug)]
pub struct Wait {
    epoll: Epoll,
    /// The wait with microsecond resolution.
    fine: fn(&Epoll, &mut [libc::epoll_event], Micros) -> nix::Result<usize>,
    /// It was refused, for example by an older runtime's seccomp profile: whole milliseconds are used
    /// instead.
    is_refused: AtomicBool,
    /// Whether the failure to wait has been logged.
    is_said: AtomicBool,
}

const RING: u64 = 0;
const AGENT: u64 = 1;
const LINKS: u64 = 2;
/// One event per source.
const MOST: usize = 3;
/// Longest sleep when waiting is impossible.
const BLIND: Micros = 5_000;

impl Wait {
    /// The ring is edge-triggered: only records that request a wake-up end a wait. Unread answers to probes
    /// do not, and are read when something is due. The same holds for a signal behind a record that another
    /// CPU is still writing; signals are repeated until they are answered.
    ///
    /// # Errors
    /// When the kernel cannot create a descriptor.
    pub fn for_any(ring: &impl AsFd, agent: &impl AsFd, links: Option<&LinkEvents>) -> nix::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(ring, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, RING))?;
        epoll.add(agent, EpollEvent::new(EpollFlags::EPOLLIN, AGENT))?;
        if let Some(links) = links {
            epoll.add(links, EpollEvent::new(EpollFlags::EPOLLIN, LINKS))?;
        }
        Ok(Self {
            epoll,
            fine: wait_fine,
            is_refused: AtomicBool::new(false),
            is_said: AtomicBool::new(false),
        })
    }

    /// Waits for at most this many microseconds; an interrupted wait is a short one. If the kernel refuses to
    /// wait at all, this sleeps instead: the thread must not spin.
    pub fn at_most(&self, micros: Micros) -> Ready {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MOST];
        let count = match self.wait(&mut events, micros) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(error) => {
                if !self.is_said.swap(true, Ordering::Relaxed) {
                    tracing::error!(%error, "failover cannot wait for signals; polling for them every few milliseconds");
                }
                std::thread::sleep(Duration::from_micros(micros.min(BLIND)));
                return Ready { agent: true, links: true };
            }
        };
        let ready = events.iter().take(count).map(|event| event.u64);
        ready.fold(Ready::default(), |ready, from| Ready {
            agent: ready.agent || from == AGENT,
            links: ready.links || from == LINKS,
        })
    }

    fn wait(&self, events: &mut [libc::epoll_event; MOST], micros: Micros) -> nix::Result<usize> {
        if !self.is_refused.load(Ordering::Relaxed) {
            match (self.fine)(&self.epoll, events, micros) {
                Err(error @ (Errno::ENOSYS | Errno::EPERM)) => {
                    tracing::warn!(
                        %error,
                        "the kernel or a seccomp profile refuses epoll_pwait2; failover waits in whole milliseconds"
                    );
                    self.is_refused.store(true, Ordering::Relaxed);
                }
                waited => return waited,
            }
        }
        let mut coarse = [EpollEvent::empty(); MOST];
        let millis = EpollTimeout::try_from(micros.div_ceil(1_000)).unwrap_or(EpollTimeout::NONE);
        let count = self.epoll.wait(&mut coarse, millis)?;
        for (event, ready) in events.iter_mut().zip(&coarse[..count]) {
            event.u64 = ready.data();
        }
        Ok(count)
    }
}

fn wait_fine(epoll: &Epoll, events: &mut [libc::epoll_event], micros: Micros) -> nix::Result<usize> {
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(micros / 1_000_000).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::try_from(micros % 1_000_000 * 1_000).unwrap_or(0),
    };
    let (epoll, most) = (epoll.0.as_raw_fd(), libc::c_int::try_from(events.len()).unwrap_or(0));
    // SAFETY: the descriptor is open as long as `epoll`, and the kernel writes no more than `most` events.
    let count =
        unsafe { libc::epoll_pwait2(epoll, events.as_mut_ptr(), most, &raw const time, std::ptr::null()) };
    Errno::result(count).map(|count| usize::try_from(count).unwrap_or(0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::time::Instant;

    use nix::sys::eventfd::EventFd;

    use super::*;

    #[test]
    fn a_wait_that_is_refused_does_not_spin_and_sees_what_is_ready() {
        for error in [Errno::EPERM, Errno::ENOSYS, Errno::EBADF] {
            let (ring, agent) = (EventFd::new().unwrap(), EventFd::new().unwrap());
            let mut wait = Wait::for_any(&ring, &agent, None).unwrap();
            wait.fine = match error {
                Errno::EPERM => |_, _, _| Err(Errno::EPERM),
                Errno::ENOSYS => |_, _, _| Err(Errno::ENOSYS),
                _ => |_, _, _| Err(Errno::EBADF),
            };
            let began = Instant::now();
            for _ in 0..5 {
                wait.at_most(4_000);
            }
            assert!(began.elapsed() >= Duration::from_millis(20), "{error}: {:?}", began.elapsed());
            agent.write(1).unwrap();
            assert!(wait.at_most(1_000_000).agent, "{error}");
        }
    }
}
