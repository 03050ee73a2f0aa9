//! Rules of others' firewalls that Kilo needs: iptables' FORWARD chains and nftables' masquerading.

pub mod conntrack;
pub mod forward;
pub mod nat_rules;
mod program;
