//! Where the program `inject` sends a packet that the agent has written.

/// First word of the control block (`skb->cb`) that the agent passes to the program `inject`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inject {
    /// Like a packet from this host's own stack.
    Stack = 1,
    /// Into this node's tunnel, even on a node that does not lead.
    Tunnel = 2,
    /// To a node of the location, without an outer header.
    Lan = 3,
    /// Out of the interface in the second word, to the next hop by the kernel's routes, without an outer
    /// header.
    Out = 4,
}
