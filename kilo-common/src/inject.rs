//! Where a packet that the agent has written goes: what it asks of the program `inject`.

/// What the agent writes into the control block of a packet for the program `inject`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inject {
    /// Goes as this host's own packets do.
    Stack = 1,
    /// Into the own tunnel, also on a node that does not lead.
    Tunnel = 2,
    /// To a node of the location, without outer header.
    Lan = 3,
    /// Out of the interface in the second word, to the next hop that the kernel's routes name, without outer header.
    Out = 4,
}
