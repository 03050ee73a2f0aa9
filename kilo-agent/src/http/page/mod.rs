//! The page at `/`, which shows an operator the mesh and its health. `/status` has the same data as JSON,
//! `/events` as server-sent events.

mod events;
mod feed;
mod files;
mod html;
mod report;

use std::sync::Arc;

use hyper::StatusCode;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

pub use events::MOST_LISTENERS;
pub use feed::Feed;
pub use files::is_file;
pub use report::{DropHelp, Report, Verdict};

use super::{Answer, respond, text};

/// Scripts, styles and data come only from this agent, and nothing inline is allowed.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page, its files and its data.
#[derive(Clone, Debug)]
pub struct Page {
    feed: Feed,
    listeners: Arc<Semaphore>,
}

impl Page {
    /// Creates the page from the reports of `feed`.
    pub fn new(feed: Feed) -> Self {
        Self { feed, listeners: Arc::new(Semaphore::new(MOST_LISTENERS)) }
    }

    /// `/`: the page with its content rendered for use without scripts.
    pub async fn html(&self) -> Answer {
        match html::html(&self.feed.report().await) {
            Ok(page) => super::html(StatusCode::OK, POLICY, page),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}\n")),
        }
    }

    /// `/status`: the report as JSON.
    pub async fn status(&self) -> Answer {
        match serde_json::to_vec_pretty(&self.feed.report().await) {
            Ok(body) => respond(StatusCode::OK, "application/json", body),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        }
    }

    /// `/events`: a stream that ends with `closing`.
    pub fn events(&self, closing: CancellationToken) -> Answer {
        events::answer(self.feed.clone(), &self.listeners, closing)
    }

    /// The page's file at this path.
    pub fn file(path: &str) -> Option<Answer> {
        files::answer(path)
    }
}
