//! The Peer resource on a real API server: what it accepts, what it rejects without a webhook, and what
//! kubectl shows.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;

use kilo_core::{objects::peer, wireguard::key::PublicKey};
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, PostParams},
};
use serde_json::{Value, json};

use api::{ADMIN, ApiServer, apply_crds};

fn peers(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &ApiResource::erase::<peer::Peer>(&()))
}

fn spec(change: impl FnOnce(&mut Value)) -> Value {
    let mut spec = json!({"allowedIPs": ["10.5.0.1/32"], "publicKey": PublicKey([7; 32]).to_string()});
    change(&mut spec);
    spec
}

fn object(spec: &Value) -> DynamicObject {
    serde_json::from_value(json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "p"}, "spec": spec,
    }))
    .unwrap()
}

#[tokio::test]
async fn the_schema_refuses_what_an_agent_would_ignore_and_takes_what_it_uses() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let peers = peers(&client);
    let endpoint =
        |host: Value, port: i64| spec(|spec| spec["endpoint"] = json!({"dnsOrIP": host, "port": port}));
    for (field, spec) in [
        ("spec.allowedIPs", spec(|spec| spec["allowedIPs"] = json!(["10.5.0.1"]))),
        ("spec.allowedIPs", spec(|spec| spec["allowedIPs"] = json!(["10.5.0.0/33"]))),
        ("spec.allowedIPs", spec(|spec| spec["allowedIPs"] = json!("10.5.0.1/32"))),
        ("spec.allowedIPs", spec(|spec| drop(spec.as_object_mut().unwrap().remove("allowedIPs")))),
        ("spec.publicKey", spec(|spec| spec["publicKey"] = json!("short"))),
        ("spec.publicKey", spec(|spec| spec["publicKey"] = json!("!".repeat(44)))),
        ("spec.publicKey", spec(|spec| drop(spec.as_object_mut().unwrap().remove("publicKey")))),
        ("spec.presharedKey", spec(|spec| spec["presharedKey"] = json!("short"))),
        ("spec.persistentKeepalive", spec(|spec| spec["persistentKeepalive"] = json!(-1))),
        ("spec.persistentKeepalive", spec(|spec| spec["persistentKeepalive"] = json!(65536))),
        ("spec.endpoint.port", endpoint(json!({"ip": "192.0.2.1"}), 0)),
        ("spec.endpoint.port", endpoint(json!({"ip": "192.0.2.1"}), 65536)),
        ("spec.endpoint.dnsOrIP.dns", endpoint(json!({"dns": "UPPER.example.com"}), 1)),
        ("spec.endpoint.dnsOrIP.dns", endpoint(json!({"dns": "a..b"}), 1)),
        ("spec.endpoint.dnsOrIP.dns", endpoint(json!({"dns": "a".repeat(254)}), 1)),
    ] {
        assert!(peer::parse(object(&spec)).is_err(), "an agent would use {spec}");
        let refused = peers.create(&PostParams::default(), &object(&spec)).await;
        let message = refused.map(|_| spec.clone()).unwrap_err().to_string();
        assert!(message.contains(field), "{field}: {message}");
    }
    for spec in [
        spec(|_| {}),
        spec(|spec| spec["allowedIPs"] = json!(["10.5.0.1/24", "fd00::/64", "0.0.0.0/0"])),
        spec(|spec| spec["allowedIPs"] = json!([])),
        spec(|spec| spec["presharedKey"] = json!("")),
        spec(|spec| {
            *spec = json!({
                "allowedIPs": ["10.5.0.1/32"], "publicKey": PublicKey([7; 32]).to_string(), "persistentKeepalive": 10,
                "endpoint": null, "presharedKey": null,
            });
        }),
        endpoint(json!({"ip": "2001:db8::1", "dns": ""}), 51820),
        endpoint(json!({"ip": "rubbish", "dns": "vpn.example.com"}), 65535),
    ] {
        assert!(peer::parse(object(&spec)).is_ok(), "an agent would ignore {spec}");
        let created = peers.create(&PostParams::default(), &object(&spec)).await;
        assert!(created.is_ok(), "{spec}: {created:?}");
        peers.delete("p", &DeleteParams::default()).await.unwrap();
    }
}

#[tokio::test]
async fn kubectl_shows_allowed_ips_endpoint_and_age() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    // The request that kubectl makes to print a table.
    let request = hyper::http::Request::get("/apis/kilo.squat.ai/v1alpha1/peers")
        .header("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
        .body(Vec::new())
        .unwrap();
    let table: Value = client.request(request).await.unwrap();
    let columns: Vec<_> = table["columnDefinitions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|column| (column["name"].as_str().unwrap(), column["priority"].as_i64().unwrap()))
        .collect();
    let wanted = [
        "Name",
        "Allowed IPs",
        "DNS",
        "IP",
        "Port",
        "Keepalive",
        "Ready",
        "Reason",
        "Last Handshake",
        "Endpoint",
        "Message",
        "Public Key",
        "Age",
    ];
    let is_wide = |name| i64::from(matches!(name, "Message" | "Public Key"));
    assert_eq!(columns, wanted.map(|name| (name, is_wide(name))));
}
