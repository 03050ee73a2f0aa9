//! Packets made to disappear: rules with direction, family, protocol, port and
//! length, which drop the first, every nth or just the nth packet. The kernel's
//! nftables does it and counts, so that a test can say the fault really happened.

use std::str::FromStr;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};

use crate::lab::space::Space;

/// Which packets of the host.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Direction {
    /// Those it receives, whoever they are for.
    In,
    /// Those it sends itself.
    Out,
}

/// Address family.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Which of the matching packets are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drop {
    /// The first so many.
    First(u32),
    /// Every so many, beginning with the first.
    Every(u32),
    /// This one only, counted from 1.
    Nth(u32),
}

impl FromStr for Drop {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (which, count) = text.split_once(':').unwrap_or((text, ""));
        match (which, count.parse()) {
            ("first", Ok(count)) => Ok(Self::First(count)),
            ("every", Ok(count)) if count > 0 => Ok(Self::Every(count)),
            ("nth", Ok(count)) if count > 0 => Ok(Self::Nth(count)),
            _ => Err("write first:N, every:N or nth:N".to_owned()),
        }
    }
}

/// What is dropped.
#[derive(Args, Clone, Debug)]
pub struct Rule {
    /// Packets the host receives, or those it sends itself.
    #[arg(long, value_enum)]
    pub direction: Direction,
    /// Family of the outermost header.
    #[arg(long, value_enum, default_value = "v4")]
    pub family: Family,
    /// udp, tcp, icmp, icmpv6 or a number.
    #[arg(long, default_value = "udp")]
    pub protocol: String,
    /// Destination port.
    #[arg(long)]
    pub port: Option<u16>,
    /// Bytes with the IP header: at least.
    #[arg(long, default_value_t = 0)]
    pub shortest: u32,
    /// Bytes with the IP header: at most.
    #[arg(long, default_value_t = 65535)]
    pub longest: u32,
    /// first:N, every:N or nth:N of them.
    #[arg(long)]
    pub drop: Drop,
}

impl Rule {
    /// Pure: the table nft reads.
    fn table(&self) -> String {
        let hook = match self.direction {
            Direction::In => "prerouting",
            Direction::Out => "output",
        };
        let family = match self.family {
            Family::V4 => "ipv4",
            Family::V6 => "ipv6",
        };
        let mut matches = format!("meta nfproto {family} meta l4proto {} ", self.protocol);
        if let Some(port) = self.port {
            matches += &format!("th dport {port} ");
        }
        matches += &format!("meta length {}-{} ", self.shortest, self.longest);
        // A generator that starts anew after so many packets does not within a test.
        let which = match self.drop {
            Drop::First(count) => format!("numgen inc mod 1000000000 < {count}"),
            Drop::Every(count) => format!("numgen inc mod {count} 0"),
            Drop::Nth(count) => format!("numgen inc mod 1000000000 {}", count.saturating_sub(1)),
        };
        format!(
            "table inet fault {{
    counter seen {{ }}
    counter dropped {{ }}
    chain fault {{
        type filter hook {hook} priority -400; policy accept;
        {matches}counter name seen {which} counter name dropped drop
    }}
}}
"
        )
    }

    /// Puts the rule in force in the namespace until the guard is dropped.
    pub fn inject(&self, space: &Space) -> Result<Injected> {
        space.sh(&format!("nft -f - <<'RULES'\n{}RULES", self.table()))?;
        Ok(Injected { space: space.clone() })
    }
}

/// A rule in force.
pub struct Injected {
    space: Space,
}

impl Injected {
    /// Packets that matched, and those of them that were dropped.
    pub fn hits(&self) -> Result<(u64, u64)> {
        let read = |name: &str| -> Result<u64> {
            let text = self.space.sh(&format!("nft list counter inet fault {name}"))?;
            let packets = text.split_whitespace().skip_while(|word| *word != "packets").nth(1);
            packets.and_then(|number| number.parse().ok()).with_context(|| text.clone())
        };
        Ok((read("seen")?, read("dropped")?))
    }
}

impl std::ops::Drop for Injected {
    fn drop(&mut self) {
        let _ = self.space.sh("nft delete table inet fault");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_becomes_a_table_with_both_counters() {
        let rule = Rule {
            direction: Direction::Out,
            family: Family::V4,
            protocol: "udp".to_owned(),
            port: Some(51820),
            shortest: 176,
            longest: 176,
            drop: Drop::First(2),
        };
        let table = rule.table();
        let line = "meta nfproto ipv4 meta l4proto udp th dport 51820 meta length 176-176 counter name seen \
                    numgen inc mod 1000000000 < 2 counter name dropped drop";
        assert!(table.contains(line), "{table}");
        assert!(table.contains("hook output"), "{table}");
    }

    #[test]
    fn which_packets_are_dropped_is_read_from_text() {
        assert_eq!("every:10".parse(), Ok(Drop::Every(10)));
        assert_eq!("nth:3".parse(), Ok(Drop::Nth(3)));
        for text in ["", "first", "every:0", "nth:0", "last:3", "first:-1"] {
            assert!(text.parse::<Drop>().is_err(), "{text}");
        }
    }
}
