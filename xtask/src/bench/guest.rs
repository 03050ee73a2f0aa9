//! The part of the benchmark that runs in the guest: every variant, one after the other.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};

use super::{
    agent::{self, Setup},
    figures::Cost,
    frames::Wrap,
    kernel_variants,
    site::Site,
    stages::{Bench, Floor, floor},
};

const NFT: &str = "iptables-nft-restore";
const LEGACY: &str = "iptables-legacy-restore";

/// A variant: what carries the packets.
enum Variant {
    Plain,
    /// Packets from a local socket into WireGuard.
    Wireguard,
    Masquerade(&'static str),
    Kilo {
        nodes: usize,
        restore: &'static str,
    },
    Ours {
        wrap: Wrap,
        nodes: usize,
        remote: (usize, usize),
        masquerade: &'static str,
        /// Number of active leaders; `None`: no failover.
        leaders: Option<u8>,
    },
    /// Ours with IPIP and five nodes, where packets of pods may bypass the stack.
    HostRouting,
}

/// Role of the measured node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Leader,
    /// A leader that relays for two others.
    Relay,
    /// A member of its location.
    Member,
}

impl Variant {
    fn name(&self) -> String {
        let rules = |restore: &str| if restore == NFT { "nft" } else { "legacy" };
        match self {
            Self::Plain => "plain".to_owned(),
            Self::Wireguard => "wireguard".to_owned(),
            Self::Masquerade(restore) => format!("iptables-{}", rules(restore)),
            Self::Kilo { nodes, restore } => format!("kilo-{nodes}-{}", rules(restore)),
            Self::Ours { wrap, nodes, remote: (locations, each), masquerade, leaders } => {
                let method = if *masquerade == "ebpf" { wrap.flag() } else { masquerade };
                let all = if *locations == 1 { *nodes } else { nodes + locations * each };
                let leaders = leaders.map(|leaders| format!("-leaders-{leaders}")).unwrap_or_default();
                format!("ours-{method}-{all}{leaders}")
            }
            Self::HostRouting => "ours-ipip-5-host-routing".to_owned(),
        }
    }

    fn wrap(&self) -> Wrap {
        match self {
            Self::Plain | Self::Wireguard | Self::Masquerade(_) => Wrap::None,
            Self::Kilo { .. } | Self::HostRouting => Wrap::Ipip,
            Self::Ours { wrap, .. } => *wrap,
        }
    }

    /// Number of the other node: with several active leaders, a member.
    const fn member(&self) -> usize {
        if let Self::Ours { leaders: Some(_), .. } = self { 2 } else { 1 }
    }

    /// Roles to measure. Relaying involves only the programs and costs the same with every tunnel.
    fn roles(&self) -> &'static [Role] {
        match self {
            // This variant is WireGuard alone.
            Self::Wireguard => &[Role::Leader],
            // Of this one, only the pods' side differs.
            Self::HostRouting => &[Role::Member],
            Self::Ours { wrap: Wrap::Ipip, masquerade: "ebpf", leaders: None, .. } => {
                &[Role::Leader, Role::Relay, Role::Member]
            }
            _ => &[Role::Leader, Role::Member],
        }
    }

    /// Sets the node up.
    fn set_up(&self, site: &Site, role: Role, kg: &Path) -> Result<()> {
        let leads = role != Role::Member;
        match *self {
            Self::Plain | Self::Wireguard => {
                site.base_rules(NFT)?;
                kernel_variants::plain(site, leads)
            }
            Self::Masquerade(restore) => {
                site.base_rules(restore)?;
                kernel_variants::plain(site, leads)?;
                kernel_variants::masquerade(site, restore)
            }
            Self::Kilo { nodes, restore } => {
                site.base_rules(restore)?;
                kernel_variants::kilo(site, nodes, leads, restore)
            }
            Self::Ours { wrap, nodes, remote: (remote_locations, remote_nodes), masquerade, leaders } => {
                site.base_rules(NFT)?;
                let relays = role == Role::Relay;
                let setup = Setup {
                    nodes,
                    remote_locations,
                    remote_nodes,
                    leads,
                    relays,
                    leaders,
                    wrap,
                    masquerade,
                    host_routing: false,
                };
                agent::set_up(site, &setup, kg)?;
                match leaders {
                    Some(2..) => agent::give_its_own(site, &setup),
                    _ if relays => agent::bind_pair(site),
                    _ => Ok(()),
                }
            }
            Self::HostRouting => {
                site.base_rules(NFT)?;
                site.node.tolerate_gaps_in_tcp(true)?;
                let setup = Setup {
                    nodes: 5,
                    remote_locations: 1,
                    remote_nodes: 1,
                    leads,
                    relays: false,
                    leaders: None,
                    wrap: Wrap::Ipip,
                    masquerade: "ebpf",
                    host_routing: true,
                };
                agent::set_up(site, &setup, kg)
            }
        }
    }
}

/// Measures the variants whose name contains `only`; writes their costs to `json`.
pub fn main(directory: &Path, kg: &Path, json: &Path, only: &str, large: bool) -> Result<()> {
    agent::check_binary(kg)?;
    fs::write(json.with_extension("kernel"), fs::read("/proc/sys/kernel/osrelease")?)?;
    let mut costs = Vec::new();
    let floor = {
        let site = Site::create(&directory.join("floor"), 1)?;
        site.wireguard("0.0.0.0/0")?;
        floor(&site)?
    };
    let mut failed = Vec::new();
    let wanted = |variant: &&Variant| only.split(',').any(|part| variant.name().contains(part));
    for variant in variants(large).iter().filter(wanted) {
        if let Err(error) = measure(variant, directory, kg, &floor, &mut costs) {
            println!("bench: {}: {error:#}", variant.name());
            failed.push(variant.name());
        }
        fs::write(json, serde_json::to_vec_pretty(&costs)?).context("costs")?;
    }
    anyhow::ensure!(failed.is_empty(), "not measured to the end: {}", failed.join(", "));
    Ok(())
}

/// Sorts costs in the order of the variants.
pub fn sort(costs: &mut [Cost]) {
    let names: Vec<String> = variants(true).iter().map(Variant::name).collect();
    costs.sort_by_key(|cost| names.iter().position(|name| *name == cost.variant));
}

fn variants(large: bool) -> Vec<Variant> {
    let ours = |wrap, nodes, remote| Variant::Ours { wrap, nodes, remote, masquerade: "ebpf", leaders: None };
    let led_by = |leaders| Variant::Ours {
        wrap: Wrap::Ipip,
        nodes: 5,
        remote: (1, 1),
        masquerade: "ebpf",
        leaders: Some(leaders),
    };
    let mut variants = vec![
        ours(Wrap::Ipip, 5, (1, 1)),
        Variant::HostRouting,
        led_by(1),
        led_by(2),
        Variant::Plain,
        Variant::Wireguard,
        Variant::Masquerade(NFT),
        Variant::Kilo { nodes: 5, restore: NFT },
        Variant::Kilo { nodes: 100, restore: NFT },
        ours(Wrap::Vxlan, 5, (1, 1)),
        ours(Wrap::None, 5, (1, 1)),
        ours(Wrap::Ipip, 100, (1, 1)),
        Variant::Ours { wrap: Wrap::Ipip, nodes: 5, remote: (1, 1), masquerade: "nftables", leaders: None },
        Variant::Kilo { nodes: 5, restore: LEGACY },
        Variant::Kilo { nodes: 100, restore: LEGACY },
        ours(Wrap::Ipip, 1000, (1, 1)),
        Variant::Kilo { nodes: 1000, restore: NFT },
        Variant::Kilo { nodes: 1000, restore: LEGACY },
    ];
    if large {
        variants.push(ours(Wrap::Ipip, 500, (19, 500)));
    }
    variants
}

fn measure(
    variant: &Variant,
    directory: &Path,
    kg: &Path,
    floor: &Floor,
    costs: &mut Vec<Cost>,
) -> Result<()> {
    for &role in variant.roles() {
        let name = variant.name();
        let site = Site::create(&directory.join(format!("{name}-{role:?}")), variant.member())?;
        let mut bench = Bench::new(&site, &name, variant.wrap(), floor);
        variant.set_up(&site, role, kg)?;
        site.fix_neighbours()?;
        let measured = match role {
            Role::Leader if matches!(variant, Variant::Wireguard) => {
                site.handshake().and_then(|()| bench.wireguard())
            }
            Role::Leader => site.handshake().and_then(|()| bench.leader()),
            Role::Relay => bench.relay(),
            Role::Member => bench.member().and_then(|()| bench.masquerade()),
        };
        costs.append(&mut bench.costs);
        measured.with_context(|| agent::counts(&site))?;
    }
    Ok(())
}
