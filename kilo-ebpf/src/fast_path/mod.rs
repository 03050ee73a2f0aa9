//! Fewer instructions for what most packets are; whatever does not fit takes the long way with the
//! same result.

pub mod established;
pub mod transit;
