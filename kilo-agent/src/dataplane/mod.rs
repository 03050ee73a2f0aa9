//! BPF programs and maps: load, attach, diff, count.
