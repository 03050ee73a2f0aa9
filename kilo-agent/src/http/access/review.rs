//! Asks the API server about a token.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, UserInfo},
    authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use kilo_core::errors::error_chain;
use kube::{Api, Client, api::PostParams};
use parking_lot::Mutex;
use tokio::time::timeout;

/// Timeout for an answer of the API server.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of reviews of strangers' tokens per [`WHILE`], so that they cannot make an agent flood its
/// API server. Known tokens have a separate budget of the same size, so that strangers do not hold them up.
const MOST: usize = 20;
const WHILE: Duration = Duration::from_secs(1);

/// The result for a token and a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The token's owner may see the path.
    Allowed,
    /// The API server does not know the token.
    Unknown,
    /// The token's owner, with this name, may not see the path.
    Forbidden(String),
    /// The API server has not answered, with the reason.
    Unanswered(String),
}

type PendingReview = Pin<Box<dyn Future<Output = Finding> + Send>>;

/// Whether this agent knows a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The API server has allowed it something before.
    Known,
    /// Any other token.
    Stranger,
}

/// Asks the API server about tokens, at a limited rate.
pub struct Reviewer {
    ask: Arc<dyn Fn(String, &'static str) -> PendingReview + Send + Sync>,
    known: Budget,
    strangers: Budget,
}

/// Times of recent reviews.
#[derive(Default)]
struct Budget(Mutex<VecDeque<Instant>>);

impl Budget {
    /// Takes one review from the budget; false if it is used up.
    fn spend(&self, now: Instant) -> bool {
        let mut asked = self.0.lock();
        asked.retain(|then| now.saturating_duration_since(*then) < WHILE);
        let may = asked.len() < MOST;
        if may {
            asked.push_back(now);
        }
        may
    }
}

impl fmt::Debug for Reviewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reviewer").finish_non_exhaustive()
    }
}

impl Reviewer {
    /// Creates a reviewer that calls `ask` with a token and a path.
    pub fn new<F>(ask: impl Fn(String, &'static str) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Finding> + Send + 'static,
    {
        let ask: Arc<dyn Fn(String, &'static str) -> PendingReview + Send + Sync> =
            Arc::new(move |token, path| Box::pin(ask(token, path)));
        Self { ask, known: Budget::default(), strangers: Budget::default() }
    }

    /// Reviews a token; [`Finding::Unanswered`] if the budget is used up or no answer comes in time.
    pub async fn review(&self, token: &str, path: &'static str, whose: Whose, now: Instant) -> Finding {
        let budget = match whose {
            Whose::Known => &self.known,
            Whose::Stranger => &self.strangers,
        };
        if !budget.spend(now) {
            return Finding::Unanswered(
                "too many tokens are being presented to this agent; try again in a second".to_owned(),
            );
        }
        let answer = timeout(PATIENCE, (self.ask)(token.to_owned(), path)).await;
        answer.unwrap_or_else(|_| Finding::Unanswered(format!("no answer within {} s", PATIENCE.as_secs())))
    }
}

/// Creates a reviewer with this client, which needs the rights of the ClusterRole `system:auth-delegator`.
pub fn through_api(client: Client) -> Reviewer {
    Reviewer::new(move |token, path| {
        let client = client.clone();
        async move {
            ask(client, token, path).await.unwrap_or_else(|error| {
                let why = error_chain(&error);
                tracing::warn!(error = why, "failed to ask the API server about a token (TokenReview)");
                Finding::Unanswered(why)
            })
        }
    })
}

async fn ask(client: Client, token: String, path: &'static str) -> kube::Result<Finding> {
    let spec = TokenReviewSpec { token: Some(token), ..TokenReviewSpec::default() };
    let reviews = Api::<TokenReview>::all(client.clone());
    let review =
        reviews.create(&PostParams::default(), &TokenReview { spec, ..TokenReview::default() }).await?;
    let status = review.status.unwrap_or_default();
    let Some(user) = status.user.filter(|_| status.authenticated == Some(true)) else {
        return Ok(Finding::Unknown);
    };
    let name = user.username.clone().unwrap_or_default();
    let review = SubjectAccessReview { spec: access(user, path), ..SubjectAccessReview::default() };
    let reviews = Api::<SubjectAccessReview>::all(client);
    let review = reviews.create(&PostParams::default(), &review).await?;
    let status = review.status.unwrap_or_default();
    Ok(if status.allowed && status.denied != Some(true) {
        Finding::Allowed
    } else {
        Finding::Forbidden(name)
    })
}

fn access(user: UserInfo, path: &str) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        user: user.username,
        uid: user.uid,
        groups: user.groups,
        extra: user.extra,
        non_resource_attributes: Some(NonResourceAttributes {
            path: Some(path.to_owned()),
            verb: Some("get".to_owned()),
        }),
        ..SubjectAccessReviewSpec::default()
    }
}
