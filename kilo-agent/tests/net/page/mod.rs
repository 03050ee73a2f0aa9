//! The page in a headless Chromium: its content, its robustness, and its accessibility.
//! Pictures are written to `target/page` (or `$KILO_PAGE_PICTURES`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod browser;
mod data;
mod signed_out;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use browser::{Browser, Look, text};
use data::{report, report_at};
use kilo_agent::{
    health::Health,
    http::{
        self, Graph,
        access::Gate,
        page::{Feed, MOST_LISTENERS, Page, Report},
    },
    metrics::Metrics,
    status::{Status, View},
    timestamp::Timestamp,
};
use parking_lot::Mutex;
use serde_json::json;
use tokio::{runtime::Runtime, sync::watch};
use tokio_util::sync::CancellationToken;

use crate::{cluster, netns::isolated, wait::until};

/// Time within which an event must be on the page.
const PROMISED: Duration = Duration::from_secs(5);
/// Longest time that a reader waits on a busy machine.
const SOON: Duration = Duration::from_secs(30);
/// Time within which a page is drawn on a busy machine.
const DRAWN: Duration = Duration::from_secs(30);
const WIDE: Look = Look { width: 1280, height: 900, dark: false };
const PHONE: Look = Look { width: 390, height: 844, dark: false };

/// The agent's server with reports of our own.
struct Server {
    url: String,
    report: Arc<Mutex<Report>>,
    stop: CancellationToken,
    runtime: Option<Runtime>,
}

impl Server {
    fn start(first: Report) -> Self {
        Self::behind(first, Gate::Open, "127.0.0.1:0")
    }

    /// An agent's server that requires tokens, at this address.
    fn behind(first: Report, gate: Gate, address: &str) -> Self {
        let runtime = Runtime::new().unwrap();
        let report = Arc::new(Mutex::new(first));
        let shown = Arc::clone(&report);
        let (sender, view) = watch::channel(Arc::new(View::default()));
        let health = Health::new(Duration::from_secs(600));
        let mut context = http::Context::new(health, Metrics::default(), view, Graph::default()).behind(gate);
        context.page = Page::new(Feed::new(context.answer_limit.clone(), move || {
            let report = shown.lock().clone();
            async move { report }
        }));
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let address = address.parse().unwrap();
        // The previous server may not have released it yet.
        let listener = until("the address is free", SOON, || runtime.block_on(http::bind(address)));
        let url = format!("http://{}/", listener.local_addr().unwrap());
        runtime.spawn(async move {
            http::serve(listener, None, move |request| context.clone().answer(request), stopped).await;
            drop(sender);
        });
        Self { url, report, stop, runtime: Some(runtime) }
    }

    fn show(&self, report: Report) {
        *self.report.lock() = report;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn pictures() -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/page");
    std::env::var_os("KILO_PAGE_PICTURES").map_or(target, PathBuf::from)
}

const IS_DRAWN: &str = "document.querySelector('#live')?.textContent === 'live' && document.querySelectorAll('#map .head').length > 0";
/// The page says in words that its agent is gone.
const IS_GONE: &str = "document.querySelector('#live').textContent === 'no answer' && document.querySelector('#verdict-text').textContent.includes(' does not answer. What is shown is as of')";
const CARDS: &str = "document.querySelectorAll('#cards article').length";

#[test]
fn the_page_shows_five_sixty_and_five_hundred_nodes() {
    let Some(mut browser) = Browser::start() else { return };
    for (nodes, locations, out) in [(5, 2, 0), (60, 6, 3), (500, 60, 17)] {
        let report = report(nodes, locations, out);
        let verdict = report.verdict.clone();
        let server = Server::start(report);
        for (name, look) in [
            ("light", WIDE),
            ("dark", Look { dark: true, ..WIDE }),
            ("phone", PHONE),
            ("phone-dark", Look { dark: true, ..PHONE }),
        ] {
            browser.look(look);
            browser.open(&server.url);
            browser.until(IS_DRAWN, DRAWN);
            assert_eq!(
                text(&browser.value("document.querySelector('#verdict-text').textContent")),
                verdict.text
            );
            assert_eq!(
                browser.value("document.querySelector('#verdict').classList.contains('good')"),
                json!(verdict.healthy)
            );
            assert_eq!(browser.value(CARDS), json!(locations));
            assert_eq!(browser.value("document.querySelectorAll('#nodes tr').length"), json!(nodes));
            assert_eq!(
                browser.value("document.querySelectorAll('#map .node:not(.peer)').length"),
                json!(nodes)
            );
            assert_eq!(browser.value("document.querySelectorAll('#map .node.out').length"), json!(out));
            let sideways = "document.documentElement.scrollWidth - document.documentElement.clientWidth";
            assert_eq!(browser.value(sideways), json!(0), "{nodes} nodes, {name}");
            browser.picture(&pictures().join(format!("{nodes}-{name}.png")), false);
            if nodes == 60 {
                browser.picture(&pictures().join(format!("{nodes}-{name}-whole.png")), true);
            }
        }
        // A server that ends under an open page would be an error of its own.
        browser.open("about:blank");
        assert_eq!(browser.page_errors, Vec::<String>::new(), "{nodes} nodes");
    }
}

#[test]
fn a_node_is_found_and_the_map_is_walked_by_keys() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start(report(500, 60, 17));
    browser.look(WIDE);
    browser.open(&server.url);
    browser.until(IS_DRAWN, DRAWN);
    browser.press("/");
    assert_eq!(browser.value("document.activeElement.id"), json!("search"));
    browser.call("Input.insertText", json!({"text": "kyoto-3-node-004"}));
    browser.until("document.querySelector('#found').textContent === '1 node'", SOON);
    assert_eq!(browser.value(CARDS), json!(1));
    assert_eq!(browser.value("document.querySelectorAll('#nodes tr').length"), json!(1));
    browser.press("Enter");
    let focused = "document.activeElement.getAttribute('aria-label')";
    let label = text(&browser.value(focused));
    assert!(label.starts_with("kyoto-3-node-004, ready, address 10."), "{label}");
    browser.until("!document.querySelector('#tip').hidden", SOON);
    let tip = text(&browser.value("document.querySelector('#tip').innerText"));
    assert!(tip.contains("kyoto-3-node-004") && tip.contains("checked in"), "{tip}");
    browser.picture(&pictures().join("found.png"), false);
    let is_seen = "(() => { const [a, b] = [document.activeElement.getBoundingClientRect(), document.querySelector('#map svg').getBoundingClientRect()]; return a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom; })()";
    assert_eq!(browser.value(is_seen), json!(true));
    browser.press("Escape");
    browser.until("document.querySelector('#tip').hidden", SOON);
    browser.press("ArrowDown");
    let next = text(&browser.value(focused));
    assert!(next != label && next != "null", "{next}");
    // Only one element of the map is in the tab order.
    assert_eq!(browser.value("document.querySelectorAll('#map [tabindex=\"0\"]').length"), json!(1));
    // Expands and collapses a location.
    browser.value("document.querySelector('#map .head').focus()");
    let opened = "document.activeElement.getAttribute('aria-expanded')";
    let before = text(&browser.value(opened));
    browser.press("Enter");
    assert_ne!(text(&browser.value(opened)), before);
    // The filter leaves what is unhealthy.
    browser.value(
        "document.querySelector('#search').value = ''; document.querySelector('#only-problems').click()",
    );
    browser.until("document.querySelectorAll('#nodes tr').length < 500", SOON);
    assert_eq!(browser.value("[...document.querySelectorAll('#nodes tr')].filter((row) => row.cells[3].textContent === 'no').length"), json!(17));
    assert_eq!(browser.page_errors, Vec::<String>::new());
}

#[test]
fn what_peers_and_nodes_are_called_is_text_and_nothing_else() {
    let Some(mut browser) = Browser::start() else { return };
    let hostile =
        "\"'><img src=x onerror=window.owned=1><script>window.owned=1</script><svg onload=window.owned=1>";
    let text_of = serde_json::to_string(&report(6, 2, 2)).unwrap();
    let status: Status = serde_json::from_str(&text_of).unwrap();
    let mut status = serde_json::to_value(status).unwrap();
    for list in ["peers", "nodes", "locations"] {
        for (at, one) in status[list].as_array_mut().unwrap().iter_mut().enumerate() {
            for field in ["name", "location", "endpoint", "reason", "warning", "leader"] {
                let is_rule = list == "locations" && field == "reason";
                if one[field].is_string() && !is_rule {
                    one[field] = json!(format!("{hostile}{}", at % 2));
                }
            }
        }
    }
    status["nodes"][5]["notReady"] = json!([hostile]);
    for field in ["warnings", "errors", "degraded"] {
        status["agent"][field] = json!([hostile]);
    }
    status["problems"] = json!({hostile: hostile});
    let mut report = Report::new(serde_json::from_value(status).unwrap(), report(6, 2, 2).leader_changes);
    for change in &mut report.leader_changes {
        (change.location, change.why) = (hostile.to_owned(), hostile.to_owned());
    }
    let server = Server::start(report);
    browser.look(WIDE);
    browser.open(&server.url);
    browser.until(IS_DRAWN, DRAWN);
    browser.value("for (const head of document.querySelectorAll('#map .head')) head.dispatchEvent(new PointerEvent('pointerenter'))");
    browser.value("document.querySelector('#expand').click()");
    assert_eq!(browser.value("window.owned ?? 0"), json!(0));
    assert_eq!(
        browser.value(
            "document.querySelectorAll('img, script:not([src]), svg svg, [onerror], [onload]').length"
        ),
        json!(0)
    );
    assert_eq!(
        browser.value(
            "document.querySelector('#peers').innerText.includes('<img src=x onerror=window.owned=1>')"
        ),
        json!(true)
    );
    // The security policy is in force, and blocks injected scripts.
    browser.value("(() => { const script = document.createElement('script'); script.textContent = 'window.owned = 2'; document.body.append(script); })()");
    assert_eq!(browser.value("window.owned ?? 0"), json!(0));
    assert!(
        browser.page_errors.iter().all(|what| what.contains("Content Security Policy")),
        "{:?}",
        browser.page_errors
    );
    assert!(!browser.page_errors.is_empty(), "the policy forbids nothing");
}

#[test]
fn several_active_leaders_are_on_the_card_the_map_and_the_tables() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start(report(60, 6, 3));
    browser.look(WIDE);
    browser.open(&server.url);
    let server_made = "document.querySelector('#nodes').innerText.includes('by dublin-node-001')";
    browser.until(server_made, DRAWN);
    browser.until(IS_DRAWN, DRAWN);
    let card = text(&browser.value("document.querySelector('[data-key=\"location:dublin\"]').innerText"));
    for words in [
        "2 gateways share its nodes:\n\ndublin-node-000 for 5 nodes\ndublin-node-001 for 4 nodes",
        "Tunnel to dublin-node-000",
        "Tunnel to dublin-node-001",
    ] {
        assert!(card.contains(words), "{words} is missing from\n{card}");
    }
    let chips = "[...document.querySelectorAll('[data-key=\"location:dublin\"] .chip')].map((it) => it.textContent).join('; ')";
    let chips = text(&browser.value(chips));
    let all = "dublin-node-000 leads; dublin-node-001 gateway; dublin-node-002 by dublin-node-000; dublin-node-003 by dublin-node-001";
    assert!(chips.starts_with(all), "{chips}");
    let role = |node: &str| {
        format!(
            "[...document.querySelectorAll('#nodes tr')].find((row) => row.cells[0].textContent === '{node}').cells[2].textContent"
        )
    };
    for (node, wanted) in [
        ("dublin-node-000", "leader"),
        ("dublin-node-001", "gateway"),
        ("dublin-node-003", "by dublin-node-001"),
        ("chicago-node-001", ""),
    ] {
        assert_eq!(browser.value(&role(node)), json!(wanted), "{node}");
    }
    let locations = text(&browser.value("document.querySelector('#locations').innerText"));
    assert!(locations.contains("dublin-node-000, dublin-node-001"), "{locations}");
    let tunnels = text(&browser.value("document.querySelector('#tunnels').innerText"));
    assert!(tunnels.contains("location:dublin (dublin-node-001)"), "{tunnels}");
    let labels = "[...document.querySelectorAll('#map .node.gateway [aria-label]')].map((it) => it.getAttribute('aria-label')).join('; ')";
    let label = text(&browser.value(labels));
    assert!(label.starts_with("dublin-node-001, gateway: ") && !label.contains("; "), "{label}");
    let label = text(&browser.value(
        "document.querySelector('#map [aria-label^=\"dublin-node-003\"]').getAttribute('aria-label')",
    ));
    assert!(label.contains("uses gateway dublin-node-001"), "{label}");
    let label = text(&browser.value(
        "document.querySelector('#map [aria-label^=\"location dublin\"]').getAttribute('aria-label')",
    ));
    let shares = "2 gateways: dublin-node-000 for 5 nodes, dublin-node-001 for 4 nodes";
    assert!(label.contains(shares) && label.contains("tunnel to dublin-node-001 up"), "{label}");
    assert_eq!(browser.page_errors, Vec::<String>::new());
}

#[test]
fn what_changes_is_on_the_page_within_five_seconds() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start(report(5, 2, 0));
    browser.look(WIDE);
    browser.open(&server.url);
    browser.until(IS_DRAWN, DRAWN);
    assert!(text(&browser.value("document.title")).starts_with("✔ Healthy"));
    browser.note_when(
        "ill",
        "document.querySelector('#verdict-text').textContent.startsWith('Not healthy, 1 problem')",
    );
    browser.note_when("gone", IS_GONE);
    let changed = SystemTime::now();
    server.show(report_at(5, 2, 1, Timestamp(1_790_000_001)));
    let took = browser.noted("ill", changed, SOON);
    println!("a node that is lost was on the page after {took:?}");
    assert!(took < PROMISED, "{took:?}");
    assert_eq!(browser.value("document.querySelectorAll('#map .node.out').length"), json!(1));
    assert!(text(&browser.value("document.title")).starts_with("✖ 1 problem"));
    let ended = SystemTime::now();
    server.stop.cancel();
    let took = browser.noted("gone", ended, SOON);
    println!("an agent that ended was on the page after {took:?}");
    assert!(took < PROMISED, "{took:?}");
    browser.picture(&pictures().join("no-answer.png"), false);
}

/// A real agent whose objects declare a node dead, and which is then killed.
#[test]
fn a_real_agent_that_is_killed_is_on_its_page_within_five_seconds() {
    isolated("a_real_agent_that_is_killed_is_on_its_page_within_five_seconds", || async {
        tokio::task::spawn_blocking(killed).await.unwrap();
    });
}

fn killed() {
    cluster::prepare();
    cluster::write_node(2, "a", "10.42.2.0/24", false);
    cluster::write_node(3, "b", "10.42.3.0/24", false);
    let mut agent = cluster::kg(&[]).spawn().unwrap();
    until("the agent has put everything right", DRAWN, || cluster::has_done(&[("kilo_nodes", 3)]));
    let Some(mut browser) = Browser::start() else {
        let _ = agent.kill();
        let _ = agent.wait();
        return;
    };
    browser.look(WIDE);
    browser.open("http://127.0.0.1:1107/");
    browser.until(IS_DRAWN, DRAWN);
    assert_eq!(browser.value(CARDS), json!(2));
    browser.until("document.querySelector('#verdict-text').textContent.includes('3 of 3 nodes ready')", SOON);
    let two = "document.querySelector('#verdict-text').textContent.includes('2 of 2 nodes ready')";
    browser.note_when("left", two);
    browser.note_when("gone", IS_GONE);
    let removed = SystemTime::now();
    cluster::remove("n3");
    let took = browser.noted("left", removed, SOON);
    println!("a node that left was on the page after {took:?}");
    assert!(took < PROMISED, "{took:?}");
    let history = text(&browser.value("document.querySelector('#history').innerText"));
    assert!(history.contains("its Node object was deleted"), "{history}");
    assert_eq!(browser.page_errors, Vec::<String>::new());
    let killed = SystemTime::now();
    agent.kill().unwrap();
    agent.wait().unwrap();
    let took = browser.noted("gone", killed, SOON);
    println!("an agent that was killed was on the page after {took:?}");
    assert!(took < PROMISED, "{took:?}");
    let verdict = text(&browser.value("document.querySelector('#verdict-text').textContent"));
    assert!(verdict.starts_with("The agent of n1 does not answer. What is shown is as of"), "{verdict}");
}

#[test]
fn listeners_are_bounded_and_a_page_that_is_too_many_asks_instead() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start(report(5, 2, 0));
    let address = server.url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    let runtime = Runtime::new().unwrap();
    let listen = || {
        use std::io::{Read as _, Write as _};
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        stream.write_all(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        (stream, String::from_utf8_lossy(&head).into_owned())
    };
    let mut held: Vec<_> = (0..MOST_LISTENERS).map(|_| listen()).collect();
    assert!(held.iter().all(|(_, head)| head == "HTTP/1.1 200"));
    assert_eq!(listen().1, "HTTP/1.1 503");
    browser.look(WIDE);
    browser.open(&server.url);
    browser.until(IS_DRAWN, DRAWN);
    assert!(browser.page_errors.iter().all(|what| what.contains("503")), "{:?}", browser.page_errors);
    held.clear();
    until("places of listeners that have gone are free again", 2 * SOON, || listen().1 == "HTTP/1.1 200");
    drop(runtime);
}

#[test]
fn without_scripts_the_verdict_and_the_tables_are_there() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start(report(60, 6, 3));
    browser.look(WIDE);
    browser.call("Emulation.setScriptExecutionDisabled", json!({"value": true}));
    browser.open(&server.url);
    let words = "document.readyState === 'complete' && document.body.innerText.includes('Not healthy, ')";
    browser.until(words, DRAWN);
    assert_eq!(browser.value("document.querySelectorAll('#nodes tr').length"), json!(60));
    assert_eq!(browser.value("document.querySelectorAll('#locations tr').length"), json!(6));
    assert_eq!(browser.value("document.querySelector('#map-section').checkVisibility()"), json!(false));
    browser.picture(&pictures().join("no-script.png"), false);
}

/// `cargo xtask test` installs axe-core, which checks accessibility.
#[test]
fn axe_finds_nothing_serious() {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let file = std::env::var_os("KILO_AXE")
        .map(PathBuf::from)
        .or_else(|| Some(cache?.join("kilo/web-tools/axe.min.js")));
    let Some(axe) = file.and_then(|file| std::fs::read_to_string(file).ok()) else {
        println!("kilo-skip: there is no axe-core; `cargo xtask web-tools` gets it");
        return;
    };
    let Some(mut browser) = Browser::start() else { return };
    for (nodes, locations, out) in [(5, 2, 0), (60, 6, 3), (200, 20, 5)] {
        let server = Server::start(report(nodes, locations, out));
        for look in [WIDE, Look { dark: true, ..WIDE }, PHONE] {
            browser.look(look);
            browser.open(&server.url);
            browser.until(IS_DRAWN, DRAWN);
            browser.value(&format!("{axe};0"));
            let found = browser.value(
                "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations.map((it) => `${it.impact} ${it.id}: ${it.nodes.length} times, ${it.nodes[0].html.slice(0, 300)} ${it.nodes[0].failureSummary}`))",
            );
            let all: Vec<String> = found.as_array().unwrap().iter().map(text).collect();
            assert_eq!(all, Vec::<String>::new(), "{nodes} nodes, {look:?}");
        }
    }
}

/// Makes the documentation's picture:
/// `KILO_PAGE_DOCS=1 cargo test -p kilo-agent --test net page::the_picture`.
#[test]
fn the_picture_of_the_documentation_is_small() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/page.webp");
    if std::env::var_os("KILO_PAGE_DOCS").is_some() {
        let Some(mut browser) = Browser::start() else { return };
        let server = Server::start(report(22, 4, 2));
        browser.look(Look { width: 1280, height: 1150, dark: false });
        browser.open(&server.url);
        browser.until(IS_DRAWN, DRAWN);
        browser.picture(&file, false);
    }
    let size = std::fs::metadata(&file).unwrap().len();
    assert!(size > 0 && size <= 150 << 10, "{size} bytes");
}
