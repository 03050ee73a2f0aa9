//! See `kilo_fuzz::conf`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::conf(data));
