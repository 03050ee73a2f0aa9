//! Who leads a location when its leader fails. Every decision of
//! docs/design/failover.md and nothing else: time and random numbers are
//! arguments, what comes in is an [`Input`], what is to be done an [`Output`].
//! The simulation (`cargo xtask sim`) drives [`Agent`], and so does a thread of kg.
//!
//! ```text
//! probes ──> detector ───────┐                    ┌─> gateway   ANNOUNCE, CLAIM
//!            tunnel ─────────┼─> sentinel ────────┤
//! HELLO ───> other_gateways ─┘   (decision)       └─> planned: make before break
//! every node: member (ADOPT, witness)             far leaders: far (CLAIM, MOVED, END)
//! ```

mod agent;
pub mod detector;
pub mod far;
pub mod gateway;
pub mod member;
pub mod other_gateways;
pub mod params;
pub mod planned;
pub mod probes;
pub mod roll_call;
pub mod sentinel;
pub mod tunnel;
pub mod turn;

pub use agent::{Agent, DeclaredAlone, OwnLocation, Several, Start};
pub use kilo_common::{
    lead::{NodeId, Term},
    signal,
};
pub use params::{Params, Rule};
pub use planned::Cause;
pub use turn::{Given, Input, Note, Output, ProbePath, Target, Turn};

/// Microseconds since any start, of a clock that never goes back.
pub type Micros = u64;
/// First 8 bytes of SHA-256 of a location's name, for the leader of that location.
pub type Far = u64;
/// A signal that owns its list of members.
pub type Signal = signal::Signal<Vec<u64>>;

/// Microseconds of a millisecond.
pub const MS: Micros = 1_000;
/// Microseconds of a second.
pub const SEC: Micros = 1_000_000;
