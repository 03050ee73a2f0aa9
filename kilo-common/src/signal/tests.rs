use super::*;
use proptest::prelude::*;

const KEY: Key = Key([1, 2]);

fn written(signal: &Signal<Vec<u64>>) -> Vec<u8> {
    let mut out = [0xaa; LONGEST];
    let length = write(&mut out, signal, Some(KEY)).unwrap();
    out[..length].to_vec()
}

fn owned(signal: &Signal<Words<'_>>) -> Signal<Vec<u64>> {
    signal.map_list(|words| words.iter().collect())
}

/// Any signal that may be written.
fn any_signal() -> impl Strategy<Value = Signal<Vec<u64>>> {
    let list = || prop::collection::vec(any::<u64>(), 0..=MAX_MEMBERS / 2);
    let of = |kinds: &'static [Kind]| prop::sample::select(kinds);
    let body = prop_oneof![
        of(&[Kind::Probe, Kind::Reflected]).prop_map(|kind| (kind, Body::Empty)),
        (of(&[Kind::Roll, Kind::Present, Kind::Announce, Kind::Follows]), any::<(u64, u64)>())
            .prop_map(|(kind, (cookie, gateway))| (kind, Body::Word { cookie, gateway })),
        any::<[u32; 2]>().prop_map(|[id, patience]| (Kind::Witness, Body::Question { id, patience })),
        (any::<u32>(), prop::sample::select(&[Verdict::Failed, Verdict::Works, Verdict::Elsewhere][..]))
            .prop_map(|(id, verdict)| (Kind::Verdict, Body::Witness { id, verdict })),
        (of(&[Kind::Adopt, Kind::Handover]), any::<u64>(), any::<u32>(), list())
            .prop_map(|(kind, cookie, age, members)| (kind, Body::Members { cookie, age, members })),
        (any::<[bool; 3]>(), any::<[u64; 2]>(), list()).prop_map(
            |([is_fit, is_busy, leads], [gateway, cookie], losses)| {
                let losses = losses.iter().take(8).flat_map(|word| [*word, !word]).collect();
                (Kind::Hello, Body::Hello { is_fit, is_busy, leads, gateway, cookie, losses })
            }
        ),
        (
            of(&[Kind::Claim, Kind::Moved, Kind::End]),
            any::<u64>(),
            prop::sample::select(&[Shared::Stay, Shared::Move, Shared::MoveIfSilent][..]),
            (0u16..9, 9u16..99),
            list()
        )
            .prop_map(|(kind, gateway, shared, part, members)| {
                (kind, Body::Claim { gateway, shared, part, members })
            }),
        (of(&[Kind::Prepare, Kind::Ready]), any::<(u64, u64)>())
            .prop_map(|(kind, (cookie, gateway))| (kind, Body::Change { cookie, gateway })),
    ];
    (body, any::<u64>(), 0u64..1 << 48, any::<[u64; 2]>()).prop_map(
        |((kind, body), nonce, term, [sender, location])| Signal {
            kind,
            nonce,
            term: Term::from_bits(term),
            sender,
            location,
            body,
        },
    )
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(signal in any_signal()) {
        let bytes = written(&signal);
        prop_assert_eq!(owned(&parse(&bytes).unwrap()), signal.clone());
        prop_assert_eq!(is_authentic(&bytes, KEY), signal.kind.has_tag());
        prop_assert!(bytes.len() <= LONGEST && bytes.len().is_multiple_of(8));
        if matches!(signal.kind, Kind::Roll | Kind::Present | Kind::Announce | Kind::Follows) {
            prop_assert_eq!(bytes.len(), KERNEL);
        }
    }

    #[test]
    fn a_changed_bit_is_noticed(signal in any_signal(), at: prop::sample::Index, bit in 0u32..8) {
        let mut bytes = written(&signal);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        match parse(&bytes) {
            Err(_) => {}
            Ok(read) => {
                if signal.kind.has_tag() && read.kind.has_tag() {
                    prop_assert!(!is_authentic(&bytes, KEY), "byte {} is covered", at);
                } else {
                    prop_assert_ne!(owned(&read), signal.clone(), "byte {} is read", at);
                }
            }
        }
    }

    #[test]
    fn what_is_read_is_written_so(bytes in prop::collection::vec(any::<u8>(), 0..200), start in any_signal()) {
        // Random bytes behind a header that may hold.
        let mut input = written(&start);
        input.truncate(HEADER);
        input.extend(&bytes);
        input.truncate(input.len() / 8 * 8);
        input[3] = (input.len() / 8) as u8;
        if let Ok(read) = parse(&input) {
            let end = input.len() - if read.kind.has_tag() { TAG } else { 0 };
            prop_assert_eq!(&written(&owned(&read))[..end], &input[..end]);
        }
        // And random bytes without a header.
        prop_assert_eq!(parse(&bytes).is_ok(), false);
    }
}

#[test]
fn a_probe_and_its_answer_are_no_longer_than_their_header() {
    for kind in [Kind::Probe, Kind::Reflected] {
        let body = Body::Empty;
        let bytes = written(&Signal { kind, nonce: 1, term: Term::NONE, sender: 2, location: 3, body });
        let of = |length: usize| {
            let mut start: [u8; HEADER] = *bytes.first_chunk().unwrap();
            start[3] = (length / 8) as u8;
            header(&start, length).map(|header| header.length)
        };
        assert_eq!((bytes.len(), of(HEADER)), (HEADER, Ok(HEADER)), "{kind:?}");
        for length in [HEADER + 8, KERNEL, KERNEL + 8, LONGEST] {
            assert_eq!(of(length), Err(Malformed::Length), "{kind:?} of {length} bytes");
        }
    }
}

#[test]
fn a_signal_has_these_bytes() {
    let body = Body::Word { cookie: 0x0102_0304_0506_0708, gateway: 0x1112_1314_1516_1718 };
    let (nonce, sender, location) = (0x2122_2324_2526_2728, 0x3132_3334_3536_3738, 0x4142_4344_4546_4748);
    let term = Term::from_bits(0x0000_5152_5354_5556);
    let bytes = written(&Signal { kind: Kind::Announce, nonce, term, sender, location, body });
    let expected = "0001 0708 6b677331 2122232425262728 5152535455560000 3132333435363738 4142434445464748 \
                    0102030405060708 1112131415161718";
    let expected = expected.replace(' ', "");
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(hex(&bytes[..56]), expected);
    assert_eq!(bytes[56..], siphash::of_bytes(KEY, &bytes[..56]).to_le_bytes());
    // The kernel hashes the same words.
    let words: [u64; 7] =
        core::array::from_fn(|i| u64::from_le_bytes(*bytes[i * 8..].first_chunk().unwrap()));
    assert_eq!(siphash::of_words(KEY, &words).to_le_bytes(), bytes[56..]);
}

#[test]
fn what_is_no_signal_is_refused() {
    let body = Body::Members { cookie: 9, age: 7, members: vec![1, 2, 3] };
    let good = Signal { kind: Kind::Adopt, nonce: 1, term: Term::NONE, sender: 2, location: 3, body };
    let bytes = written(&good);
    assert!(parse(&bytes).is_ok());
    let changed = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        parse(&bytes).map(|_| ())
    };
    assert_eq!(changed(0, 8), Err(Malformed::Other), "VXLAN");
    assert_eq!(changed(1, 2), Err(Malformed::Other), "a later version");
    assert_eq!(changed(2, 17), Err(Malformed::Kind(17)));
    assert_eq!(changed(3, 9), Err(Malformed::Length));
    assert_eq!(changed(4, 0), Err(Malformed::Other));
    assert_eq!(changed(23, 1), Err(Malformed::Value), "where a hop id stands");
    assert_eq!(parse(&bytes[..bytes.len() - 8]).map(|_| ()), Err(Malformed::Length), "cut short");
    assert_eq!(parse(&bytes[..20]).map(|_| ()), Err(Malformed::Other));
    let mut out = [0; LONGEST];
    assert_eq!(write(&mut out, &good, None), None, "its kind has a tag");
    let many =
        Signal { body: Body::Members { cookie: 9, age: 0, members: vec![0; MAX_MEMBERS + 1] }, ..good };
    assert_eq!(write(&mut out, &many, Some(KEY)), None);
}
