//! Runs the targets on their kept corpus, and on some thousand random changes of it.
//!
//! `KILO_SEED=n` repeats a run, `random` draws another, `KILO_INPUTS=n` sets the number of inputs per target.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::{Duration, Instant},
};

use kilo_fuzz::{TARGETS, Target};
use kilo_test_support::seed::seed;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

/// Random inputs for each target.
const INPUTS: usize = 4_000;
/// Each target ends after this time at the latest.
const LONGEST: Duration = Duration::from_secs(4);
/// Bytes of the longest input.
const LONGEST_INPUT: usize = 2_048;

/// The kept inputs of a target, in the order of their names.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut files: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|path| fs::read(path).unwrap()).collect()
}

#[track_caller]
fn run(name: &str, target: Target, input: &[u8], from: &str) {
    let is_held = catch_unwind(AssertUnwindSafe(|| target(input))).is_ok();
    assert!(is_held, "target {name} fails on {from}; keep it in corpus/{name}: {}", input.escape_ascii());
}

#[test]
fn every_target_holds_on_its_kept_inputs() {
    for (name, target) in TARGETS {
        let inputs = corpus(name);
        assert!(inputs.len() >= 5, "{name} keeps only {} inputs", inputs.len());
        for input in &inputs {
            run(name, target, input, "a kept input");
        }
        assert!(inputs.iter().map(Vec::len).sum::<usize>() < 200_000, "{name}: minimise the corpus");
    }
}

#[test]
fn every_target_holds_on_random_changes_of_its_kept_inputs() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = seed();
    let inputs = number("KILO_INPUTS").map_or(INPUTS, |inputs| usize::try_from(inputs).unwrap());
    for (name, target) in TARGETS {
        let corpus = corpus(name);
        let mut random = StdRng::seed_from_u64(seed);
        let started = Instant::now();
        let mut done = 0;
        while done < inputs && started.elapsed() < LONGEST {
            run(name, target, &changed(&corpus, &mut random), &format!("input {done} of KILO_SEED={seed}"));
            done += 1;
        }
        println!("{done:>6} inputs for {name} in {:?}", started.elapsed());
    }
}

/// A random input of the corpus with one to eight changes.
fn changed(corpus: &[Vec<u8>], random: &mut StdRng) -> Vec<u8> {
    let mut input = corpus[random.random_range(0..corpus.len())].clone();
    for _ in 0..random.random_range(1..=8) {
        let at = random.random_range(0..=input.len());
        let end = random.random_range(at..=input.len().min(at + 40));
        match random.random_range(0..6) {
            0 => input.insert(at, random.random()),
            1 => drop(input.drain(at..end)),
            2 => input.extend_from_within(at..end),
            3 => input.truncate(input.len() - (end - at)),
            // A piece of another input.
            4 => {
                let other = &corpus[random.random_range(0..corpus.len())];
                let from = random.random_range(0..=other.len());
                let piece = &other[from..random.random_range(from..=other.len())];
                input.splice(at..end, piece.iter().copied());
            }
            _ if at < input.len() => {
                let edges = [0, 1, 0x7f, 0x80, 0xff, b'0', b'9', b'-', b'=', b':', b'/', b',', b'\n', b'"'];
                input[at] = match random.random_range(0..3) {
                    0 => input[at] ^ 1 << random.random_range(0..8),
                    1 => edges[random.random_range(0..edges.len())],
                    _ => random.random(),
                };
            }
            _ => {}
        }
    }
    input.truncate(LONGEST_INPUT);
    input
}
