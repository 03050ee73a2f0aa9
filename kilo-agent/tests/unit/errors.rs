//! Errors keep their cause, and mention it once.

use std::{collections::BTreeSet, error::Error, fs, io, iter, path::Path};

use aya::{maps::MapError, sys::SyscallError};
use kilo_agent::{
    agent::AgentError,
    backend::{BackendError, kubernetes::SuccessorError, last_good::LastGoodError},
    status::ask::AskError,
    webhook::{CertificateError, SecretError, WebhookError},
};
use kilo_core::errors::{Explained, error_chain};
use kilo_host::{
    cni::CniError,
    dataplane::DataplaneError,
    firewall::{forward::ForwardError, nat_rules::NatRulesError},
    lock::LockError,
    net::{NetError, Refused},
    wireguard::WireguardError,
};

fn cause() -> io::Error {
    io::Error::other("so the kernel says")
}

fn api() -> kube::Error {
    kube::Error::ReadEvents(cause())
}

fn explained() -> Explained {
    Explained::behind("the API server is unreachable", api())
}

/// An error, with the name of its enum and variant.
struct Row(String, Box<dyn Error>);

fn row<E: Error + 'static>(error: E) -> Row {
    let kind = std::any::type_name::<E>().rsplit("::").next().unwrap();
    let debug = format!("{error:?}");
    let variant = debug.split([' ', '(', '{']).next().unwrap();
    Row(format!("{kind}::{variant}"), error.into())
}

/// One of every variant that has a cause.
fn table() -> Vec<Row> {
    let (name, path) = (|| "a".to_owned(), || "/a".into());
    let refused = || Refused { what: name(), source: cause() };
    let call = SyscallError { call: "bpf_map_update_elem", io_error: cause() };
    vec![
        row(NetError::Socket(cause())),
        row(NetError::Kernel { what: name(), source: cause() }),
        row(NetError::Refused { writes: 1, first: refused(), others: Vec::new() }),
        row(NetError::Sysctl { path: "/a", source: cause() }),
        row(WireguardError::NoSocket { name: name(), socket: path(), source: cause() }),
        row(WireguardError::NoKernelSupport(cause())),
        row(WireguardError::NoWireguard {
            kernel: cause(),
            userspace: WireguardError::AlreadyRunning(name()).into(),
        }),
        row(WireguardError::NotStarted { name: name(), source: cause().into(), log: Some(path()) }),
        row(WireguardError::Tun { name: name(), source: cause().into() }),
        row(WireguardError::Device { what: name(), source: cause() }),
        row(WireguardError::KeyFile { path: path(), source: cause() }),
        row(WireguardError::Net(NetError::Socket(cause()))),
        row(DataplaneError::Bpffs { path: path(), source: cause() }),
        row(DataplaneError::Pin { path: path(), source: cause() }),
        row(DataplaneError::Load(api().into())),
        row(DataplaneError::Attach { ifindex: 1, program: "a", source: api().into() }),
        row(DataplaneError::Query { interface: name(), program: "a", source: cause() }),
        row(DataplaneError::List(NetError::Socket(cause()))),
        row(DataplaneError::Map(MapError::SyscallError(call))),
        row(DataplaneError::Run { source: cause() }),
        row(DataplaneError::Sweep(cause())),
        row(LockError::Refused { path: path(), source: cause() }),
        row(ForwardError::Program { program: name(), source: cause() }),
        row(NatRulesError::Program(cause())),
        row(CniError::Io(name(), cause())),
        row(CniError::Invalid(name(), cause().into())),
        row(BackendError::Io { path: name(), source: cause() }),
        row(BackendError::Api(explained())),
        row(BackendError::Unreachable(explained())),
        row(BackendError::Config(explained())),
        row(SuccessorError::Forbidden(api().into())),
        row(SuccessorError::Api(api().into())),
        row(LastGoodError::Io(cause())),
        row(AskError::Url { url: name(), source: cause().into() }),
        row(AskError::Unreachable { url: name(), source: api().into() }),
        row(AskError::Answer { url: name(), source: cause().into() }),
        row(AskError::Api(api().into())),
        row(AgentError::Backend(BackendError::Api(explained()))),
        row(AgentError::Net(NetError::Socket(cause()))),
        row(AgentError::Wireguard(WireguardError::NoKernelSupport(cause()))),
        row(AgentError::Dataplane(DataplaneError::Sweep(cause()))),
        row(AgentError::Lock(LockError::Refused { path: path(), source: cause() })),
        row(AgentError::Several {
            first: AgentError::Net(NetError::Socket(cause())).into(),
            others: vec![AgentError::Net(NetError::NoAddress)],
        }),
        row(CertificateError::Read { path: path(), source: cause() }),
        row(CertificateError::Pem { path: path(), what: "certificate", source: cause().into() }),
        row(CertificateError::Pair {
            certificate: path(),
            key: path(),
            source: rustls::Error::General(name()),
        }),
        row(SecretError::Api { what: name(), source: api() }),
        row(SecretError::Issue(rcgen::Error::KeyGenerationUnavailable)),
        row(WebhookError::Certificate(CertificateError::Read { path: path(), source: cause() })),
        row(WebhookError::Secret(SecretError::Api { what: name(), source: api() })),
        row(WebhookError::Backend(BackendError::Api(explained()))),
        row(WebhookError::Tls(rustls::Error::HandshakeNotComplete)),
        row(WebhookError::Listen { address: ([192, 0, 2, 1], 443).into(), source: cause() }),
    ]
}

/// Causes of an error, nearest first.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(error.source(), |error| (*error).source())
}

#[test]
fn what_caused_an_error_is_kept_and_said_once() {
    for Row(name, error) in table() {
        assert!(error.source().is_some(), "{name} has lost what caused it");
        let text = error.to_string();
        assert_eq!(error_chain(&*error), text, "{name} says less than its causes");
        let root = causes(&*error).last().unwrap().to_string();
        assert_eq!(text.matches(&root).count(), 1, "{name}: {text}");
    }
}

#[test]
fn the_errno_behind_a_refusal_is_found() {
    let first = Refused { what: "a".to_owned(), source: io::Error::from_raw_os_error(nix::libc::EEXIST) };
    let error = NetError::Refused { writes: 0, first, others: Vec::new() };
    let error = AgentError::Several { first: AgentError::Net(error).into(), others: Vec::new() };
    let errnos = causes(&error).filter_map(|error| error.downcast_ref::<io::Error>()?.raw_os_error());
    assert_eq!(errnos.collect::<Vec<_>>(), [nix::libc::EEXIST]);
}

/// Collects every variant that contains another error, from all public error enums below the directory.
fn variants_with_a_cause(directory: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            variants_with_a_cause(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            for part in text.split("\npub enum ").skip(1) {
                let (kind, body) = part.split_once(" {\n").unwrap();
                let body = body.split("\n}").next().unwrap();
                if kind.ends_with("Error") {
                    found.extend(made_of_errors(body).map(|variant| format!("{kind}::{variant}")));
                }
            }
        }
    }
}

fn made_of_errors(body: &str) -> impl Iterator<Item = &str> {
    let mut variant = "";
    body.lines().filter_map(move |line| {
        let code = line.trim();
        if line.starts_with("    ") && line.as_bytes().get(4).is_some_and(u8::is_ascii_uppercase) {
            variant = code.split(['(', ' ', ',']).next().unwrap_or_default();
        }
        let types = code.split_once(['(', ':']).map_or("", |(_, types)| types);
        let holds =
            ["Error", "Cause", "Explained", "Box<Self>", "Refused"].iter().any(|kind| types.contains(kind));
        (holds && !code.starts_with(['/', '#', '"'])).then_some(variant)
    })
}

#[test]
fn the_table_has_every_variant_that_is_made_of_another_error() {
    let mut found = BTreeSet::new();
    for directory in ["src", "host/src", "core/src", "failover/src"] {
        variants_with_a_cause(&Path::new(env!("CARGO_MANIFEST_DIR")).join(directory), &mut found);
    }
    let table: BTreeSet<_> = table().into_iter().map(|Row(name, _)| name).collect();
    assert_eq!(found, table);
}
