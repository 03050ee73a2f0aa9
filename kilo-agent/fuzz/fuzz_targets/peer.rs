//! See `kilo_fuzz::peer`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::peer(data));
