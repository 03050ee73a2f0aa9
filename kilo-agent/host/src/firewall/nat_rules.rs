//! Masquerading by nftables, for `--masquerade nftables`.
//!
//! The decision is that of the maps `masq_src` and `masq_dst`, as sets of a table of our own, which is
//! replaced as a whole.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    time::{Duration, Instant},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kilo_common::maps::{MASQ_EXCLUDE, MASQ_FORCE, MASQ_SRC_ALWAYS};

use super::program::{self, ProgramError};

/// Our table, of family `inet`.
pub const TABLE: &str = "kilo";
/// Interval between checks whether others have flushed the rules.
const CHECK: Duration = Duration::from_secs(10);

/// Why the rules are not as they should be.
#[derive(Debug, thiserror::Error)]
pub enum NatRulesError {
    /// The program is missing or cannot be run.
    #[error("nft cannot be run ({0}); install the package nftables, or use --masquerade off")]
    Program(#[source] io::Error),
    /// nft failed; this is its standard error.
    #[error("nft: {0}")]
    Refused(String),
    /// nft did not end.
    #[error(
        "nft was killed because it had not ended within {} s; kg tries again at the next reconcile. If this repeats, \
         find what keeps changing the rules (`nft monitor` on the host)",
        program::LIMIT.as_secs()
    )]
    Late,
}

impl NatRulesError {
    /// Label `event` of `kilo_errors_total`.
    pub const fn label(&self) -> &'static str {
        "nftables"
    }
}

/// Rules that bridge the time until another agent masquerades.
#[derive(Clone, Debug)]
pub struct Interim<'a> {
    /// Names of the interfaces where leaving packets are masqueraded.
    pub uplinks: &'a BTreeSet<String>,
    /// Destinations that packets may reach only in an outer header or through WireGuard, never in cleartext by an
    /// uplink.
    pub never_clear: &'a BTreeSet<IpNet>,
    /// Destinations whose packets the uplink's program encapsulates: dropped at the uplink once that program
    /// has ended.
    pub by_uplink: &'a BTreeSet<IpNet>,
    /// False: another agent masquerades, and these rules only drop packets that must not leave by an uplink.
    pub masquerades: bool,
    /// How long the orphaned programs keep steering.
    pub steered: Duration,
    /// Lifetime of these rules.
    pub lasts: Duration,
}

/// How long resets for unknown flows are suppressed, while each flow's next packet makes an entry.
const QUIET: Duration = Duration::from_secs(5);

/// A family as nft names it.
struct Family {
    v6: bool,
    word: &'static str,
    kind: &'static str,
}

const FAMILIES: &[Family] = &[
    Family { v6: false, word: "ip", kind: "ipv4_addr" },
    Family { v6: true, word: "ip6", kind: "ipv6_addr" },
];

/// The rules of each chain.
#[derive(Default)]
struct Rules {
    masquerade: String,
    guard: String,
    quiet: String,
}

impl Rules {
    /// Adds the rules of a family.
    fn add(&mut self, family: &Family, interim: Option<&Interim<'_>>) {
        let word = family.word;
        if interim.is_some() {
            let gate = format!("\t\t{word} daddr != @live_{word} return\n");
            self.masquerade += &gate;
            self.guard += &gate;
        }
        // A source in a prefix of both kinds counts as the programs see it: by the longer one.
        self.masquerade += &format!(
            "\t\t{word} daddr @known_{word} return\n\
             \t\t{word} daddr @forced_{word} {word} saddr != @exempt_{word} masquerade\n\
             \t\t{word} saddr @sources_{word} masquerade\n"
        );
        // That set is empty once the programs have ended.
        let gate = match interim.is_some_and(|interim| !interim.steered.is_zero()) {
            true => format!("{word} daddr != @steered_{word} "),
            false => String::new(),
        };
        // A leader also forwards packets of other nodes' pods.
        for from in ["sources", "never", "by_uplink"] {
            self.guard += &format!(
                "\t\t{word} saddr @{from}_{word} {word} daddr @never_{word} drop\n\
                 \t\t{gate}{word} saddr @{from}_{word} {word} daddr @by_uplink_{word} drop\n"
            );
        }
        if interim.is_some_and(|interim| interim.masquerades) {
            self.guard += &format!(
                "\t\t{word} daddr @known_{word} return\n\
                 \t\t{word} saddr @sources_{word} ct direction reply return\n\
                 \t\t{word} saddr @sources_{word} drop\n"
            );
        }
        let icmp = if family.v6 { "icmpv6" } else { "icmp" };
        self.quiet += &format!(
            "\t\t{word} daddr @quiet_{word} tcp flags & rst == rst drop\n\
             \t\t{word} daddr @quiet_{word} {icmp} type destination-unreachable drop\n"
        );
    }

    /// The chains with these rules, in nft syntax.
    fn chains(self, interim: Option<&Interim<'_>>) -> String {
        let Self { mut masquerade, guard, mut quiet } = self;
        let Some(interim) = interim else {
            return format!(
                "\tchain postrouting {{\n\t\ttype nat hook postrouting priority srcnat; policy accept;\n\
                 \t\toifname \"lo\" return\n{masquerade}\t}}\n"
            );
        };
        let names: Vec<_> = interim.uplinks.iter().map(|name| format!("\"{name}\"")).collect();
        let others = format!("\t\toifname != {{ {} }} return\n", names.join(", "));
        if !interim.masquerades {
            (masquerade, quiet) = (String::new(), String::new());
        }
        format!(
            "\tchain postrouting {{\n\t\ttype nat hook postrouting priority srcnat; policy accept;\n\
             {others}{masquerade}\t}}\n\
             \tchain guard {{\n\t\ttype filter hook postrouting priority srcnat + 10; policy accept;\n\
             {others}\t\tfib saddr type local return\n{guard}\t}}\n\
             \tchain quiet {{\n\t\ttype filter hook output priority 0; policy accept;\n\
             {others}{quiet}\t}}\n"
        )
    }
}

/// What is masqueraded: the values of `masq_src` and `masq_dst`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Decision {
    /// Sources: `MASQ_SRC_*`.
    pub sources: BTreeMap<IpNet, u32>,
    /// Destinations: `MASQ_EXCLUDE` or `MASQ_FORCE`.
    pub destinations: BTreeMap<IpNet, u32>,
}

impl Decision {
    /// The part of one family.
    #[must_use]
    pub fn of_family(&self, v6: bool) -> Self {
        let part = |all: &BTreeMap<IpNet, u32>| {
            all.iter().filter(|(prefix, _)| prefix.addr().is_ipv6() == v6).map(|(p, v)| (*p, *v)).collect()
        };
        Self { sources: part(&self.sources), destinations: part(&self.destinations) }
    }

    /// True when nothing is masqueraded.
    pub fn is_empty(&self) -> bool {
        self.sources.values().all(|value| *value != MASQ_SRC_ALWAYS)
            && self.destinations.values().all(|value| *value != MASQ_FORCE)
    }

    /// Name of an empty chain that identifies this content.
    fn mark(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        format!("content_{:016x}", hasher.finish())
    }

    /// The nft script that replaces the whole table.
    pub fn script(&self) -> String {
        self.script_for(None)
    }

    /// As [`Self::script`]; with `interim`, the rules bridge the time until another agent masquerades.
    fn script_for(&self, interim: Option<&Interim<'_>>) -> String {
        let mut script = format!("table inet {TABLE}\ndelete table inet {TABLE}\n");
        // Not the name of the content: an agent that comes back must not take interim rules for its own.
        let mark = if interim.is_some() { "interim".to_owned() } else { self.mark() };
        script += &format!("table inet {TABLE} {{\n\tchain {mark} {{ }}\n");
        let mut rules = Rules::default();
        for family in FAMILIES {
            let part = self.of_family(family.v6);
            if !part.is_empty() {
                part.write_sets(&mut script, family, interim);
                rules.add(family, interim);
            }
        }
        script + &rules.chains(interim) + "}\n"
    }

    /// Writes the sets of a family that the rules refer to.
    fn write_sets(&self, script: &mut String, family: &Family, interim: Option<&Interim<'_>>) {
        let Family { v6, word, kind } = *family;
        let mut set = |name: &str, prefixes: BTreeSet<IpNet>, lasts: Option<Duration>| {
            let (flags, merge) = match lasts {
                Some(lasts) => (format!("interval, timeout; timeout {}s", lasts.as_secs()), ""),
                None => ("interval".to_owned(), " auto-merge;"),
            };
            let elements: Vec<_> = prefixes.iter().map(ToString::to_string).collect();
            let elements = match elements.is_empty() {
                true => String::new(),
                false => format!("\n\t\telements = {{ {} }}", elements.join(", ")),
            };
            *script +=
                &format!("\tset {name}_{word} {{\n\t\ttype {kind}; flags {flags};{merge}{elements}\n\t}}\n");
        };
        let with = |all: &BTreeMap<IpNet, u32>, wanted: u32| {
            all.iter().filter(|(_, value)| **value == wanted).map(|(prefix, _)| *prefix).collect()
        };
        set("known", with(&self.destinations, MASQ_EXCLUDE), None);
        set("forced", with(&self.destinations, MASQ_FORCE), None);
        set("sources", with(&self.sources, MASQ_SRC_ALWAYS), None);
        let exempt = self.sources.keys().filter(|p| self.sources[*p] != MASQ_SRC_ALWAYS).copied().collect();
        set("exempt", exempt, None);
        let Some(interim) = interim else { return };
        let of_family = |prefix: &&IpNet| prefix.addr().is_ipv6() == v6;
        set("never", interim.never_clear.iter().filter(of_family).copied().collect(), None);
        set("by_uplink", interim.by_uplink.iter().filter(of_family).copied().collect(), None);
        let everybody = if v6 { Ipv6Net::default().into() } else { Ipv4Net::default().into() };
        set("quiet", BTreeSet::from([everybody]), Some(QUIET));
        if !interim.steered.is_zero() {
            set("steered", BTreeSet::from([everybody]), Some(interim.steered));
        }
        // Empty once the time is over; the rules behind its check are then not reached.
        set("live", BTreeSet::from([everybody]), Some(interim.lasts));
    }

    /// Masquerades by rules for a limited time; after that they do nothing. Flows that began without them are
    /// not translated until [`super::conntrack::Untranslated::forget`] is called, and are dropped at the
    /// uplink.
    ///
    /// # Errors
    /// When nft is missing or refuses.
    pub async fn apply_interim(&self, interim: &Interim<'_>) -> Result<(), NatRulesError> {
        nft(&["-f", "-"], Some(&self.script_for(Some(interim)))).await.map(drop)
    }
}

/// What our script and nft's listing of the same table have in common: nft writes rules in its own way, and
/// merges the elements of sets.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outline<'a> {
    /// Number of rules, by chain.
    rules: BTreeMap<&'a str, usize>,
    /// Names of the sets that are not empty.
    filled: BTreeSet<&'a str>,
}

impl<'a> Outline<'a> {
    fn of(text: &'a str) -> Self {
        let mut outline = Self::default();
        let mut within = ("", "");
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match (words.next(), within.0) {
                (Some(kind @ ("chain" | "set")), _) => {
                    within = (kind, words.next().unwrap_or_default());
                    if kind == "chain" {
                        outline.rules.insert(within.1, 0);
                    }
                }
                (Some("elements"), "set") => {
                    outline.filled.insert(within.1);
                }
                (Some("}"), _) => within = ("", ""),
                // The hook of a chain.
                (None | Some("type"), _) => {}
                (_, "chain") => *outline.rules.entry(within.1).or_default() += 1,
                _ => {}
            }
        }
        outline
    }
}

/// Keeps the table in place.
#[derive(Debug, Default)]
pub struct NatRules {
    wanted: Option<Decision>,
    checked: Option<Instant>,
}

impl NatRules {
    /// Creates or updates the table, or removes it when nobody is masqueraded.
    /// Reads it only when the decision differs from the last time or that was a
    /// while ago. Returns the number of writes.
    ///
    /// # Errors
    /// When nft is missing or refuses.
    pub async fn apply(&mut self, wanted: Decision, now: Instant) -> Result<u64, NatRulesError> {
        let same = self.wanted.as_ref() == Some(&wanted);
        let recent = self.checked.is_some_and(|checked| now.saturating_duration_since(checked) < CHECK);
        if same && (recent || wanted.is_empty()) {
            return Ok(0);
        }
        self.checked = Some(now);
        let writes = if wanted.is_empty() {
            remove().await?
        } else {
            let script = wanted.script();
            let is_there = present().await?.is_some_and(|text| Outline::of(&text) == Outline::of(&script));
            if !is_there {
                nft(&["-f", "-"], Some(&script)).await?;
            }
            u64::from(!is_there)
        };
        self.wanted = Some(wanted);
        Ok(writes)
    }
}

/// Removes the table; returns the number of writes. A host without nft has none.
///
/// # Errors
/// When nft refuses.
pub async fn remove() -> Result<u64, NatRulesError> {
    match present().await {
        Ok(None) => Ok(0),
        Err(NatRulesError::Program(source)) if source.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
        Ok(Some(_)) => nft(&["delete", "table", "inet", TABLE], None).await.map(|_| 1),
    }
}

/// The table as nft shows it; `None` when there is none.
async fn present() -> Result<Option<String>, NatRulesError> {
    match nft(&["list", "table", "inet", TABLE], None).await {
        Ok(text) => Ok(Some(text)),
        Err(NatRulesError::Refused(said)) if said.contains("No such file") => Ok(None),
        Err(error) => Err(error),
    }
}

async fn nft(arguments: &[&str], input: Option<&str>) -> Result<String, NatRulesError> {
    program::run("nft", arguments, input).await.map_err(|error| match error {
        ProgramError::Run(source) => NatRulesError::Program(source),
        ProgramError::Refused(said) => NatRulesError::Refused(said),
        ProgramError::Late => NatRulesError::Late,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As nft lists the table of [`decision`].
    const LISTED: &str = r#"table inet kilo {
	set known_ip {
		type ipv4_addr
		flags interval
		auto-merge
		elements = { 10.42.3.0/24,
			     10.42.5.0/24 }
	}

	set forced_ip {
		type ipv4_addr
		flags interval
		auto-merge
	}

	set sources_ip {
		type ipv4_addr
		flags interval
		auto-merge
		elements = { 10.42.1.0/24 }
	}

	set exempt_ip {
		type ipv4_addr
		flags interval
		auto-merge
	}

	chain MARK {
	}

	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		oifname "lo" return
		ip daddr @known_ip return
		ip daddr @forced_ip ip saddr != @exempt_ip masquerade
		ip saddr @sources_ip masquerade
	}
}
"#;

    fn decision() -> Decision {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        Decision {
            sources: [(net("10.42.1.0/24"), MASQ_SRC_ALWAYS)].into(),
            destinations: ["10.42.3.0/24", "10.42.5.0/24"].map(|text| (net(text), MASQ_EXCLUDE)).into(),
        }
    }

    #[test]
    fn a_table_is_ours_only_while_nothing_of_it_was_removed() {
        let (script, listed) = (decision().script(), LISTED.replace("MARK", &decision().mark()));
        let ours = Outline::of(&script);
        assert_eq!(Outline::of(&listed), ours);
        for (removed, instead) in [
            ("\t\tip saddr @sources_ip masquerade\n", ""),
            ("\t\telements = { 10.42.1.0/24 }\n", ""),
            ("postrouting {", "somewhere {"),
            ("content_", "contents_"),
        ] {
            assert_ne!(Outline::of(&listed.replace(removed, instead)), ours, "{removed}");
        }
    }
}
