//! Metrics of the webhook, under the same names as Kilo's.

use std::{fmt, sync::Arc};

use hyper::Method;
use kube::core::admission::Operation;
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReviewLabels {
    operation: &'static str,
    response: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    handler: &'static str,
    method: &'static str,
}

/// Handles of all metrics; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    reviews: Family<ReviewLabels, Counter>,
    requests: Family<RequestLabels, Counter>,
    /// `errors_total`: invalid requests, and unusable certificates.
    pub errors: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let (reviews, requests, errors) = (Family::default(), Family::default(), Counter::default());
        let mut registry = Registry::default();
        registry.register(
            "admission_requests",
            "Peers reviewed, by operation and response",
            Family::clone(&reviews),
        );
        registry.register("http_requests", "HTTP requests, by handler and method", Family::clone(&requests));
        registry.register(
            "errors",
            "Invalid requests, and certificates that cannot be used",
            Counter::clone(&errors),
        );
        Self { registry: Arc::new(registry), reviews, requests, errors }
    }
}

impl Metrics {
    /// Counts one decision.
    pub fn review(&self, operation: &Operation, allowed: bool) {
        let operation = match operation {
            Operation::Create => "CREATE",
            Operation::Update => "UPDATE",
            Operation::Delete => "DELETE",
            Operation::Connect => "CONNECT",
        };
        let response = if allowed { "allowed" } else { "denied" };
        self.reviews.get_or_create(&ReviewLabels { operation, response }).inc();
    }

    /// Counts one request; unknown methods share a label, so that clients cannot create labels.
    pub fn request(&self, handler: &'static str, method: &Method) {
        let method = match *method {
            Method::GET => "GET",
            Method::HEAD => "HEAD",
            Method::POST => "POST",
            Method::PUT => "PUT",
            Method::DELETE => "DELETE",
            _ => "other",
        };
        self.requests.get_or_create(&RequestLabels { handler, method }).inc();
    }

    /// Encodes all metrics as OpenMetrics text.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
