//! Fewer instructions for what most packets are; whatever does not fit takes the slow path with the
//! same result.

pub mod established;
mod opening;
pub mod steered;
