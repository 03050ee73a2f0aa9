//! Browsers that have presented a token. They keep only the name of a session, which is valid at this agent
//! alone: a cookie goes to every port of a host, where a token might be useful to others.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use hyper::header::{COOKIE, HeaderMap};
use parking_lot::Mutex;

use super::cache::{Secret, digest};

/// Name of the cookie.
const NAME: &str = "kilo-session";
/// A browser must present its token again after this long.
const LASTS: Duration = Duration::from_secs(12 * 3600);
/// Maximum number of sessions; the oldest makes room.
const MOST: usize = 64;

/// Sessions with their tokens, which are reviewed repeatedly.
#[derive(Debug, Default)]
pub struct Sessions {
    open: Mutex<HashMap<Secret, (String, Instant)>>,
}

impl Sessions {
    /// Begins a session; returns the value for its cookie.
    pub fn begin(&self, token: String, now: Instant) -> String {
        let name: String = rand::random::<[u8; 16]>().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut open = self.open.lock();
        open.retain(|_, (_, until)| now < *until);
        if open.len() >= MOST
            && let Some(oldest) = open.iter().min_by_key(|(_, (_, until))| *until).map(|(key, _)| *key)
        {
            open.remove(&oldest);
        }
        open.insert(digest(&name), (token, now + LASTS));
        format!("{NAME}={name}")
    }

    /// The token of the session in a request's cookies, unless it has expired.
    pub fn token(&self, headers: &HeaderMap, now: Instant) -> Option<String> {
        let cookies = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
        let pairs = cookies.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
        let open = self.open.lock();
        let mut found = pairs.filter(|(name, _)| *name == NAME).filter_map(|(_, it)| open.get(&digest(it)));
        found.find(|(_, until)| now < *until).map(|(token, _)| token.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_sessions_is_bounded() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        (0..2 * MOST).for_each(|_| drop(sessions.begin("token".to_owned(), now)));
        assert_eq!(sessions.open.lock().len(), MOST);
    }
}
