//! Caches the API server's answers about tokens, for a short time and in limited number. Only digests of
//! tokens are stored.

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

use super::Finding;

/// How long an acceptance counts, until a revoked right or an expired token is noticed.
const ALLOWED: Duration = Duration::from_secs(60);
/// How long a refusal counts, until a granted right is noticed.
const REFUSED: Duration = Duration::from_secs(5);
/// Maximum number of cached answers.
const MOST: usize = 256;
/// Maximum number of tokens remembered as accepted. Reviewing all of them and each path once a minute stays
/// within the budget of a [`Reviewer`](super::Reviewer) for known tokens.
const MOST_GOOD: usize = 256;

/// SHA-256 of a secret.
pub type Secret = [u8; 32];

/// Digest of a token, or of a session's name.
pub fn digest(text: &str) -> Secret {
    Sha256::digest(text.as_bytes()).into()
}

/// An answer, and when it expires.
type CachedAnswer = (Finding, Instant);

/// Cached answers about tokens and paths.
#[derive(Debug, Default)]
pub struct Cache {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    answers: HashMap<(Secret, &'static str), CachedAnswer>,
    /// Tokens that were allowed something and have not been unknown since, and when they were last allowed.
    good: HashMap<Secret, Instant>,
}

impl Cache {
    /// The cached answer, unless it has expired.
    pub fn get(&self, token: &str, path: &'static str, now: Instant) -> Option<Finding> {
        let kept = self.kept.lock();
        let (finding, until) = kept.answers.get(&(digest(token), path))?;
        (now < *until).then(|| finding.clone())
    }

    /// Whether the API server has ever allowed this token something, and has not called it unknown since. A
    /// forbidden path does not matter.
    pub fn was_good(&self, token: &str) -> bool {
        let kept = self.kept.lock();
        kept.good.contains_key(&digest(token))
    }

    /// Caches an answer, but not a failed review. The entry that expires first makes room.
    pub fn put(&self, token: &str, path: &'static str, finding: &Finding, now: Instant) {
        let lasts = match finding {
            Finding::Allowed => ALLOWED,
            Finding::Unknown | Finding::Forbidden(_) => REFUSED,
            Finding::Unanswered(_) => return,
        };
        let token = digest(token);
        let mut kept = self.kept.lock();
        let Kept { answers, good } = &mut *kept;
        match finding {
            Finding::Allowed => {
                good.insert(token, now);
                make_room(good, MOST_GOOD, |said| *said);
            }
            // An expired token is no longer valid for any path.
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

/// Removes the earliest entry if there are too many.
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
        assert_eq!(cache.kept.lock().answers.len(), MOST);
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
        assert_eq!(cache.kept.lock().good.len(), MOST_GOOD);
    }
}
