//! The configuration files that choose the API server, and the user to authenticate as.

use std::{
    env, fmt,
    path::{Path, PathBuf},
};

use kube::{
    Config,
    config::{Context, KubeConfigOptions, Kubeconfig},
};

use super::proxy;
use crate::backend::BackendError;
use kilo_core::errors::{Cause, Explained};

/// Choices made by flags; unset fields are taken from the files.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// `--kubeconfig`: a file that must be there; `None`: those of `$KUBECONFIG`, else `~/.kube/config`.
    pub kubeconfig: Option<PathBuf>,
    /// `--context`; `None`: the `current-context` of the files.
    pub context: Option<String>,
    /// `--cluster`; `None`: the cluster of the context.
    pub cluster: Option<String>,
    /// `--user`; `None`: the user of the context.
    pub user: Option<String>,
    /// `--as`: the user to impersonate; `None`: as in the files.
    pub impersonate: Option<String>,
    /// `--as-group`: groups of that user; empty: as in the files.
    pub impersonate_groups: Vec<String>,
}

/// The files found, merged as kubectl does, and the name of their source for errors.
pub(super) struct Found {
    origin: String,
    pub(super) files: Vec<PathBuf>,
    config: Kubeconfig,
}

/// The source of files, for errors, and the paths to look at.
fn places(access: &Access) -> (String, Vec<PathBuf>) {
    if let Some(path) = &access.kubeconfig {
        return (format!("--kubeconfig {}", path.display()), vec![path.clone()]);
    }
    let listed = env::var_os("KUBECONFIG").unwrap_or_default();
    let listed: Vec<_> = env::split_paths(&listed).filter(|path| !path.as_os_str().is_empty()).collect();
    if !listed.is_empty() {
        return (format!("$KUBECONFIG {}", Paths(&listed)), listed);
    }
    let own = env::home_dir().map(|home| home.join(".kube/config"));
    (Paths(own.as_slice()).to_string(), own.into_iter().collect())
}

/// Displays paths separated by commas.
pub(super) struct Paths<'a>(pub(super) &'a [PathBuf]);

impl fmt::Display for Paths<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<_> = self.0.iter().map(|path| path.display().to_string()).collect();
        f.write_str(&shown.join(", "))
    }
}

/// Whether there is no file; one that cannot be read for another reason is not missing.
pub(super) fn is_missing(path: &Path) -> bool {
    std::fs::metadata(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// The user's configuration; `None` when none of the paths exists, except that a `--kubeconfig` file must
/// exist. Of several paths, missing ones are skipped, as kubectl does.
pub(super) fn find(access: &Access) -> Result<Option<Found>, BackendError> {
    let (origin, places) = places(access);
    let failed = |cause: Cause| BackendError::Config(Explained::behind(&origin, cause));
    let mut files = Vec::new();
    let mut merged = Kubeconfig::default();
    for path in places {
        if access.kubeconfig.is_none() && is_missing(&path) {
            continue;
        }
        // Read here: the library's error names the path but loses the reason.
        let text = std::fs::read_to_string(&path).map_err(|error| {
            failed(if origin.ends_with(&path.display().to_string()) {
                error.into()
            } else {
                Explained::behind(format!("{} cannot be read", path.display()), error).into()
            })
        })?;
        let mut config = Kubeconfig::from_yaml(&text).map_err(|error| failed(error.into()))?;
        anchor_paths(&mut config, path.parent().unwrap_or(Path::new(".")));
        merged = merged.merge(config).map_err(|error| failed(error.into()))?;
        files.push(path);
    }
    Ok((!files.is_empty()).then_some(Found { origin, files, config: merged }))
}

/// The error when there is no file: lists the paths and says what to do.
pub(super) fn not_found(access: &Access) -> BackendError {
    let (_, places) = places(access);
    let places = if places.is_empty() { "$HOME is not set".to_owned() } else { Paths(&places).to_string() };
    let text = format!(
        "no kubeconfig found: there is none at {places}, and this is not a pod with a service account; \
         give --kubeconfig, or set $KUBECONFIG"
    );
    BackendError::Config(text.into())
}

impl Found {
    fn failed(&self, cause: impl Into<Cause>) -> BackendError {
        BackendError::Config(Explained::behind(&self.origin, cause))
    }

    /// Name of the context in effect.
    pub(super) fn context_name<'a>(&'a self, access: &'a Access) -> &'a str {
        access.context.as_deref().or(self.config.current_context.as_deref()).unwrap_or_default()
    }

    fn context(&self, access: &Access) -> Option<&Context> {
        let name = self.context_name(access);
        self.config.contexts.iter().find(|context| context.name == name)?.context.as_ref()
    }

    /// Name of the user in effect.
    pub(super) fn user_name<'a>(&'a self, access: &'a Access) -> Option<&'a str> {
        let of_context = || self.context(access)?.user.as_deref();
        access.user.as_deref().or_else(of_context).filter(|user| !user.is_empty())
    }

    fn cluster_name<'a>(&'a self, access: &'a Access) -> Option<&'a str> {
        let of_context = || self.context(access).map(|context| context.cluster.as_str());
        access.cluster.as_deref().or_else(of_context)
    }

    /// Checks that context, cluster and user exist: the library's errors say less, and it silently ignores a
    /// missing user.
    fn check_references(&self, access: &Access) -> Result<(), String> {
        fn known<'a>(what: &str, name: &str, names: impl Iterator<Item = &'a String>) -> Result<(), String> {
            let names: Vec<_> = names.map(String::as_str).collect();
            if names.contains(&name) {
                return Ok(());
            }
            Err(format!("{what} {name:?} does not exist; choose one of: {}", names.join(", ")))
        }
        let contexts = self.config.contexts.iter().map(|context| &context.name);
        let what = if access.context.is_some() { "context" } else { "current-context" };
        known(what, self.context_name(access), contexts)?;
        if let Some(cluster) = self.cluster_name(access) {
            known("cluster", cluster, self.config.clusters.iter().map(|cluster| &cluster.name))?;
        }
        match self.user_name(access) {
            Some(user) => known("user", user, self.config.auth_infos.iter().map(|user| &user.name)),
            None => Ok(()),
        }
    }

    /// Builds the client configuration.
    pub(super) async fn config(&self, access: &Access) -> Result<Config, BackendError> {
        self.check_references(access).map_err(|reason| self.failed(reason))?;
        let options = KubeConfigOptions {
            context: access.context.clone(),
            cluster: access.cluster.clone(),
            user: access.user.clone(),
        };
        let config = Config::from_custom_kubeconfig(self.config.clone(), &options).await;
        let mut config = config.map_err(|error| self.failed(error))?;
        if !matches!(config.cluster_url.scheme_str(), Some("http" | "https")) {
            return Err(self.failed(format!(
                "server {} is not the URL of an API server; write for example https://192.0.2.1:6443",
                config.cluster_url
            )));
        }
        if config.root_cert.as_ref().is_some_and(Vec::is_empty) {
            return Err(self.failed("the certificate authority holds no certificate in PEM"));
        }
        // The library compares NO_PROXY with the proxy instead of with the server.
        let named = self.cluster_name(access);
        let cluster = self.config.clusters.iter().find(|cluster| Some(cluster.name.as_str()) == named);
        let own = cluster.and_then(|named| named.cluster.as_ref()?.proxy_url.as_deref());
        let from = proxy::choose(own, &config.cluster_url, |name| env::var(name).ok());
        config.proxy_url = from.map_err(|wrong| self.failed(wrong))?;
        Ok(config)
    }
}

/// Makes file names relative to the directory of their configuration.
fn anchor_paths(config: &mut Kubeconfig, directory: &Path) {
    let anchor = |path: &mut Option<String>| {
        if let Some(path) = path
            && !Path::new(path).is_absolute()
        {
            *path = directory.join(&*path).to_string_lossy().into_owned();
        }
    };
    for cluster in config.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        anchor(&mut cluster.certificate_authority);
    }
    for auth in config.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
        anchor(&mut auth.client_certificate);
        anchor(&mut auth.client_key);
        anchor(&mut auth.token_file);
        // A program without a directory in its name is looked up in `PATH`.
        if let Some(exec) = &mut auth.exec
            && exec.command.as_deref().is_some_and(|command| command.contains('/'))
        {
            anchor(&mut exec.command);
        }
    }
}

/// Name of the cluster that the configuration leads to. In a pod there is none.
///
/// # Errors
/// When the configuration is unusable; the error names the file and what is wrong with it.
pub fn cluster_name(access: &Access) -> Result<String, BackendError> {
    let found = find(access)?.ok_or_else(|| not_found(access))?;
    let name = found.cluster_name(access).map(ToOwned::to_owned);
    name.ok_or_else(|| {
        found.failed(format!("current-context {:?} does not exist", found.context_name(access)))
    })
}

/// All names defined in a configuration.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Contexts, which `--context` may name.
    pub contexts: Vec<String>,
    /// Clusters, which `--cluster` may name.
    pub clusters: Vec<String>,
    /// Users, which `--user` may name.
    pub users: Vec<String>,
}

/// The names to choose from; empty when no file can be read.
pub fn names(access: &Access) -> Names {
    let Ok(Some(Found { config, .. })) = find(access) else { return Names::default() };
    Names {
        contexts: config.contexts.into_iter().map(|context| context.name).collect(),
        clusters: config.clusters.into_iter().map(|cluster| cluster.name).collect(),
        users: config.auth_infos.into_iter().map(|user| user.name).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, name: &str, text: &str) -> PathBuf {
        let path = directory.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    const TWO: &str = "kind: Config\ncurrent-context: a\n\
        contexts:\n- {name: a, context: {cluster: ka, user: ua}}\n- {name: b, context: {cluster: kb, user: ub}}\n\
        users:\n- {name: ua, user: {token: t}}\n- {name: ub, user: {token: u}}\n\
        clusters:\n- {name: ka, cluster: {server: 'https://192.0.2.1:6443'}}\n\
        - {name: kb, cluster: {server: 'https://192.0.2.2:6443', proxy-url: 'socks5://192.0.2.9:1080'}}\n";

    #[tokio::test]
    async fn context_cluster_and_user_are_chosen_separately() {
        let directory = tempfile::tempdir().unwrap();
        let path = write(directory.path(), "config", TWO);
        let pick = |context: &str, cluster: &str, user: &str| {
            let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            Access {
                kubeconfig: Some(path.clone()),
                context: some(context),
                cluster: some(cluster),
                user: some(user),
                ..Access::default()
            }
        };
        for (access, url, user, cluster) in [
            (pick("", "", ""), "https://192.0.2.1:6443/", "ua", "ka"),
            (pick("b", "", ""), "https://192.0.2.2:6443/", "ub", "kb"),
            (pick("", "kb", ""), "https://192.0.2.2:6443/", "ua", "kb"),
            (pick("b", "ka", "ua"), "https://192.0.2.1:6443/", "ua", "ka"),
        ] {
            let found = find(&access).unwrap().unwrap();
            assert_eq!(found.config(&access).await.unwrap().cluster_url.to_string(), url, "{access:?}");
            assert_eq!(found.user_name(&access), Some(user), "{access:?}");
            assert_eq!(cluster_name(&access).unwrap(), cluster, "{access:?}");
        }
        let proxied = pick("b", "", "");
        let config = find(&proxied).unwrap().unwrap().config(&proxied).await.unwrap();
        assert_eq!(config.proxy_url.unwrap().to_string(), "socks5://192.0.2.9:1080/");
        for (access, wanted) in [
            (pick("c", "", ""), "context \"c\" does not exist; choose one of: a, b"),
            (pick("", "kc", ""), "cluster \"kc\" does not exist; choose one of: ka, kb"),
            (pick("", "", "uc"), "user \"uc\" does not exist; choose one of: ua, ub"),
        ] {
            let error = find(&access).unwrap().unwrap().config(&access).await.unwrap_err().to_string();
            assert!(error.contains(wanted) && error.contains(path.to_str().unwrap()), "{error}");
        }
        assert_eq!(names(&pick("", "", "")).contexts, ["a", "b"]);
    }
}
