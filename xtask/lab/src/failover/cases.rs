//! The one table of failover's cases: what fails, and what is accepted.

use std::fmt;

use anyhow::Result;

use super::{
    breaking::{self, Broken},
    clocks, crowd, flaps, flood, forged, laptop, many_members, named_leader, partial_failures, renumbered,
    shares,
};
use crate::{Lab, faults::control_plane, network::Shape};

/// For cases that are not on the list of docs/reliability.md: several active leaders, and more packets than a
/// leader carries.
pub const UNLISTED: u8 = 0;
/// Last line of that page about how a leader fails or leadership moves; later ones are about what else holds then.
const LAST_OF_LEADERS: u8 = 24;

/// What a case accepts.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// Answers resume within so many milliseconds, from another leader.
    Outage(u64),
    /// Answers resume within so many milliseconds, from any leader.
    Silence(u64),
    /// The leader changes at most so often, whatever is lost.
    Switches(u64),
    /// At most so many datagrams are lost.
    Lost(u64),
    /// Nothing is lost, and no other node leads.
    Undisturbed,
    /// Whatever is lost, nobody else leads.
    NoSwitch,
    /// Answers resume within so many milliseconds, and the second flow loses nothing.
    OnlyIts(u64),
    /// About a third of the members move and lose 10 of 1,000 datagrams a second at most, the others nothing.
    Third,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outage(most) | Self::Silence(most) => write!(f, "{most} ms"),
            Self::Switches(most) => write!(f, "{most} switches"),
            Self::Lost(most) => write!(f, "{most} lost"),
            Self::Undisturbed => write!(f, "nothing lost, no switch"),
            Self::NoSwitch => write!(f, "no switch"),
            Self::OnlyIts(most) => write!(f, "{most} ms; others 0 lost"),
            Self::Third => write!(f, "a third moves, each 10 lost of 1,000/s; others 0 lost"),
        }
    }
}

/// A row of docs/failover.md: what is broken, where traffic is watched, and what it may lose.
pub struct Case {
    /// Its name on the command line.
    pub id: &'static str,
    /// Line of docs/reliability.md that it belongs to, or [`UNLISTED`].
    pub line: u8,
    /// What happens, in words.
    pub name: &'static str,
    /// Namespace from which the watched traffic comes.
    pub from: &'static str,
    /// Namespace to which it goes.
    pub to: &'static str,
    /// Ends of a second flow, which is not to suffer more than the first.
    pub also: Option<(&'static str, &'static str)>,
    /// Nodes without failover; to the others they look like nodes with Kilo itself.
    pub off: &'static [&'static str],
    /// Stand-bys of each location.
    pub stand_bys: u8,
    /// Active leaders of each location.
    pub leaders: u8,
    /// What is accepted.
    pub limit: Limit,
    /// Within how many milliseconds answers resume in 95 of 100 runs.
    pub p95: Option<u64>,
    /// What happens before traffic is watched.
    pub prepare: Option<fn(&mut Lab) -> Result<()>>,
    /// Part of every test run.
    pub is_always: bool,
    /// A debug build is too slow for what is accepted.
    pub needs_release: bool,
    /// Which nodes the lab has.
    pub shape: Shape,
    /// Makes the fault.
    pub inject: fn(&mut Lab) -> Result<Broken>,
}

const fn case(
    id: &'static str,
    line: u8,
    name: &'static str,
    limit: Limit,
    inject: fn(&mut Lab) -> Result<Broken>,
) -> Case {
    let (from, to) = ("pod-a3", "pod-b2");
    let (also, off, prepare) = (None, &[], None);
    Case {
        id,
        line,
        name,
        from,
        to,
        also,
        off,
        stand_bys: 1,
        leaders: 1,
        limit,
        p95: None,
        prepare,
        is_always: false,
        needs_release: false,
        shape: Shape::Plain,
        inject,
    }
}

impl Case {
    const fn in_release(self) -> Self {
        Self { needs_release: true, ..self }
    }

    const fn always(self) -> Self {
        Self { is_always: true, ..self }
    }

    /// Whether it is about several active leaders or a VPN peer, and not on the list of docs/reliability.md.
    pub fn is_of_several(&self) -> bool {
        self.line == UNLISTED
            && (self.leaders > 1
                || self.shape != Shape::Plain
                || self.from == "laptop"
                || self.id == "gateway-joins")
    }

    /// Whether it is less about how the leader fails than about what holds meanwhile.
    pub const fn is_under_conditions(&self) -> bool {
        self.line > LAST_OF_LEADERS
    }

    /// In 95 of 100 runs answers must resume within so many milliseconds.
    const fn p95(self, most: u64) -> Self {
        Self { p95: Some(most), ..self }
    }

    /// What is accepted, in words.
    pub fn accepted(&self) -> String {
        let p95 = self.p95.map(|most| format!("p95 {most} ms, all ")).unwrap_or_default();
        format!("{p95}{}", self.limit)
    }

    const fn stand_bys(self, stand_bys: u8) -> Self {
        Self { stand_bys, ..self }
    }

    /// Watches one flow whose gateway fails, and one of a node that uses another.
    const fn leaders(self, leaders: u8) -> Self {
        Self { leaders, from: "pod-a3", to: "pod-b1", also: Some(("pod-a2", "pod-b1")), ..self }
    }

    /// Twelve members send at the same rate, with so many active leaders, each watched by a stand-by.
    const fn crowd(self, leaders: u8) -> Self {
        let stand_bys = if leaders > 3 { leaders } else { 3 };
        let this = self.in_release();
        Self { leaders, stand_bys, to: "pod-b1", shape: Shape::Crowd, prepare: Some(crowd::at_home), ..this }
    }

    /// A machine that follows gateways (`kgctl connect`) talks to a node whose gateway fails, and to the other
    /// location.
    const fn of_laptop(self) -> Self {
        let (from, to, also) = ("laptop", "pod-a3", Some(("laptop", "pod-b1")));
        Self { from, to, also, shape: Shape::Public, prepare: Some(laptop::connects), ..self }
    }

    /// The laptop, with what `kgctl showconf` has printed once, talks to a node of the first leader.
    const fn of_static_laptop(self) -> Self {
        let also = Some(("laptop", "pod-b1"));
        Self { from: "laptop", to: "pod-a3", also, prepare: Some(laptop::settle_static), ..self }
    }

    /// Watches a location of a thousand members.
    const fn large(self) -> Self {
        Self { to: "pod-b1", shape: Shape::Large, prepare: Some(many_members::at_rest), ..self }
    }

    /// A laptop with `kgctl connect` is connected, but the watched flow is not its own.
    const fn beside_laptop(self) -> Self {
        Self { shape: Shape::Public, prepare: Some(laptop::connects), ..self }
    }

    /// The far end is the other location's leader: two stand-bys behind NAT have no tunnel.
    const fn with_far_leader(self) -> Self {
        Self { to: "pod-b1", ..self }
    }

    const fn also(self, from: &'static str, to: &'static str) -> Self {
        Self { also: Some((from, to)), ..self }
    }

    const fn prepared(self, prepare: fn(&mut Lab) -> Result<()>) -> Self {
        Self { prepare: Some(prepare), ..self }
    }

    const fn off(self, off: &'static [&'static str]) -> Self {
        Self { off, ..self }
    }
}

/// The new agents find maps of layout 2.
fn upgraded(lab: &mut Lab) -> Result<Broken> {
    control_plane::upgrade(lab).map(Broken::done)
}

/// Parses a case's id from the command line.
///
/// # Errors
/// Lists all ids when there is no such case.
pub fn named(text: &str) -> Result<String, String> {
    if CASES.iter().any(|case| case.id == text) {
        return Ok(text.to_owned());
    }
    let ids: Vec<_> = CASES.iter().map(|case| case.id).collect();
    Err(format!("no such case; there are {}", ids.join(", ")))
}

/// All cases, by line.
#[rustfmt::skip]
pub const CASES: &[Case] = &[
    case("clocks-jump", 16, "the clocks of the leader, its stand-by and the far leader jump by an hour, there and back (30 s each; `--for`), then the leader loses power", Limit::Outage(1000), clocks::jump).p95(500).prepared(clocks::restart_with_clocks),
    case("power-off", 17, "the leader loses power", Limit::Outage(1000), breaking::power_off).p95(500).always(),
    case("uplink-silent", 18, "the leader's uplink carries nothing, its carrier stays", Limit::Outage(1000), breaking::uplink_silent).always(),
    case("carrier-down", 18, "the leader's uplink loses its carrier", Limit::Outage(100), breaking::carrier_down),
    case("kilo0-down", 18, "kilo0 of the leader is down", Limit::Outage(1000), breaking::kilo0_down),
    case("lan-dead", 18, "the leader's LAN interface carries nothing", Limit::Outage(1000), breaking::lan_dead),
    case("lan-down", 18, "the leader's LAN interface is down, its uplink is not", Limit::Silence(1000), breaking::lan_down),
    case("leader-forwards-nothing", 19, "the leader forwards nothing, and answers everything", Limit::Outage(1000), partial_failures::forwards_nothing).always(),
    case("leader-drops-new-flows", 19, "the leader forwards no new flows, and goes on with those it has", Limit::Outage(1000), partial_failures::drops_new_flows),
    case("leader-returns", 20, "the old leader comes back and leads again", Limit::Lost(10), breaking::leader_returns).prepared(breaking::leader_was_away),
    case("leader-moves", 21, "the leader annotation moves", Limit::Lost(10), breaking::leader_moves),
    case("leader-cordoned", 21, "the leader's Node is cordoned", Limit::Lost(10), breaking::leader_cordoned),
    case("power-flaps", 24, "the leader loses power 20 times in 60 s", Limit::Switches(2), flaps::power),
    case("uplink-flaps", 24, "the leader's uplink falls silent 20 times in 60 s", Limit::Switches(2), flaps::uplink),
    case("flaps-in-turn", 24, "leader and stand-by lose power in turn, 20 times in 60 s", Limit::Switches(2), flaps::in_turn).stand_bys(2),
    case("agents-killed", 68, "SIGKILL for every agent at once, back 2 s later", Limit::Undisturbed, breaking::agents_killed).always(),
    case("agents-stopped", 68, "the agents of the leader, the stand-by, a member and the far leader stand still, one after the other (30 s each; `--for`)", Limit::Undisturbed, breaking::agents_stopped),
    case("agents-restarted", 68, "every agent restarts, one after the other", Limit::Undisturbed, breaking::agents_restarted),
    case("agents-restarted-in-term", 68, "the same while a stand-by leads, since the leader was away", Limit::Undisturbed, breaking::agents_restarted).prepared(breaking::leader_was_away),
    case("agents-upgraded", 68, "every agent is replaced by one of another map layout", Limit::Undisturbed, upgraded),
    case("agents-upgraded-in-term", 68, "every agent is replaced by one of another map layout while a stand-by leads", Limit::Undisturbed, upgraded).prepared(breaking::leader_was_away),
    case("agents-stalled", 68, "agents stand still for 200 ms every 5 s, for 30 s", Limit::Undisturbed, breaking::agents_stalled),
    case("power-off-member-agent-dead", 69, "the leader loses power while a member's agent is dead", Limit::Outage(1000), breaking::power_off_with_dead_agent).p95(500).always(),
    case("power-off-cluster-away", 69, "the leader loses power when the cluster has been away for a while (30 s; `--for`)", Limit::Outage(1000), breaking::power_off_cluster_away).p95(500),
    case("halves", 70, "the leader and the others do not hear each other on the LAN", Limit::Outage(1000), partial_failures::leader_cut_off).also("pod-a1", "pod-b2"),
    case("stand-by-apart", 70, "the stand-by and the others do not hear each other on the LAN", Limit::Outage(1000), partial_failures::stand_by_cut_off).also("pod-a2", "pod-b2"),
    case("loss", 71, "5 % of all packets between hosts are lost, and all CPUs are busy (30 s; `--for`)", Limit::NoSwitch, breaking::loss),
    case("member-is-kilo", 72, "the leader loses power, a member knows no failover", Limit::Silence(5000), breaking::power_off).off(&["a3"]),
    case("far-side-is-kilo", 72, "the leader loses power, the other location knows no failover", Limit::Silence(5000), breaking::power_off).off(&["b1", "b2"]),
    case("leader-is-kilo", 72, "the leader loses power, and knew no failover: as with Kilo", Limit::Silence(90_000), breaking::kilo_off).off(&["a1"]),
    case("forged", 73, "somebody on the LAN forges and repeats signals, a member sends some through the tunnel", Limit::Undisturbed, forged::send),
    case("repeated", 73, "leadership moves and comes back, and what made members follow the other node is sent to them again", Limit::Outage(1000), forged::repeat),
    case("location-comes-and-goes", UNLISTED, "a location that does not answer comes and goes, which changes the other location's WireGuard address, while the far leader's agent and then the leader's stand still (15 s each; half of `--for`)", Limit::Undisturbed, renumbered::location_comes_and_goes),
    case("many-members", 74, "of 1,003 nodes of its location the leader loses power, after 30 s (`--for`) in which agents' `failover` threads take 1 % of a core each at most", Limit::Outage(1000), many_members::power_off).p95(500).large(),
    case("two-lose-power", 75, "the leader and a stand-by lose power at once", Limit::Outage(1500), breaking::two_lose_power).stand_bys(2),
    case("flood", UNLISTED, "nothing fails, and more small datagrams than leaders carry are sent between two locations (30 s; `--for`)", Limit::Switches(1), flood::overload),
    case("gateway-off", UNLISTED, "of two active leaders one loses power", Limit::OnlyIts(1000), breaking::power_off).p95(500).leaders(2).prepared(shares::all_reach_all),
    case("gateway-joins", UNLISTED, "a node is made an active leader beside the first", Limit::Lost(10), shares::joins).with_far_leader(),
    case("kilo-joins", UNLISTED, "of two active leaders one goes on alone, since a node with Kilo itself joins", Limit::Lost(10), shares::kilo_joins).leaders(2).with_far_leader().prepared(shares::all_reach_all).in_release(),
    case("kilo-leaves", UNLISTED, "two active leaders are asked for, and the last node with Kilo itself leaves", Limit::Lost(10), shares::kilo_leaves).leaders(2).with_far_leader().off(&["b2"]).prepared(shares::one_leads_beside_kilo).in_release(),
    case("connect-leader-off", UNLISTED, "the leader loses power that a machine with `kgctl connect` uses", Limit::OnlyIts(1000), breaking::power_off).of_laptop(),
    case("connect-cluster-away", UNLISTED, "the same when the cluster has been away for a while (30 s; `--for`)", Limit::OnlyIts(1000), breaking::power_off_cluster_away).of_laptop(),
    case("connect-gateway-off", UNLISTED, "of two active leaders that one loses power which a machine with `kgctl connect` uses", Limit::OnlyIts(1000), breaking::power_off).leaders(2).of_laptop(),
    case("static-gateway-off", UNLISTED, "of two active leaders the one loses power that a machine with a static configuration does not use", Limit::Lost(0), breaking::stand_by_off).leaders(2).of_static_laptop(),
    case("static-agents-restarted", UNLISTED, "every agent restarts, one after the other, and a machine with a static configuration goes on", Limit::Undisturbed, breaking::agents_restarted).of_static_laptop(),
    case("static-leader-cordoned", UNLISTED, "the leader's Node is cordoned that a machine with a static configuration uses", Limit::Lost(10), breaking::leader_cordoned).of_static_laptop(),
    case("static-leader-reboots", UNLISTED, "the leader that a machine with a static configuration uses loses power for 5 s", Limit::Silence(40_000), breaking::leader_reboots).of_static_laptop(),
    case("static-address-changes", UNLISTED, "the leader's public address changes, and its name with it, and a machine with a static configuration turns its tunnel off and on", Limit::Silence(15_000), named_leader::address_changes_and_tunnel_is_renewed).of_static_laptop().prepared(named_leader::static_by_name),
    case("connect-address-changes", UNLISTED, "the public address of the leader that a machine with `kgctl connect` uses changes, and its name with it", Limit::OnlyIts(40_000), named_leader::address_changes).of_laptop().prepared(named_leader::connects_by_name),
    case("connect-begins", UNLISTED, "the leader loses power while a machine with `kgctl connect` begins to, whose Peer was made a moment ago", Limit::Silence(1000), laptop::begins).with_far_leader().beside_laptop(),
    case("crowd-one", UNLISTED, "15 nodes send alike by one leader: what it carries is counted", Limit::NoSwitch, crowd::one).crowd(1),
    case("crowd-two", UNLISTED, "14 nodes send alike by two active leaders: bytes within 25 % of fair", Limit::NoSwitch, crowd::two).crowd(2),
    case("crowd-three", UNLISTED, "13 nodes, three active leaders: bytes within 25 % of fair", Limit::NoSwitch, crowd::three).crowd(3),
    case("crowd-four", UNLISTED, "12 nodes, four active leaders: bytes within 25 % of fair", Limit::NoSwitch, crowd::four).crowd(4),
    case("crowd-off", UNLISTED, "12 members, of three active leaders one loses power, another one with each run", Limit::OnlyIts(1000), crowd::one_off).p95(500).crowd(3),
    case("crowd-four-off", UNLISTED, "12 members, of four active leaders the last loses power", Limit::OnlyIts(1000), crowd::last_off).p95(500).crowd(4),
    case("crowd-joins", UNLISTED, "12 members, a third active leader beside two", Limit::Third, crowd::third_joins).crowd(1).prepared(crowd::two_lead),
];
