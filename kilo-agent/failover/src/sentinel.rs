//! The decision of a stand-by: whether to take over, and for which nodes.
//!
//! A needless takeover costs packets in flight, not an outage, and a stand-by acts only with proof that its
//! own tunnel worked all the time the leader's path did not.

use crate::{Micros, NodeId, Params, Rule, SEC, detector::Detector, signal::Verdict, tunnel::Tunnels};

/// One question to witnesses.
#[derive(Clone, Debug)]
struct Round {
    id: u32,
    asked: Vec<NodeId>,
    works: Vec<NodeId>,
    failed: Vec<NodeId>,
    deadline: Micros,
    /// Decided, but waiting for better stand-bys: until when, and whether it takes the location.
    waits: Option<(Micros, bool)>,
}

impl Round {
    /// Whether most of those asked say that the path has failed.
    fn has_majority(&self) -> bool {
        self.failed.len() * 2 > self.asked.len().max(1) && self.failed.len() > self.works.len()
    }
}

/// The result of a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Do nothing now.
    Wait,
    /// Ask witnesses, and call the roll.
    Ask,
    /// It would take over, but has done so too often.
    OverBudget,
    /// Take over the location except for some nodes, or this node alone.
    Take {
        /// Whether it takes the location, or itself only.
        all: bool,
        /// Witnesses whose path works: they stay.
        but: Vec<NodeId>,
    },
}

/// What a decision depends on.
pub struct Scene<'a> {
    /// Times and counts.
    pub params: &'a Params,
    /// Time of the decision.
    pub now: Micros,
    /// Probes of the path through the leader.
    pub detector: &'a Detector,
    /// Probes of this node's own tunnels.
    pub tunnels: &'a Tunnels,
    /// Whether this node could lead now.
    pub is_able: bool,
    /// Whether the location has no third node: nobody can be a witness.
    pub alone: bool,
    /// How many better stand-bys were heard lately.
    pub better: usize,
    /// Whether this node has lost leadership lately.
    pub has_lost: bool,
    /// How long nothing must have come back through the leader before it is lost; 0 unless it is overloaded.
    pub patience: Micros,
}

/// The decisions of one stand-by.
#[derive(Clone, Debug, Default)]
pub struct Sentinel {
    round: Option<Round>,
    blocked_until: Micros,
    asked_twice: Option<Micros>,
    /// When the budget is whole again.
    spent_until: Micros,
    /// Changes of leader in the location, as the latest term counts them.
    changes: Option<u32>,
}

impl Sentinel {
    /// How long witnesses are not asked a third time about a soft suspicion that nobody answered.
    const TWICE: Micros = 2 * SEC;
    /// Pause after the budget was found spent.
    const BLOCKED: Micros = 2 * SEC;

    /// When it has to be woken.
    pub fn wake(&self) -> Micros {
        self.round.as_ref().map_or(Micros::MAX, |round| round.waits.map_or(round.deadline, |(at, _)| at))
    }

    /// Forgets the question: the leader changed, or the agent slept.
    pub fn reset(&mut self) {
        self.round = None;
    }

    /// Decides nothing until then.
    pub fn rest_until(&mut self, until: Micros) {
        self.blocked_until = until;
    }

    /// Records that witnesses were asked. The question's `id` is random, so that no answer
    /// to another agent counts.
    pub fn asked(&mut self, id: u32, asked: Vec<NodeId>, deadline: Micros) {
        let (works, failed) = (Vec::new(), Vec::new());
        self.round = Some(Round { id, asked, works, failed, deadline, waits: None });
    }

    /// Records a witness's answer.
    pub fn verdict(&mut self, from: NodeId, id: u32, verdict: Verdict) {
        let Some(round) = self.round.as_mut().filter(|round| round.id == id && round.asked.contains(&from))
        else {
            return;
        };
        let answers = match verdict {
            Verdict::Works => &mut round.works,
            Verdict::Failed => &mut round.failed,
            Verdict::Elsewhere => return,
        };
        if !answers.contains(&from) {
            answers.push(from);
        }
    }

    /// Decides what to do now. Has to be called again after [`Decision::Ask`] and [`Self::asked`].
    pub fn decide(&mut self, scene: &Scene<'_>) -> Decision {
        let Scene { params, now, detector, .. } = *scene;
        if self.blocked_until > now {
            return Decision::Wait;
        }
        let (lan, path) = detector.misses();
        // If the leader's kernel answers, it is alive, and an overloaded one drops many probes, but not all.
        // Witnesses are asked a moment before.
        let quiet = detector.quiet_for(now) + if self.round.is_none() { 5 * params.interval } else { 0 };
        let path = if lan < params.hard && quiet < scene.patience { 0 } else { path };
        if let Some(Round { waits: Some((at, all)), works, .. }) = &self.round {
            if now < *at {
                return Decision::Wait;
            }
            let still = path >= params.hard && (lan >= params.hard || path >= params.soft);
            let decision = Decision::Take { all: *all, but: works.clone() };
            self.round = None;
            return if still { self.spend(scene, decision) } else { Decision::Wait };
        }
        // Two nodes have no witness, and wait for more misses.
        let (hard, soft) =
            if scene.alone { (params.hard + 1, params.soft + 2) } else { (params.hard, params.soft) };
        // LAN probes begin with the first path probe that is not answered.
        let nearly = lan + 2 >= hard && path + 1 >= hard || path + 2 >= soft;
        let Some(round) = &mut self.round else {
            return if nearly && scene.is_able { Decision::Ask } else { Decision::Wait };
        };
        let is_hard = lan >= hard && path >= hard;
        let is_over = now >= round.deadline;
        let suspects = is_hard || path >= soft;
        let mut decision = Decision::Wait;
        if suspects && Self::has_proof(scene) {
            let (works, failed) = (round.works.len(), round.failed.len());
            let answers = works + failed;
            if is_over && !round.asked.is_empty() && answers == 0 && !is_hard && self.may_ask_twice(now) {
                self.asked_twice = Some(now);
                self.round = None;
                return Decision::Ask;
            }
            let Some(round) = &mut self.round else { return Decision::Wait };
            let majority = round.has_majority();
            if majority || is_over || round.asked.is_empty() {
                let all = majority || if answers == 0 { is_hard } else { failed >= works && failed > 0 };
                if scene.better > 0 && params.keeps(Rule::Rank) {
                    round.waits = Some((now + params.rank * scene.better as u64, all));
                    return Decision::Wait;
                }
                decision = Decision::Take { all, but: round.works.clone() };
            }
        }
        if is_over || decision != Decision::Wait {
            self.round = None;
        }
        self.spend(scene, decision)
    }

    /// As [`Self::decide`], for a gateway that uses itself, about one that others use: that one's kernel has
    /// missed so many LAN probes since then. None of this node's own packets take that path, so most
    /// witnesses have to say that theirs do not pass.
    pub fn decide_by_witnesses(&mut self, scene: &Scene<'_>, misses: usize, since: Micros) -> Decision {
        let Scene { params, now, tunnels, .. } = *scene;
        if self.blocked_until > now {
            return Decision::Wait;
        }
        let is_silent = misses >= params.hard;
        let Some(round) = &mut self.round else {
            let is_asked = misses + 1 >= params.hard && scene.is_able;
            return if is_asked { Decision::Ask } else { Decision::Wait };
        };
        let decision = Decision::Take { all: true, but: round.works.clone() };
        if let Some((at, _)) = round.waits {
            if now < at {
                return Decision::Wait;
            }
            self.round = None;
            return if is_silent { self.spend(scene, decision) } else { Decision::Wait };
        }
        let proved =
            tunnels.were_good(since) && scene.is_able && tunnels.proves(since + params.interval * 3 / 2);
        if round.has_majority() && is_silent && proved {
            if scene.better > 0 && params.keeps(Rule::Rank) {
                round.waits = Some((now + params.rank * scene.better as u64, true));
                return Decision::Wait;
            }
            self.round = None;
            return self.spend(scene, decision);
        }
        if now >= round.deadline {
            self.round = None;
            self.blocked_until = now + params.hello;
        }
        Decision::Wait
    }

    /// Whether this node's own tunnel worked all the time that the leader's path did not: good since before
    /// the first missed probe, and answering one sent well after it.
    fn has_proof(scene: &Scene<'_>) -> bool {
        let Scene { params, now, detector, tunnels, .. } = *scene;
        if !params.keeps(Rule::Proof) {
            return scene.is_able;
        }
        let (Some(silent), Some(good)) = (detector.silent_since(), tunnels.good_since()) else {
            return false;
        };
        // Where both had failed, the leader's path may be back a moment after this node's own tunnel: several
        // of its probes have to be missed since then.
        let several = detector.timeout(params) + params.interval * (params.hard as u64 + 1);
        let proved = good <= silent || good + several <= now;
        proved && scene.is_able && tunnels.proves(silent.max(good) + params.interval * 3 / 2)
    }

    fn may_ask_twice(&self, now: Micros) -> bool {
        self.asked_twice.is_none_or(|asked| asked + Self::TWICE < now)
    }

    /// Charges the budget for new changes of leader, whichever gateway made them; `changes` is the count
    /// of the latest term known.
    pub fn count_changes(&mut self, params: &Params, now: Micros, changes: u32) {
        let (burst, refill) = params.budget;
        if self.changes.is_some_and(|known| known < changes) {
            self.spent_until = (self.spent_until.max(now) + refill).min(now + burst * refill);
        }
        self.changes = self.changes.max(Some(changes));
    }

    /// Slows down a location in which everything flaps: a gateway that has lost leadership lately waits.
    fn spend(&mut self, scene: &Scene<'_>, decision: Decision) -> Decision {
        let Scene { params, now, .. } = *scene;
        let (burst, refill) = params.budget;
        let takes_all = matches!(decision, Decision::Take { all: true, .. });
        if takes_all
            && scene.has_lost
            && params.keeps(Rule::Budget)
            && self.spent_until > now + (burst - 1) * refill
        {
            self.blocked_until = now + Self::BLOCKED;
            return Decision::OverBudget;
        }
        decision
    }
}
