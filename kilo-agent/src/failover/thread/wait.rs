//! Waiting: for records of the ring that wake, for the agent, for links, and for the next deadline.

use std::os::fd::{AsFd, AsRawFd as _};

use kilo_failover::Micros;
use kilo_host::net::link_down::LinkEvents;
use nix::{
    libc,
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags},
};

/// Of whom there is something to be read, besides signals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub agent: bool,
    pub links: bool,
}

/// What is waited for.
#[derive(Debug)]
pub struct Wait(Epoll);

const RING: u64 = 0;
const AGENT: u64 = 1;
const LINKS: u64 = 2;
/// Each once.
const MOST: libc::c_int = 3;

impl Wait {
    /// Of the ring only what wakes counts (edge-triggered): answers to probes that are in it unread let this thread
    /// sleep, and are read when something is due; so is what lies behind a record that another CPU
    /// still writes, though it be a signal: signals are repeated until they are answered.
    ///
    /// # Errors
    /// When there is no descriptor to be had.
    pub fn for_any(ring: &impl AsFd, agent: &impl AsFd, links: Option<&LinkEvents>) -> nix::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(ring, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, RING))?;
        epoll.add(agent, EpollEvent::new(EpollFlags::EPOLLIN, AGENT))?;
        if let Some(links) = links {
            epoll.add(links, EpollEvent::new(EpollFlags::EPOLLIN, LINKS))?;
        }
        Ok(Self(epoll))
    }

    /// Waits for so many microseconds at most; an interrupted wait is a short one.
    pub fn at_most(&self, micros: Micros) -> Ready {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MOST as usize];
        let time = libc::timespec {
            tv_sec: libc::time_t::try_from(micros / 1_000_000).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::try_from(micros % 1_000_000 * 1_000).unwrap_or(0),
        };
        let (epoll, most) = (self.0.0.as_raw_fd(), events.len() as libc::c_int);
        // SAFETY: the descriptor is open as long as `self`, and the kernel writes no more than `most` events.
        let count = unsafe {
            libc::epoll_pwait2(epoll, events.as_mut_ptr(), most, &raw const time, std::ptr::null())
        };
        let ready = events.iter().take(usize::try_from(count).unwrap_or(0)).map(|event| event.u64);
        ready.fold(Ready::default(), |ready, from| Ready {
            agent: ready.agent || from == AGENT,
            links: ready.links || from == LINKS,
        })
    }
}
