//! The number that random tests draw from.

/// The seed when nobody names one: a run of a commit is then the same everywhere.
const USUAL: u64 = 1;

/// `KILO_SEED`, which repeats a run; with `KILO_SEED=random` one is drawn. It is printed.
#[must_use]
pub fn seed() -> u64 {
    let named = std::env::var("KILO_SEED").unwrap_or_default();
    let seed = if named == "random" { rand::random() } else { named.parse().unwrap_or(USUAL) };
    println!("KILO_SEED={seed}");
    seed
}
