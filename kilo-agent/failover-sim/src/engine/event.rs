//! What happens, and when: the queue returns the earliest event first.

use std::rc::Rc;

use kilo_failover::Micros;

/// Something that happens at a moment of simulated time.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Wake(usize),
    Resume(usize),
    Starts(usize),
    Ends(usize),
    /// A signal on the LAN; `sent_at`: when it was first sent.
    Lan {
        to: usize,
        bytes: Rc<[u8]>,
        sent_at: Micros,
    },
    LanProbe {
        prober: usize,
        probed: usize,
        nonce: u64,
        back: bool,
    },
    /// A forwarded probe arrives at a gateway, from the node before.
    AtGateway {
        member: usize,
        from: usize,
        gateway: usize,
        far: usize,
        nonce: u64,
    },
    /// The probe arrives at the far leader.
    AtFar {
        member: usize,
        gateway: usize,
        far: usize,
        nonce: u64,
    },
    BackAtGateway {
        member: usize,
        gateway: usize,
        nonce: u64,
    },
    /// An answer arrives at the prober.
    Answer {
        node: usize,
        nonce: u64,
    },
    OwnAtFar {
        gateway: usize,
        far: usize,
        nonce: u64,
    },
    /// A signal arrives through a tunnel.
    ToFar {
        gateway: usize,
        far: usize,
        bytes: Rc<[u8]>,
    },
    FromFar {
        gateway: usize,
        far: usize,
        bytes: Rc<[u8]>,
    },
    FarApplies {
        far: usize,
    },
    /// A node's agent reads the objects.
    ReadObjects(usize),
    /// So many of the first gateways lead from now on.
    Active(usize),
    /// The next packet of the traffic.
    Packet,
    FarResume(usize),
    /// A far leader learns who the gateways are.
    FarPlans(usize),
    FarWake(usize),
    /// A far leader's agent forgets what its device had when it started.
    FarForgets(usize),
    FarProbe {
        far: usize,
        gateway: usize,
        nonce: u64,
        back: bool,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Queued {
    pub(super) at: Micros,
    pub(super) number: u64,
    pub(super) event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}
