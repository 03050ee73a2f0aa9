//! The userspace device in real network namespaces.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use crate::netns;
use crate::wait::task as wait;

use std::{
    fs,
    io::{Read, Write},
    net::UdpSocket,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use kilo_core::{
    settings::WireguardMode,
    wireguard::{
        DeviceState, WireguardPeer, WireguardPlan, diff,
        key::{PublicKey, SecretKey},
        uapi,
    },
};
use kilo_host::{
    net::{Net, links},
    wireguard::{Backend, Device, Ensured, WireguardError, ensure_device, socket::socket_path, userspace},
};
use netns::{isolated, sh, succeeds};

const LIMIT: Duration = Duration::from_secs(10);

/// The agent's own program: `kg userspace-wireguard <interface>`.
fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_kg"))
}

/// Also ends the processes of a failed test, which go with their device.
struct Cleanup;

impl Drop for Cleanup {
    fn drop(&mut self) {
        succeeds("ip link delete wga; ip -n b link delete wgb");
    }
}

fn secret(n: u8) -> SecretKey {
    SecretKey::from_bytes([n; 32])
}

fn request(name: &str, text: &str) -> String {
    let mut stream = UnixStream::connect(socket_path(name)).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn state(name: &str) -> DeviceState {
    uapi::decode_state(&request(name, "get=1\n\n"), SystemTime::now()).unwrap().0
}

fn configure(name: &str, plan: &WireguardPlan, key: &SecretKey) {
    let changes = diff(&state(name), plan, key);
    assert_eq!(request(name, &diff::request(&changes).encode()), "errno=0\n\n");
}

fn plan(port: u16, peer: PublicKey, endpoint: &str, nets: &[&str], roams: bool) -> WireguardPlan {
    let peer_plan = WireguardPeer {
        allowed_ips: nets.iter().map(|net| net.parse().unwrap()).collect(),
        endpoint: Some(endpoint.parse().unwrap()),
        roams,
        persistent_keepalive: if roams { 5 } else { 0 },
        preshared_key: Some(secret(9)),
    };
    WireguardPlan { listen_port: port, peers: [(peer, peer_plan)].into() }
}

fn network() {
    sh("ip link set lo up; mkdir -p /run/netns; ip netns add b; ip -n b link set lo up
        ip link add va type veth peer name vb netns b; ip link set va mtu 9000; ip -n b link set vb mtu 9000
        ip link set va up; ip -n b link set vb up
        ip addr add 192.0.2.1/24 dev va; ip -n b addr add 192.0.2.2/24 dev vb
        ip addr add 2001:db8::1/64 dev va nodad; ip -n b addr add 2001:db8::2/64 dev vb nodad");
}

/// A missing device is created; an existing one is adopted, but not for another backend.
async fn made_once_and_adopted(net: &Net, exe: &Path) -> Ensured {
    let absent = ensure_device(net.rtnl(), "wga", WireguardMode::Userspace, false, exe).await;
    assert!(matches!(absent, Err(WireguardError::Absent(_))), "{absent:?}");
    let start = Instant::now();
    let made = ensure_device(net.rtnl(), "wga", WireguardMode::Userspace, true, exe).await.unwrap();
    println!("kilo-figure: userspace WireGuard started in {:?}", start.elapsed());
    assert_eq!((made.backend, made.created), (Backend::Userspace, true));
    let again = ensure_device(net.rtnl(), "wga", WireguardMode::Auto, false, exe).await.unwrap();
    assert_eq!(again, Ensured { created: false, ..made });
    assert!(matches!(
        ensure_device(net.rtnl(), "wga", WireguardMode::Kernel, true, exe).await,
        Err(WireguardError::OtherBackend { .. })
    ));
    made
}

/// A moved prefix is listed with its new peer only, and stays there.
async fn a_prefix_moves_between_peers(
    device: &Device,
    more: &mut WireguardPlan,
    b: PublicKey,
    a: &SecretKey,
) {
    let other = secret(3).public();
    let moved: ipnet::IpNet = "10.100.7.0/24".parse().unwrap();
    more.peers.get_mut(&b).unwrap().allowed_ips.remove(&moved);
    more.peers.insert(
        other,
        WireguardPeer { allowed_ips: std::iter::once(moved).collect(), ..WireguardPeer::default() },
    );
    assert_eq!(device.reconcile(more, a).await.unwrap(), 1);
    more.peers.get_mut(&b).unwrap().persistent_keepalive = 4;
    assert_eq!(device.reconcile(more, a).await.unwrap(), 1);
    assert_eq!(device.reconcile(more, a).await.unwrap(), 0);
    more.peers.remove(&other);
    assert_eq!(device.reconcile(more, a).await.unwrap(), 1);
}

#[test]
fn two_devices_talk_roam_and_end() {
    isolated("two_devices_talk_roam_and_end", || async {
        network();
        let _cleanup = Cleanup;
        let exe = program();
        let net = Net::new().unwrap();

        let made = made_once_and_adopted(&net, exe).await;
        sh(&format!("ip netns exec b {} userspace-wireguard wgb >/dev/null 2>&1 &", exe.display()));
        wait::until("the second process", LIMIT, async || UnixStream::connect(socket_path("wgb")).is_ok())
            .await;

        let (a, b) = (secret(1), secret(2));
        // B first: A's keepalive starts a handshake at once, and its next attempt is 5 s later.
        configure("wgb", &plan(51821, a.public(), "192.0.2.1:51820", &["10.4.0.1/32"], false), &b);
        let device = Device::open(net.rtnl(), "wga", Backend::Userspace).await.unwrap();
        let to_b = plan(51820, b.public(), "192.0.2.2:51821", &["10.4.0.2/32", "10.9.0.0/16"], true);
        assert_eq!(device.reconcile(&to_b, &a).await.unwrap(), 3);
        assert_eq!(device.reconcile(&to_b, &a).await.unwrap(), 0);
        sh("ip addr add 10.4.0.1/24 dev wga; ip link set wga up mtu 1420
            ip -n b addr add 10.4.0.2/24 dev wgb; ip -n b link set wgb up mtu 1420");
        sh("ping -c 3 -i 0.2 -W 3 10.4.0.2");

        // wireguard-control, which other tools use, sees the same.
        let name = "wga".parse().unwrap();
        let seen = wireguard_control::Device::get(&name, wireguard_control::Backend::Userspace).unwrap();
        assert_eq!(seen.listen_port, Some(51820));
        assert_eq!(seen.peers.len(), 1);
        assert!(seen.peers[0].stats.last_handshake_time.is_some());

        // What one handle has read, its copies reuse when the caller accepts that age.
        device.read().await.unwrap();
        let (hour, nothing) = (Duration::from_hours(1), Duration::ZERO);
        let copy = device.clone();
        let shared = copy.status_within(hour).await.unwrap();
        assert_eq!(shared.at, device.status_within(hour).await.unwrap().at);
        assert!(copy.status_within(nothing).await.unwrap().at > shared.at);
        assert!(shared.peers[&b.public()].handshake_age.is_some());

        // The session survives a change of allowed IPs: counters continue without a new handshake.
        let before = device.read_status().await.unwrap()[&b.public()].clone();
        let mut more = to_b.clone();
        let peer = more.peers.get_mut(&b.public()).unwrap();
        peer.allowed_ips.extend(
            (0..300u32)
                .map(|n| format!("10.{}.{}.0/24", 100 + n / 256, n % 256).parse::<ipnet::IpNet>().unwrap()),
        );
        peer.allowed_ips.remove(&"10.9.0.0/16".parse().unwrap());
        assert_eq!(device.reconcile(&more, &a).await.unwrap(), 2);
        assert_eq!(
            device.reconcile(&more, &a).await.unwrap(),
            0,
            "300 allowed IPs read back with an empty diff"
        );
        let after = device.read_status().await.unwrap()[&b.public()].clone();
        assert!(after.rx_bytes >= before.rx_bytes && before.rx_bytes > 0);
        assert!(after.handshake_age >= before.handshake_age);
        sh("ping -c 1 -W 3 10.4.0.2");

        a_prefix_moves_between_peers(&device, &mut more, b.public(), &a).await;
        sh("ping -c 1 -W 3 10.4.0.2");

        // B roams to another port; A keeps the learnt one although the plan has the other.
        configure("wgb", &plan(51899, a.public(), "192.0.2.1:51820", &["10.4.0.1/32"], false), &b);
        sh("ip netns exec b ping -c 2 -i 0.2 -W 3 10.4.0.1");
        let learnt = device.read_status().await.unwrap()[&b.public()].endpoint;
        assert_eq!(learnt, Some("192.0.2.2:51899".parse().unwrap()));
        assert_eq!(device.reconcile(&more, &a).await.unwrap(), 0);
        sh("ping -c 1 -W 3 10.4.0.2");

        // IPv6 outside, and packets beyond 4 KiB inside.
        configure("wgb", &plan(51899, a.public(), "[2001:db8::1]:51820", &["10.4.0.1/32"], false), &b);
        sh("ip netns exec b ping -c 2 -i 0.2 -W 3 10.4.0.1");
        let learnt = device.read_status().await.unwrap()[&b.public()].endpoint;
        assert_eq!(learnt, Some("[2001:db8::2]:51899".parse().unwrap()));
        sh("ip link set wga mtu 8900; ip -n b link set wgb mtu 8900; ping -c 1 -W 3 -M do -s 8800 10.4.0.2");

        // A taken port is reported, and the old one stays in use.
        let taken = UdpSocket::bind("0.0.0.0:51830").unwrap();
        more.listen_port = 51830;
        let error = device.reconcile(&more, &a).await.unwrap_err();
        assert!(matches!(error, WireguardError::PortInUse(51830)), "{error}");
        assert_eq!(error.label(), "port");
        drop(taken);
        more.listen_port = 51820;
        assert_eq!(device.reconcile(&more, &a).await.unwrap(), 0);
        sh("ip netns exec b ping -c 1 -W 3 10.4.0.1");

        // Deleting the interface ends the process; SIGTERM removes interface and socket.
        assert!(links::delete(net.rtnl(), made.index).await.unwrap());
        wait::until("the socket of a deleted interface goes", LIMIT, async || !socket_path("wga").exists())
            .await;
        assert!(matches!(device.read().await, Err(WireguardError::Vanished(_))));
        let process = sh("ip netns pids b");
        sh(&format!("kill -TERM {process}"));
        wait::until("the socket goes", LIMIT, async || !socket_path("wgb").exists()).await;
        wait::until("the interface goes", LIMIT, async || !succeeds("ip -n b link show wgb")).await;
    });
}

#[test]
fn a_killed_process_leaves_nothing_in_the_way() {
    isolated("a_killed_process_leaves_nothing_in_the_way", || async {
        sh("ip link set lo up");
        let _cleanup = Cleanup;
        let exe = program();
        let net = Net::new().unwrap();
        let process = userspace::spawn_detached(exe, "wga").unwrap();
        wait::until("the process", LIMIT, async || UnixStream::connect(socket_path("wga")).is_ok()).await;
        assert_eq!(fs::metadata(socket_path("wga")).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(sh(&format!("ps -o sid= -p {}", process.id())).trim(), process.id().to_string());
        // A second process refuses and says why.
        assert!(matches!(userspace::run("wga").await, Err(WireguardError::AlreadyRunning(_))));
        sh(&format!("kill -KILL {}", process.id()));
        wait::until("its end", LIMIT, async || process.has_ended()).await;
        assert!(socket_path("wga").exists(), "the dead process could not remove its socket");
        let made = ensure_device(net.rtnl(), "wga", WireguardMode::Userspace, true, exe).await.unwrap();
        assert!(made.created);

        assert_eq!(request("wga", "set=1\nlisten_port=x\n\n"), "errno=22\n\n");
        assert_eq!(request("wga", "hello\n\n"), "errno=22\n\n");
        let peer = diff::request(&[diff::Change::SetPeer(secret(1).public(), diff::PeerUpdate::default())]);
        assert_eq!(request("wga", &peer.encode()), "errno=126\n\n", "a peer before the key");
        assert!(request("wga", "get=1\n\n").ends_with("errno=0\n\n"));
    });
}

#[test]
fn a_deleted_interface_is_made_again_while_its_process_still_ends() {
    isolated("a_deleted_interface_is_made_again_while_its_process_still_ends", || async {
        sh("ip link set lo up");
        let _cleanup = Cleanup;
        let net = Net::new().unwrap();
        let process = userspace::spawn_detached(program(), "wga").unwrap();
        wait::until("the process", LIMIT, async || UnixStream::connect(socket_path("wga")).is_ok()).await;
        let mesh = plan(51820, secret(2).public(), "192.0.2.2:51820", &["10.9.0.2/32"], false);
        configure("wga", &mesh, &secret(1));
        // As on a machine so slow that the process has not noticed the deletion.
        sh(&format!("kill -STOP {}; ip link delete wga", process.id()));
        let goes_on = async {
            wait::fault_lasts(Duration::from_millis(500)).await;
            sh(&format!("kill -CONT {}", process.id()));
        };
        let made = ensure_device(net.rtnl(), "wga", WireguardMode::Userspace, true, program());
        let (made, ()) = tokio::join!(made, goes_on);
        assert!(made.unwrap().created);
        wait::until("its end", LIMIT, async || process.has_ended()).await;
        // Port and socket belong to the new one.
        configure("wga", &mesh, &secret(1));
    });
}

#[test]
fn a_key_that_changes_again_and_again_under_traffic_keeps_the_port() {
    isolated("a_key_that_changes_again_and_again_under_traffic_keeps_the_port", || async {
        network();
        let _cleanup = Cleanup;
        let net = Net::new().unwrap();
        ensure_device(net.rtnl(), "wga", WireguardMode::Userspace, true, program()).await.unwrap();
        let mesh = plan(51820, secret(2).public(), "192.0.2.2:51820", &["10.9.0.2/32"], false);
        configure("wga", &mesh, &secret(1));
        // The port always has something to read.
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = socket.send_to(&[4; 1400], "127.0.0.1:51820");
                }
            });
            let refused = (0..50u16).find_map(|round| {
                let changes = diff(&state("wga"), &mesh, &secret(10 + (round % 2) as u8));
                let answer = request("wga", &diff::request(&changes).encode());
                (answer != "errno=0\n\n").then_some((round, answer))
            });
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(refused, None, "a change of the key");
        });
        assert_eq!(UdpSocket::bind("0.0.0.0:51820").unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    });
}

#[test]
fn what_stands_in_the_way_is_named() {
    isolated("what_stands_in_the_way_is_named", || async {
        sh("ip link add br7 type bridge; ip tuntap add dev tun7 mode tun");
        let net = Net::new().unwrap();
        let exe = Path::new("/nonexistent/kg");
        let ensure =
            async |name| ensure_device(net.rtnl(), name, WireguardMode::Auto, true, exe).await.unwrap_err();
        let error = ensure("br7").await;
        assert!(matches!(&error, WireguardError::NotWireguard { kind, .. } if kind == "bridge"), "{error}");
        let error = ensure("tun7").await;
        assert!(matches!(&error, WireguardError::NoSocket { .. }), "{error}");
        assert!(matches!(ensure("a/b").await, WireguardError::InvalidName(_)));
        let error = ensure_device(net.rtnl(), "wga", WireguardMode::Userspace, true, exe).await.unwrap_err();
        assert!(matches!(&error, WireguardError::NotStarted { .. }), "{error}");
    });
}
