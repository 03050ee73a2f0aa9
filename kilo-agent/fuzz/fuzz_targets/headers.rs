//! See `kilo_fuzz::headers`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::headers(data));
