//! Shortcuts for the most frequent packets, with fewer instructions; all others take the slow path, with the
//! same result.

pub mod established;
mod opening;
pub mod steered;
