//! The faults of docs/reliability.md and the tests that cover each; `list.rs` has the faults that the lab injects.

/// A fault that the mesh must survive: a row ("line") of the list in docs/reliability.md.
pub struct Requirement {
    /// Its number.
    pub number: u8,
    /// What goes wrong.
    pub fault: &'static str,
    /// Tests besides `cargo xtask lab faults`, as `program::test`, or `lab: NAME` and `cluster: NAME` for a
    /// check there.
    pub tests: &'static [&'static str],
    /// What no test shows.
    pub missing: &'static str,
    /// What was seen in runs that are not in the tables, in Markdown; empty: nothing.
    pub seen: &'static str,
}

const fn requirement(
    number: u8,
    fault: &'static str,
    tests: &'static [&'static str],
    missing: &'static str,
) -> Requirement {
    Requirement { number, fault, tests, missing, seen: "" }
}

impl Requirement {
    /// Adds what was seen in runs that are not in the tables.
    const fn seen(self, seen: &'static str) -> Self {
        Self { seen, ..self }
    }
}

/// The simulation, which runs fault schedules over the code that decides.
const SIMULATED: &[&str] = &["schedules::every_fault_stays_within_its_limits"];

/// All requirements, by number.
pub const REQUIREMENTS: &[Requirement] = &[
    requirement(
        1,
        "agent killed",
        &["lab: killing kg with SIGKILL loses no packet and a restarted one adopts"],
        "",
    ),
    requirement(2, "agent restarts", &["lab: restarting kg cleanly loses no packet"], ""),
    requirement(
        3,
        "upgrade to another map layout",
        &[
            "bpf::attach::maps_of_another_version_go_when_our_programs_are_in_place",
            "bpf::attach::the_next_agent_takes_over_without_a_gap",
        ],
        "programs of layout 2 themselves: maps of its shape are what the agents find, under today's programs",
    ),
    requirement(
        4,
        "killed between two steps of an apply",
        &["net::killed::an_agent_killed_anywhere_in_an_apply_leaves_what_the_next_completes"],
        "each single step: 9 of the system calls of an apply are chosen, 23 with KILO_KILLS=all",
    ),
    requirement(
        5,
        "pins of another layout, foreign or corrupt; no bpffs",
        &[
            "bpf::load::a_pin_of_another_shape_is_replaced",
            "bpf::load::rubbish_that_is_no_map_is_replaced",
            "bpf::load::a_program_pinned_in_the_place_of_a_map_is_replaced",
            "bpf::load::the_bpf_file_system_is_mounted_when_it_is_not",
        ],
        "",
    ),
    requirement(6, "two agents on a node", &["lab: a second agent on a node waits and sets nothing up"], ""),
    requirement(
        7,
        "1,000 reconciles with nothing new",
        &[
            "net::apply::a_thousand_routes_are_quick_and_1000_reconciles_write_nothing",
            "bpf::attach::nothing_new_writes_nothing",
            "lab: a reconcile with nothing new writes nothing",
        ],
        "",
    ),
    requirement(
        8,
        "a task panics",
        &["health::later_failures_count_only_after_patience_is_over", "health::what_is_broken_stays_broken"],
        "",
    ),
    requirement(9, "uninstalled", &["lab: after `kg uninstall` nothing of ours is left"], ""),
    requirement(
        10,
        "API server away",
        &[
            "api::server_failures::a_restart_of_the_server_is_survived_and_writes_go_on",
            "liveness::while_the_own_heartbeat_does_not_come_back_nobody_is_given_up",
            "liveness::whose_heartbeat_was_the_last_before_the_server_went_away_does_not_matter",
            "liveness::a_node_heard_first_after_an_outage_takes_nobody_for_dead",
        ],
        "an hour of it under traffic: as long as the table says, longer with --away",
    ),
    requirement(
        11,
        "API server away at start",
        &[
            "api::agent::an_agent_that_starts_while_the_api_server_is_away_works_with_the_last_good_topology",
            "api::last_good::a_host_that_boots_while_the_api_server_is_away_has_everything_and_the_server_rules_when_back",
        ],
        "",
    ),
    requirement(
        12,
        "API server reachable through the mesh only",
        &[
            "api::through_mesh::a_location_that_reaches_the_api_server_through_the_mesh_only_follows_it_and_comes_back_from_a_reboot",
        ],
        "a new leader of the API server's location: without failover, nodes that reach the server through the old leader do not learn of it; with failover they need no server for that (line 69)",
    ),
    requirement(
        13,
        "410 Gone, broken watches, half of the nodes missing",
        &[
            "api::server_failures::a_watch_goes_on_after_its_connection_broke",
            "api::server_failures::a_history_that_is_gone_and_half_of_the_nodes_with_it",
            "api::server_failures::one_list_without_half_of_the_nodes_removes_none_when_the_next_has_them",
        ],
        "",
    ),
    requirement(
        14,
        "429 and slow answers",
        &[
            "api::server_failures::an_overloaded_server_is_named_left_alone_for_longer_and_longer_and_found_again",
            "api::agent::an_overloaded_api_server_is_asked_less_and_less_and_holds_up_nothing_on_the_host",
            "api::agent::an_api_server_that_takes_requests_and_never_answers_holds_up_nothing_on_the_host",
        ],
        "",
    ),
    requirement(
        15,
        "one node's annotations are rubbish",
        &["unit::bad_objects::rubbish_in_any_annotation_is_named_and_nothing_else_about_the_node_is_lost"],
        "",
    ),
    requirement(
        16,
        "one node's clock is wrong by an hour",
        &[
            "liveness::a_clock_that_is_an_hour_wrong_changes_nothing",
            "publisher::a_clock_that_is_set_back_writes_no_more_than_heartbeats",
            "unit::crate_graph::failover_knows_no_wall_clock",
        ],
        "",
    ),
    requirement(17, "leader loses power", SIMULATED, ""),
    requirement(18, "leader's uplink or kilo0 down", SIMULATED, ""),
    requirement(19, "leader drops new flows", SIMULATED, ""),
    requirement(
        20,
        "former leader comes back",
        &[],
        "0 lost: at most 10 datagrams with failover, and without it some hundreds, as above",
    ),
    requirement(
        21,
        "leader annotation moves",
        &[
            "unit::topology_properties::only_hop_entries_change_on_a_member_when_the_leader_does",
            "cluster: the leader's machine is drained, and its stand-by leads before it goes",
        ],
        "0 lost: what is on its way when two locations learn of it one after the other; a handshake that came too early is begun again within 0.8 s",
    ),
    requirement(
        22,
        "two nodes take themselves or each other for the leader",
        &["bpf::receive::a_node_that_does_not_lead_refuses_remote_destinations"],
        "",
    ),
    requirement(23, "a location is gone", &["bpf::send::a_leader_without_a_hop_drops"], ""),
    requirement(24, "20 flaps in 60 s", SIMULATED, ""),
    requirement(
        25,
        "kilo0 deleted, renamed, renumbered",
        &[
            "net::wireguard_kernel::a_deleted_interface_is_not_made_again_behind_our_back",
            "lab: kilo0 down or deleted while no agent runs leaks nothing, and is mended by the next",
            "lab: kilo0 deleted again and again under traffic leaks nothing",
        ],
        "",
    ),
    requirement(
        26,
        "key rotated",
        &[
            "private_key::is_made_once_and_kept",
            "net::wireguard_userspace::a_key_that_changes_again_and_again_under_traffic_keeps_the_port",
        ],
        "less than the seconds WireGuard needs for the next handshake",
    ),
    requirement(27, "endpoint roams", &["net::wireguard_userspace::two_devices_talk_roam_and_end"], ""),
    requirement(28, "a DNS endpoint cannot be resolved", &[], ""),
    requirement(
        29,
        "two peers with one key, overlapping allowed IPs",
        &["unit::topology_properties::two_nodes_with_one_key_leave_the_first_as_it_is"],
        "",
    ),
    requirement(
        30,
        "peers larger than a netlink message",
        &["net::wireguard_kernel::large_peers_moves_and_releases"],
        "",
    ),
    requirement(
        31,
        "peers the kernel reports in parts",
        &[
            "device::a_peer_in_several_parts_is_put_together_once",
            "net::wireguard_kernel::large_peers_moves_and_releases",
        ],
        "",
    ),
    requirement(
        32,
        "uplink changes its address, goes down and up",
        &["bpf::attach::interfaces_that_go_come_back_or_change_their_name_are_followed"],
        "",
    ),
    requirement(
        33,
        "interface or port is somebody else's",
        &[
            "net::wireguard_userspace::what_stands_in_the_way_is_named",
            "net::wireguard_kernel::a_taken_port_shows_when_the_interface_goes_up",
        ],
        "",
    ),
    requirement(
        34,
        "peers come and go",
        &[
            "diff::adding_a_peer_mentions_no_other",
            "net::wireguard_kernel::a_change_of_allowed_ips_loses_no_packet_of_others",
        ],
        "",
    ),
    requirement(
        35,
        "6.1, 6.12 and newest kernels",
        &["bpf::load::every_program_loads_with_room_to_spare"],
        "",
    ),
    requirement(
        36,
        "programs of others on the hook",
        &[
            "bpf::attach::programs_of_others_before_and_after_ours_run_too_over_tcx",
            "bpf::attach::programs_of_others_before_and_after_ours_run_too_over_clsact",
        ],
        "",
    ),
    requirement(
        37,
        "link or qdisc removed",
        &[
            "net::hooks::a_tcx_link_that_somebody_removed_is_back_within_five_seconds_and_counted",
            "net::hooks::a_filter_or_qdisc_that_somebody_removed_is_back_at_once_and_counted",
        ],
        "",
    ),
    requirement(
        38,
        "never two copies",
        &["bpf::attach::restarts_in_any_mix_of_modes_leave_exactly_one_copy"],
        "",
    ),
    requirement(
        39,
        "maps full",
        &[
            "bpf::map_sizes::a_full_map_takes_what_fits_refuses_one_more_and_hurts_nothing_else",
            "bpf::map_sizes::every_map_of_the_object_is_as_its_row_in_the_table_says",
            "bpf::masquerade_both::a_full_table_of_flows_forgets_the_least_used_and_serves_new_and_forgotten_ones",
        ],
        "prefix_v6, masq_src and masq_dst are really filled with KILO_FILL=all only",
    ),
    requirement(
        40,
        "NAT ports used up",
        &[
            "bpf::masquerade::used_up_ports_are_a_counted_drop",
            "bpf::masquerade_both::nat_gc_removes_flows_that_have_ended_and_frees_their_ports",
        ],
        "",
    ),
    requirement(
        41,
        "half of a NAT pair evicted",
        &[
            "bpf::masquerade_both::a_flow_that_lost_one_half_gets_it_back_with_its_next_packet",
            "nat::a_half_whose_port_became_another_flows_expires_alone",
            "nat::both_halves_of_a_silent_flow_go_together_and_others_stay",
        ],
        "",
    ),
    requirement(
        42,
        "two CPUs, one tuple",
        &["bpf::masquerade_both::two_processors_that_see_a_flow_first_at_once_agree_on_its_port"],
        "",
    ),
    requirement(
        43,
        "unknown location",
        &[
            "bpf::send::a_leader_without_a_hop_drops",
            "bpf::send::a_member_steers_remote_destinations_and_never_encrypts",
        ],
        "",
    ),
    requirement(
        44,
        "malformed headers",
        &[
            "bpf::agreement::programs_and_model_agree_on_random_packets_and_tables",
            "bpf::agreement::programs_and_model_agree_on_the_kept_packets",
            "bpf::receive::no_truncation_and_no_flipped_byte_gets_past_the_checks",
        ],
        "",
    ),
    requirement(
        45,
        "fragments",
        &[
            "bpf::receive::a_fragmented_outer_packet_is_dropped",
            "bpf::masquerade_both::fragments_follow_their_first_one_both_ways",
        ],
        "",
    ),
    requirement(
        46,
        "ICMP and its errors",
        &[
            "bpf::masquerade::tcp_and_echo_are_translated_with_their_own_checksums",
            "bpf::masquerade_both::an_error_from_outside_reaches_the_pod_with_its_own_packet_quoted",
            "bpf::masquerade_both::a_pods_own_error_goes_out_quoting_what_the_sender_knows",
        ],
        "",
    ),
    requirement(
        47,
        "path MTU",
        &["lab: senders learn the path MTU whatever link is small, and TCP goes on"],
        "",
    ),
    requirement(
        48,
        "offloads",
        &[
            "lab: offloads on or off, pods receive the bytes that were sent",
            "lab: datagrams that pods hand over many at once arrive whole",
            "lab: tunnels of pods' own carry known bytes, by the device where no outer header can be written",
        ],
        "",
    ),
    requirement(
        49,
        "unknown protocols",
        &[
            "bpf::masquerade::what_cannot_be_translated_never_leaves_with_a_pods_address",
            "bpf::receive::ordinary_traffic_is_left_alone",
        ],
        "",
    ),
    requirement(
        50,
        "TTL 1, loops",
        &[
            "bpf::receive::a_packet_at_the_end_of_its_life_goes_to_the_stack_which_notifies_the_sender",
            "bpf::receive::a_node_that_does_not_lead_refuses_remote_destinations",
        ],
        "",
    ),
    requirement(
        51,
        "multicast, broadcast, link-local, own addresses",
        &["bpf::send::multicast_broadcast_and_link_local_are_never_steered"],
        "",
    ),
    requirement(
        52,
        "checksums and inverse translation",
        &[
            "checksum::an_incremental_update_equals_a_full_computation",
            "flow::each_half_of_a_pair_names_the_other",
            "bpf::masquerade_both::udp_tcp_and_echo_of_both_families_go_out_and_come_back",
        ],
        "",
    ),
    requirement(
        53,
        "encapsulated packets of strangers",
        &[
            "bpf::receive::only_nodes_of_the_location_may_steer",
            "bpf::receive::an_inner_source_must_belong_to_the_node_that_sends_it",
        ],
        "",
    ),
    requirement(
        54,
        "steered port is not a NAT port",
        &["nat::the_ports_of_wireguard_and_of_the_tunnel_are_never_chosen"],
        "",
    ),
    requirement(
        55,
        "keys on disk and in logs",
        &[
            "private_key::open_permissions_are_narrowed",
            "key::a_secret_is_not_shown_by_debug",
            "last_good::why_a_file_is_ignored_quotes_no_key",
        ],
        "",
    ),
    requirement(
        56,
        "least capabilities",
        &[
            "api::manifests::confined::the_agent_runs_under_the_confinement_of_its_daemon_set",
            "net::cli_bad_input::without_capabilities_it_says_which_and_leaves_nothing",
        ],
        "",
    ),
    requirement(
        57,
        "webhook and HTTP bad input",
        &[
            "net::http_server::rubbish_is_answered_with_its_status_and_disturbs_nobody",
            "api::webhook::rubbish_is_answered_with_its_status_and_disturbs_nobody",
        ],
        "",
    ),
    requirement(
        58,
        "small RBAC",
        &["api::manifests::accounts::the_agents_account_may_do_what_the_agent_does_and_nothing_else"],
        "",
    ),
    requirement(59, "rp_filter", &[], ""),
    requirement(
        60,
        "FORWARD policy DROP",
        &[
            "lab: pods pass a FORWARD policy DROP with --iptables-forward-rules, and not without",
            "net::forward::pods_pass_a_forward_policy_drop_of_legacy_iptables",
        ],
        "",
    ),
    requirement(
        61,
        "DNAT and INVALID",
        &["lab: service addresses lead to pods of every node, with rp_filter=1 and INVALID dropped"],
        "",
    ),
    requirement(
        62,
        "host sockets, hostPort, NodePort",
        &[
            "bpf::masquerade::a_port_a_host_socket_listens_on_is_not_taken",
            "bpf::masquerade_both::a_port_of_the_hosts_later_flow_is_changed_when_a_pod_has_it",
            "lab: node ports and host ports lead to pods from outside and from other nodes' pods, whose own flows stay apart",
        ],
        "a pod's flow that gets the port of a hostPort or NodePort towards the same remote address and port",
    ),
    requirement(
        63,
        "another masquerade rule",
        &[],
        "a rule that comes together with connection tracking: flows we masquerade already get another port and end",
    ),
    requirement(64, "ip_forward turned off", &["net::apply::forwarding_is_seen_and_turned_on"], ""),
    requirement(
        65,
        "1,000 and 10,000 nodes",
        &["unit::topology_properties::ten_thousand_nodes_are_planned_in_reasonable_time"],
        "map writes, memory and idle CPU: cargo xtask bench measures them",
    ),
    requirement(
        66,
        "hours of random faults",
        &[
            "net::leaks::two_hundred_reconfigurations_leave_nothing_over",
            "random faults heal and leave nothing over",
        ],
        "hours: ten minutes when its turn comes, with a seed that is printed, cargo xtask lab soak --time 2h for more",
    ),
    // From here on: what the project promises beyond the list it began with.
    requirement(
        67,
        "static stability: agents dead, API server away, a node reboots",
        &[],
        "pods of the node that boots: they are silenced, because nothing of ours is there before its agent",
    ),
    requirement(68, "agents killed, stopped, restarted, upgraded, stalled", SIMULATED, ""),
    requirement(
        69,
        "as 17, with members' agents dead, or the API server away for an hour before",
        SIMULATED,
        "the API server away for an hour: by hand, one run; 30 s in the figures, longer with --for",
    ),
    requirement(
        70,
        "LAN in two halves, each with a gateway",
        SIMULATED,
        "each half on its own side of a far location",
    ),
    requirement(
        71,
        "5 % of packets lost on every link, and busy CPUs, for an hour",
        &["schedules::nobody_takes_over_in_an_hour_of_loss_and_stalls"],
        "no change of leader in every such hour: one of three recorded hours, beside large labs, had two",
    ),
    requirement(
        72,
        "far side, member or leader is Kilo",
        &[
            "schedules::every_fault_stays_within_its_limits",
            "cluster: in a mesh where nodes are Kilo in Go, the leader's machine loses power",
        ],
        "Kilo's own program in the lab: there agents with --failover=off stand in for it, which to the others is the same",
    ),
    requirement(
        73,
        "forged, repeated and foreign signals",
        &[
            "bpf::signals::what_is_forged_stale_or_foreign_changes_nothing",
            "bpf::signals::a_later_announce_is_obeyed_and_no_other_ever",
            "bpf::signals::a_claim_counts_from_a_gateways_own_address_in_the_tunnel_alone",
        ],
        "",
    ),
    requirement(
        74,
        "1,000 members in the location",
        SIMULATED,
        "1,000 agents: of 1,000 members only the kernel's answers are there, by the programs' own code",
    ),
    requirement(75, "leader and stand-by lose power", SIMULATED, ""),
    requirement(
        76,
        "the leader's machine is torn down under a Deployment with Services",
        &["cluster: the leader's machine loses power, and its stand-by leads within half a second"],
        "",
    )
    .seen("[failover](failover.md#what-was-seen): twenty runs, p95 511 ms, 542 ms at most"),
];

#[cfg(test)]
mod tests;
