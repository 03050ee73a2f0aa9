//! Runs a command of this program on a node, in its agent's pod, through the API server; also reads pod logs.

use std::{
    io::{ErrorKind, Write},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Arg, ArgMatches, Command, parser::ValueSource};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kilo_agent::status::{
    Status,
    ask::{self, AskError},
    pods::{self, Listed},
};
use kilo_core::errors::{Cause, Explained};
use kube::{
    Api, Resource as _, ResourceExt as _,
    api::{AttachParams, AttachedProcess, LogParams},
    core::Request,
};
use parking_lot::Mutex;
use tokio::io::{self, AsyncRead, AsyncWriteExt as _};

use crate::{
    cluster::{API_HEADING, AgentsFlags, ApiFlags, Cluster},
    progress::Progress,
    refusal::Asked,
    terminal::Plain,
};

/// Usual mount point of the BPF file system.
pub const BPFFS: &str = "/sys/fs/bpf";
/// Flag of a command that should exit when its standard input ends.
pub const UNTIL_STDIN_ENDS: &str = "until-stdin-ends";
/// Context of errors on a machine without a data path.
#[cfg(target_os = "linux")]
pub const NOT_HERE: &str =
    "inspecting this machine, because no node is named (`kgctl COMMAND NODE` goes there)";
/// Name of the agent's container in the manifests.
const CONTAINER: &str = "kilo";
/// Timeout of a program in a pod that runs only for its output.
const PATIENCE: Duration = Duration::from_secs(30);
/// Largest output of such a program, in bytes.
const LARGEST: usize = 64 << 20;
/// Largest log of a container, in bytes; the kubelet is asked to limit it.
const LARGEST_LOG: usize = 64 << 20;
/// Number of agents asked at the same time.
const AT_A_TIME: usize = 16;
/// Argument with the name of the node.
const NODE: &str = "node";
/// Argument with the namespace of the agents.
const NAMESPACE: &str = "namespace";
/// How long an interrupted command may still write.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// The flags given to a command, except the node and those that lead to its agent's pod.
///
/// # Errors
/// When flags that lead to a pod are given without a node, where they would do nothing.
pub fn flags(command: &Command, matches: &ArgMatches) -> Result<Vec<String>> {
    let is_given = |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let given: Vec<_> = command.get_arguments().filter(is_given).collect();
    let leads_there = |arg: &&Arg| arg.get_help_heading() == Some(API_HEADING) || arg.get_id() == NAMESPACE;
    let (api, own): (Vec<_>, Vec<_>) = given.into_iter().partition(leads_there);
    if let Some(flag) = api.first().and_then(|arg| arg.get_long())
        && matches.value_source(NODE).is_none()
    {
        bail!(
            "--{flag} needs the name of a node: without one kgctl inspects this machine and contacts no API \
             server"
        );
    }
    let words = own.into_iter().filter_map(|arg| Some((arg.get_long()?, arg))).flat_map(|(long, arg)| {
        let takes_value = arg.get_action().takes_values();
        let values = matches.get_raw(arg.get_id().as_str()).into_iter().flatten();
        let values = values.map(move |value| match takes_value {
            true => format!("--{long}={}", value.to_string_lossy()),
            false => format!("--{long}"),
        });
        values.collect::<Vec<_>>()
    });
    let ends = command.get_arguments().any(|arg| arg.get_long() == Some(UNTIL_STDIN_ENDS));
    Ok(words.chain(ends.then(|| format!("--{UNTIL_STDIN_ENDS}"))).collect())
}

/// Runs `kgctl COMMAND FLAGS` on a node with its output here; returns whether it succeeded. When this process
/// is interrupted, the remote one notices by the end of its standard input.
pub async fn run(
    (api, agents): (&ApiFlags, &AgentsFlags),
    node: &str,
    command: &str,
    flags: &[String],
) -> Result<bool> {
    let progress = Progress::new(&format!("starting kgctl {command} on {node}"), 0);
    let cluster = Cluster::open(api).await?.with_agents(agents);
    let pod = pod_of(&cluster, node).await?;
    let words: Vec<_> = ["kgctl", command].into_iter().chain(flags.iter().map(String::as_str)).collect();
    let process = exec(&cluster, &pod, &words).await?;
    let progress = Mutex::new(Some(progress));
    let (mut out, mut err) = (
        Ending { progress: &progress, to: Plain::new(std::io::stdout()) },
        Ending { progress: &progress, to: Plain::new(std::io::stderr()) },
    );
    follow(process, &mut out, &mut err).await
}

/// Ends the progress line before the first output.
struct Ending<'a, W> {
    progress: &'a Mutex<Option<Progress>>,
    to: W,
}

impl<W: Write> Write for Ending<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        drop(self.progress.lock().take());
        self.to.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// The statuses of these nodes' agents, in their order.
pub async fn statuses_on(
    cluster: &Cluster,
    nodes: impl IntoIterator<Item = String>,
    progress: Option<&Progress>,
) -> Vec<(String, Result<Status>)> {
    let asked = nodes.into_iter().map(async |node| {
        let seen = status_on(cluster, &node).await;
        progress.into_iter().for_each(Progress::step);
        (node, seen)
    });
    stream::iter(asked).buffered(AT_A_TIME).collect().await
}

/// The status of a node's agent, through the API server.
pub async fn status_on(cluster: &Cluster, node: &str) -> Result<Status> {
    let found = cluster.agents_pods(Some(node)).await?.pods;
    let running = pods::running(&found).ok_or_else(|| AskError::NoPod(node.to_owned()))?;
    status_of(cluster, running).await
}

/// The status of the agent in a pod, through the API server.
pub async fn status_of(cluster: &Cluster, pod: &Pod) -> Result<Status> {
    match ask::pod(&cluster.client, pod).await {
        Err(AskError::Token { .. }) => status_by_exec(cluster, pod).await,
        Err(AskError::Api(cause)) => Err(refused(cluster, pod, cause)),
        answer => Ok(answer?),
    }
}

/// Explains what the API server's proxy says in place of an agent.
fn refused(cluster: &Cluster, pod: &Pod, cause: Cause) -> anyhow::Error {
    let namespace = pod.namespace().unwrap_or_default();
    match cause.downcast::<kube::Error>() {
        Ok(error) => {
            let text = cluster.explain(&error, Asked::new("get", "pods/proxy").within(&namespace));
            Explained::of(text, *error).into()
        }
        Err(cause) => AskError::Api(cause).into(),
    }
}

/// For an agent that requires a token, which the API server's proxy does not forward: kgctl in its pod has
/// one.
async fn status_by_exec(cluster: &Cluster, pod: &Pod) -> Result<Status> {
    let text = output(cluster, pod, &["kgctl", "status", "--agent", "--output=json"]).await;
    let text = text.context("the agent requires a token (--page-access=token); kgctl in its pod has one")?;
    serde_json::from_slice(&text).context("the status was truncated")
}

/// The output of a program in the agent's container, which must end with success in time.
pub async fn output(cluster: &Cluster, pod: &Pod, words: &[&str]) -> Result<Vec<u8>> {
    let run = async {
        let process = exec(cluster, pod, words).await?;
        let (mut out, mut err) = (Bounded::default(), Bounded::default());
        if !follow(process, &mut out, &mut err).await? {
            let said = String::from_utf8_lossy(&err.0);
            bail!("{} in pod {} failed: {}", shortened(words), pod.name_any(), said.trim());
        }
        Ok(out.0)
    };
    let answer = tokio::time::timeout(PATIENCE, run).await;
    answer.map_err(|_| anyhow!("the command did not finish within {} s", PATIENCE.as_secs()))?
}

/// The log of a container, limited in size and time, so that a node cannot fill memory or stall this.
pub async fn log(cluster: &Cluster, pod: &Pod, wanted: LogParams) -> Result<String> {
    let namespace = pod.namespace().unwrap_or_default();
    let wanted = LogParams { limit_bytes: i64::try_from(LARGEST_LOG).ok(), ..wanted };
    let request = Request::new(Pod::url_path(&(), Some(&namespace))).logs(&pod.name_any(), &wanted)?;
    let asked = Asked::new("get", "pods/log").within(&namespace);
    let answer = cluster.ask(asked, ask::bounded(&cluster.client, request, LARGEST_LOG));
    let answer = tokio::time::timeout(PATIENCE, answer).await;
    answer.map_err(|_| anyhow!("the log was not complete within {} s", PATIENCE.as_secs()))?
}

/// A command line as shown in errors.
fn shortened(words: &[&str]) -> String {
    const MOST: usize = 120;
    let line = words.join(" ");
    match line.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// Accepts a limited number of bytes, so that a node cannot fill memory.
#[derive(Default)]
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > LARGEST {
            let text = format!("it sends more than {LARGEST} bytes");
            return Err(std::io::Error::new(ErrorKind::FileTooLarge, text));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The running agent's pod of a node.
pub async fn pod_of(cluster: &Cluster, node: &str) -> Result<Pod> {
    let Listed { pods: found, within } = cluster.agents_pods(Some(node)).await?;
    match (pods::running(&found), found.first()) {
        (Some(pod), _) => Ok(pod.clone()),
        (None, Some(pod)) => bail!(
            "the agent's pod on node {node} is not running: {}",
            pods::not_running(pod).unwrap_or_default()
        ),
        (None, None) => bail!(
            "no agent pod (label {}{}) runs on node {node}: `kgctl status` lists the nodes, and says why a node has none",
            pods::LABEL,
            within.map(|namespace| format!(", namespace {namespace}: see --namespace")).unwrap_or_default()
        ),
    }
}

/// Starts a program in the agent's container of a pod.
pub async fn exec(cluster: &Cluster, pod: &Pod, words: &[&str]) -> Result<AttachedProcess> {
    let namespace = pod.namespace().unwrap_or_default();
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let names: Vec<_> = containers.map(|container| container.name.as_str()).collect();
    let container = if names.contains(&CONTAINER) { CONTAINER } else { names.first().unwrap_or(&CONTAINER) };
    let parameters = AttachParams::default().container(container).stdin(true).stdout(true).stderr(true);
    let name = pod.name_any();
    let asked = Asked::new("get and create", "pods/exec").within(&namespace);
    let started = cluster.ask(asked, async {
        match pods.exec(&name, words.iter().copied(), &parameters).await {
            // A refused protocol upgrade has no reason; the same request without the upgrade returns one.
            Err(refused @ kube::Error::UpgradeConnection(_)) => {
                let plain =
                    format!("/api/v1/namespaces/{namespace}/pods/{name}/exec?command=kgctl&stdout=true");
                let request = hyper::Request::get(plain).body(Vec::new()).map_err(kube::Error::HttpError)?;
                match cluster.client.request_text(request).await {
                    Err(kube::Error::Api(status)) if matches!(status.code, 401 | 403 | 404) => {
                        Err(kube::Error::Api(status))
                    }
                    _ => Err(refused),
                }
            }
            other => other,
        }
    });
    started.await.with_context(|| format!("failed to start {} in pod {name}", shortened(words)))
}

/// Copies a program's output until it ends, or this process is interrupted; returns whether it succeeded.
pub async fn follow(
    mut process: AttachedProcess,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<bool> {
    let mut stdin = process.stdin().context("the command has no standard input")?;
    let status = process.take_status().context("the command has no status")?;
    let (stdout, stderr) = (process.stdout(), process.stderr());
    let copies = async { tokio::try_join!(copy(stdout, out), copy(stderr, err)) };
    let mut copies = std::pin::pin!(copies);
    tokio::select! {
        copied = &mut copies => {
            copied?;
        }
        () = interrupted() => {
            // The command's last output is still copied.
            let _ = stdin.shutdown().await;
            drop(stdin);
            let _ = tokio::time::timeout(LAST_WORDS, copies).await;
            return Ok(true);
        }
    }
    let Some(status) = status.await else { bail!("the connection to the command broke") };
    match status.status.as_deref() {
        Some("Success") => Ok(true),
        // It has written the reason to its stderr.
        _ if status.reason.as_deref() == Some("NonZeroExitCode") => Ok(false),
        _ => bail!("{}", status.message.unwrap_or_else(|| "the command could not be run".to_owned())),
    }
}

/// Returns on SIGINT or SIGTERM.
pub async fn interrupted() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}

/// Copies until the end, or until the output is closed (`| head`).
async fn copy(from: Option<impl AsyncRead + Unpin>, to: &mut impl Write) -> std::io::Result<()> {
    let Some(mut from) = from else { return Ok(()) };
    let mut buffer = vec![0; 1 << 14];
    loop {
        let length = match io::AsyncReadExt::read(&mut from, &mut buffer).await {
            Ok(length) if length > 0 => length,
            _ => return Ok(()),
        };
        // Flushed at once: no more may come for a while.
        match to.write_all(&buffer[..length]).and_then(|()| to.flush()) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::FileTooLarge => return Err(error),
            Err(_) => return Ok(()),
        }
    }
}

/// Completes when standard input ends; never, if that is not wanted.
#[cfg(target_os = "linux")]
pub fn end_of_stdin(wanted: bool) -> tokio::sync::oneshot::Receiver<()> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    // Ends only with the process: a read of standard input cannot be cancelled.
    std::thread::spawn(move || {
        if wanted {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        } else {
            loop {
                std::thread::park();
            }
        }
        let _ = sender.send(());
    });
    receiver
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn what_a_node_sends_has_an_end() {
        let mut out = Bounded(vec![0; LARGEST - 2]);
        assert_eq!(out.write(&[1, 2]).unwrap(), 2);
        assert!(out.write(&[3]).is_err());
    }

    #[tokio::test]
    async fn a_command_that_writes_without_end_is_given_up_and_says_so() {
        let mut out = Bounded::default();
        let error = copy(Some(io::repeat(b'x')), &mut out).await.unwrap_err();
        assert_eq!(error.to_string(), "it sends more than 67108864 bytes");
        assert!(out.0.len() <= LARGEST);
        let line = shortened(&["kgctl", "probe", &"é".repeat(500)]);
        assert!(line.starts_with("kgctl probe é") && line.chars().count() == 121, "{line}");
    }

    fn given(line: &str) -> Result<Vec<String>> {
        let root = crate::Cli::command();
        let matches = root.clone().get_matches_from(line.split(' '));
        let (name, below) = matches.subcommand().unwrap();
        flags(root.find_subcommand(name).unwrap(), below)
    }

    #[test]
    fn flags_go_with_the_command_but_not_those_that_lead_to_the_node() {
        let line = "kgctl monitor --context=prod a1 -c 3 --reason too_big --reason no_hop --counters";
        let flags = given(line).unwrap();
        assert_eq!(
            flags,
            ["--reason=too_big", "--reason=no_hop", "--count=3", "--counters", "--until-stdin-ends"]
        );
        let line = "kgctl trace a1 --src fd00::1 --dst=fd00::2 -o json --kubeconfig=/a";
        assert_eq!(given(line).unwrap(), ["--src=fd00::1", "--dst=fd00::2", "--output=json"]);
        let line = "kgctl monitor a1 -n networking --counters";
        assert_eq!(given(line).unwrap(), ["--counters", "--until-stdin-ends"]);
        for flag in ["--context", "--namespace"] {
            let text = given(&format!("kgctl monitor {flag}=prod")).unwrap_err().to_string();
            assert!(text.starts_with(&format!("{flag} needs the name of a node")), "{text}");
        }
        assert!(given("kgctl monitor --counters").is_ok());
    }
}
