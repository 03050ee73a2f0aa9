//! The webhook of the manifest: its certificate, and what it rejects.

use super::*;

#[test]
fn the_webhook_of_the_manifest_makes_its_certificate_and_refuses_invalid_peers() {
    netns::isolated(
        "the_webhook_of_the_manifest_makes_its_certificate_and_refuses_invalid_peers",
        webhook_refuses,
    );
}

/// A replica of the webhook's Deployment, confined as there; the second has other ports.
fn replica(server: &ApiServer, number: u16) -> Running {
    let deployment = find("peer-validation.yaml", ("Deployment", "peer-validation-server"));
    let pod = &deployment.data["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(strings(&container["securityContext"]["capabilities"]["drop"]), ["ALL"]);
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(pod["securityContext"]["runAsUser"], 1000);
    let port = |argument: String| {
        argument
            .replace(":8443", &format!(":{}", 8443 + number))
            .replace(":1107", &format!(":{}", 1107 + number))
    };
    let script = "mount --bind / / && mount -o remount,bind,ro / && exec \"$0\" \"$@\"";
    let child = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-ec", script])
        .args(["setpriv", "--no-new-privs", "--reuid=1000", "--regid=1000", "--clear-groups"])
        .args(["--inh-caps=-all", "--bounding-set=-all", "/run/kg"])
        .args(strings(&container["args"]).into_iter().map(port))
        .env("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        .env("KUBERNETES_SERVICE_PORT", server.port().to_string())
        .spawn();
    Running(child.unwrap())
}

/// The certificate that the replica on this port serves.
fn served_certificate(port: u16) -> String {
    netns::sh(&format!("openssl s_client -connect 127.0.0.1:{port} </dev/null 2>/dev/null | openssl x509"))
}

async fn webhook_refuses() {
    // Without kube-proxy, the Service's name resolves to the containers' own ports.
    netns::sh(&format!(
        "ip link set lo up; touch /run/kg; mount --bind {KG} /run/kg; \
         echo '127.0.0.1 localhost peer-validation.kilo.svc' > /run/hosts; mount --bind /run/hosts /etc/hosts"
    ));
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    apply_crds(&admin).await;
    mount_account(&server, &account(&server, "peer-validation.yaml", "kilo", "kilo-peer-validation").await);
    let replicas = [replica(&server, 0), replica(&server, 1)];
    let mut hook = find("peer-validation.yaml", ("ValidatingWebhookConfiguration", "peers.kilo.squat.ai"));
    let client = &mut hook.data["webhooks"][0]["clientConfig"];
    let path = client["service"]["path"].as_str().unwrap().to_owned();
    *client = json!({ "url": format!("https://peer-validation.kilo.svc:8443{path}") });
    apply(&admin, &hook, false).await.unwrap();
    assert!(http_at("127.0.0.1", 1107, "/health").await.contains("200"));
    assert!(http_at("127.0.0.1", 1108, "/health").await.contains("200"));

    let secrets: Api<Secret> = Api::namespaced(admin.clone(), "kilo");
    let name = "peer-validation-webhook-tls";
    let kept = async |key: &str| -> String {
        let data = secrets.get(name).await.unwrap().data.unwrap_or_default();
        data.get(key).map(|bytes| String::from_utf8(bytes.0.clone()).unwrap()).unwrap_or_default()
    };
    let hooks: Api<ValidatingWebhookConfiguration> = Api::all(admin.clone());
    let trusted = async || -> String {
        let hook = hooks.get("peers.kilo.squat.ai").await.unwrap();
        let bundle = hook.webhooks.unwrap()[0].client_config.ca_bundle.clone();
        bundle.map(|bundle| String::from_utf8(bundle.0).unwrap()).unwrap_or_default()
    };
    let first = kept("tls.crt").await;
    assert_eq!((served_certificate(8443), served_certificate(8444)), (first.clone(), first.clone()));
    assert_eq!(trusted().await, kept("ca.crt").await);
    let names = netns::sh(
        "openssl s_client -connect 127.0.0.1:8443 </dev/null 2>/dev/null | openssl x509 -noout -ext subjectAltName",
    );
    assert!(names.contains("DNS:peer-validation.kilo.svc,"), "{names}");

    // The schema accepts this, and the server takes a moment to learn of the webhook.
    let bad = validated("bad", &json!({}));
    let refusal =
        wait::until("the webhook is asked", LIMIT, async || match apply(&admin, &bad, true).await {
            Err(error) if error.to_string().contains("denied") => Ok(error.to_string()),
            other => Err(format!("{other:?}")),
        })
        .await;
    println!("{refusal}");
    assert!(refusal.contains("admission webhook \"peers.kilo.squat.ai\" denied"), "{refusal}");
    assert!(refusal.contains("dnsOrIP"), "{refusal}");
    let good = validated("good", &json!({ "dns": "vpn.example.com" }));
    apply(&admin, &good, false).await.unwrap();

    // Renewal: the next authority is trusted before the next certificate is used.
    let make_due = async || {
        let due = Patch::Merge(
            json!({ "metadata": { "annotations": { "kilo.squat.ai/renew-after": "2020-01-01T00:00:00Z" } } }),
        );
        secrets.patch(name, &PatchParams::default(), &due).await.unwrap();
    };
    make_due().await;
    // Renewal is so overdue that no time is left to wait: the replicas take both steps one after the other.
    wait::until("a new certificate is in use", LIMIT, async || kept("tls.crt").await != first).await;
    let second = kept("tls.crt").await;
    wait::until("both replicas serve with it", LIMIT, async || {
        served_certificate(8443) == second && served_certificate(8444) == second
    })
    .await;
    assert_eq!(trusted().await, kept("ca.crt").await);
    assert_eq!(trusted().await.matches("BEGIN CERTIFICATE").count(), 2, "the former one is trusted, too");
    assert_eq!(kept("next.crt").await, "");
    wait::until("peers can be written", LIMIT, async || apply(&admin, &good, false).await.is_ok()).await;
    // When the authority is removed, as by a manifest applied anew, it comes back.
    let mut object = hooks.get("peers.kilo.squat.ai").await.unwrap();
    object.webhooks.as_mut().unwrap()[0].client_config.ca_bundle = None;
    hooks.replace("peers.kilo.squat.ai", &PostParams::default(), &object).await.unwrap();
    wait::until("the authority is back", LIMIT, async || !trusted().await.is_empty()).await;
    drop(replicas);
}

/// A Peer with an endpoint at this host.
fn validated(name: &str, host: &Value) -> DynamicObject {
    serde_json::from_value(json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": name },
        "spec": { "allowedIPs": [], "publicKey": PublicKey([9; 32]).to_string(),
                  "endpoint": { "dnsOrIP": host, "port": 51820 } },
    }))
    .unwrap()
}
