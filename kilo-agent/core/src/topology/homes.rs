//! Several active leaders of one location: which nodes they are, and which one each node uses. Pure: every
//! agent that sees the same nodes computes the same.

mod shares;

use std::collections::BTreeSet;

use super::{Node, Segment, leader};
use shares::Slots;

/// Active leaders of a location and who uses which, as indexes of [`Segment::members`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Homes {
    /// Nodes that can lead, Kilo's leader first if it can.
    pub active: Vec<usize>,
    /// Chosen nodes that are about to go: they lead until nobody uses them any more.
    pub leaving: Vec<usize>,
    /// Nodes that can take over, each from the active leader it uses.
    pub stand_bys: Vec<usize>,
    /// The active leader each member uses. Active leaders use themselves.
    pub of: Vec<usize>,
}

/// A node that may be chosen, present or not.
struct Candidate<'a> {
    node: &'a Node,
    /// Index among the members; `None`: it takes no part now.
    member: Option<usize>,
}

impl Candidate<'_> {
    fn can_lead(&self) -> bool {
        self.member.is_some() && self.node.leaving.is_none()
    }
}

/// Maximum number of active leaders of a location, however many nodes are annotated:
/// each sends HELLO to each.
pub(super) const MOST_LEADERS: usize = 8;

impl Segment {
    /// How many active leaders its nodes ask for: the least that any of them says.
    pub(super) fn leaders_asked(&self) -> usize {
        self.members.iter().map(|member| member.node.leaders.unwrap_or(1)).min().unwrap_or(1)
    }

    /// The nodes that are to lead, whether they are there or not, and the others that could, in Kilo's order.
    fn chosen<'a>(&'a self, lost: &[&'a Node], wanted: usize) -> (Vec<Candidate<'a>>, Vec<Candidate<'a>>) {
        let present = self.members.iter().enumerate();
        let present = present.map(|(at, member)| Candidate { node: &member.node, member: Some(at) });
        let lost = lost.iter().map(|node| Candidate { node, member: None });
        let mut all: Vec<_> = present.chain(lost).filter(|candidate| candidate.node.is_capable()).collect();
        let first = |candidate: &Candidate<'_>| candidate.member == Some(self.leader);
        let order = |it: &Candidate<'a>| (!first(it), leader::rank(it.node), it.node.name.clone());
        all.sort_by_key(order);
        if !all.iter().any(|candidate| candidate.node.gateway) {
            let rest = all.split_off(wanted.min(all.len()));
            return (all, rest);
        }
        let (mut chosen, mut rest): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|candidate| candidate.node.gateway || first(candidate));
        rest.extend(chosen.split_off(MOST_LEADERS.min(chosen.len())));
        rest.sort_by_key(order);
        (chosen, rest)
    }

    /// Annotated nodes that could lead, but are more than may.
    pub(super) fn annotated_in_vain(&self, lost: &[&Node]) -> Vec<&str> {
        let (_, rest) = self.chosen(lost, 0);
        let members = rest.into_iter().filter(|it| it.node.gateway).filter_map(|it| it.member);
        members.map(|at| self.members[at].name()).collect()
    }

    /// Its active leaders; `None`: it has one. `lost`: its nodes that are known but take no part, whose
    /// slots stay theirs. All nodes of the mesh must know several active leaders ([`Node::leaders`]).
    pub fn homes(&self, lost: &[&Node], stand_bys: usize) -> Option<Homes> {
        let wanted = self.leaders_asked();
        // The chosen ones have their slots, whether they are there or not.
        let (chosen, mut rest) = self.chosen(lost, wanted);
        rest.retain(|candidate| candidate.member.is_some());
        let mut active: Vec<_> = chosen.iter().filter(|it| it.can_lead()).collect();
        let leaving: Vec<usize> =
            chosen.iter().filter(|it| !it.can_lead()).filter_map(|it| it.member).collect();
        // One annotated node is enough; when all are about to go, the next node leads.
        let is_annotated = chosen.iter().any(|it| it.node.gateway);
        let wanted = if is_annotated { 1 } else { wanted };
        let missing = wanted.saturating_sub(active.len());
        let promoted: Vec<_> = rest.iter().filter(|it| it.can_lead()).take(missing).collect();
        active.extend(&promoted);
        // A node that is about to go has members until another one has taken them: until then there are two.
        if chosen.len() < 2 || active.is_empty() || active.len() + leaving.len() < 2 {
            return None;
        }
        let is_promoted = |it: &Candidate<'_>| promoted.iter().any(|one| one.node.name == it.node.name);
        // By Kilo's rule for nodes, not by who leads now, so that slots do not change.
        let mut by_rank: Vec<_> = chosen.iter().collect();
        by_rank.sort_by_key(|it| (leader::rank(it.node), it.node.name.as_str()));
        let slots = Slots {
            chosen: by_rank.into_iter().map(|it| (it.node.name.as_str(), it.can_lead())).collect(),
            promoted: promoted.iter().map(|it| it.node.name.as_str()).collect(),
        };
        // Each slot has a share of those that could lead, and of the others. Neither depends on who can lead
        // now, nor on `stand_bys`, which may differ between agents.
        let among = |candidates: &[Candidate<'_>]| {
            let mut among = vec![false; self.members.len()];
            candidates.iter().filter_map(|it| it.member).for_each(|at| among[at] = true);
            among
        };
        let (is_chosen, could_lead) = (among(&chosen), among(&rest));
        let (capable, others): (Vec<usize>, Vec<usize>) =
            (0..self.members.len()).filter(|at| !is_chosen[*at]).partition(|at| could_lead[*at]);
        let active: Vec<usize> = active.iter().filter_map(|it| it.member).collect();
        let mut of: Vec<usize> = (0..self.members.len()).collect();
        let mut load = vec![0; slots.len()];
        let mut uses = |at: usize, slot: usize| {
            let home = active.iter().find(|at| self.members[**at].name() == slots.name(slot));
            of[at] = home.copied().unwrap_or(self.leader);
        };
        // A gateway was among those that could lead before it was chosen.
        let gateways = slots.gateways();
        for (group, beside) in [(capable, &gateways[..]), (others, &[][..])] {
            let members: Vec<&str> = group.iter().map(|at| self.members[*at].name()).collect();
            for (at, slot) in group.into_iter().zip(slots.assign(&members, beside, &mut load)) {
                uses(at, slot);
            }
        }
        for at in &leaving {
            uses(*at, slots.least(self.members[*at].name(), &mut load));
        }
        // Absent ones count, too, so that others do not change their slots because of them.
        let count = if stand_bys == 0 { 0 } else { stand_bys.max(chosen.len()) };
        let next: Vec<usize> =
            rest.iter().filter(|it| it.can_lead() && !is_promoted(it)).filter_map(|it| it.member).collect();
        let stand_bys = watching(&next, &of, count);
        Some(Homes { active, leaving, stand_bys, of })
    }
}

/// `count` of `next` as stand-bys, in their order: for each active leader the first one that uses it, which
/// watches it, and then the next ones. `of`: the active leader that each uses.
fn watching(next: &[usize], of: &[usize], count: usize) -> Vec<usize> {
    let mut watched = BTreeSet::new();
    let (first, more): (Vec<usize>, Vec<usize>) = next.iter().partition(|at| watched.insert(of[**at]));
    let chosen: BTreeSet<usize> = first.into_iter().chain(more).take(count).collect();
    next.iter().copied().filter(|at| chosen.contains(at)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        settings::Granularity,
        topology::{Leaving, Mesh},
        wireguard::key::PublicKey,
    };

    fn node(name: &str, leaders: usize) -> Node {
        let mut key = [0; 32];
        key.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
        Node {
            name: name.to_owned(),
            location: "x".to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey(key)),
            internal_ip: "10.0.0.1/24".parse().ok(),
            signal: true,
            leaders: Some(leaders),
            ..Node::default()
        }
    }

    fn nodes(count: usize, leaders: usize) -> Vec<Node> {
        (0..count).map(|n| node(&format!("n{n:02}"), leaders)).collect()
    }

    /// The active leader that each member uses, by name.
    fn used(nodes: &[Node], lost: &[&Node], stand_bys: usize) -> Option<BTreeMap<String, String>> {
        let mesh = Mesh::new(nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap());
        let segment = &mesh.segments[0];
        let name = |at: usize| segment.members[at].name().to_owned();
        let homes = segment.homes(lost, stand_bys)?;
        Some(homes.of.iter().enumerate().map(|(at, home)| (name(at), name(*home))).collect())
    }

    fn loads(used: &BTreeMap<String, String>) -> BTreeMap<&str, usize> {
        let mut loads = BTreeMap::new();
        for home in used.values() {
            *loads.entry(home.as_str()).or_default() += 1;
        }
        loads
    }

    fn moved(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> Vec<String> {
        let differs = |(node, home): &(&String, &String)| after.get(*node).is_some_and(|to| to != *home);
        before.iter().filter(differs).map(|(node, _)| node.clone()).collect()
    }

    /// 60 nodes, gateways included, with other names in each of 40 runs; docs/gateways.md quotes the results.
    #[test]
    fn what_is_no_failure_moves_nodes_of_other_gateways_too() {
        let with = |gateways: &[&str], leader: &str, run: usize| -> Vec<Node> {
            let gateways = ["ga", "gb", "gc", "gd"].iter().map(|name| Node {
                gateway: gateways.contains(name),
                leader: *name == leader,
                ..node(name, 1)
            });
            gateways.chain((0..56).map(|n| node(&format!("m{run}-{n}"), 1))).collect()
        };
        let changes = |before: (&[&str], &str), after: (&[&str], &str), more: Option<&str>, new: &str| {
            let moves = |run: usize| {
                let mut nodes = with(after.0, after.1, run);
                nodes.extend(more.map(|more| node(more, 1)));
                let after = used(&nodes, &[], 0).unwrap();
                let moves = moved(&used(&with(before.0, before.1, run), &[], 0).unwrap(), &after);
                let (to_new, others): (Vec<_>, Vec<_>) = moves.iter().partition(|node| after[*node] == new);
                (to_new.len(), others.len())
            };
            let runs: Vec<_> = (0..40).map(moves).collect();
            let mean = |of: fn(&(usize, usize)) -> usize| runs.iter().map(of).sum::<usize>() as f64 / 40.0;
            let most = runs.iter().map(|(_, others)| *others).max().unwrap();
            (mean(|(to_new, _)| *to_new), mean(|(_, others)| *others), most)
        };
        let (three, four) = (&["ga", "gb", "gc"][..], &["ga", "gb", "gc", "gd"][..]);
        for (gateways, most) in [(three, 1.5), (four, 2.5)] {
            let found = changes((gateways, ""), (gateways, ""), Some("z"), "");
            assert!((most - 0.5..most).contains(&found.1) && found.2 <= 5, "a node more: {found:?}");
        }
        let found = changes((&["ga", "gb"], ""), (three, ""), None, "gc");
        assert_eq!(found, (20.0, 0.0, 0), "the last one is added");
        let found = changes((&["ga", "gc"], ""), (three, ""), None, "gb");
        assert!(found.0 >= 19.0 && (1.0..6.0).contains(&found.1), "one before the last is added: {found:?}");
        let found = changes((three, "ga"), (three, "gc"), None, "");
        assert!((25.0..30.0).contains(&found.1), "`leader` moves from ga to gc: {found:?}");
    }

    #[test]
    fn one_leader_is_none_of_several() {
        assert_eq!(used(&nodes(5, 1), &[], 2), None);
        // The least that any node says counts: agents restart one after the other.
        let mut some = nodes(5, 3);
        some[4].leaders = Some(1);
        assert_eq!(used(&some, &[], 2), None);
        assert_eq!(used(&nodes(1, 3), &[], 2), None, "nobody else is there");
    }

    #[test]
    fn twelve_members_are_shared_fairly_among_two_three_and_four() {
        for gateways in 2..=4 {
            let used = used(&nodes(12 + gateways, gateways), &[], 2).unwrap();
            let fair = (12 + gateways) as f64 / gateways as f64;
            let loads = loads(&used);
            assert_eq!(loads.len(), gateways);
            for load in loads.values() {
                assert!((*load as f64 - fair).abs() <= 0.25 * fair, "{loads:?}");
            }
            for gateway in 0..gateways {
                let name = format!("n{gateway:02}");
                assert_eq!(used[&name], name, "gateways serve themselves");
            }
        }
    }

    #[test]
    fn each_active_leader_is_watched_by_a_stand_by_that_uses_it() {
        let all = nodes(15, 3);
        let mesh = Mesh::new(&all, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap());
        let homes = mesh.segments[0].homes(&[], 2).unwrap();
        assert_eq!((&homes.active[..], homes.stand_bys.len()), (&[0, 1, 2][..], 3));
        let mut watched: Vec<_> = homes.stand_bys.iter().map(|at| homes.of[*at]).collect();
        watched.sort_unstable();
        assert_eq!(watched, [0, 1, 2]);
    }

    #[test]
    fn annotated_nodes_lead_beside_kilos_leader_however_many_are_asked_for() {
        let mut all = nodes(8, 1);
        all[5].gateway = true;
        all[6].gateway = true;
        let used = used(&all, &[], 2).unwrap();
        assert_eq!(loads(&used).into_keys().collect::<Vec<_>>(), ["n00", "n05", "n06"]);
        all[5].signal = false;
        all[6].gateway = false;
        assert_eq!(self::used(&all, &[], 2), None, "it knows no signals");
    }

    #[test]
    fn a_node_that_was_deleted_and_is_registered_again_counts_once() {
        let all = nodes(8, 2);
        let pods = |node: &Node| Node { pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()], ..node.clone() };
        let homes = |present: &[Node], lost: &[&Node]| {
            let subnet = "10.4.0.0/16".parse().unwrap();
            let mesh = Mesh::new(present, &BTreeMap::new(), Granularity::Location, subnet);
            let lost: Vec<_> = lost.iter().map(|node| std::sync::Arc::new(pods(node))).collect();
            mesh.with_lost(&lost).homes_of(0).map(std::borrow::Cow::into_owned)
        };
        assert_eq!(homes(&all, &[&all[0]]), homes(&all, &[]), "it takes part again");
        let mut rest = all.clone();
        let gone = rest.remove(0);
        assert_eq!(homes(&rest, &[&gone, &gone]), homes(&rest, &[&gone]), "it does not take part yet");
        assert_ne!(homes(&rest, &[&gone]), homes(&rest, &[]));
    }

    /// The location's active leaders, those that are about to go, and which one each node uses.
    type Leads<'a> = (Vec<&'a str>, Vec<&'a str>, BTreeMap<String, String>);

    fn leads(nodes: &[Node]) -> Option<Leads<'_>> {
        let mesh = Mesh::new(nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap());
        let homes = mesh.segments[0].homes(&[], 2)?;
        let names = |list: &[usize]| list.iter().map(|at| nodes[*at].name.as_str()).collect();
        Some((names(&homes.active), names(&homes.leaving), used(nodes, &[], 2)?))
    }

    #[test]
    fn who_is_about_to_go_keeps_its_nodes_until_the_last_one_has_taken_them() {
        let cordoned = |annotated: &[usize], cordoned: &[usize]| {
            let mut all = nodes(8, 1);
            annotated.iter().for_each(|at| all[*at].gateway = true);
            cordoned.iter().for_each(|at| all[*at].leaving = Some(Leaving::Cordoned));
            all
        };
        for (annotated, gone, active, leaving) in [
            (vec![5], vec![5], "n00", vec!["n05"]),
            (vec![5], vec![0], "n05", vec!["n00"]),
            (vec![5, 6], vec![0, 5], "n06", vec!["n00", "n05"]),
            (vec![5, 6], vec![0, 5, 6], "n01", vec!["n00", "n05", "n06"]),
        ] {
            let all = cordoned(&annotated, &gone);
            let (leads, leaves, used) = leads(&all).unwrap();
            assert_eq!((leads, leaves), (vec![active], leaving), "{annotated:?} without {gone:?}");
            assert!(used.values().all(|home| home == active), "{used:?}");
        }
        let mut two = nodes(3, 2);
        (1..3).for_each(|at| two[at].leaving = Some(Leaving::Cordoned));
        assert_eq!(leads(&two).unwrap().1, ["n01"], "nobody can be promoted");
        let mut one = nodes(3, 1);
        one[0].leaving = Some(Leaving::Cordoned);
        assert_eq!(leads(&one), None, "--leaders=1");
        let everybody: Vec<usize> = (0..8).collect();
        assert_eq!(leads(&cordoned(&[5], &everybody)), None, "nobody stays");
    }

    #[test]
    fn of_more_annotated_nodes_than_eight_the_first_lead() {
        let mut all = nodes(20, 1);
        all[3..].iter_mut().for_each(|node| node.gateway = true);
        let used = used(&all, &[], 2).unwrap();
        let names: Vec<_> = loads(&used).into_keys().collect();
        assert_eq!(names, ["n00", "n03", "n04", "n05", "n06", "n07", "n08", "n09"]);
        let mesh = Mesh::new(&all, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap());
        assert_eq!(mesh.segments[0].gateways(2), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "with one leader");
    }

    #[test]
    fn who_uses_whom_does_not_depend_on_the_number_of_stand_bys() {
        let mut all = nodes(14, 2);
        for leaving in [None, Some(1), Some(2)] {
            leaving.into_iter().for_each(|at: usize| all[at].leaving = Some(Leaving::Cordoned));
            let homes = [0, 1, 2, 3, 4].map(|stand_bys| used(&all, &[], stand_bys).unwrap());
            assert!(homes.iter().all(|used| *used == homes[0]), "{homes:?}");
        }
    }

    #[test]
    fn gateways_stay_gateways_when_a_node_elsewhere_stops_to_know_several() {
        let mut annotated = nodes(8, 1);
        annotated[6].gateway = true;
        annotated[7].gateway = true;
        for of_x in [nodes(8, 4), annotated] {
            let elsewhere = |leaders| {
                let internal_ip = "10.9.0.1/24".parse().ok();
                Node { location: "y".to_owned(), leaders, internal_ip, ..node("y00", 4) }
            };
            let gateways = |leaders| {
                let all: Vec<Node> = of_x.iter().cloned().chain([elsewhere(leaders)]).collect();
                let subnet = "10.4.0.0/16".parse().unwrap();
                let mesh = Mesh::new(&all, &BTreeMap::new(), Granularity::Location, subnet);
                mesh.with_acting(1, std::sync::Arc::default()).gateways_of(0).into_owned()
            };
            let (before, after) = (gateways(Some(4)), gateways(None));
            let active = before.homes.unwrap().active;
            assert!(active.len() > 2 && after.homes.is_none());
            assert!(active.iter().all(|at| after.order.contains(at)), "{active:?}, then {:?}", after.order);
        }
    }

    #[test]
    fn a_third_leader_takes_about_a_third_and_losing_one_moves_only_its_own() {
        let (two, three) = (nodes(14, 2), nodes(14, 3));
        let (before, after) = (used(&two, &[], 0).unwrap(), used(&three, &[], 0).unwrap());
        let moves = moved(&before, &after);
        assert!((3..=6).contains(&moves.len()), "{moves:?}");
        assert!(moves.iter().all(|node| after[node] == "n02"), "only to the new one: {moves:?}");
        // Without a stand-by to be promoted: all nodes but three cannot lead.
        let mut three = nodes(15, 1);
        three[..3].iter_mut().for_each(|node| node.gateway = true);
        let before = used(&three, &[], 2).unwrap();
        for lost in 0..3 {
            let mut rest = three.clone();
            let gone = rest.remove(lost);
            let after = used(&rest, &[&gone], 2).unwrap();
            for node in moved(&before, &after) {
                assert_eq!(before[&node], gone.name, "{node} used another one");
            }
            // One that is about to go is left by its members, and gets no new ones.
            let mut leaves = three.clone();
            leaves[lost].leaving = Some(Leaving::Cordoned);
            let after = used(&leaves, &[], 2).unwrap();
            for node in moved(&before, &after) {
                assert_eq!(before[&node], gone.name);
            }
            assert!(!after.values().any(|home| *home == gone.name));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn of_any_names_shares_are_fair_and_a_loss_moves_only_the_lost_ones(
            names in proptest::collection::btree_set("[a-z0-9-]{1,12}", 4..40),
            gateways in 2usize..5,
            lost in 0usize..5,
        ) {
            let mut all: Vec<Node> = names.iter().map(|name| node(name, 1)).collect();
            let gateways = gateways.min(all.len() - 1);
            all[..gateways].iter_mut().for_each(|node| node.gateway = true);
            let before = used(&all, &[], 0).unwrap();
            let loads = loads(&before);
            let (least, most) = (loads.values().min().unwrap(), loads.values().max().unwrap());
            // A fourth gateway may have been one of few, which then have two less ([`shares`]).
            let apart = if gateways < 4 { 1 } else { 2 };
            prop_assert!(loads.len() == gateways && most - least <= apart, "{loads:?}");
            // The order of the nodes does not matter.
            let reversed: Vec<Node> = all.iter().rev().cloned().collect();
            prop_assert_eq!(&used(&reversed, &[], 0).unwrap(), &before);
            let mut rest = all.clone();
            let gone = rest.remove(lost % gateways);
            let after = used(&rest, &[&gone], 0);
            prop_assert_eq!(after.is_some(), gateways > 2);
            for node in after.iter().flat_map(|after| moved(&before, after)) {
                prop_assert_eq!(&before[&node], &gone.name);
            }
        }

        #[test]
        fn where_a_stand_by_leads_in_anothers_place_nobody_elses_nodes_move(
            names in proptest::collection::btree_set("[a-z0-9-]{1,12}", 6..40),
            leaders in 2usize..5,
            lost in 0usize..5,
            stays in proptest::bool::ANY,
        ) {
            let all: Vec<Node> = names.iter().map(|name| node(name, leaders)).collect();
            let before = used(&all, &[], 2).unwrap();
            let mut rest = all.clone();
            let gone = rest.remove(lost % leaders);
            if stays {
                rest.insert(lost % leaders, Node { leaving: Some(Leaving::Cordoned), ..gone.clone() });
            }
            let away: Vec<&Node> = (!stays).then_some(&gone).into_iter().collect();
            let after = used(&rest, &away, 2).unwrap();
            for node in moved(&before, &after) {
                let promoted = after[&node] == node && before[&node] != node;
                prop_assert!(before[&node] == gone.name || promoted, "{node}: {before:?}, {after:?}");
            }
            let loads = loads(&after);
            let (least, most) = (loads.values().min().unwrap(), loads.values().max().unwrap());
            prop_assert!(loads.len() == leaders && !loads.contains_key(&*gone.name), "{loads:?}");
            prop_assert!(most - least <= 2, "{loads:?}");
        }
    }
}
