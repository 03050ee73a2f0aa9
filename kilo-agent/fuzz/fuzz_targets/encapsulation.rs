//! See `kilo_fuzz::encapsulation`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::encapsulation(data));
