//! What the API server has answered about tokens, kept for a short time and for a bounded number. Tokens
//! themselves are not kept, only their digests.

use std::{
    collections::HashMap,
    hash::Hash,
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
/// How many tokens are remembered as accepted. Asking about all of them and each path once a minute is
/// within what a [`Reviewer`](super::Reviewer) asks about known tokens.
const MOST_GOOD: usize = 256;

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
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    answers: HashMap<(Secret, &'static str), Known>,
    /// Tokens that were allowed something since they were last unknown, and when that was last.
    good: HashMap<Secret, Instant>,
}

impl Cache {
    /// What is known now.
    pub fn get(&self, token: &str, path: &'static str, now: Instant) -> Option<Finding> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (finding, until) = kept.answers.get(&(digest(token), path))?;
        (now < *until).then(|| finding.clone())
    }

    /// Whether the API server has allowed this token something, however long ago, and has not disowned it since.
    pub fn was_good(&self, token: &str) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.good.contains_key(&digest(token))
    }

    /// Keeps an answer, but not a review that failed. What ends first makes room.
    pub fn put(&self, token: &str, path: &'static str, finding: &Finding, now: Instant) {
        let lasts = match finding {
            Finding::Allowed => ALLOWED,
            Finding::Unknown | Finding::Forbidden(_) => REFUSED,
            Finding::Unanswered(_) => return,
        };
        let token = digest(token);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Kept { answers, good } = &mut *kept;
        match finding {
            Finding::Allowed => {
                good.insert(token, now);
                make_room(good, MOST_GOOD, |said| *said);
            }
            // A token that has ended is good for no path any more.
            Finding::Unknown if good.remove(&token).is_some() => {
                answers.retain(|(whose, _), _| *whose != token);
            }
            _ => {}
        }
        answers.retain(|_, (_, until)| now < *until);
        answers.insert((token, path), (finding.clone(), now + lasts));
        make_room(answers, MOST, |(_, until)| *until);
    }
}

/// Removes the earliest entry when there is one too many.
fn make_room<K: Copy + Eq + Hash, V>(map: &mut HashMap<K, V>, most: usize, time: impl Fn(&V) -> Instant) {
    if map.len() > most
        && let Some(first) = map.iter().min_by_key(|(_, value)| time(value)).map(|(key, _)| *key)
    {
        map.remove(&first);
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
        assert_eq!(cache.kept.lock().map(|kept| kept.answers.len()).ok(), Some(MOST));
        assert_eq!(cache.get("good", "/", now + ALLOWED / 2), Some(Finding::Allowed));
        assert_eq!(cache.get("good", "/status", now), None);
        assert_eq!(cache.get("good", "/", now + ALLOWED), None);
    }

    #[test]
    fn a_token_stays_known_until_it_ends_and_their_number_is_bounded() {
        let (cache, now) = (Cache::default(), Instant::now());
        for path in ["/", "/status"] {
            cache.put("good", path, &Finding::Allowed, now);
        }
        cache.put("good", "/graph", &Finding::Forbidden("ana".to_owned()), now);
        cache.put("stranger", "/", &Finding::Unknown, now);
        assert!(cache.was_good("good") && !cache.was_good("stranger"));
        cache.put("good", "/events", &Finding::Unknown, now);
        assert!(!cache.was_good("good"));
        assert_eq!(cache.get("good", "/", now), None, "it has ended for all paths");
        for number in 0..2 * MOST_GOOD as u64 {
            cache.put(&number.to_string(), "/", &Finding::Allowed, now + Duration::from_millis(number));
        }
        assert!(!cache.was_good("0") && cache.was_good(&(2 * MOST_GOOD - 1).to_string()));
        assert_eq!(cache.kept.lock().map(|kept| kept.good.len()).ok(), Some(MOST_GOOD));
    }
}
