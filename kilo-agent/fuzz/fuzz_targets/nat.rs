//! See `kilo_fuzz::nat`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::nat(data));
