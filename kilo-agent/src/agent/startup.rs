//! What an agent starts before the nodes are known.

use std::path::Path;

use tokio::task::JoinHandle;

use super::{AgentError, Options};
use crate::resolve::Resolver;
use kilo_core::settings::{AttachMode, Masquerade};
use kilo_host::{
    dataplane::{self, Dataplane},
    lock::{self, Lock},
};

/// What starts before the nodes are known: see [`begin`].
pub struct Startup {
    resolver: Resolver,
    /// The task that is loading the programs.
    loading: Option<JoinHandle<Result<(Dataplane, Lock), AgentError>>>,
    /// The loaded programs.
    loaded: Option<(Dataplane, Lock)>,
}

impl Startup {
    /// Waits for the programs that are being loaded and checks for other required kernel features.
    ///
    /// # Errors
    /// When a program fails to load or a feature is missing.
    pub async fn prepare(mut self, options: &Options) -> Result<Self, AgentError> {
        if options.masquerade == Masquerade::Ebpf {
            dataplane::realtime::check()?;
        }
        if let Some(loading) = self.loading.take() {
            self.loaded = loading.await.ok().transpose()?;
        }
        Ok(self)
    }

    /// The resolved names, and the data path with its lock: as loaded, or opened now.
    pub(super) async fn finish(self, options: &Options) -> Result<(Resolver, Dataplane, Lock), AgentError> {
        let Self { resolver, loaded, .. } = self.prepare(options).await?;
        let (dataplane, pins) = match loaded {
            Some(loaded) => loaded,
            None => open(&options.bpffs, options.debug, options.attach)?,
        };
        Ok((resolver, dataplane, pins))
    }
}

/// Starts what depends on this host only, so that it overlaps with listing the nodes: resolves this node's
/// name, and loads the programs where an earlier agent left some or where `prepared` asks for it. Otherwise
/// nothing is created before the backend has answered.
pub fn begin(options: &Options, prepared: bool) -> Startup {
    let mut resolver = Resolver::default();
    resolver.ask_own(&options.hostname);
    let early = prepared || dataplane::top_directory(&options.bpffs).exists();
    let (bpffs, debug, attach) = (options.bpffs.clone(), options.debug, options.attach);
    let load = move || open(&bpffs, debug, attach);
    Startup { resolver, loading: early.then(|| tokio::task::spawn_blocking(load)), loaded: None }
}

/// Opens the data path, holding the lock that keeps other agents from its programs and maps.
fn open(bpffs: &Path, debug: bool, attach: AttachMode) -> Result<(Dataplane, Lock), AgentError> {
    dataplane::make_top_directory(bpffs)?;
    let pins = lock::pins(&dataplane::top_directory(bpffs))?;
    Ok((Dataplane::open_with(bpffs, debug, attach)?, pins))
}
