//! See `kilo_fuzz::annotations`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::annotations(data));
