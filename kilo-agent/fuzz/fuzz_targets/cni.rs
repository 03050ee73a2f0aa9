//! See `kilo_fuzz::cni`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::cni(data));
