//! The node under test: its network namespace, a second namespace that simulates the network around it, and
//! a WireGuard peer with a session.

use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use super::frames::{ETHERNET, Flow, Load, VXLAN_PORT, VXLAN_VNI, Wrap, encrypted_v6};
use crate::{
    command::output,
    lab::{
        netns::{self, Netns},
        wait,
    },
};

/// WireGuard port of every node.
pub const PORT: u16 = 51820;
/// Ports of a relay: the one that the leader elsewhere sends to, and that of the other end.
pub const RELAY_PORTS: (u16, u16) = (51_830, 51_831);
/// An address outside the mesh.
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
/// Base of the public addresses of leaders elsewhere.
const PUBLIC: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 0);
/// IPv6 addresses of the node, of two leaders elsewhere and of the router.
pub const OWN_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0x11);
pub const REMOTE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x21);
pub const SECOND_REMOTE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x22);
const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);
/// Router of the node's network.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);

/// Private address of a node of this location; number 0 is the node under test.
pub fn private(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, 0, 11).to_bits().wrapping_add(number as u32).into()
}

/// Private address of a node elsewhere.
pub fn remote_private(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 32, 0, 11).to_bits().wrapping_add(number as u32).into()
}

/// First address of the pod CIDR (/24) of a node of this location.
pub fn pods(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 64, 0, 0).to_bits().wrapping_add((number as u32) << 8).into()
}

/// First address of the pod CIDR (/24) of a node elsewhere.
pub fn remote_pods(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 128, 0, 0).to_bits().wrapping_add((number as u32) << 8).into()
}

/// Public address of a node elsewhere.
pub fn public(number: usize) -> Ipv4Addr {
    PUBLIC.to_bits().wrapping_add(21 + number as u32).into()
}

/// A host of a prefix.
pub fn host(prefix: Ipv4Addr, number: u32) -> Ipv4Addr {
    prefix.to_bits().wrapping_add(number).into()
}

/// Writes a WireGuard private key to `file`; returns the public key.
fn generate_key(file: &Path) -> Result<String> {
    fs::write(file, output(Command::new("wg").arg("genkey"))?)?;
    let public = output(Command::new("sh").args(["-c", "wg pubkey < \"$0\""]).arg(file))?;
    Ok(public.trim().to_owned())
}

/// The namespaces and the directory of their files.
pub struct Site {
    /// The node under test.
    pub node: Netns,
    /// Everything around it.
    pub around: Netns,
    /// Files of this site.
    pub directory: PathBuf,
    /// Public key of the leader of the first other location.
    pub remote_key: String,
    /// Number of the location's other node that sends and receives packets.
    pub member: usize,
}

/// Link-layer address of the node's `eth0` and of its end of the pod's link.
pub const NODE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x11];

impl Site {
    /// Builds the namespaces: `eth0` to the network, `pod0` to a pod. `member`: number of the other node.
    pub fn create(directory: &Path, member: usize) -> Result<Self> {
        fs::create_dir_all(directory)?;
        let around = Netns::create("bench", "around")?;
        let mut node = Netns::create("bench", "node")?;
        node.hold(&directory.join("namespaces.log"))?;
        let key = generate_key(&directory.join("node.key"))?;
        let remote_key = generate_key(&directory.join("remote.key"))?;
        let mac = NODE_MAC.map(|byte| format!("{byte:02x}")).join(":");
        node.ip(&format!(
            "link add eth0 address {mac} type veth peer name lan netns {netns}\n\
             link add pod0 address {mac} type veth peer name pod netns {netns}\n\
             address add {}/16 dev eth0\naddress add {}/24 dev pod0\nlink set eth0 up\nlink set pod0 up\n\
             route add default via {GATEWAY}\n",
            private(0),
            host(pods(0), 1),
            netns = around.id,
        ))?;
        // The namespace has every host's address: it takes all but the node's as local.
        around.ip(&format!(
            "link set lan up\nlink set pod up\nroute add local 192.0.2.0/24 dev lo\n\
             route add local 10.1.0.0/29 dev lo\nroute add local 10.1.0.12/30 dev lo\n\
             route add local 10.1.0.16/28 dev lo\nroute add local 10.1.0.32/27 dev lo\n\
             route add local 10.1.0.64/26 dev lo\nroute add local 10.1.0.128/25 dev lo\n\
             route add local 10.1.1.0/24 dev lo\nroute add local 10.1.2.0/23 dev lo\n\
             route add local 10.1.4.0/22 dev lo\nroute add {own}/32 dev lan\n\
             address add {}/32 dev lo\n\
             link add wg-remote type wireguard\nlink set wg-remote up\n\
             link add lan-ipip type ipip local {member} remote {own}\nlink set lan-ipip up\n\
             link add lan-vxlan type vxlan id {VXLAN_VNI} dstport {VXLAN_PORT} local {member} remote {own} dev lan\n\
             link set lan-vxlan up\n",
            public(0),
            own = private(0),
            member = private(member),
        ))?;
        around.sh(&format!(
            "wg set wg-remote listen-port {PORT} private-key {} peer {} allowed-ips 0.0.0.0/0 endpoint {}:{PORT}",
            directory.join("remote.key").display(),
            key,
            private(0),
        ))?;
        node.sh("echo 1 > /proc/sys/net/ipv4/ip_forward; echo 2097152 > /proc/sys/net/netfilter/nf_conntrack_max || true; \
                 for d in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $d; done; \
                 for n in default all eth0; do echo 1 > /proc/sys/net/ipv6/conf/$n/disable_ipv6; done")?;
        Ok(Self { node, around, directory: directory.to_owned(), remote_key, member })
    }

    /// Rules of any routing node, whatever routes: connection tracking, and a rule for established
    /// connections.
    pub fn base_rules(&self, restore: &str) -> Result<()> {
        self.restore(
            restore,
            "*filter\n-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A FORWARD -j ACCEPT\nCOMMIT\n",
        )
    }

    /// Adds rules with `iptables-nft-restore` or `iptables-legacy-restore`.
    pub fn restore(&self, restore: &str, rules: &str) -> Result<()> {
        let file = self.directory.join("rules");
        fs::write(&file, rules)?;
        self.node.sh(&format!("{restore} --noflush < {}", file.display())).map(drop)
    }

    /// Creates `kilo0` with the remote leader as its peer, as agents do.
    pub fn wireguard(&self, allowed: &str) -> Result<()> {
        self.node.ip(
            "link add kilo0 mtu 1420 type wireguard\nlink set kilo0 up\naddress add 10.4.0.1/16 dev kilo0\n",
        )?;
        self.node
            .sh(&format!(
                "wg set kilo0 listen-port {PORT} private-key {} peer {} allowed-ips {allowed} endpoint {}:{PORT}",
                self.directory.join("node.key").display(),
                self.remote_key,
                public(0),
            ))
            .map(drop)
    }

    /// Sends until `kilo0` and the remote leader have a session.
    pub fn handshake(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(15);
        while Instant::now() < deadline {
            let _ = self.node.sh(&format!("ping -c1 -W1 {}", host(remote_pods(0), 2)));
            if self.node.sh("wg show kilo0 transfer")?.lines().any(|line| !line.contains("\t0\t")) {
                return Ok(());
            }
            wait::pace(Duration::from_millis(100));
        }
        bail!("no handshake:\n{}", self.node.sh("wg show kilo0; ip route")?)
    }

    /// Makes neighbours permanent: their revalidation would disturb a measurement.
    pub fn fix_neighbours(&self) -> Result<()> {
        let lan = self.lan_mac()?;
        let mut batch = String::new();
        for next_hop in [GATEWAY, private(1), private(2)] {
            batch += &format!("neighbour replace {next_hop} lladdr {lan} dev eth0 nud permanent\n");
        }
        batch += &format!(
            "neighbour replace {} lladdr 02:00:00:00:00:99 dev pod0 nud permanent\n",
            host(pods(0), 2)
        );
        self.node.ip(&batch)
    }

    /// Gives `eth0` an IPv6 address and a router with a permanent neighbour entry.
    pub fn enable_ipv6(&self) -> Result<()> {
        let lan = self.lan_mac()?;
        self.node.sh("echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6; echo 0 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6; \
                      echo 1 > /proc/sys/net/ipv6/conf/all/forwarding")?;
        self.node.ip(&format!(
            "address add {OWN_V6}/64 dev eth0 nodad\nneighbour replace {GATEWAY_V6} lladdr {lan} dev eth0 nud permanent\n\
             route add default via {GATEWAY_V6} dev eth0\n"
        ))
    }

    fn lan_mac(&self) -> Result<String> {
        let text = self.around.sh("ip -brief link show lan")?;
        text.split_whitespace().nth(2).map(ToOwned::to_owned).context("no address of lan")
    }

    /// A packet from a pod of another node of the location to a pod elsewhere.
    pub fn outward(&self, wrap: Wrap, load: Load, port: u16) -> Vec<u8> {
        Flow {
            from: (host(pods(self.member), 2), port),
            to: (host(remote_pods(0), 2), 5000),
            load,
            wrap,
            nodes: (private(self.member), private(0)),
        }
        .frame(NODE_MAC)
    }

    /// A packet from a pod elsewhere to a pod of node `to` of the location.
    pub fn inward(&self, wrap: Wrap, to: usize, load: Load, port: u16) -> Vec<u8> {
        Flow {
            from: (host(remote_pods(0), 2), 5000),
            to: (host(pods(to), 2), port),
            load,
            wrap,
            nodes: (private(self.member), private(0)),
        }
        .frame(NODE_MAC)
    }

    /// A packet to a pod elsewhere, for devices without a link-layer header.
    pub fn own_packet(&self, load: Load, port: u16) -> Vec<u8> {
        match load {
            Load::Gso => self.outward(Wrap::Ipip, load, port),
            _ => self.outward(Wrap::None, load, port).split_off(ETHERNET),
        }
    }

    /// A packet from the node's own pod.
    pub fn pod_packet(&self, to: Ipv4Addr, load: Load, port: u16) -> Vec<u8> {
        self.plain((host(pods(0), 2), port), (to, 5000), load)
    }

    /// The reply to a pod's masqueraded packet.
    pub fn answer(&self, load: Load, port: u16) -> Vec<u8> {
        self.plain((OUTSIDE, 5000), (private(0), port), load)
    }

    /// A packet from the leader elsewhere to a relay's port of a pair.
    pub fn to_relay(&self, load: Load) -> Vec<u8> {
        self.plain((public(0), PORT), (private(0), RELAY_PORTS.0), load)
    }

    /// IPv6 counterpart of [`Self::to_relay`].
    pub fn to_relay_v6(&self, load: Load) -> Vec<u8> {
        encrypted_v6((REMOTE_V6, PORT), (OWN_V6, RELAY_PORTS.0), load.payload(), NODE_MAC)
    }

    fn plain(&self, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), load: Load) -> Vec<u8> {
        Flow { from, to, load, wrap: Wrap::None, nodes: (from.0, to.0) }.frame(NODE_MAC)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = netns::remove([self.node.clone(), self.around.clone()]);
    }
}
