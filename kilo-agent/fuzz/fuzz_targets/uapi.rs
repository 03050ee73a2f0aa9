//! See `kilo_fuzz::uapi`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kilo_fuzz::uapi(data));
