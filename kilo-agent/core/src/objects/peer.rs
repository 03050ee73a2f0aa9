//! The Peer custom resource, `peers.kilo.squat.ai/v1alpha1`.

use std::net::IpAddr;

use ipnet::IpNet;
use kube::{CustomResource, ResourceExt as _, core::DynamicObject};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::errors::error_chain;
use crate::{
    objects, signal_id,
    wireguard::{Endpoint, EndpointHost, PublicKey, is_dns_name},
};

/// What a VPN peer is and may reach.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kilo.squat.ai",
    version = "v1alpha1",
    kind = "Peer",
    doc = "A WireGuard peer outside the cluster that joins its network.",
    plural = "peers",
    shortname = "peer",
    derive = "PartialEq",
    status = "PeerStatus",
    printcolumn = r#"{"name":"Allowed IPs","type":"string","jsonPath":".spec.allowedIPs"}"#,
    printcolumn = r#"{"name":"DNS","type":"string","jsonPath":".spec.endpoint.dnsOrIP.dns"}"#,
    printcolumn = r#"{"name":"IP","type":"string","jsonPath":".spec.endpoint.dnsOrIP.ip"}"#,
    printcolumn = r#"{"name":"Port","type":"integer","jsonPath":".spec.endpoint.port"}"#,
    printcolumn = r#"{"name":"Keepalive","type":"integer","jsonPath":".spec.persistentKeepalive"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].reason"}"#,
    printcolumn = r#"{"name":"Last Handshake","type":"date","jsonPath":".status.lastHandshake"}"#,
    printcolumn = r#"{"name":"Endpoint","type":"string","jsonPath":".status.endpoint"}"#,
    printcolumn = r#"{"name":"Message","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].message","priority":1}"#,
    printcolumn = r#"{"name":"Public Key","type":"string","jsonPath":".spec.publicKey","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct PeerSpec {
    /// Prefixes (CIDR) the peer sends from and is sent to.
    #[serde(rename = "allowedIPs")]
    #[schemars(extend("items" = {"type": "string", "format": "cidr"}))]
    pub allowed_ips: Vec<String>,
    /// Where the peer is reached; omit it for a peer that connects by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<PeerEndpoint>,
    /// Seconds between keepalive packets; 0 = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 65535))]
    pub persistent_keepalive: Option<i64>,
    /// Optional symmetric key, base64 of 32 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^(\s*[A-Za-z0-9+/]{43}=)?\s*$"))]
    pub preshared_key: Option<String>,
    /// WireGuard public key, base64 of 32 bytes.
    #[schemars(regex(pattern = r"^\s*[A-Za-z0-9+/]{43}=\s*$"))]
    pub public_key: String,
}

/// State of a peer as the agents see it. The leader of the first location writes it, except for the last handshake and
/// its endpoint, which are written by the leader with the newest handshake.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PeerStatus {
    /// Whether the peer is part of the mesh.
    #[serde(default)]
    pub accepted: bool,
    /// Why it is not accepted, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Conditions, for `kubectl wait`: only `Ready`, which says what `accepted` says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<PeerCondition>,
    /// Time of the peer's last handshake with any leader (RFC 3339); about a minute behind at most, with few peers.
    #[serde(default, rename = "lastHandshake", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub last_handshake: Option<String>,
    /// Address and port at which that leader saw the peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
}

/// Annotation of a Peer, `true`: the machine holds all gateways of each location, and follows what they claim.
/// `kgctl connect` writes it while it runs.
pub const FOLLOWS: &str = "kilo.squat.ai/follows-gateways";

/// Type of the condition that says whether leaders accept the peer.
pub const READY: &str = "Ready";

/// A condition, in the shape that Kubernetes' conditions have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PeerCondition {
    /// Type of the condition; `Ready` is the only one.
    #[serde(rename = "type")]
    pub type_: String,
    /// True, False or Unknown.
    pub status: String,
    /// The reason for the current status, as one word for programs.
    pub reason: String,
    /// The same as a sentence for people.
    pub message: String,
    /// Time of the last change of `status` (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub last_transition_time: String,
}

/// Host and port of a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PeerEndpoint {
    /// The host.
    #[serde(rename = "dnsOrIP")]
    pub dns_or_ip: DnsOrIp,
    /// UDP port, 1 to 65535.
    #[schemars(range(min = 1, max = 65535))]
    pub port: i64,
}

/// A host by name or address; the name wins when both are given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DnsOrIp {
    /// A DNS name in lower case (RFC 1123).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(max = 253),
        regex(pattern = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?$")
    )]
    pub dns: Option<String>,
    /// An IPv4 or IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<String>,
}

/// Why a Peer object cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPeer {
    /// An allowed IP is not a CIDR.
    #[error("spec.allowedIPs: {0:?} is not a valid CIDR; write for example 10.5.0.1/32")]
    AllowedIp(String),
    /// An allowed IP is a gateway's own.
    #[error("spec.allowedIPs: {0} is refused: {reason}", reason = signal_id::CONTROL_REFUSED)]
    Control(IpNet),
    /// An allowed IP that never leaves a host or its link.
    #[error("spec.allowedIPs: {0} is refused: {1} addresses are not sent through WireGuard")]
    NeverRouted(IpNet, &'static str),
    /// The key does not parse.
    #[error("spec.{0} is not a valid WireGuard key (base64 of 32 bytes)")]
    Key(&'static str),
    /// The public key that no private key has.
    #[error(
        "spec.publicKey: 32 bytes of zero are no machine's key; write what `wg pubkey` prints on the peer's machine"
    )]
    ZeroKey,
    /// The host is neither a valid name nor an address.
    #[error("spec.endpoint.dnsOrIP: {0:?} is neither a DNS name nor an IP address")]
    Host(String),
    /// The host is an address at which nothing is reached.
    #[error(
        "spec.endpoint.dnsOrIP: {0} is not the address of a machine; omit the endpoint of a peer that connects by itself"
    )]
    Unspecified(IpAddr),
    /// The port is out of range.
    #[error("spec.endpoint.port: {0} is not between 1 and 65535")]
    Port(i64),
    /// The keepalive is out of range.
    #[error("spec.persistentKeepalive: {0} is not between 0 and 65535")]
    Keepalive(i64),
}

/// Reads a Peer object of any shape.
///
/// # Errors
/// Why it is not a Peer, or which field is wrong.
pub fn parse(object: DynamicObject) -> Result<objects::Peer, String> {
    let object = object.try_parse::<Peer>().map_err(|error| error_chain(&error))?;
    from_object(&object).map_err(|error| error.to_string())
}

/// Checks and converts a Peer object, for both the admission webhook and the agent.
///
/// # Errors
/// The first field that is wrong.
pub fn from_object(object: &Peer) -> Result<objects::Peer, InvalidPeer> {
    let spec = &object.spec;
    let allowed_ips = spec
        .allowed_ips
        .iter()
        .map(|text| {
            let prefix: IpNet = text.parse().map_err(|_| InvalidPeer::AllowedIp(text.clone()))?;
            if signal_id::is_control(&prefix) {
                return Err(InvalidPeer::Control(prefix));
            }
            match never_routed(&prefix) {
                Some(kind) => Err(InvalidPeer::NeverRouted(prefix, kind)),
                None => Ok(prefix.trunc()),
            }
        })
        .collect::<Result<_, _>>()?;
    let keepalive = spec.persistent_keepalive.unwrap_or(0);
    let persistent_keepalive =
        u16::try_from(keepalive).map_err(|_| InvalidPeer::Keepalive(keepalive))?.into();
    let preshared_key = match spec.preshared_key.as_deref() {
        None | Some("") => None,
        Some(text) => Some(text.parse().map_err(|_| InvalidPeer::Key("presharedKey"))?),
    };
    let public_key = spec.public_key.parse().map_err(|_| InvalidPeer::Key("publicKey"))?;
    if public_key == PublicKey([0; 32]) {
        return Err(InvalidPeer::ZeroKey);
    }
    Ok(objects::Peer {
        name: object.metadata.name.clone().unwrap_or_default(),
        allowed_ips,
        endpoint: spec.endpoint.as_ref().map(endpoint).transpose()?,
        persistent_keepalive,
        preshared_key,
        public_key,
        follows: object.annotations().get(FOLLOWS).is_some_and(|value| value == "true"),
    })
}

/// What the addresses of a prefix are that lies wholly among those which never leave a host or its link.
fn never_routed(prefix: &IpNet) -> Option<&'static str> {
    let (loopback, link_local, multicast) = match prefix.addr() {
        IpAddr::V4(ip) => ((ip.is_loopback(), 8), (ip.is_link_local(), 16), (ip.is_multicast(), 4)),
        IpAddr::V6(ip) => ((ip.is_loopback(), 128), (ip.is_unicast_link_local(), 10), (ip.is_multicast(), 8)),
    };
    [(loopback, "loopback"), (link_local, "link-local"), (multicast, "multicast")]
        .into_iter()
        .find(|&((is_of, shortest), _)| is_of && prefix.prefix_len() >= shortest)
        .map(|(_, kind)| kind)
}

fn endpoint(endpoint: &PeerEndpoint) -> Result<Endpoint, InvalidPeer> {
    let port =
        u16::try_from(endpoint.port).ok().filter(|&port| port > 0).ok_or(InvalidPeer::Port(endpoint.port))?;
    let dns = endpoint.dns_or_ip.dns.as_deref().filter(|dns| !dns.is_empty());
    let ip = endpoint.dns_or_ip.ip.as_deref().filter(|ip| !ip.is_empty());
    let host = match (dns, ip) {
        (Some(dns), _) if is_dns_name(dns) => EndpointHost::Dns(dns.to_owned()),
        (None, Some(text)) => match text.parse() {
            Ok(ip) if IpAddr::is_unspecified(&ip) => return Err(InvalidPeer::Unspecified(ip)),
            Ok(ip) => EndpointHost::Ip(ip),
            Err(_) => return Err(InvalidPeer::Host(text.to_owned())),
        },
        (dns, _) => return Err(InvalidPeer::Host(dns.unwrap_or_default().to_owned())),
    };
    Ok(Endpoint { host, port })
}

/// The object that describes this peer.
pub fn to_object(peer: &objects::Peer) -> Peer {
    let endpoint = peer.endpoint.as_ref().map(|endpoint| PeerEndpoint {
        dns_or_ip: match &endpoint.host {
            EndpointHost::Dns(name) => DnsOrIp { dns: Some(name.clone()), ip: None },
            EndpointHost::Ip(ip) => DnsOrIp { dns: None, ip: Some(ip.to_string()) },
        },
        port: endpoint.port.into(),
    });
    let mut object = Peer::new(
        &peer.name,
        PeerSpec {
            allowed_ips: peer.allowed_ips.iter().map(ToString::to_string).collect(),
            endpoint,
            persistent_keepalive: Some(peer.persistent_keepalive.into()),
            preshared_key: peer.preshared_key.map(|key| key.reveal()),
            public_key: peer.public_key.to_string(),
        },
    );
    if peer.follows {
        object.annotations_mut().insert(FOLLOWS.to_owned(), "true".to_owned());
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid() -> Peer {
        Peer::new(
            "laptop",
            PeerSpec {
                allowed_ips: vec!["10.5.0.1/32".to_owned()],
                endpoint: None,
                persistent_keepalive: Some(10),
                preshared_key: None,
                public_key: PublicKey([9; 32]).to_string(),
            },
        )
    }

    #[test]
    fn each_wrong_field_is_named() {
        let with = |change: fn(&mut PeerSpec)| {
            let mut peer = valid();
            change(&mut peer.spec);
            from_object(&peer).unwrap_err().to_string()
        };
        assert!(with(|spec| spec.allowed_ips = vec!["10.5.0.1".to_owned()]).contains("allowedIPs"));
        for problem in [
            with(|spec| spec.allowed_ips.push("fd6b:696c:6f00::/48".to_owned())),
            with(|spec| spec.allowed_ips.push("fd6b:696c:6f00:1:2:3:4:5/128".to_owned())),
        ] {
            assert!(
                problem.contains("allowedIPs: fd6b:696c:6f00:") && problem.contains("gateways"),
                "{problem}"
            );
        }
        assert!(with(|spec| spec.public_key = "short".to_owned()).contains("publicKey"));
        assert!(with(|spec| spec.preshared_key = Some("short".to_owned())).contains("presharedKey"));
        assert!(with(|spec| spec.persistent_keepalive = Some(-1)).contains("persistentKeepalive"));
        let endpoint = |dns: &str, ip: &str, port| {
            let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            let mut peer = valid();
            peer.spec.endpoint =
                Some(PeerEndpoint { dns_or_ip: DnsOrIp { dns: text(dns), ip: text(ip) }, port });
            from_object(&peer)
        };
        assert!(endpoint("", "1.2.3.4", 0).unwrap_err().to_string().contains("port"));
        assert!(endpoint("", "1.2.3", 1).unwrap_err().to_string().contains("dnsOrIP"));
        assert!(endpoint("UPPER", "", 1).is_err());
        assert!(endpoint("", "", 1).is_err());
        let both = endpoint("vpn.example.com", "1.2.3.4", 1).unwrap();
        assert_eq!(both.endpoint.map(|endpoint| endpoint.to_string()), Some("vpn.example.com:1".to_owned()));
    }

    #[test]
    fn what_no_machine_can_have_is_refused() {
        let with_prefix = |prefix: &str| {
            let mut peer = valid();
            peer.spec.allowed_ips.push(prefix.to_owned());
            from_object(&peer).map_err(|problem| problem.to_string())
        };
        for (prefix, kind) in [
            ("127.0.0.0/8", "loopback"),
            ("127.0.0.53/32", "loopback"),
            ("::1/128", "loopback"),
            ("169.254.0.0/16", "link-local"),
            ("169.254.169.254/32", "link-local"),
            ("fe80::/10", "link-local"),
            ("fe80::1/64", "link-local"),
            ("224.0.0.0/4", "multicast"),
            ("239.1.0.0/16", "multicast"),
            ("ff00::/8", "multicast"),
            ("ff02::1/128", "multicast"),
        ] {
            let problem = with_prefix(prefix).unwrap_err();
            assert!(problem.contains(prefix) && problem.contains(kind), "{problem}");
        }
        for prefix in
            ["0.0.0.0/0", "::/0", "128.0.0.0/1", "224.0.0.0/3", "126.0.0.0/7", "fe00::/9", "::/1", "::2/128"]
        {
            assert!(with_prefix(prefix).is_ok(), "{prefix}");
        }
        let mut peer = valid();
        peer.spec.public_key = PublicKey([0; 32]).to_string();
        assert_eq!(from_object(&peer), Err(InvalidPeer::ZeroKey));
        for ip in ["0.0.0.0", "::"] {
            let mut peer = valid();
            let dns_or_ip = DnsOrIp { dns: None, ip: Some(ip.to_owned()) };
            peer.spec.endpoint = Some(PeerEndpoint { dns_or_ip, port: 51820 });
            assert_eq!(from_object(&peer), Err(InvalidPeer::Unspecified(ip.parse().unwrap())));
        }
    }

    #[test]
    fn an_object_made_from_a_peer_is_read_back() {
        let peer = from_object(&valid()).unwrap();
        assert_eq!(from_object(&to_object(&peer)), Ok(peer.clone()));
        let follows = objects::Peer { follows: true, ..peer };
        assert_eq!(from_object(&to_object(&follows)), Ok(follows));
        let mut other = valid();
        other.annotations_mut().insert(FOLLOWS.to_owned(), "yes".to_owned());
        assert!(from_object(&other).is_ok_and(|peer| !peer.follows));
    }
}
