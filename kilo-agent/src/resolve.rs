//! Resolves DNS names of endpoints and of this host beside the reconciles: a slow or silent name server holds
//! nothing up. A failed name does not affect the others, and keeps its last address.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    time::{Duration, Instant},
};

use tokio::{sync::mpsc, time::timeout_at};

use kilo_core::{topology::Mesh, wireguard::EndpointHost};

/// How long an answer for this host's name counts. It is common for a host not to have its name in DNS.
const OWN_NAME_COUNTS: Duration = Duration::from_secs(300);
/// How long an answer for an endpoint's name counts.
const ENDPOINT_COUNTS: Duration = Duration::from_secs(10);
/// How long a new name is waited for: most answers arrive at once, and then nothing is set up twice.
const FIRST_ANSWER: Duration = Duration::from_millis(100);
/// Timeout for one name.
const PATIENCE: Duration = Duration::from_secs(2);

type Answer = (String, io::Result<Vec<IpAddr>>);

/// Caches the last good answer for each name.
#[derive(Debug)]
pub struct Resolver {
    names: BTreeMap<String, Name>,
    own: Option<String>,
    /// How long a new name is waited for.
    wait: Duration,
    answers: mpsc::UnboundedSender<Answer>,
    answered: mpsc::UnboundedReceiver<Answer>,
}

#[derive(Debug, Default)]
struct Name {
    asked: Option<Instant>,
    under_way: bool,
    answered: bool,
    addresses: Vec<IpAddr>,
    /// Why the last lookup failed, if it did.
    failure: Option<String>,
}

impl Name {
    /// Records why a lookup failed; true unless the one before failed for the same reason.
    fn fail(&mut self, why: String) -> bool {
        let is_news = self.failure.as_ref() != Some(&why);
        self.failure = Some(why);
        is_news
    }
}

impl Default for Resolver {
    fn default() -> Self {
        let (answers, answered) = mpsc::unbounded_channel();
        Self { names: BTreeMap::new(), own: None, wait: FIRST_ANSWER, answers, answered }
    }
}

impl Resolver {
    /// Creates a resolver whose callers wait for new names until they are answered or time out.
    pub fn waiting() -> Self {
        Self { wait: PATIENCE, ..Self::default() }
    }

    /// Starts to look up this host's own name, for a later [`Self::resolve_own`].
    pub fn ask_own(&mut self, hostname: &str) {
        self.own = Some(hostname.to_owned());
        self.start(hostname, OWN_NAME_COUNTS);
    }

    /// The addresses of this host's own name, as far as known.
    pub async fn resolve_own(&mut self, hostname: &str) -> Vec<IpAddr> {
        self.own = Some(hostname.to_owned());
        self.ask(&BTreeSet::from([hostname]), OWN_NAME_COUNTS).await;
        self.names.get(hostname).map(|name| name.addresses.clone()).unwrap_or_default()
    }

    /// The address of each name in the mesh's endpoints, as far as known.
    pub async fn resolve(&mut self, mesh: &Mesh) -> BTreeMap<String, IpAddr> {
        let endpoints = mesh.segments.iter().map(|segment| &segment.endpoint);
        let gateways = mesh.segments.iter().zip(&mesh.gateways).flat_map(|(segment, gateways)| {
            gateways.order.iter().filter_map(|at| segment.members[*at].node.endpoint.as_ref())
        });
        let names: BTreeSet<&str> = endpoints
            .chain(gateways)
            .chain(mesh.peers.iter().filter_map(|peer| peer.endpoint.as_ref()))
            .filter_map(|endpoint| match &endpoint.host {
                EndpointHost::Dns(name) => Some(name.as_str()),
                EndpointHost::Ip(_) => None,
            })
            .collect();
        let own = &self.own;
        self.names.retain(|name, _| names.contains(name.as_str()) || own.as_ref() == Some(name));
        self.ask(&names, ENDPOINT_COUNTS).await;
        let first = |name: &str| Some((name.to_owned(), *self.names.get(name)?.addresses.first()?));
        names.into_iter().filter_map(first).collect()
    }

    /// Waits for an answer that changes something.
    pub async fn changed(&mut self) {
        loop {
            // Never closed: this end holds a sender.
            let Some(answer) = self.answered.recv().await else { return std::future::pending().await };
            if self.take(answer) {
                return;
            }
        }
    }

    /// Looks up names that are unknown or outdated, and waits briefly for new ones.
    async fn ask(&mut self, names: &BTreeSet<&str>, counts: Duration) {
        for name in names {
            self.start(name, counts);
        }
        while let Ok(answer) = self.answered.try_recv() {
            self.take(answer);
        }
        loop {
            let new = names.iter().filter_map(|name| self.names.get(*name)).filter(|known| !known.answered);
            let Some(asked) = new.filter_map(|known| known.asked).max() else { return };
            let answer = timeout_at((asked + self.wait).into(), self.answered.recv()).await;
            let Ok(Some(answer)) = answer else { return };
            self.take(answer);
        }
    }

    /// Looks up a name unless a lookup is under way or the last answer still counts.
    fn start(&mut self, name: &str, counts: Duration) {
        let known = self.names.entry(name.to_owned()).or_default();
        if known.under_way || known.asked.is_some_and(|asked| asked.elapsed() < counts) {
            return;
        }
        (known.asked, known.under_way) = (Some(Instant::now()), true);
        let (name, answers) = (name.to_owned(), self.answers.clone());
        tokio::spawn(async move {
            let answer = lookup(&name).await;
            // The receiver is gone when the agent ends.
            let _ = answers.send((name, answer));
        });
    }

    /// Records an answer; true when it changes something.
    fn take(&mut self, (name, answer): Answer) -> bool {
        let Some(known) = self.names.get_mut(&name) else { return false };
        (known.under_way, known.answered) = (false, true);
        match answer {
            Ok(mut addresses) => {
                known.failure = None;
                // The address in use stays first while it is still among the answers: round robin must not
                // cause flapping.
                if let Some(kept) = known.addresses.first()
                    && let Some(at) = addresses.iter().position(|address| address == kept)
                {
                    addresses.swap(0, at);
                }
                if let Some((_, rest)) = addresses.split_first_mut() {
                    rest.sort_unstable();
                }
                let differs = known.addresses != addresses && !addresses.is_empty();
                if differs {
                    known.addresses = addresses;
                }
                differs
            }
            Err(error) => {
                // It is looked up again every few seconds.
                if known.fail(error.to_string()) && self.own.as_ref() != Some(&name) {
                    tracing::warn!(name, %error, "failed to resolve endpoint");
                }
                false
            }
        }
    }
}

/// Looks up every address of a host name.
///
/// # Errors
/// The resolver's error, or a timeout.
pub async fn lookup(name: &str) -> io::Result<Vec<IpAddr>> {
    match tokio::time::timeout(PATIENCE, tokio::net::lookup_host((name, 0))).await {
        Ok(Ok(addresses)) => Ok(addresses.map(|address| address.ip()).collect()),
        Ok(Err(error)) => Err(error),
        Err(_) => {
            let text = format!("no answer within {} s", PATIENCE.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(resolver: &mut Resolver, name: &str) {
        resolver.names.insert(name.to_owned(), Name { under_way: true, ..Name::default() });
    }

    fn addresses(list: &[u8]) -> Vec<IpAddr> {
        list.iter().map(|last| IpAddr::from([192, 0, 2, *last])).collect()
    }

    #[tokio::test]
    async fn a_name_that_is_not_answered_holds_nothing_up() {
        let mut resolver = Resolver::default();
        // As if a lookup at a silent name server were under way.
        asked(&mut resolver, "slow");
        let started = Instant::now();
        assert_eq!(resolver.resolve_own("slow").await, addresses(&[]));
        assert!(started.elapsed() < PATIENCE / 2);
        resolver.answers.send(("slow".to_owned(), Ok(addresses(&[1])))).unwrap();
        resolver.changed().await;
        assert_eq!(resolver.resolve_own("slow").await, addresses(&[1]));
    }

    #[test]
    fn an_address_that_is_still_answered_stays_and_a_failure_takes_none_away() {
        let mut resolver = Resolver::default();
        asked(&mut resolver, "peer");
        let mut take = |answer| resolver.take(("peer".to_owned(), answer));
        assert!(take(Ok(addresses(&[2, 3, 1]))));
        assert!(!take(Ok(addresses(&[1, 2, 3]))), "round robin");
        assert!(!take(Err(io::Error::other("no answer"))));
        assert!(take(Ok(addresses(&[1, 3]))));
        assert_eq!(resolver.names["peer"].addresses, addresses(&[1, 3]));
    }

    #[test]
    fn a_failure_is_news_until_the_next_answer() {
        let mut resolver = Resolver::default();
        asked(&mut resolver, "peer");
        let mut name = Name::default();
        let mut is_news = |why: &str| name.fail(why.to_owned());
        assert!(is_news("no answer") && !is_news("no answer") && is_news("no such name"));
        for (answer, failure) in
            [(Err(io::Error::other("no answer")), Some("no answer")), (Ok(addresses(&[1])), None)]
        {
            resolver.take(("peer".to_owned(), answer));
            assert_eq!(resolver.names["peer"].failure.as_deref(), failure);
        }
    }

    #[test]
    fn what_nobody_asks_for_any_more_is_not_taken() {
        let mut resolver = Resolver::default();
        assert!(!resolver.take(("gone".to_owned(), Ok(addresses(&[1])))));
    }
}
