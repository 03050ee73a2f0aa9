//! A page whose token is no longer accepted says so, and how to continue.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use kilo_agent::http::access::{Finding, Gate, LocalToken, Reviewer};
use serde_json::json;

use super::{Browser, DRAWN, IS_DRAWN, SOON, Server, WIDE, data::report, pictures, text};

/// Accepts the token `second`, and `first` until it has expired.
fn gate(has_ended: &Arc<AtomicBool>) -> Gate {
    let has_ended = Arc::clone(has_ended);
    let reviewer = Reviewer::new(move |token, _| {
        let good = token == "second" || (token == "first" && !has_ended.load(Ordering::Relaxed));
        async move { if good { Finding::Allowed } else { Finding::Unknown } }
    });
    Gate::token(reviewer, LocalToken::of("local"))
}

fn sign_in(browser: &mut Browser, token: &str) {
    browser.until("document.querySelector('#token') !== null", DRAWN);
    browser.value("document.querySelector('#token').focus()");
    browser.call("Input.insertText", json!({"text": token}));
    browser.press("Enter");
    browser.until(IS_DRAWN, DRAWN);
}

/// Restarts the server, which ends the connection of `/events`, as happens every minute.
fn restart(server: Server, gate: Gate) -> Server {
    let address = server.url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    drop(server);
    Server::behind(report(5, 2, 0), gate, &address)
}

const IS_SIGNED_OUT: &str = "document.querySelector('#live').textContent === 'signed out'";

#[test]
fn a_page_whose_token_has_ended_says_so_and_leads_to_the_form() {
    let Some(mut browser) = Browser::start() else { return };
    let has_ended = Arc::new(AtomicBool::new(false));
    let one = gate(&has_ended);
    let server = Server::behind(report(5, 2, 0), one.clone(), "127.0.0.1:0");
    browser.look(WIDE);
    browser.open(&server.url);
    sign_in(&mut browser, "first");
    let is_link_shown = "document.querySelector('#sign-in').checkVisibility()";
    assert_eq!(browser.value(is_link_shown), json!(false));

    // Its next review finds the token expired.
    has_ended.store(true, Ordering::Relaxed);
    assert_eq!(browser.value("fetch('graph').then((answer) => answer.status)"), json!(401));
    let server = restart(server, one);
    browser.until(IS_SIGNED_OUT, SOON);
    let verdict = text(&browser.value("document.querySelector('#verdict-text').textContent"));
    let words = "Signed out: the agent of amsterdam-node-000 does not accept this page's token any more. What is shown is as of ";
    assert!(verdict.starts_with(words), "{verdict}");
    assert!(text(&browser.value("document.title")).starts_with("✖ Signed out"));
    browser.picture(&pictures().join("signed-out.png"), false);
    browser.value("document.querySelector('#sign-in').click()");
    browser.until("document.body.innerText.includes('Your token expired or was revoked')", SOON);
    browser.picture(&pictures().join("sign-in.png"), false);
    sign_in(&mut browser, "second");

    // A restarted agent knows no sessions; the user signs in in another tab.
    let server = restart(server, gate(&has_ended));
    browser.until(IS_SIGNED_OUT, SOON);
    let other_tab = "fetch('./', {method: 'POST', body: new URLSearchParams({token: 'second'})}).then((answer) => answer.status)";
    assert_eq!(browser.value(other_tab), json!(200));
    browser.until(IS_DRAWN, SOON);
    let verdict = text(&browser.value("document.querySelector('#verdict-text').textContent"));
    assert!(verdict.starts_with("Healthy: 5 of 5 nodes ready"), "{verdict}");
    assert_eq!(browser.value(is_link_shown), json!(false));
    drop(server);
}
