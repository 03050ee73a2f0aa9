//! WireGuard as values: keys, endpoints, configuration files, the UAPI protocol, and the
//! difference between what a device has and what it should have.

pub mod conf;
pub mod diff;
mod endpoint;
mod interface_name;
pub mod key;
pub mod silence;
mod state;
pub mod uapi;

pub use diff::{Change, diff};
pub use endpoint::{Endpoint, EndpointHost, InvalidEndpoint, is_dns_name};
pub use interface_name::is_interface_name;
pub use key::{PublicKey, SecretKey};
pub use state::{DeviceState, PeerState, WireguardPeer, WireguardPlan};
