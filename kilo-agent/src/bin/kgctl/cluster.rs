//! The API server that a command talks to, and explanations of its refusals.

use std::{path::PathBuf, time::Duration};

use anyhow::Result;
use clap::Args;
use hyper::Request;
use k8s_openapi::api::core::v1::Pod;
use kilo_agent::{
    AGENTS_NAMESPACE,
    backend::kubernetes::{self, Access, Server, read_once},
    cli::parse_duration,
    status::pods::{self, Listed},
};
use kilo_core::{
    errors::{Explained, error_chain},
    objects::Snapshot,
};
use kube::Client;

use crate::{
    complete,
    progress::Progress,
    refusal::{self, Asked},
};

/// Help heading of the flags that select an API server.
pub const API_HEADING: &str = "API server";

/// Flags of every command that talks to an API server, as kubectl has them.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = API_HEADING)]
pub struct ApiFlags {
    /// Kubernetes configuration; default: $KUBECONFIG, else ~/.kube/config.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; default: its current-context.
    #[arg(long, value_name = "NAME", add = complete::contexts())]
    pub context: Option<String>,
    /// Cluster of the kubeconfig, instead of the context's.
    #[arg(long, value_name = "NAME", add = complete::clusters())]
    pub cluster: Option<String>,
    /// User of the kubeconfig, instead of the context's.
    #[arg(long, value_name = "NAME", add = complete::users())]
    pub user: Option<String>,
    /// User to impersonate; may be a service account (`system:serviceaccount:NAMESPACE:NAME`).
    #[arg(long = "as", value_name = "USER")]
    pub impersonate: Option<String>,
    /// Group to impersonate (repeatable).
    #[arg(long = "as-group", value_name = "GROUP", requires = "impersonate")]
    pub impersonate_groups: Vec<String>,
    /// Longest time a single request may take, for example 5s or 1m; 0 = no limit.
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = parse_timeout)]
    pub request_timeout: Duration,
}

/// Flags of every command that looks for the agents' pods.
#[derive(Args, Clone, Debug, Default)]
pub struct AgentsFlags {
    /// Namespace of the agents. Default: all namespaces, or only kube-system if your account may not list the
    /// pods of all.
    #[arg(long, short, value_name = "NAME")]
    pub namespace: Option<String>,
}

/// Parses a duration like kubectl: a bare number is in seconds.
fn parse_timeout(text: &str) -> Result<Duration, kilo_agent::cli::InvalidDuration> {
    text.parse().map(Duration::from_secs).or_else(|_| parse_duration(text))
}

impl ApiFlags {
    /// The access that the flags choose.
    pub fn access(&self) -> Access {
        Access {
            kubeconfig: self.kubeconfig.clone(),
            context: self.context.clone(),
            cluster: self.cluster.clone(),
            user: self.user.clone(),
            impersonate: self.impersonate.clone(),
            impersonate_groups: self.impersonate_groups.clone(),
        }
    }
}

/// A connection to the API server that kubeconfig and flags name, with the limit for each request.
#[derive(Clone)]
pub struct Cluster {
    /// For requests made step by step; pass them through [`Cluster::ask`] for its errors.
    pub client: Client,
    server: Server,
    /// Limit for a single request; `None` = unlimited.
    timeout: Option<Duration>,
    /// Namespace of the agents, if it was given.
    agents: Option<String>,
}

/// The API server did not answer in time.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NoAnswer(String);

impl Cluster {
    /// Reads the configuration; sends no request yet.
    pub async fn open(flags: &ApiFlags) -> Result<Self> {
        let timeout = (!flags.request_timeout.is_zero()).then_some(flags.request_timeout);
        let patience = timeout.unwrap_or(Duration::MAX);
        let (client, server) = kubernetes::connect(&flags.access(), None, patience).await?;
        Ok(Self { client, server, timeout, agents: None })
    }

    /// The same connection, for a command that looks for agents.
    pub fn with_agents(self, flags: &AgentsFlags) -> Self {
        Self { agents: flags.namespace.clone(), ..self }
    }

    /// Namespace of the agents, as given or that of the manifests.
    pub fn agents_namespace(&self) -> &str {
        self.agents.as_deref().unwrap_or(AGENTS_NAMESPACE)
    }

    /// Namespace of these pods of agents; without any, [`Self::agents_namespace`].
    pub fn namespace_of<'a>(&'a self, pods: &'a [Pod]) -> &'a str {
        let found = pods.first().and_then(|pod| pod.metadata.namespace.as_deref());
        found.filter(|_| self.agents.is_none()).unwrap_or_else(|| self.agents_namespace())
    }

    /// The agents' pods of one node or of all.
    pub async fn agents_pods(&self, node: Option<&str>) -> Result<Listed> {
        let asked = Asked::new("list", "pods").within(self.agents_namespace());
        self.ask(asked, pods::list(&self.client, node, self.agents.as_deref())).await
    }

    /// The response to one request; an error explains the refusal and what to do about it.
    pub async fn ask<T>(&self, asked: Asked<'_>, answer: impl Future<Output = kube::Result<T>>) -> Result<T> {
        let progress = Progress::new(&format!("waiting for the API server: {}", asked.words()), 0);
        let answer = match self.timeout {
            Some(limit) => tokio::time::timeout(limit, answer).await.map_err(|_| limit),
            None => Ok(answer.await),
        };
        drop(progress);
        let error = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error,
            Err(limit) => {
                let limit = humantime::format_duration(limit);
                let text = format!(
                    "no answer within {limit} (--request-timeout) from the API server {}",
                    self.server
                );
                return Err(NoAnswer(text).into());
            }
        };
        let page = match &error {
            kube::Error::SerdeError(_) => self.page().await,
            _ => None,
        };
        let text = refusal::explain(&error, asked, &self.server, page.as_deref());
        Err(Explained::of(text, error).into())
    }

    /// Explains a refusal of a request that was not made by [`Self::ask`].
    pub fn explain(&self, refused: &kube::Error, asked: Asked<'_>) -> String {
        refusal::explain(refused, asked, &self.server, None)
    }

    /// The text of a server that is not an API server; `None` when it is one, or does not respond.
    async fn page(&self) -> Option<String> {
        let request = Request::get("/version").body(Vec::new()).ok()?;
        let asked = tokio::time::timeout(Duration::from_secs(5), self.client.request_text(request)).await;
        let text = match asked.ok()? {
            Ok(text) => text,
            Err(kube::Error::Api(status)) => status.message.clone(),
            Err(error) => error_chain(&error),
        };
        serde_json::from_str::<serde_json::Value>(&text).is_err().then_some(text)
    }

    /// All nodes and peers as they are now.
    pub async fn snapshot(&self, topology_label: &str) -> Result<Snapshot> {
        let _progress = Progress::new("reading nodes and peers", 0);
        let nodes = self.ask(Asked::new("list", "nodes"), read_once::nodes(&self.client)).await?;
        let peers = self.ask(Asked::new("list", "peers"), read_once::peers(&self.client)).await?;
        Ok(read_once::snapshot(nodes, peers, topology_label))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_what_kubectl_takes() {
        assert_eq!(parse_timeout("30"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_timeout("1m30s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_timeout("0"), Ok(Duration::ZERO));
        assert!(parse_timeout("soon").unwrap_err().to_string().contains("30s"));
    }
}
