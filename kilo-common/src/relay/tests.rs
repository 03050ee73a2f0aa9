use proptest::prelude::*;

use super::*;

const DATA: [u8; 8] = [4, 0, 0, 0, 1, 2, 3, 4];

fn mapped(last: u8) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 203, 0, 113, last]
}

#[test]
fn recorded_messages_do_not_fill_the_ring() {
    let key = Key([1, 2]);
    let raw = |kind, sequence| {
        let message = Message { kind, flags: 0, nonce: 1, sequence, sender: 3, other: 4, token: 0, port: 0 };
        let bytes = message.write(key);
        core::array::from_fn(|word| u64::from_ne_bytes(bytes[word * 8..][..8].try_into().unwrap()))
    };
    let mut sender = Sender::new(key.0);
    let mut heard = |kind, sequence, second| sender.hear(&raw(kind, sequence), second).is_ok();
    assert!(heard(Kind::Ask, 1_000, 7));
    let repeated = (0..1_000).filter(|_| heard(Kind::Ask, 1_000, 7)).count();
    assert_eq!(repeated, LATE as usize);
    assert!(!heard(Kind::Ask, 999, 7), "an older one");
    assert!(heard(Kind::Ask, 1_001, 7), "what only the sender can make");
    // Answers repeat the sequence numbers of what they answer.
    assert!(heard(Kind::Offer, 5, 7));
    assert!(heard(Kind::Ask, 1_000, 8), "the next second");
    // A sender's own new messages do not fill it either.
    let new = (0..1_000).filter(|number| heard(Kind::Ask, 2_000 + number, 9)).count();
    assert_eq!(new, MOST as usize);
    assert!(heard(Kind::Ask, 3_000, 10), "the next second");
}

/// A port whose two ends are bound: .1:40001 sends to .3, and it goes on to .2:40002.
fn port() -> Port {
    Port {
        from: mapped(1),
        at: mapped(3),
        to: mapped(2),
        by: mapped(3),
        from_port: 40_001,
        to_port: 40_002,
        by_port: FIRST_PORT + 1,
        ..Port::default()
    }
}

fn from(source: u8, source_port: u16, first: [u8; 8]) -> Arrival {
    let (source, local) = (halves(&mapped(source)), halves(&mapped(3)));
    Arrival { source, local, source_port, port: FIRST_PORT, first, is_fragment: false }
}

#[test]
fn a_bound_end_alone_sends_through_its_port() {
    let port = port();
    assert_eq!(at_port(&from(1, 40_001, DATA), Some(&port)), Fate::Forward);
    for (source, source_port) in [(2, 40_001), (1, 40_002), (9, 40_001), (2, 40_002)] {
        let stranger = Fate::Drop(DropReason::RelayStranger);
        assert_eq!(at_port(&from(source, source_port, DATA), Some(&port)), stranger, "{source}");
    }
    let elsewhere = Arrival { local: halves(&mapped(4)), ..from(1, 40_001, DATA) };
    assert_eq!(at_port(&elsewhere, Some(&port)), Fate::Stack, "it is not this pair's");
    assert_eq!(at_port(&Arrival { is_fragment: true, ..elsewhere }, Some(&port)), Fate::Stack);
    assert_eq!(at_port(&from(9, 443, *b"\x40quic..."), Some(&port)), Fate::Stack, "an answer to a pod");
}

#[test]
fn a_port_that_is_not_bound_at_both_ends_sends_nothing_on() {
    let unbound = Fate::Drop(DropReason::RelayUnbound);
    for half in [Port { from_port: 0, ..port() }, Port { to_port: 0, ..port() }, Port::default()] {
        assert_eq!(at_port(&from(1, 40_001, DATA), Some(&half)), unbound);
    }
    assert_eq!(at_port(&from(1, 40_001, DATA), None), Fate::Stack, "no pair's port is the stack's");
}

#[test]
fn nothing_but_wireguards_datagrams_and_messages_pass() {
    let port = port();
    for first in [*b"GET / HT", [5, 0, 0, 0, 0, 0, 0, 0], [4, 0, 0, 1, 0, 0, 0, 0], [0, 1, 4, 0, 0, 0, 0, 0]]
    {
        let fate = at_port(&from(1, 40_001, first), Some(&port));
        assert_eq!(fate, Fate::Drop(DropReason::RelayStranger), "{first:?}");
    }
    let tried = *b"\0\x01\x04\0kgr1";
    assert_eq!(at_port(&from(1, 40_001, tried), Some(&port)), Fate::Forward);
    let ask = *b"\0\x01\x01\0kgr1";
    assert_eq!(at_port(&from(9, 9, ask), Some(&port)), Fate::Hear, "it may come from another port");
    let part = Arrival { is_fragment: true, ..from(1, 40_001, DATA) };
    assert_eq!(at_port(&part, Some(&port)), Fate::Drop(DropReason::OuterFragment));
}

#[test]
fn wireguards_own_datagrams_are_left_to_it() {
    assert_eq!(at_wireguard(&from(1, 1, DATA)), Fate::Stack);
    assert_eq!(at_wireguard(&from(1, 1, *b"\0\x01\x04\0kgr1")), Fate::Hear);
}

proptest! {
    #[test]
    fn a_message_is_read_as_it_was_written_and_every_changed_bit_is_noticed(
        kind in 1..=5u8, flags: u8, words: [u64; 5], port: u16, key: [u64; 2], bit in 0..LENGTH * 8,
    ) {
        let [nonce, sequence, sender, other, token] = words;
        let kind = Kind::from_u8(kind).unwrap();
        let message = Message { kind, flags, nonce, sequence, sender, other, token, port };
        let bytes = message.write(Key(key));
        prop_assert_eq!(Message::read(&bytes), Some(message));
        let raw = |bytes: &[u8; LENGTH]| -> Raw {
            core::array::from_fn(|at| u64::from_ne_bytes(bytes[at * 8..at * 8 + 8].try_into().unwrap()))
        };
        prop_assert!(authentic(&raw(&bytes), key).is_ok());
        prop_assert_eq!(super::sender(&raw(&bytes)), sender);
        let mut changed = bytes;
        changed[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(authentic(&raw(&changed), key).is_err());
    }
}
