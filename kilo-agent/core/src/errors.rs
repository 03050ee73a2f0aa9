//! Errors as operators read them: one line that says each cause once.
//!
//! An error's own text is complete: what failed, why, and what to do about it. Its `source()` is for code
//! that looks for an errno or a status; a log line needs the text alone.

use std::{error::Error, fmt::Display};

/// A cause of any type, where errors of different libraries meet.
pub type Cause = Box<dyn Error + Send + Sync>;

/// An error in the operator's words, with what caused it.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Explained {
    text: String,
    #[source]
    cause: Option<Cause>,
}

impl Explained {
    /// An error whose `text` says all that an operator needs to know about `cause`.
    pub fn of(text: impl Into<String>, cause: impl Into<Cause>) -> Self {
        Self { text: text.into(), cause: Some(cause.into()) }
    }

    /// An error that says what failed, followed by the causes in their own words.
    pub fn behind(what: impl Display, cause: impl Into<Cause>) -> Self {
        let cause = cause.into();
        Self::of(format!("{what}: {}", error_chain(&*cause)), cause)
    }
}

/// An error without a cause.
impl From<String> for Explained {
    fn from(text: String) -> Self {
        Self { text, cause: None }
    }
}

impl From<&str> for Explained {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

/// An error with its causes, each said once. The chain ends at an [`Explained`], whose text names its cause.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut last = error;
    while let Some(cause) = last.source().filter(|_| !last.is::<Explained>()) {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        last = cause;
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Layer {
        #[error("reading: {0}")]
        Repeats(#[source] io::Error),
        #[error("reading failed")]
        Hides(#[source] io::Error),
        #[error("{0}")]
        Explains(#[source] Explained),
    }

    fn denied() -> io::Error {
        io::ErrorKind::PermissionDenied.into()
    }

    #[test]
    fn each_cause_is_said_once_and_none_behind_an_explanation() {
        for (error, said) in [
            (Layer::Repeats(denied()), "reading: permission denied"),
            (Layer::Hides(denied()), "reading failed: permission denied"),
            (Layer::Explains(Explained::of("run as root", denied())), "run as root"),
            (
                Layer::Explains(Explained::behind("kubeconfig", Layer::Hides(denied()))),
                "kubeconfig: reading failed: permission denied",
            ),
            (Layer::Explains("no pod".into()), "no pod"),
        ] {
            assert_eq!(error_chain(&error), said);
        }
    }
}
