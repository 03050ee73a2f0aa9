//! `kgctl connectivity-test`: pods on some nodes probe each other and other destinations.

mod clear_text;
mod heartbeat;
mod matrix;
#[cfg(target_os = "linux")]
mod path_mtu;
pub mod probe;
mod test_pods;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Node;
use kilo_agent::{
    cli::{parse_address, parse_period},
    status::Status,
    timestamp::Timestamp,
};
use kilo_core::{errors::error_chain, objects::Snapshot};
use kube::{Api, api::ListParams};

use crate::{
    cluster::{AgentsFlags, Cluster},
    complete,
    outcome::Outcome,
    progress::Progress,
    refusal::Asked,
    remote,
    source::{self, MeshFlags},
    terminal,
};
use matrix::{Cell, Report, Target};
use probe::{Answer, Kind, Probe};
use test_pods::{ProbePod, TestPods};

/// Number of pods probing at the same time.
const AT_A_TIME: usize = 16;
/// Nodes chosen per location when none are named, and the maximum in total.
const OF_A_LOCATION: usize = 2;
const OF_ALL: usize = 10;
/// Maximum characters shown of an error.
const LONGEST: usize = 300;
/// Port of the kubelet; a refused connection also counts as reached.
const NODE_PORT: u16 = 10250;
/// How long to wait for a namespace to be deleted.
const LEAVING: Duration = Duration::from_secs(60);

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl connectivity-test                                two nodes of each location, ten at most
  kgctl connectivity-test a1 b1 c1                       pods on these nodes
  kgctl connectivity-test --outside=192.0.2.80:443       pods must reach this, too
  kgctl connectivity-test -o yaml                        each probe with its result
  kgctl connectivity-test --image=registry.example/kilo:0.1.0")]
pub struct ConnectivityArgs {
    /// Nodes to start pods on; default: two of each location, leaders first, ten at most.
    #[arg(add = complete::nodes())]
    nodes: Vec<String>,
    /// Image of the test pods; must contain kgctl. Default: the agents' image.
    #[arg(long)]
    image: Option<String>,
    /// An address outside of the cluster with its port, which pods must reach (repeatable).
    #[arg(long, value_name = "IP:PORT", value_parser = parse_address)]
    outside: Vec<SocketAddr>,
    /// TCP port probed on VPN peers; a refused connection counts as reached.
    #[arg(long, value_name = "PORT", default_value = "22")]
    peer_port: u16,
    /// Longest time until the pods run.
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = parse_period)]
    timeout: Duration,
    /// Format.
    #[arg(long, short, default_value = "table")]
    output: Output,
    #[command(flatten)]
    agents: AgentsFlags,
    #[command(flatten)]
    flags: MeshFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    Table,
    /// For programs.
    Json,
    /// For programs.
    Yaml,
}

/// Returns the report as text, and whether nothing failed.
pub async fn run(args: &ConnectivityArgs) -> Result<Outcome> {
    let cluster = Cluster::open(&args.flags.api).await?.with_agents(&args.agents);
    let snapshot = cluster.snapshot(&args.flags.shape.topology_label).await?;
    let mesh = source::mesh(&snapshot, &args.flags)?;
    let seen = source::status(&mesh, &snapshot, &args.flags.shape, Timestamp::now());
    let nodes = chosen(&seen, &args.nodes)?;
    let image = match &args.image {
        Some(image) => image.clone(),
        None => agents_image(&cluster).await?,
    };
    let mut test_pods = TestPods::new(cluster.clone(), image);
    let mut interrupted = std::pin::pin!(remote::interrupted());
    loop {
        tokio::select! {
            biased;
            () = &mut interrupted => bail!("interrupted"),
            free = test_pods.wait_until_free(LEAVING) => free?,
        }
        // Not interrupted halfway: nobody would know the owner of the namespace.
        if test_pods.claim().await? {
            break;
        }
    }
    let tested = tokio::select! {
        biased;
        () = &mut interrupted => Err(anyhow!("interrupted")),
        lost = test_pods.keep() => Err(lost),
        tested = test(&test_pods, &snapshot, &seen, &nodes, args) => tested,
    };
    if let Err(error) = test_pods.remove(LEAVING).await {
        eprintln!(
            "kgctl: {}; to remove it, run the test again after {} s, or run `kubectl delete namespace {}`",
            error_chain(error.as_ref()),
            heartbeat::STALE.as_secs(),
            test_pods::NAMESPACE
        );
    }
    let report = tested?;
    let text = match args.output {
        Output::Json => serde_json::to_string_pretty(&report)? + "\n",
        Output::Yaml => serde_yaml_ng::to_string(&report)?,
        Output::Table => report.table(),
    };
    Ok(Outcome::found(text, report.is_good()))
}

/// Nodes with their locations: the named ones, or some of each location.
fn chosen(seen: &Status, named: &[String]) -> Result<BTreeMap<String, String>> {
    if !named.is_empty() {
        return named
            .iter()
            .map(|name| match seen.nodes.iter().find(|node| node.name == *name) {
                Some(node) if node.ready => Ok((name.clone(), node.location.clone())),
                Some(node) => bail!("node {name:?} is not ready: {}", node.not_ready.join(", ")),
                None => bail!("node {name:?} does not exist"),
            })
            .collect();
    }
    let mut nodes: Vec<_> = seen.nodes.iter().filter(|node| node.ready).collect();
    nodes.sort_by_key(|node| !node.leads);
    let mut taken: BTreeMap<&str, usize> = BTreeMap::new();
    nodes.retain(|node| {
        let count = taken.entry(&node.location).or_default();
        *count += 1;
        *count <= OF_A_LOCATION
    });
    if nodes.is_empty() {
        bail!("no node is ready: `kgctl status` says why");
    }
    Ok(nodes.into_iter().take(OF_ALL).map(|node| (node.name.clone(), node.location.clone())).collect())
}

async fn agents_image(cluster: &Cluster) -> Result<String> {
    let found = cluster.agents_pods(None).await?;
    let specs = found.pods.iter().filter_map(|pod| pod.spec.as_ref());
    let image = specs.flat_map(|spec| &spec.containers).find(|container| container.name == "kilo");
    image.and_then(|container| container.image.clone()).with_context(|| match found.pods.is_empty() {
        true => format!("the agents' image is not known, name one with --image: {}", found.none_found()),
        false => "the agents' pods do not say which image to use; name one with --image".to_owned(),
    })
}

async fn test(
    test_pods: &TestPods,
    snapshot: &Snapshot,
    seen: &Status,
    nodes: &BTreeMap<String, String>,
    args: &ConnectivityArgs,
) -> Result<Report> {
    let pods = test_pods.start(nodes, args.timeout).await?;
    let internal = internal_ips(test_pods.cluster(), nodes).await?;
    let services = test_pods.service().await?;
    let handshaken = clear_text::peers_with_handshake(test_pods.cluster(), seen).await;
    let peers = peers(snapshot, args.peer_port, &handshaken);
    let before = clear_text::Figures::read(test_pods.cluster(), seen).await;
    let progress = Progress::new("probing from pods", pods.len());
    let asked = pods.iter().map(async |pod| {
        let cells = cells(pod, &pods, &services, (seen, &internal), &args.outside, &peers);
        let cells = ask(test_pods.cluster(), pod, cells).await;
        progress.step();
        cells
    });
    let answered: Vec<_> = stream::iter(asked).buffer_unordered(AT_A_TIME).collect().await;
    drop(progress);
    let mut probes = Vec::new();
    for answered in answered {
        probes.extend(answered?);
    }
    probes.sort_by(|a, b| {
        (&a.from, a.target, &a.to, a.address, a.kind).cmp(&(&b.from, b.target, &b.to, b.address, b.kind))
    });
    let after = clear_text::Figures::read(test_pods.cluster(), seen).await;
    let mut findings = clear_text::findings(&before, &after, &probes);
    let silent = snapshot.peers.keys().filter(|name| !handshaken.contains(*name));
    findings.extend(silent.map(|name| matrix::Finding {
        what: format!("peer/{name}"),
        good: None,
        text: "not tried: no leader has a handshake of the last three minutes with it".to_owned(),
    }));
    Ok(Report { probes, findings })
}

/// Connected peers, with each of their addresses.
fn peers(snapshot: &Snapshot, port: u16, connected: &[String]) -> Vec<(String, SocketAddr)> {
    let of = |name: &String| snapshot.peers.get(name).map(|peer| (name.clone(), peer.allowed_ips.clone()));
    connected
        .iter()
        .filter_map(of)
        .flat_map(|(name, prefixes)| {
            let single = prefixes.into_iter().filter(|prefix| prefix.prefix_len() == prefix.max_prefix_len());
            single.map(move |prefix| (name.clone(), (prefix.addr(), port).into())).collect::<Vec<_>>()
        })
        .collect()
}

/// The `InternalIP` addresses in the objects of these nodes.
async fn internal_ips(
    cluster: &Cluster,
    nodes: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, Vec<IpAddr>>> {
    let objects: Api<Node> = Api::all(cluster.client.clone());
    let mut internal = BTreeMap::new();
    for name in nodes.keys() {
        let named = ListParams::default().fields(&format!("metadata.name={name}"));
        let listed = cluster.ask(Asked::new("list", "nodes"), objects.list(&named)).await?;
        let statuses = listed.items.into_iter().filter_map(|node| node.status?.addresses);
        let own = statuses.flatten().filter(|address| address.type_ == "InternalIP");
        internal.insert(name.clone(), own.filter_map(|address| address.address.parse().ok()).collect());
    }
    Ok(internal)
}

/// All probes of one pod.
fn cells(
    from: &ProbePod,
    pods: &[ProbePod],
    services: &[IpAddr],
    (seen, internal): (&Status, &BTreeMap<String, Vec<IpAddr>>),
    outside: &[SocketAddr],
    peers: &[(String, SocketAddr)],
) -> Vec<Cell> {
    let mut cells = Vec::new();
    let mut add = |target, to: &str, location: &str, kind, address: SocketAddr| {
        // A pod without an address of this family cannot reach the target.
        if from.addresses.iter().any(|own| own.is_ipv4() == address.is_ipv4()) {
            cells.push(Cell {
                from: from.node.clone(),
                from_location: from.location.clone(),
                target,
                to: to.to_owned(),
                to_location: location.to_owned(),
                kind,
                address,
                error: None,
            });
        }
    };
    for to in pods {
        for address in &to.addresses {
            for kind in [Kind::Tcp, Kind::Udp, Kind::Bulk, Kind::Full] {
                add(Target::Pod, &to.node, &to.location, kind, (*address, probe::PORT).into());
            }
        }
        let carried = seen.nodes.iter().find(|node| node.name == to.node).and_then(|node| node.internal_ip);
        // The mesh carries one address of a node; the one of the other family is reachable only within the
        // location.
        let other = internal.get(&to.node).into_iter().flatten().filter(|address| {
            from.location == to.location
                && carried.is_none_or(|carried| carried.is_ipv4() != address.is_ipv4())
        });
        for address in carried.into_iter().chain(other.copied()) {
            add(Target::Node, &to.node, &to.location, Kind::Reach, (address, NODE_PORT).into());
        }
    }
    for address in services {
        add(Target::Service, "", "", Kind::Tcp, (*address, probe::PORT).into());
    }
    for address in outside {
        add(Target::Outside, "", "", Kind::Reach, *address);
    }
    for (name, address) in peers {
        add(Target::Peer, name, "", Kind::Reach, *address);
    }
    cells
}

/// Runs the probes of `cells` in a pod.
async fn ask(cluster: &Cluster, pod: &ProbePod, mut cells: Vec<Cell>) -> Result<Vec<Cell>> {
    let probes: Vec<_> =
        cells.iter().enumerate().map(|(id, cell)| Probe { id, kind: cell.kind, to: cell.address }).collect();
    let words = ["kgctl", probe::CLIENT, &serde_json::to_string(&probes)?];
    let out = remote::output(cluster, &pod.object, &words).await;
    let out = out.with_context(|| format!("the probes of the pod on {} failed", pod.node))?;
    let answers: Vec<Answer> = serde_json::from_slice(&out).context("the answers of a pod were truncated")?;
    note(&mut cells, answers);
    Ok(cells)
}

/// Records a pod's answers; cells without an answer have failed.
fn note(cells: &mut [Cell], answers: Vec<Answer>) {
    for cell in &mut *cells {
        cell.error = Some("the pod reported no result for this probe".to_owned());
    }
    for Answer { id, error } in answers {
        if let Some(cell) = cells.get_mut(id) {
            cell.error = error.map(|error| terminal::plain(&error).chars().take(LONGEST).collect());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn leaders_come_first_and_of_each_location_two() {
        let seen = crate::status_filter::tests::status(9, &[4]);
        let nodes = chosen(&seen, &[]).unwrap();
        assert_eq!(nodes.keys().collect::<Vec<_>>(), ["n000", "n001", "n002", "n003"]);
        assert_eq!(nodes["n001"], "location:odd");
        let named = chosen(&seen, &["n008".to_owned()]).unwrap();
        assert_eq!(named.len(), 1);
        for (name, wanted) in [("n004", "not ready: asleep"), ("n999", "does not exist")] {
            let said = chosen(&seen, &[name.to_owned()]).unwrap_err().to_string();
            assert!(said.contains(wanted), "{said}");
        }
    }

    #[test]
    fn a_pod_tries_what_its_families_can_reach() {
        let pod = |node: &str, addresses: &[&str]| ProbePod {
            node: node.to_owned(),
            location: "location:even".to_owned(),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            object: k8s_openapi::api::core::v1::Pod::default(),
        };
        let pods = [pod("n000", &["10.42.0.2", "fd42::2"]), pod("n002", &["10.42.2.2"])];
        let mut seen = crate::status_filter::tests::status(3, &[]);
        for (node, address) in seen.nodes.iter_mut().zip(["10.1.0.1", "10.1.0.2", "10.1.0.3"]) {
            node.internal_ip = address.parse().ok();
        }
        let services = ["10.43.0.9".parse().unwrap(), "fd43::9".parse().unwrap()];
        let outside = ["192.0.2.80:443".parse().unwrap()];
        let peers = [("laptop".to_owned(), "10.5.0.1:22".parse().unwrap())];
        let internal = |text: &str| text.split(' ').map(|address| address.parse().unwrap()).collect();
        let internal = BTreeMap::from([
            ("n000".to_owned(), internal("10.1.0.1 fd01::1")),
            ("n002".to_owned(), internal("10.1.0.3 fd01::3")),
        ]);
        let count = |from: &ProbePod, pods: &[ProbePod], internal| {
            let cells = cells(from, pods, &services, (&seen, internal), &outside, &peers);
            let of = |target| cells.iter().filter(|cell| cell.target == target).count();
            [of(Target::Pod), of(Target::Service), of(Target::Outside), of(Target::Peer), of(Target::Node)]
        };
        assert_eq!(count(&pods[0], &pods, &internal), [12, 2, 1, 1, 4]);
        assert_eq!(count(&pods[1], &pods, &internal), [8, 1, 1, 1, 2], "it has no IPv6");
        let mut apart = pods.clone();
        apart[1].location = "location:odd".to_owned();
        assert_eq!(count(&pods[0], &apart, &internal)[4], 3, "of the other family only within a location");
        assert_eq!(count(&pods[0], &pods, &BTreeMap::new())[4], 2);
    }

    #[test]
    fn what_a_pod_says_nothing_of_has_failed() {
        let cell = Cell {
            from: String::new(),
            from_location: String::new(),
            target: Target::Pod,
            to: String::new(),
            to_location: String::new(),
            kind: Kind::Tcp,
            address: ([10, 42, 1, 2], 8080).into(),
            error: None,
        };
        let mut cells = vec![cell; 3];
        let long = Some("é\u{1b}".repeat(1000));
        note(
            &mut cells,
            vec![Answer { id: 0, error: None }, Answer { id: 2, error: long }, Answer { id: 9, error: None }],
        );
        assert_eq!(cells[0].error, None);
        assert_eq!(cells[1].error.as_deref(), Some("the pod reported no result for this probe"));
        let shown = cells[2].error.as_deref().unwrap();
        assert!(shown.chars().count() == LONGEST && !shown.contains('\u{1b}'), "{shown}");
    }
}
