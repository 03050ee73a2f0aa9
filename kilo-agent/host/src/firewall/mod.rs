//! Firewall rules that Kilo needs: accepting in iptables' FORWARD chains, and masquerading by nftables.

pub mod conntrack;
pub mod forward;
pub mod nat_rules;
mod program;
