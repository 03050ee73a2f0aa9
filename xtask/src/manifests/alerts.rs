//! Alerts from one table, which generates the `PrometheusRule`, its page in docs/ and promtool's tests.

use std::fmt::Write as _;

/// Address of the page.
const RUNBOOKS: &str = "https://github.com/kilo-ebpf/kilo/blob/main/docs/alerts.md";

/// A promtool input series: name with labels, and its values minute by minute.
type Series = (&'static str, &'static str);

/// A rule of manifests/prometheusrule.yaml, and a section of docs/alerts.md.
struct Alert {
    name: &'static str,
    severity: &'static str,
    /// What it means to the person on call.
    summary: &'static str,
    expr: &'static str,
    /// How long the expression must hold before it fires.
    hold: &'static str,
    /// What to check, and what to do.
    remedy: &'static str,
    /// Series on which it fires within an hour.
    fires: &'static [Series],
    /// Labels of the fired alert besides name and severity.
    labels: &'static [(&'static str, &'static str)],
    /// Series on which it does not fire.
    quiet: &'static [Series],
}

const A1: (&str, &str) = ("instance", "a1");

const ALERTS: &[Alert] = &[
    Alert {
        name: "KiloAgentDown",
        severity: "warning",
        summary: "Prometheus cannot reach an agent, or a replica of the webhook (namespace `kilo`).",
        expr: r#"up{job=~"(.+/)?kilo"} == 0"#,
        hold: "5m",
        remedy: "Traffic goes on without the agent; changes do not reach the node. `kgctl status` names the reason why \
                 its pod does not run; when it runs, something keeps Prometheus from port 1107 of the node.",
        fires: &[(r#"up{job="kube-system/kilo", instance="a1"}"#, "0x60")],
        labels: &[("job", "kube-system/kilo"), A1],
        quiet: &[
            (r#"up{job="kube-system/kilo", instance="a1"}"#, "0x3 1x57"),
            (r#"up{job="other", instance="a1"}"#, "0x60"),
        ],
    },
    Alert {
        name: "KiloAgentsMissing",
        severity: "critical",
        summary: "No agent is scraped at all.",
        expr: "absent(kilo_build_info)",
        hold: "10m",
        remedy: "Is the DaemonSet there (`kubectl -n kube-system get daemonset kilo`), and does a PodMonitor select its \
                 pods (`manifests/podmonitor.yaml`)? Does Prometheus read that PodMonitor: kube-prometheus-stack's reads only those \
                 with [its label](monitoring.md#a-prometheus-that-selects-by-a-label). Where one rule engine holds several \
                 clusters, this fires only when no agent of any of them is scraped.",
        fires: &[("up", "1x60")],
        labels: &[],
        quiet: &[(r#"kilo_build_info{version="0.1.0"}"#, "1x60")],
    },
    Alert {
        name: "KiloAgentStuck",
        severity: "critical",
        summary: "An agent no longer reconciles.",
        expr: "rate(kilo_reconciles_total[5m]) == 0",
        hold: "5m",
        remedy: "Traffic goes on; changes do not reach the node. `/health` of the node says why. Nothing restarts the agent: there is no \
                 liveness probe. Collect `kgctl sysdump NODE`, delete the agent's pod, and report it. With `--resync-period` of 5m or \
                 more an agent with nothing to do fires this, too.",
        fires: &[(r#"kilo_reconciles_total{instance="a1"}"#, "7x60")],
        labels: &[A1],
        quiet: &[(r#"kilo_reconciles_total{instance="a1"}"#, "0+2x60")],
    },
    Alert {
        name: "KiloReconcileFailing",
        severity: "warning",
        summary: "A step of an agent's work fails again and again.",
        expr: r#"sum by (cluster, job, instance, event) (increase(kilo_errors_total{event!="invalid_object"}[10m])) > 3"#,
        hold: "10m",
        remedy: "The label `event` is the step ([what each is](monitoring.md#events-of-kilo_errors_total)); the log of the agent \
                 at level ERROR has the reason and what to do.",
        fires: &[(r#"kilo_errors_total{instance="a1", event="netlink"}"#, "0+1x60")],
        labels: &[A1, ("event", "netlink")],
        quiet: &[
            (r#"kilo_errors_total{instance="a1", event="api"}"#, "0x20 3x40"),
            (r#"kilo_errors_total{instance="a1", event="invalid_object"}"#, "0+1x60"),
        ],
    },
    Alert {
        name: "KiloTunnelSilent",
        severity: "critical",
        summary: "A leader sends into a tunnel whose other end does not answer.",
        expr: "kilo_silent_tunnels > 0",
        hold: "2m",
        remedy: "`kgctl status` and `/health` of the leader name the other end and its endpoint. Is UDP 51820 open on both \
                 sides, and the endpoint reachable from here? See \
                 [troubleshooting](troubleshooting.md#locations-do-not-reach-each-other).",
        fires: &[(r#"kilo_silent_tunnels{instance="a1"}"#, "1x60")],
        labels: &[A1],
        quiet: &[(r#"kilo_silent_tunnels{instance="a1"}"#, "0x10 1 0x49")],
    },
    Alert {
        name: "KiloLocationWithoutLeader",
        severity: "critical",
        summary: "A location has no node in the mesh, so nothing can reach it.",
        expr: "max by (cluster, job) (kilo_locations_without_leader) > 0",
        hold: "3m",
        remedy: "`kgctl status` shows the location without a leader, and beside each of its nodes why it is not in the mesh.",
        fires: &[(r#"kilo_locations_without_leader{instance="a1"}"#, "1x60")],
        labels: &[],
        quiet: &[(r#"kilo_locations_without_leader{instance="a1"}"#, "0x10 1x2 0x48")],
    },
    Alert {
        name: "KiloNodesLeftOut",
        severity: "warning",
        summary: "Nodes that were in the mesh no longer are.",
        expr: "max by (cluster, job) (kilo_nodes_left_out) > 0",
        hold: "10m",
        remedy: "`kgctl status` says why, in the column REASON; so does `kubectl describe node`. Delete the Node objects of machines \
                 that will not come back.",
        fires: &[(r#"kilo_nodes_left_out{instance="a1"}"#, "2x60")],
        labels: &[],
        quiet: &[(r#"kilo_nodes_left_out{instance="a1"}"#, "0x10 1x9 0x41")],
    },
    Alert {
        name: "KiloViewStale",
        severity: "warning",
        summary: "An agent's view of the cluster is stale: its own heartbeat does not come back.",
        // Agents without heartbeat intervals do not have this metric.
        expr: "time() - kilo_last_check_in_seconds > 60 + 2 * kilo_heartbeat_interval_seconds \
               or (time() - kilo_last_check_in_seconds > 120 unless on (cluster, job, instance) kilo_heartbeat_interval_seconds)",
        hold: "1m",
        remedy: "The agent does not reach the API server, or may not patch its node: its log says which. Traffic goes on with the \
                 last good state; nodes that fail are not declared dead meanwhile.",
        fires: &[
            (r#"kilo_last_check_in_seconds{instance="a1"}"#, "0x60"),
            (r#"kilo_heartbeat_interval_seconds{instance="a1"}"#, "300x60"),
        ],
        labels: &[A1],
        quiet: &[
            (r#"kilo_last_check_in_seconds{instance="a1"}"#, "0+60x60"),
            (r#"kilo_heartbeat_interval_seconds{instance="a1"}"#, "30x60"),
        ],
    },
    Alert {
        name: "KiloSlicesWithoutWriter",
        severity: "warning",
        summary: "Agents are configured for slices, but the number of agents that have written them for five minutes is not one.",
        // Not `kilo_slices_in_use`: without a writer, none is in use after some minutes. Agents that take the Lease but
        // cannot write give it up after 100 s, one after the other.
        expr: "sum by (cluster, job) (kilo_slices_wanted) > 0 and sum by (cluster, job) (min_over_time(kilo_slices_writer[5m])) != 1",
        hold: "10m",
        remedy: "Without a writer agents go back to reading all Nodes within minutes, and nothing else is lost. The Lease \
                 `kilo-node-slices` beside the agents says who wrote last; the log of that node and of those of the control plane \
                 says why they do not: mostly the rules and the Lease of `manifests/slices.yaml` are missing.",
        fires: &[
            (r#"kilo_slices_wanted{instance="a1"}"#, "1x60"),
            (
                r#"kilo_slices_writer{instance="a1"}"#,
                "1 1 0 0 0 1 1 0 0 0 1 1 0 0 0 1 1 0 0 0 1 1 0 0 0 1 1 0 0 0 \
                 1 1 0 0 0 1 1 0 0 0 1 1 0 0 0 1 1 0 0 0 1 1 0 0 0 1 1 0 0 0",
            ),
        ],
        labels: &[],
        quiet: &[
            (r#"kilo_slices_wanted{instance="a1"}"#, "1x60"),
            (r#"kilo_slices_writer{instance="a1"}"#, "1x10 0x49"),
            (r#"kilo_slices_writer{instance="a2"}"#, "0x12 1x47"),
        ],
    },
    Alert {
        name: "KiloSlicesWrong",
        severity: "warning",
        summary: "Slices are missing, cannot be read or contradict each other.",
        expr: "max by (cluster, job) (kilo_slice_problems) > 0",
        hold: "5m",
        remedy: "The agent that writes slices repairs them within about a second. If the alert stays, its log says what keeps it \
                 from that, or somebody else writes slices ([security](security.md#what-an-agent-can-do-to-the-cluster)). `kgctl status` compares \
                 slices with Nodes.",
        fires: &[(r#"kilo_slice_problems{instance="a1"}"#, "1x60")],
        labels: &[],
        quiet: &[(r#"kilo_slice_problems{instance="a1"}"#, "0x10 1x3 0x47")],
    },
    Alert {
        name: "KiloViewsDiffer",
        severity: "warning",
        summary: "Nodes see different meshes.",
        expr: "max by (cluster, job) (kilo_nodes) != min by (cluster, job) (kilo_nodes)",
        hold: "3m",
        remedy: "Nodes that see different meshes may not reach each other. Compare `kgctl status NODE` of one with the most \
                 (`kilo_nodes`) and one with the fewest; the log of the latter says why it misses some.",
        fires: &[(r#"kilo_nodes{instance="a1"}"#, "5x60"), (r#"kilo_nodes{instance="a2"}"#, "4x60")],
        labels: &[],
        quiet: &[(r#"kilo_nodes{instance="a1"}"#, "5x60"), (r#"kilo_nodes{instance="a2"}"#, "4x2 5x58")],
    },
    Alert {
        name: "KiloPacketsForged",
        severity: "warning",
        summary: "Packets come from an unexpected sender, or to a node that is not their gateway.",
        expr: r#"sum by (cluster, job, instance, reason) (increase(kilo_dropped_packets_total{reason=~"unknown_sender|foreign_source|not_for_us|wrong_interface|unchecked|forged_vxlan|arrived_in_clear"}[10m])) > 0"#,
        hold: "1m",
        remedy: "They were dropped. `kgctl monitor` on the node shows who sends them; the label `reason` distinguishes spoofing, two \
                 networks that overlap, and two nodes that disagree about the leader ([drop reasons](drop-reasons.md)).",
        fires: &[(r#"kilo_dropped_packets_total{instance="a1", reason="foreign_source"}"#, "0x10 1x50")],
        labels: &[A1, ("reason", "foreign_source")],
        quiet: &[
            (r#"kilo_dropped_packets_total{instance="a1", reason="foreign_source"}"#, "9x60"),
            (r#"kilo_dropped_packets_total{instance="a1", reason="not_unicast"}"#, "0+5x60"),
        ],
    },
    Alert {
        name: "KiloPacketsDropped",
        severity: "warning",
        summary: "Packets are dropped because they have no route, or because the network cannot carry them.",
        expr: r#"sum by (cluster, job, instance, reason) (rate(kilo_dropped_packets_total{reason=~"no_hop|no_prefix|encapsulation|rewrite|outer_fragment|too_big|not_encrypted|inside_tunnel"}[5m])) > 1"#,
        hold: "5m",
        remedy: "The label `reason` has its remedy among the [drop reasons](drop-reasons.md); `kgctl monitor --reason REASON` shows \
                 the packets, `kgctl trace` what becomes of one.",
        fires: &[(r#"kilo_dropped_packets_total{instance="a1", reason="no_hop"}"#, "0+300x60")],
        labels: &[A1, ("reason", "no_hop")],
        quiet: &[
            (r#"kilo_dropped_packets_total{instance="a1", reason="no_hop"}"#, "0+6x60"),
            (r#"kilo_dropped_packets_total{instance="a1", reason="congestion"}"#, "0+300x60"),
        ],
    },
    Alert {
        name: "KiloMasqueradeFull",
        severity: "critical",
        summary: "New masqueraded connections find no free port.",
        expr: r#"sum by (cluster, job, instance, reason) (increase(kilo_dropped_packets_total{reason=~"nat_exhausted|nat_map_full"}[10m])) > 0"#,
        hold: "1m",
        remedy: "New connections fail; established ones continue. `nat_exhausted`: pods hold too many connections to one destination, let \
                 them reuse some or give the node more addresses. `nat_map_full`: the kernel could not insert an entry; compare \
                 `kilo_nat_entries` with 131,072, look at `dmesg`, and report it.",
        fires: &[(r#"kilo_dropped_packets_total{instance="a1", reason="nat_exhausted"}"#, "0x10 5x50")],
        labels: &[A1, ("reason", "nat_exhausted")],
        quiet: &[(r#"kilo_dropped_packets_total{instance="a1", reason="nat_exhausted"}"#, "5x60")],
    },
    Alert {
        name: "KiloMapNearlyFull",
        severity: "warning",
        summary: "A BPF map is nearly full.",
        expr: "kilo_map_entries / kilo_map_capacity > 0.9",
        hold: "10m",
        remedy: "What each map holds, and how much: [tables](data-path.md#tables). Prefixes, `masq_addr` and `device`: a change that \
                 does not fit is refused as a whole; use fewer `allowed-location-ips` and Peers. `hop`, `node` and `signal_key`: split \
                 the location. `nat`: the flows that were used least recently are evicted; let pods reuse connections, or spread \
                 them over more nodes.",
        fires: &[
            (r#"kilo_map_entries{instance="a1", map="hop"}"#, "4000x60"),
            (r#"kilo_map_capacity{instance="a1", map="hop"}"#, "4096x60"),
        ],
        labels: &[A1, ("map", "hop")],
        quiet: &[
            (r#"kilo_map_entries{instance="a1", map="hop"}"#, "3000x60"),
            (r#"kilo_map_capacity{instance="a1", map="hop"}"#, "4096x60"),
        ],
    },
    Alert {
        name: "KiloProgramsReattached",
        severity: "warning",
        summary: "Something else removes Kilo's programs from interfaces.",
        expr: "increase(kilo_reattached_total[15m]) > 0",
        hold: "1m",
        remedy: "They are back within 3 s, and packets were not steered meanwhile. Look for another program that manages TC \
                 hooks on this node; [add-on](add-on.md) lists which programs can share an interface.",
        fires: &[(r#"kilo_reattached_total{instance="a1"}"#, "0x10 2x50")],
        labels: &[A1],
        quiet: &[(r#"kilo_reattached_total{instance="a1"}"#, "2x60")],
    },
    Alert {
        name: "KiloRestless",
        severity: "warning",
        summary: "An agent keeps rewriting host state: something else reverts its changes.",
        // At rest nothing is written, and nodes and peers that come and go leave pauses, so it is not how much is written
        // that tells an opponent, who reverts each minute or more often, but that it never ends.
        expr: "increase(kilo_writes_total[3m]) > 0",
        hold: "30m",
        remedy: "For half an hour there were no three minutes without a write; at rest nothing is written. Often it is NetworkManager, another CNI \
                 or a cron job: `ip monitor` on the node shows which address, route or rule comes and goes, and so which program does it. \
                 It fires as well where nodes or peers come and go all the time; the log names those.",
        fires: &[(r#"kilo_writes_total{instance="a1"}"#, "0+2x60")],
        labels: &[A1],
        quiet: &[
            // A rollout, and a cluster where a node comes or goes each six minutes.
            (r#"kilo_writes_total{instance="a1"}"#, "0+600x15 9000x45"),
            (r#"kilo_writes_total{instance="a2"}"#, "0x5 14x5 28x5 42x5 56x5 70x5 84x5 98x5 112x5 126x5"),
        ],
    },
    Alert {
        name: "KiloAddressConflict",
        severity: "warning",
        summary: "Several nodes claim one private address.",
        expr: "kilo_address_conflicts > 0",
        hold: "5m",
        remedy: "`kgctl status` names them under CLAIMED-BY. Delete the Node object that is stale, or correct \
                 `kilo.squat.ai/force-internal-ip`: \
                 [troubleshooting](troubleshooting.md#two-nodes-claim-one-private-address).",
        fires: &[(r#"kilo_address_conflicts{instance="a1"}"#, "1x60")],
        labels: &[A1],
        quiet: &[(r#"kilo_address_conflicts{instance="a1"}"#, "0x10 1x4 0x46")],
    },
    Alert {
        name: "KiloKeyConflict",
        severity: "warning",
        summary: "Several nodes have one WireGuard key, so all but one of them are out of the mesh.",
        expr: "kilo_key_conflicts > 0",
        hold: "5m",
        remedy: "`kgctl status` names them under CLAIMED-BY. On all but one of them remove `/var/lib/kilo/key` and delete the agent's \
                 pod, or delete the Node object that is stale: [troubleshooting](troubleshooting.md#two-nodes-have-one-key).",
        fires: &[(r#"kilo_key_conflicts{instance="a1"}"#, "1x60")],
        labels: &[A1],
        quiet: &[(r#"kilo_key_conflicts{instance="a1"}"#, "0x10 1x4 0x46")],
    },
    Alert {
        name: "KiloPrefixConflict",
        severity: "warning",
        summary: "Pod CIDRs of nodes overlap, or a node has the WireGuard address of a location.",
        expr: "kilo_prefix_conflicts > 0",
        hold: "5m",
        remedy: "`kgctl status` names the prefixes and nodes under CLAIMED-BY. Register all but one of the nodes again, with pod CIDRs of \
                 their own, or choose another `--subnet`: [troubleshooting](troubleshooting.md#prefixes-of-nodes-overlap).",
        fires: &[(r#"kilo_prefix_conflicts{instance="a1"}"#, "1x60")],
        labels: &[A1],
        quiet: &[(r#"kilo_prefix_conflicts{instance="a1"}"#, "0x10 1x4 0x46")],
    },
    Alert {
        name: "KiloLeaderFailed",
        severity: "warning",
        summary: "A leader failed, and another node took over.",
        expr: r#"sum by (cluster, job, instance, cause) (increase(kilo_failovers_total{cause=~"lost|alone|handed_over"}[10m])) > 0"#,
        hold: "1m",
        remedy: "Traffic goes on by the node in the label `instance`, except for what the old leader masqueraded. `kgctl status INSTANCE` \
                 says under LAST-CHANGE who was lost and why, and so does an Event `LeadsLocation` about its Node: look at the \
                 node that was lost. `lost`: nothing passed it; `alone`: nothing from the node in `instance` did; \
                 `handed_over`: it lost its link or its tunnels. [Failover](failover.md) says what comes next.",
        fires: &[(r#"kilo_failovers_total{instance="a1", cause="lost"}"#, "0x10 1x50")],
        labels: &[A1, ("cause", "lost")],
        quiet: &[
            (r#"kilo_failovers_total{instance="a1", cause="lost"}"#, "3x60"),
            (r#"kilo_failovers_total{instance="a1", cause="planned"}"#, "0+1x60"),
        ],
    },
    Alert {
        name: "KiloStandByUnfit",
        severity: "warning",
        summary: "A stand-by could not take over from its leader.",
        expr: r#"kilo_stand_by_fit == 0 and on (cluster, job, instance) kilo_failover_role{role="stand-by"} == 1"#,
        hold: "5m",
        remedy: "Its own tunnels to other locations do not answer: `kgctl status INSTANCE` shows them under TUNNEL. A \
                 stand-by needs a way there, see [what it needs](failover.md#turn-it-on); if it has none, annotate another node with \
                 `kilo.squat.ai/leader`, or run with fewer `--stand-bys`.",
        fires: &[
            (r#"kilo_stand_by_fit{instance="a1"}"#, "0x60"),
            (r#"kilo_failover_role{instance="a1", role="stand-by"}"#, "1x60"),
        ],
        labels: &[A1],
        quiet: &[
            (r#"kilo_stand_by_fit{instance="a1"}"#, "0x3 1x57"),
            (r#"kilo_failover_role{instance="a1", role="stand-by"}"#, "1x60"),
            (r#"kilo_stand_by_fit{instance="a2"}"#, "0x60"),
            (r#"kilo_failover_role{instance="a2", role="stand-by"}"#, "0x60"),
            (r#"kilo_stand_by_fit{instance="a3"}"#, "0x60"),
        ],
    },
    Alert {
        name: "KiloLeadersFlap",
        severity: "critical",
        summary: "Leadership of a location changes so often that changes are held back.",
        expr: r#"sum by (cluster, job, instance) (increase(kilo_suspicions_total{outcome="over_budget"}[10m])) > 0"#,
        hold: "1m",
        remedy: "After eight changes at once gateways that have lost leadership within ten minutes wait 15 s before they take it \
                 again. Find what comes and goes: the Events \
                 `LeadsLocation` of the last hour (`kubectl get events`) name the nodes and why each was left. Cordon a node \
                 that keeps failing; where whole networks flap, a longer `--failover-interval` waits for them.",
        fires: &[(r#"kilo_suspicions_total{instance="a1", outcome="over_budget"}"#, "0x10 1x50")],
        labels: &[A1],
        quiet: &[
            (r#"kilo_suspicions_total{instance="a1", outcome="over_budget"}"#, "2x60"),
            (r#"kilo_suspicions_total{instance="a1", outcome="asked"}"#, "0+1x60"),
        ],
    },
    Alert {
        name: "KiloSignalsForged",
        severity: "warning",
        summary: "Failover signals arrive that are not authentic.",
        expr: r#"sum by (cluster, job, instance) (increase(kilo_signals_refused_total{why=~"forged|foreign"}[10m])) + sum by (cluster, job, instance) (increase(kilo_dropped_packets_total{reason=~"forged_signal"}[10m])) > 0 or (sum by (cluster, job, instance) (increase(kilo_signals_refused_total{why=~"member|gateway|location|replayed"}[10m])) > 0 and sum by (cluster, job, instance) (increase(kilo_signals_refused_total{why=~"member|gateway|location|replayed"}[10m] offset 10m)) > 0)"#,
        hold: "1m",
        remedy: "They were refused, and nothing has changed. Expected for a few seconds after a node changes its key or location, and for up to \
                 ten minutes between gateways of different builds or after a gateway steps down. Otherwise \
                 `kgctl monitor --reason forged_signal` on the node shows from where and by which interface they come: somebody on the \
                 network of the nodes sends them ([drop reasons](drop-reasons.md)).",
        fires: &[
            (r#"kilo_signals_refused_total{instance="a1", why="forged"}"#, "0x10 1x50"),
            (r#"kilo_signals_refused_total{instance="a1", why="replayed"}"#, "0+1x60"),
            (r#"kilo_dropped_packets_total{instance="a1", reason="forged_signal"}"#, "0x60"),
        ],
        labels: &[A1],
        quiet: &[
            (r#"kilo_signals_refused_total{instance="a1", why="forged"}"#, "4x60"),
            (r#"kilo_signals_refused_total{instance="a1", why="leap"}"#, "0+1x60"),
            (r#"kilo_signals_refused_total{instance="a1", why="gateway"}"#, "0x10 5x50"),
            (r#"kilo_dropped_packets_total{instance="a1", reason="forged_signal"}"#, "4x60"),
            (r#"kilo_dropped_packets_total{instance="a1", reason="stale_signal"}"#, "0+5x60"),
        ],
    },
];

impl Alert {
    fn runbook(&self) -> String {
        format!("{RUNBOOKS}#{}", self.name.to_lowercase())
    }

    /// The alert as an item of a group's `rules`.
    fn rule(&self, indent: &str, expr: &str) -> String {
        let Self { name, severity, hold, .. } = self;
        let summary = quoted(self.summary);
        let runbook = self.runbook();
        [
            format!("- alert: {name}"),
            format!("  expr: '{expr}'"),
            format!("  for: {hold}"),
            format!("  labels: {{severity: {severity}}}"),
            "  annotations:".to_owned(),
            format!("    summary: {summary}"),
            format!("    runbook_url: {runbook}"),
        ]
        .map(|line| format!("{indent}{line}\n"))
        .concat()
    }
}

/// A single-quoted YAML string.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// `prometheusrule.yaml`, for the Prometheus operator.
pub fn prometheus_rule() -> String {
    let mut text = String::from(
        "# docs/alerts.md says what each asks for.\n\
         # For the Prometheus operator.\n\
         apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: kilo\n  namespace: kube-system\n\
         \x20 labels:\n    app.kubernetes.io/name: kilo\n    app.kubernetes.io/part-of: kilo\nspec:\n  groups:\n\
         \x20   - name: kilo\n      rules:\n",
    );
    text.extend(ALERTS.iter().map(|alert| alert.rule("        ", alert.expr)));
    text
}

/// The same rules as a file for Prometheus itself.
pub fn rule_file() -> String {
    file_of(ALERTS.iter().map(|alert| alert.rule("      ", alert.expr)))
}

fn file_of(rules: impl Iterator<Item = String>) -> String {
    format!("groups:\n  - name: kilo\n    rules:\n{}", rules.collect::<String>())
}

/// Number of alerts.
pub const fn count() -> usize {
    ALERTS.len()
}

/// `docs/alerts.md`.
pub fn page() -> String {
    let mut text = String::from(
        "# Alerts\n\n\
         For operators who were called: what each alert means, and what to do. The rules are in\n\
         [`manifests/prometheusrule.yaml`](../manifests/prometheusrule.yaml), for the Prometheus operator; the component\n\
         `monitoring` and the chart's value `prometheusRule.enabled` bring them along. Metrics are explained in\n\
         [monitoring](monitoring.md#metrics).\n\n\
         Each alert links to its section here by `runbook_url`. That address works once the project is published at\n\
         `github.com/kilo-ebpf/kilo`. A Prometheus of kube-prometheus-stack reads the rules only if they carry\n\
         [its label](monitoring.md#a-prometheus-that-selects-by-a-label). Where one rule engine (Thanos, Mimir) holds several\n\
         clusters, the rules tell them apart by the label `cluster`.\n\n\
         This page and the rules are made from one table (`cargo xtask manifests`), and promtool tests that each fires\n\
         when it should and stays quiet when it should not.\n",
    );
    for alert in ALERTS {
        let Alert { name, severity, summary, expr, hold, remedy, .. } = alert;
        let _ = write!(
            text,
            "\n## {name}\n\n**{severity}**, after {hold}. {summary}\n\n```promql\n{expr}\n```\n\n{remedy}\n"
        );
    }
    text
}

/// promtool tests of the rule file `rules`: each alert fires when it should, and only then.
pub fn promtool_tests(rules: &str) -> String {
    tests_of(rules, ALERTS)
}

fn tests_of(rules: &str, alerts: &[Alert]) -> String {
    let tests: String = alerts.iter().map(Alert::tests).collect();
    format!("rule_files: [{rules}]\nevaluation_interval: 1m\ntests:\n{tests}")
}

impl Alert {
    fn tests(&self) -> String {
        let labels = self.labels.iter().map(|(name, value)| format!(", {name}: {value}"));
        let labels = format!("severity: {}{}", self.severity, labels.collect::<String>());
        let fired = format!(
            "          - exp_labels: {{{labels}}}\n            exp_annotations: {{summary: {}, runbook_url: '{}'}}\n",
            quoted(self.summary),
            self.runbook(),
        );
        // A counter that grew once fires for a while, a lasting condition for the whole hour.
        let grew_once = self.fires.iter().any(|(_, values)| values.starts_with("0x10 "));
        let at = if grew_once { "13m" } else { "50m" };
        self.test(self.fires, &[at], &fired) + &self.test(self.quiet, &["5m", "15m", "25m", "35m", "50m"], "")
    }

    /// One promtool test, evaluated at these times; `fired` is the expected alert, empty for none.
    fn test(&self, series: &[Series], at: &[&str], fired: &str) -> String {
        let series =
            series.iter().map(|(name, values)| format!("      - {{series: '{name}', values: '{values}'}}\n"));
        let fired = if fired.is_empty() { " []\n".to_owned() } else { format!("\n{fired}") };
        let at = at.iter().map(|at| {
            format!("      - eval_time: {at}\n        alertname: {}\n        exp_alerts:{fired}", self.name)
        });
        format!(
            "  - interval: 1m\n    input_series:\n{}    alert_rule_test:\n{}",
            series.collect::<String>(),
            at.collect::<String>(),
        )
    }
}

#[cfg(test)]
mod tests;
