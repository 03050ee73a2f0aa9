//! See `kilo_fuzz::checksum`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::checksum(data));
