//! The seed of random tests.

/// Default seed: runs of one commit are the same everywhere.
const USUAL: u64 = 1;

/// Seed from `KILO_SEED`, which repeats a run; `KILO_SEED=random` draws one. It is printed.
#[must_use]
pub fn seed() -> u64 {
    let named = std::env::var("KILO_SEED").unwrap_or_default();
    let seed = if named == "random" { rand::random() } else { named.parse().unwrap_or(USUAL) };
    println!("KILO_SEED={seed}");
    seed
}
