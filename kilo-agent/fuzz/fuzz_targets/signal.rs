//! See `kilo_fuzz::signal`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::signal(data));
