//! Kilo's agent as a library. Data flows one way:
//! `backend` → `topology` → `plan` → {`wireguard`, `net`, `dataplane`}.

pub mod agent;
pub mod backend;
pub mod cli;
pub mod cni;
pub mod connect;
pub mod dataplane;
pub mod flag_table;
pub mod health;
pub mod http;
pub mod interface;
pub mod lock;
pub mod metrics;
pub mod net;
pub mod peering;
pub mod plan;
pub mod resolve;
pub mod sorted;
pub mod status;
pub mod topology;
pub mod webhook;
pub mod wireguard;
