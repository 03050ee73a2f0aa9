//! Kilo's agent as a library. Data flows one way:
//! `backend` → `topology` → `plan` → {`wireguard`, `net`, `dataplane`}.

pub mod backend;
pub mod cli;
pub mod dataplane;
pub mod health;
pub mod http;
pub mod metrics;
pub mod net;
pub mod plan;
pub mod topology;
pub mod wireguard;
