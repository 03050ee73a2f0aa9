//! One write of a slice.

use std::time::Duration;

use kilo_core::{
    errors::error_chain,
    objects::slices::{NodeSlice, NodeSliceSpec},
};
use kube::{
    Api, Client, Resource as _,
    api::{DeleteParams, PostParams, Preconditions},
};

use super::client::is_right_missing;

/// Timeout of a write, short enough for the Lease to be renewed in time.
const ANSWER: Duration = Duration::from_secs(4);

/// A slice as the API server has it now.
pub(super) struct Written {
    /// Its version; the one before, if it was deleted.
    pub version: u64,
    /// What the API server has kept of its content; `None`: it was deleted.
    pub kept: Option<NodeSliceSpec>,
}

/// Why a write failed.
pub(super) enum Failed {
    /// This account may not write slices: which right it lacks.
    Refused(String),
    /// Another attempt may succeed.
    Again {
        /// What went wrong.
        error: String,
        /// Nobody can say whether it was applied, and whether any other write would be answered.
        unanswered: bool,
    },
}

/// Writes or deletes a slice, if it is still at this version: another writer's content is not lost.
pub(super) async fn write(
    client: &Client,
    name: &str,
    version: Option<&String>,
    content: Option<NodeSliceSpec>,
) -> Result<Written, Failed> {
    let slices: Api<NodeSlice> = Api::all(client.clone());
    let parameters = PostParams { field_manager: Some("kilo".to_owned()), ..PostParams::default() };
    let request = async {
        let Some(spec) = content else {
            let preconditions = Preconditions { resource_version: version.cloned(), uid: None };
            let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            return slices.delete(name, &parameters).await.map(|_| None);
        };
        let mut slice = NodeSlice::new(name, spec);
        slice.meta_mut().resource_version = version.cloned();
        match version {
            Some(_) => slices.replace(name, &parameters, &slice).await.map(Some),
            None => slices.create(&parameters, &slice).await.map(Some),
        }
    };
    let again = |error, unanswered| Failed::Again { error, unanswered };
    let answer = tokio::time::timeout(ANSWER, request).await;
    let object = match answer.map_err(|_| again("no answer".to_owned(), true))? {
        Ok(object) => object,
        Err(kube::Error::Api(status)) if is_right_missing(&status) => {
            return Err(Failed::Refused(status.message));
        }
        Err(error) => {
            let answered = matches!(&error, kube::Error::Api(status) if status.code < 500);
            return Err(again(error_chain(&error), !answered));
        }
    };
    let number = |version: &String| version.parse().unwrap_or(0);
    let written = object.as_ref().and_then(|object| object.metadata.resource_version.as_ref());
    let version = written.or(version).map_or(0, number);
    Ok(Written { version, kept: object.map(|object| object.spec) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::kubernetes::test_server::{self, refusal};

    async fn refused(message: &'static str) -> Option<Failed> {
        let client = test_server::client(move |_| refusal(403, "Forbidden", message, "nodes-00000"));
        write(&client, "nodes-00000", None, Some(NodeSliceSpec::default())).await.err()
    }

    #[tokio::test]
    async fn a_slice_that_admission_refuses_is_tried_again_and_does_not_say_that_a_right_is_missing() {
        let lacks = "nodeslices is forbidden: User \"kilo\" cannot create resource \"nodeslices\"";
        assert!(matches!(refused(lacks).await, Some(Failed::Refused(which)) if which == lacks));
        let denied = refused("admission webhook \"w\" denied the request: too large").await;
        assert!(matches!(denied, Some(Failed::Again { unanswered: false, .. })));
    }
}
