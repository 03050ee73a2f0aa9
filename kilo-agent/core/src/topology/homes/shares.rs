//! How members are shared among active leaders: by rendezvous hashing, so that a leader that comes or
//! goes moves few members.

use std::cmp::Reverse;

/// Active leaders by name, as slots to which members are assigned.
pub(super) struct Slots<'a> {
    /// The chosen ones, and whether each can lead.
    pub(super) chosen: Vec<(&'a str, bool)>,
    /// Nodes that lead in place of a chosen one that cannot.
    pub(super) promoted: Vec<&'a str>,
}

impl<'a> Slots<'a> {
    pub(super) fn len(&self) -> usize {
        self.chosen.len() + self.promoted.len()
    }

    pub(super) fn name(&self, slot: usize) -> &'a str {
        match self.chosen.get(slot) {
            Some((name, _)) => name,
            None => self.promoted[slot - self.chosen.len()],
        }
    }

    fn can_lead(&self, slot: usize) -> bool {
        self.chosen.get(slot).is_none_or(|(_, can)| *can)
    }

    /// Assigns the member to the leader with the fewest members. `load`: how many each has; it is updated.
    pub(super) fn least(&self, member: &str, load: &mut [usize]) -> usize {
        let able = (0..self.len()).filter(|slot| self.can_lead(*slot));
        let least = able.min_by_key(|slot| (load[*slot], Reverse(weight(member, self.name(*slot)))));
        let slot = least.unwrap_or(0);
        load[slot] += 1;
        slot
    }

    /// Names of the chosen ones.
    pub(super) fn gateways(&self) -> Vec<&'a str> {
        self.chosen.iter().map(|(name, _)| *name).collect()
    }

    /// A slot for each of `members`, by [`shares`] of them and those `beside` them, which have their slots.
    /// Only the members of a chosen one that cannot lead go to the slots with the fewest; a node that leads
    /// in its place uses itself.
    pub(super) fn assign(&self, members: &[&str], beside: &[&str], load: &mut [usize]) -> Vec<usize> {
        let count = self.chosen.len();
        let all = [members, beside].concat();
        let slots = shares(&all, &self.gateways()).into_iter().map(Some);
        let mut assigned: Vec<Option<usize>> = slots.take(members.len()).collect();
        let itself = |member: &&str| Some(count + self.promoted.iter().position(|name| name == member)?);
        for (slot, member) in assigned.iter_mut().zip(members) {
            let keeps = slot.filter(|slot| self.can_lead(*slot) && itself(member).is_none());
            *slot = itself(member).or(keeps);
            keeps.into_iter().for_each(|slot| load[slot] += 1);
        }
        let pairs = assigned.into_iter().zip(members);
        pairs.map(|(slot, member)| slot.unwrap_or_else(|| self.least(member, load))).collect()
    }
}

/// Which of `gateways` each of `names` is assigned to; a gateway among them is assigned to itself. The first
/// gateway has all; each next one takes itself, and then its share from those that have most, the names with
/// the highest weights first. A gateway that comes or goes at the end therefore moves only those that it
/// takes or gives back, whether it was there before or not. Their numbers differ by one, or by two where a
/// gateway was with one that had few.
fn shares(names: &[&str], gateways: &[&str]) -> Vec<usize> {
    let mut has: Vec<Share> = Vec::new();
    for (before, gateway) in gateways.iter().enumerate() {
        let itself = names.iter().position(|name| name == gateway);
        if before == 0 {
            let free = (0..names.len()).filter(|at| Some(*at) != itself).collect();
            has.push(Share { itself, free });
            continue;
        }
        // Highest weight last, so `pop` takes it.
        let key = |at: &usize| (weight(names[*at], gateway), *at);
        for share in &mut has {
            share.free.retain(|at| Some(*at) != itself);
            share.free.sort_by_cached_key(key);
        }
        let mut own = Share { itself, free: Vec::new() };
        loop {
            let most = has.iter().map(Share::len).max().unwrap_or(0);
            // The second where it was itself with one that had few.
            if own.len() >= names.len() / (before + 1) && most <= own.len() + 1 {
                break;
            }
            let fullest = has.iter_mut().filter(|share| share.len() == most);
            let from = fullest.max_by_key(|share| share.free.last().map(key));
            let Some(taken) = from.and_then(|share| share.free.pop()) else { break };
            own.free.push(taken);
        }
        has.push(own);
    }
    let mut slots = vec![0; names.len()];
    for (slot, share) in has.iter().enumerate() {
        share.itself.iter().chain(&share.free).for_each(|at| slots[*at] = slot);
    }
    slots
}

/// What a gateway has, by index: itself, which nobody takes, and names that a later gateway may take.
struct Share {
    itself: Option<usize>,
    free: Vec<usize>,
}

impl Share {
    fn len(&self) -> usize {
        self.free.len() + usize::from(self.itself.is_some())
    }
}

/// Rendezvous (highest-random-weight) hash of a member and a gateway (FNV-1a, then mixed so that names
/// that differ in a letter are far apart).
fn weight(member: &str, gateway: &str) -> u64 {
    let bytes = member.bytes().chain([0xff]).chain(gateway.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_gateway_more_moves_none_but_those_it_takes(
            names in proptest::collection::btree_set("[a-z0-9-]{1,12}", 8..60),
            order in Just((0..8).collect::<Vec<usize>>()).prop_shuffle(),
            gateways in 2usize..8,
            elsewhere in proptest::bool::ANY,
        ) {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let gateways: Vec<&str> = order.iter().take(gateways).map(|at| names[*at]).collect();
            // It is mostly one of the members.
            let last = gateways.len() - 1;
            let names: Vec<&str> =
                names.into_iter().filter(|name| !elsewhere || *name != gateways[last]).collect();
            let (before, after) = (shares(&names, &gateways[..last]), shares(&names, &gateways));
            let mut loads = vec![0; gateways.len()];
            for ((name, before), after) in names.iter().zip(&before).zip(&after) {
                loads[*after] += 1;
                prop_assert!(after == before || *after == last, "{name}");
                let itself = gateways.iter().position(|gateway| gateway == name);
                prop_assert!(itself.is_none_or(|itself| itself == *after), "{name}");
            }
            let apart = loads.iter().max().unwrap() - loads.iter().min().unwrap();
            prop_assert!(apart <= if gateways.len() <= 3 { 1 } else { 2 }, "{loads:?}");
        }
    }
}
