//! A container runtime's side of CNI: runs the plugins of a configuration list
//! for one pod, each with the result of the one before it.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

/// Where Debian's package containernetworking-plugins puts the plugins.
pub const PLUGINS: &str = "/usr/lib/cni";

/// The pod an interface `eth0` is made for.
#[derive(Clone, Copy, Debug)]
pub struct Pod<'a> {
    /// Name of the container.
    pub id: &'a str,
    /// Path of its network namespace, as the plugins see it.
    pub netns: &'a str,
    /// Host ports, as in `[{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]`.
    pub port_mappings: &'a [Value],
}

/// Connects the pod; returns the result of the last plugin. `command` makes a
/// command that runs where the node is.
///
/// # Errors
/// When a plugin fails, with its output.
pub fn add(list: &str, pod: Pod<'_>, command: impl Fn(&Path) -> Command) -> Result<Value> {
    let list: Value = serde_json::from_str(list).context("CNI configuration list")?;
    let mut result = Value::Null;
    for plugin in plugins(&list) {
        let answer = run("ADD", &list, plugin, pod, &result, &command)?;
        result = serde_json::from_str(&answer).with_context(|| answer.clone())?;
    }
    Ok(result)
}

/// Disconnects the pod, in reverse order. `result` is what [`add`] returned.
///
/// # Errors
/// When a plugin fails, with its output.
pub fn delete(list: &str, pod: Pod<'_>, result: &Value, command: impl Fn(&Path) -> Command) -> Result<()> {
    let list: Value = serde_json::from_str(list).context("CNI configuration list")?;
    for plugin in plugins(&list).iter().rev() {
        run("DEL", &list, plugin, pod, result, &command)?;
    }
    Ok(())
}

fn plugins(list: &Value) -> &[Value] {
    list["plugins"].as_array().map_or(&[], Vec::as_slice)
}

fn run(
    verb: &str,
    list: &Value,
    plugin: &Value,
    pod: Pod<'_>,
    previous: &Value,
    command: impl Fn(&Path) -> Command,
) -> Result<String> {
    let mut config = plugin.clone();
    config["name"] = list["name"].clone();
    config["cniVersion"] = list["cniVersion"].clone();
    if !previous.is_null() {
        config["prevResult"] = previous.clone();
    }
    if plugin["capabilities"]["portMappings"] == true && !pod.port_mappings.is_empty() {
        config["runtimeConfig"] = json!({ "portMappings": pod.port_mappings });
    }
    let program = plugin["type"].as_str().context("a plugin without a type")?;
    let mut child = command(&Path::new(PLUGINS).join(program))
        .env("CNI_COMMAND", verb)
        .env("CNI_CONTAINERID", pod.id)
        .env("CNI_NETNS", pod.netns)
        .env("CNI_IFNAME", "eth0")
        .env("CNI_PATH", PLUGINS)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{program}: install containernetworking-plugins"))?;
    // Dropped at the end of the statement: the plugin reads to the end.
    child.stdin.take().context("no standard input")?.write_all(config.to_string().as_bytes())?;
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{program} {verb} {}: {said} {}", pod.id, String::from_utf8_lossy(&output.stderr));
    }
    Ok(said)
}
