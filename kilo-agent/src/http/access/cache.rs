//! What the API server has said of tokens, for a short time and for a bounded number. Tokens themselves are
//! not kept, only their digests.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};

use super::Finding;

/// A right that is taken away, or a token that ends, is noticed after this long.
const ALLOWED: Duration = Duration::from_secs(60);
/// A right that is given is noticed after this long.
const REFUSED: Duration = Duration::from_secs(5);
/// Answers that are kept.
const MOST: usize = 256;

/// SHA-256 of a secret.
pub type Secret = [u8; 32];

/// Of a token, or of a session's name.
pub fn digest(text: &str) -> Secret {
    Sha256::digest(text.as_bytes()).into()
}

/// An answer, and until when it counts.
type Known = (Finding, Instant);

/// Answers about tokens and paths.
#[derive(Debug, Default)]
pub struct Cache {
    known: Mutex<HashMap<(Secret, &'static str), Known>>,
}

impl Cache {
    /// What is known now.
    pub fn get(&self, token: &str, path: &'static str, now: Instant) -> Option<Finding> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (finding, until) = known.get(&(digest(token), path))?;
        (now < *until).then(|| finding.clone())
    }

    /// Keeps an answer, but not a review that failed. What ends first makes room.
    pub fn put(&self, token: &str, path: &'static str, finding: &Finding, now: Instant) {
        let lasts = match finding {
            Finding::Allowed => ALLOWED,
            Finding::Unknown | Finding::Forbidden(_) => REFUSED,
            Finding::Unanswered(_) => return,
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, (_, until)| now < *until);
        if known.len() >= MOST
            && let Some(first) = known.iter().min_by_key(|(_, (_, until))| *until).map(|(key, _)| *key)
        {
            known.remove(&first);
        }
        known.insert((digest(token), path), (finding.clone(), now + lasts));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_answers_is_bounded_and_what_is_allowed_outlives_guesses() {
        let (cache, now) = (Cache::default(), Instant::now());
        cache.put("good", "/", &Finding::Allowed, now);
        for guess in 0..2 * MOST {
            cache.put(&guess.to_string(), "/", &Finding::Unknown, now);
        }
        assert_eq!(cache.known.lock().map(|known| known.len()).ok(), Some(MOST));
        assert_eq!(cache.get("good", "/", now + ALLOWED / 2), Some(Finding::Allowed));
        assert_eq!(cache.get("good", "/status", now), None);
        assert_eq!(cache.get("good", "/", now + ALLOWED), None);
    }
}
