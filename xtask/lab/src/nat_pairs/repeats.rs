//! A stranger that repeats a pair's messages at once, while agents may still take them for late ones: repeats
//! are not answered.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddrV4},
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Result, anyhow, ensure};
use kilo_common::relay::{self, Kind as Message, LENGTH};
use kilo_core::tunnel_path::TunnelPath;

use super::{
    LIMIT,
    mesh::{Mesh, Setup},
    stranger::{ADDRESS, STRANGER, received, refused},
};
use crate::{
    faults::traffic::Traffic,
    nat::{self, Kind, Shape},
    netns::Netns,
    raw_udp::{self, Datagram},
    wait,
};

/// For how long messages are repeated; in use a pair tries its whole path every 400 ms, and asks as often.
const TIME: Duration = Duration::from_secs(5);
/// Age of a repeated message: the agent that it was for has taken it by then, and would accept late ones.
const AGE: Duration = Duration::from_millis(100);
/// Greatest age on a busy machine; agents accept late messages for 2 s.
const OLDEST: Duration = Duration::from_secs(1);
/// How often each message is repeated: by a hundred an agent would use up its answers of a second.
const TIMES: usize = 100;
/// Public endpoints of both ends' WireGuard behind full-cone NATs.
const ENDS: [SocketAddrV4; 2] = [
    SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 1), 45_001),
    SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 2), 45_002),
];

/// Two ends whose NATs let in everybody, and that are relayed because nothing passes between both: a stranger
/// repeats their messages to the relay with their sources, and to the other end in the name of a victim.
pub(super) fn run(setup: Setup<'_>) -> Result<()> {
    let shape = Shape { kinds: [Kind::FullCone; 2], ..Shape::default() };
    setup.with(shape, &["z"], true, |mesh| {
        let (path, _) = mesh.wait_connected()?;
        ensure!(path == TunnelPath::Relayed, "nothing passes between both, so the tunnel cannot be {path}");
        let stranger = nat::stranger(&mesh.lab, STRANGER, ADDRESS)?;
        let (x, y) = (mesh.network.node("x")?.clone(), mesh.network.node("y")?.clone());
        let flow = Traffic::start_every(&x.pod, y.pod_ip().into(), Duration::from_millis(10));
        flow.settle(LIMIT)?;
        let said = [to_relay(mesh, &stranger)?, to_other_end(mesh, &stranger)?];
        let figures = flow.finish()?;
        ensure!(figures.lost == 0, "{} of {} lost: {:?}", figures.lost, figures.sent, figures.holes);
        mesh.wait_for_path(TunnelPath::Relayed, Duration::ZERO)?;
        println!(
            "a stranger repeats messages at once: {}; 0 of the pair's {} datagrams lost",
            said.join("; "),
            figures.sent
        );
        Ok(())
    })
}

/// Repeats what the ends ask and try by the relay, with their sources.
fn to_relay(mesh: &Mesh, stranger: &Netns) -> Result<String> {
    let router = &mesh.network.router;
    // How often a frame is seen on its way depends on the number of devices.
    let quiet = heard(messages(router))?;
    let often = |seen: &[Datagram]| -> usize {
        let mut counts = BTreeMap::new();
        let tried = seen.iter().filter(|datagram| kind_of(datagram) == Some(Message::Tried));
        tried.for_each(|datagram| *counts.entry(datagram).or_insert(0) += 1);
        counts.values().copied().max().unwrap_or(0)
    };
    let usual = often(&quiet);
    ensure!(usual > 0, "no try of the whole path was answered in {} s", TIME.as_secs());
    let is_ends = |at: SocketAddrV4| ENDS.iter().any(|end| end.ip() == at.ip());
    let listening = messages(router);
    let sent = repeat(mesh, stranger, move |heard| {
        let is_repeated = matches!(kind_of(heard), Some(Message::Ask | Message::Try)) && is_ends(heard.from);
        vec![heard.clone(); if is_repeated { TIMES } else { 0 }]
    })?;
    let seen = heard(listening)?;
    let now = often(&seen);
    ensure!(now <= usual, "one try was answered {} times after {sent} repeats", now / usual);
    let mut said = Vec::new();
    for end in ENDS {
        let count = |is_counted: &dyn Fn(&Datagram, Message) -> bool| {
            let kinds = seen.iter().filter_map(|datagram| Some((datagram, kind_of(datagram)?)));
            kinds.filter(|(datagram, kind)| is_counted(datagram, *kind)).count()
        };
        let asked = count(&|datagram, kind| {
            datagram.from.ip() == end.ip() && matches!(kind, Message::Ask | Message::Try)
        });
        let answered = count(&|datagram, kind| {
            datagram.to.ip() == end.ip() && matches!(kind, Message::Offer | Message::Invite | Message::Tried)
        });
        // All messages have the same length.
        ensure!(answered <= asked, "{answered} answers to {end}, in whose name {asked} messages were sent");
        said.push(format!("{} answers to {} messages of {}", answered / usual, asked / usual, end.ip()));
    }
    Ok(format!("{sent} to the relay, {}, each try answered once", said.join(", ")))
}

/// Repeats tries to the end that they are for, as if a victim had sent them.
fn to_other_end(mesh: &Mesh, stranger: &Netns) -> Result<String> {
    received(stranger, "answers")?;
    let ends = ["x", "y"];
    let refused = || -> Result<u64> {
        let all = ends.iter().map(|name| Ok(refused(&mesh.network.node(name)?.netns)?.values().sum::<u64>()));
        all.sum::<Result<u64>>()
    };
    let before = refused()?;
    let sent = repeat(mesh, stranger, |heard| {
        let to = ENDS.into_iter().zip([ENDS[1], ENDS[0]]).find(|(from, _)| from.ip() == heard.from.ip());
        let to = to.filter(|_| kind_of(heard) == Some(Message::Try));
        let repeats = to.map(|(_, to)| {
            let from = SocketAddrV4::new(ADDRESS, 51_820);
            vec![Datagram { from, to, payload: heard.payload.clone() }; TIMES]
        });
        repeats.unwrap_or_default()
    })?;
    wait::time_passes(Duration::from_secs(1), "answers arrive");
    let came = received(stranger, "answers")?;
    ensure!(came == 0, "{came} answers to a victim, in whose name {sent} tries were repeated");
    let refused = refused()? - before;
    ensure!(refused > 0, "of {sent} repeated tries neither end has refused any");
    Ok(format!("{sent} tries to the other end in a victim's name, {refused} refused, 0 answers"))
}

/// Repeats what `again` makes of each message on the wire; returns how many were sent.
fn repeat(
    mesh: &Mesh,
    stranger: &Netns,
    again: impl Fn(&Datagram) -> Vec<Datagram> + Send + 'static,
) -> Result<usize> {
    let repeating = raw_udp::answer((&mesh.network.router, stranger), (TIME, AGE), again);
    let (sent, oldest) = repeating.join().map_err(|_| anyhow!("the thread that repeats"))???;
    ensure!(sent > 0, "no message was seen in {} s", TIME.as_secs());
    ensure!(oldest <= OLDEST, "a message was repeated only after {} ms", oldest.as_millis());
    Ok(sent)
}

type Listening = JoinHandle<Result<Result<Vec<Datagram>>>>;

/// Records the messages on the wire while others are repeated.
fn messages(router: &Netns) -> Listening {
    raw_udp::record(router, TIME, |datagram| kind_of(datagram).is_some(), |_| false)
}

fn heard(listening: Listening) -> Result<Vec<Datagram>> {
    listening.join().map_err(|_| anyhow!("the listening thread"))??
}

/// What kind of message a datagram is.
fn kind_of(datagram: &Datagram) -> Option<Message> {
    let bytes: &[u8; LENGTH] = datagram.payload.as_slice().try_into().ok()?;
    Some(relay::Message::read(bytes)?.kind)
}
