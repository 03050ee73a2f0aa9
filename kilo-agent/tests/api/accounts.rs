//! Accounts with the rights that the manifests give them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{fs, path::PathBuf};

use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::{Pod, ServiceAccount},
};
use kube::{
    Api, Client,
    api::{DynamicObject, PostParams},
    config::{AuthInfo, Kubeconfig, NamedAuthInfo},
};

use crate::api::{ADMIN, ApiServer, apply, manifest, until_may};

/// Applies a role, its binding and its account; returns a kubeconfig with a token of that account, as a pod
/// would have it.
pub async fn account(server: &ApiServer, file: &str, namespace: &str, account: &str) -> PathBuf {
    grant(server, file, namespace, account).await;
    token_of(server, namespace, account).await
}

/// Applies the roles and bindings of a manifest, and waits until the account has their rights.
pub async fn grant(server: &ApiServer, file: &str, namespace: &str, account: &str) {
    let admin = server.client(ADMIN).await;
    for object in manifest(file) {
        let roles = [
            "Namespace",
            "ServiceAccount",
            "ClusterRole",
            "ClusterRoleBinding",
            "Role",
            "RoleBinding",
            "Lease",
        ];
        if roles.contains(&object.types.as_ref().unwrap().kind.as_str()) {
            apply(&admin, &object, false).await.unwrap();
        }
    }
    until_bound(&admin, &format!("system:serviceaccount:{namespace}:{account}"), file).await;
}

/// A kubeconfig with a token of this account.
pub async fn token_of(server: &ApiServer, namespace: &str, account: &str) -> PathBuf {
    issued(server, namespace, account, None).await
}

/// The same for a pod of that account, as its kubelet requests it: the token names the pod's node.
pub async fn token_of_pod(server: &ApiServer, account: &str, pod: &Pod) -> PathBuf {
    let of = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
    };
    issued(server, pod.metadata.namespace.as_deref().unwrap(), account, Some(of)).await
}

async fn issued(
    server: &ApiServer,
    namespace: &str,
    account: &str,
    bound: Option<BoundObjectReference>,
) -> PathBuf {
    let admin = server.client(ADMIN).await;
    let accounts: Api<ServiceAccount> = Api::namespaced(admin, namespace);
    let pod = bound.as_ref().and_then(|of| of.name.clone()).unwrap_or_default();
    let request = TokenRequest {
        spec: TokenRequestSpec {
            expiration_seconds: Some(3600),
            bound_object_ref: bound,
            ..Default::default()
        },
        ..Default::default()
    };
    let issued = accounts.create_token_request(account, &PostParams::default(), &request).await.unwrap();
    let path = server.kubeconfig(ADMIN, server.port());
    let mut config = Kubeconfig::read_from(&path).unwrap();
    config.auth_infos = vec![NamedAuthInfo {
        name: "u".to_owned(),
        auth_info: Some(AuthInfo { token: Some(issued.status.unwrap().token.into()), ..Default::default() }),
        ..Default::default()
    }];
    let path = path.with_file_name(format!("{account}{pod}.kubeconfig"));
    fs::write(&path, serde_yaml_ng::to_string(&config).unwrap()).unwrap();
    path
}

/// Waits until the user may do what the first rule of each role in the file allows.
async fn until_bound(admin: &Client, user: &str, file: &str) {
    let objects = manifest(file);
    let kind = |object: &DynamicObject| object.types.as_ref().unwrap().kind.clone();
    let (_, subject) = user.rsplit_once(':').unwrap();
    let binds = |binding: &&DynamicObject| {
        kind(binding).ends_with("RoleBinding")
            && binding.data["subjects"].as_array().unwrap().iter().any(|one| one["name"] == subject)
    };
    for binding in objects.iter().filter(binds) {
        let reference = &binding.data["roleRef"];
        let role = objects.iter().find(|object| {
            reference["kind"] == kind(object) && object.metadata.name.as_deref() == reference["name"].as_str()
        });
        if let Some(role) = role {
            until_granted(admin, user, role, binding.metadata.namespace.as_deref().unwrap_or_default()).await;
        }
    }
}

/// Waits until the user may do what the first rule of a role allows.
pub async fn until_granted(admin: &Client, user: &str, role: &DynamicObject, namespace: &str) {
    let rules = role.data["rules"].as_array().unwrap();
    let Some(rule) = rules.iter().find(|rule| rule["resources"].is_array()) else { return };
    let first = |field: &str| rule[field][0].as_str().unwrap_or_default();
    let what = (first("verbs"), first("apiGroups"), first("resources"));
    until_may(admin, user, what, (namespace, first("resourceNames")), true).await;
}
