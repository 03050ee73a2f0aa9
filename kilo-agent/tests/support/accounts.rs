//! Accounts of the manifests, with the rights they have there.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of this")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{fs, path::PathBuf, time::Duration};

use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::ServiceAccount,
};
use kube::{
    Api,
    api::PostParams,
    config::{AuthInfo, Kubeconfig, NamedAuthInfo},
};

use crate::api::{ADMIN, ApiServer, apply, manifest};

/// Applies a role, its binding and its account, and returns a configuration
/// with a token of that account, as a pod would have it.
pub async fn account(server: &ApiServer, file: &str, namespace: &str, account: &str) -> PathBuf {
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
    token_of(server, namespace, account).await
}

/// A configuration with a token of this account.
pub async fn token_of(server: &ApiServer, namespace: &str, account: &str) -> PathBuf {
    let admin = server.client(ADMIN).await;
    let accounts: Api<ServiceAccount> = Api::namespaced(admin, namespace);
    let request = TokenRequest {
        spec: TokenRequestSpec { expiration_seconds: Some(3600), ..Default::default() },
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
    let path = path.with_file_name(format!("{account}.kubeconfig"));
    fs::write(&path, serde_yaml_ng::to_string(&config).unwrap()).unwrap();
    // The authorizer learns of new bindings by a watch.
    tokio::time::sleep(Duration::from_secs(1)).await;
    path
}
