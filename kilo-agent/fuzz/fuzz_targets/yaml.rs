//! See `kilo_fuzz::yaml`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::yaml(data));
