//! The other nodes' agents, as the API server sees them: each writes its heartbeat every 30 s.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::api::core::v1 as core;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::objects;

const PERIOD: Duration = Duration::from_secs(30);
/// Requests in flight at a time.
const WORKERS: usize = 8;

pub fn unix_now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
}

/// Writes heartbeats until dropped.
pub struct CheckIns {
    written: Arc<AtomicU64>,
    running: Arc<AtomicBool>,
    workers: Vec<tokio::task::JoinHandle<()>>,
}

impl CheckIns {
    /// For all nodes but the agent's own, number 0.
    pub fn start(client: &Client, nodes: usize) -> Self {
        let written = Arc::new(AtomicU64::new(0));
        let running = Arc::new(AtomicBool::new(true));
        let workers = (0..WORKERS).map(|worker| {
            let (written, running) = (Arc::clone(&written), Arc::clone(&running));
            let api: Api<core::Node> = Api::all(client.clone());
            tokio::spawn(async move {
                let mine: Vec<usize> = (1..nodes).filter(|number| number % WORKERS == worker).collect();
                let mut pace = tokio::time::interval(PERIOD / mine.len() as u32);
                for number in mine.iter().cycle() {
                    pace.tick().await;
                    while !running.load(Ordering::Relaxed) {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    let patch = json!({"metadata": {"annotations": {
                        "kilo.squat.ai/last-seen": unix_now().to_string()
                    }}});
                    let parameters =
                        PatchParams { field_manager: Some("kilo".to_owned()), ..PatchParams::default() };
                    let patched =
                        api.patch_metadata(&objects::name(*number), &parameters, &Patch::Merge(&patch)).await;
                    patched.unwrap();
                    written.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        Self { workers: workers.collect(), written, running }
    }

    /// Number of heartbeats written.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Pauses (false) or continues (true).
    pub fn set(&self, running: bool) {
        self.running.store(running, Ordering::Relaxed);
    }
}

impl Drop for CheckIns {
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.abort();
        }
    }
}
