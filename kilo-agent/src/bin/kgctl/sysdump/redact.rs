//! Removes what must not leave a cluster: private and pre-shared keys, tokens, passwords. Plain text and
//! values, without I/O.

use std::{collections::BTreeSet, sync::LazyLock};

use regex::{Captures, Regex};
use serde_json::Value;

/// Replacement for a secret.
pub const REMOVED: &str = "<removed>";

/// Prefix of our annotations; others may hold anything, for example a whole Peer with its pre-shared key.
const OUR_ANNOTATIONS: &str = "kilo.squat.ai/";

/// Names of secret fields of objects, in lower case without punctuation.
const SECRET_FIELDS: [&str; 9] = [
    "presharedkey",
    "privatekey",
    "token",
    "password",
    "passwd",
    "secret",
    "clientkeydata",
    "apikey",
    "bearer",
];

#[allow(clippy::expect_used, reason = "the patterns are constants, which a test compiles")]
fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("a valid pattern")
}

/// 32 bytes or more in base64, like WireGuard's keys: private, pre-shared and public ones look alike.
static BASE64_KEY: LazyLock<Regex> = LazyLock::new(|| pattern(r"[A-Za-z0-9+/]{42,}={1,2}"));
/// 32 bytes in hexadecimal, as in the configuration protocol of a userspace WireGuard process.
static HEX_KEY: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?P<before>\S*?)\b(?P<key>[0-9a-fA-F]{64})\b"));
/// Names of secrets; `=` or `:` follows.
const NAME: &str = r"(?i)\b([a-z0-9_-]*(?:(?:preshared|private|pre-shared|secret|api|client)[_-]?key(?:-data)?|psk|password|passwd|token|secret))";
/// Tokens of service accounts, of `kubeadm join` and k3s, and in headers; passwords in URLs; PEM;
/// `name=value`, where the value ends with its quotes, even in JSON inside a string.
static OTHERS: LazyLock<[(Regex, &str); 9]> = LazyLock::new(|| {
    let named = |rest: &str| (pattern(&format!("{NAME}{rest}")), "$1$2<removed>");
    [
        (pattern(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)"), REMOVED),
        (pattern(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]*)?"), REMOVED),
        (pattern(r"\b[a-z0-9]{6}\.[a-z0-9]{16}\b"), REMOVED),
        (pattern(r#"\bK10[0-9a-f]{64}::[^\s"']+"#), REMOVED),
        (pattern(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/_.=-]{8,}"), "$1 <removed>"),
        (pattern(r"(://[^/\s:@]*):[^/\s@]+@"), "$1:<removed>@"),
        named(r#"("?\s*[=:]\s*")(?:[^"\\\n]|\\.)+"#),
        named(r#"((?:\\+"|')?\s*[=:]\s*(?:\\+"|'))[^"'\\\n]+"#),
        named(r#"("?\s*[=:]\s*"?)[^\s"',;&\\]+"#),
    ]
});

/// Removes secrets, but keeps the public keys of the mesh.
#[derive(Debug, Default)]
pub struct Redactor {
    public: BTreeSet<String>,
}

impl Redactor {
    /// `public`: keys of nodes and peers in base64.
    pub fn new(public: impl IntoIterator<Item = String>) -> Self {
        Self { public: public.into_iter().collect() }
    }

    /// Returns the text without secrets.
    pub fn text(&self, text: &str) -> String {
        let text = BASE64_KEY.replace_all(text, |found: &Captures<'_>| {
            if self.public.contains(&found[0]) { found[0].to_owned() } else { REMOVED.to_owned() }
        });
        let text = HEX_KEY.replace_all(&text, |found: &Captures<'_>| {
            // Reports need the digests of images and the IDs of containers.
            let before = &found["before"];
            let known = before.ends_with("sha256:") || before.ends_with("://");
            format!("{before}{}", if known { &found["key"] } else { REMOVED })
        });
        OTHERS.iter().fold(text.into_owned(), |text, (pattern, instead)| {
            pattern.replace_all(&text, *instead).into_owned()
        })
    }
}

/// Removes secrets and useless fields from an object of the API server.
pub fn object(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("managedFields");
            if let Some(annotations) = fields.get_mut("annotations").and_then(Value::as_object_mut) {
                annotations.retain(|name, _| name.starts_with(OUR_ANNOTATIONS));
            }
            // Environment of containers: names may stay, values may be secret.
            if let Some(variables) = fields.get_mut("env").and_then(Value::as_array_mut) {
                for variable in variables.iter_mut().filter_map(Value::as_object_mut) {
                    if let Some(text) = variable.get_mut("value") {
                        *text = REMOVED.into();
                    }
                }
            }
            for (name, field) in fields.iter_mut() {
                let plain: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
                if SECRET_FIELDS.contains(&plain.to_ascii_lowercase().as_str()) && field.is_string() {
                    *field = REMOVED.into();
                } else {
                    object(field);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(object),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const PUBLIC: &str = "GY5aT1N9dTR/nJnT1N2f4ClZWVj0jOAld0r8ysWLyjg=";
    const SECRET: &str = "YAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=";

    #[test]
    fn public_keys_stay_and_nothing_secret_does() {
        let redactor = Redactor::new([PUBLIC.to_owned()]);
        let kept = format!("peer: {PUBLIC} sha256:{} containerd://{}", "0a".repeat(32), "1b".repeat(32));
        assert_eq!(redactor.text(&kept), kept);
        let hex = "60a9f3e5317e9575c9b5ed78b638b7ce530dabe85ddab614220241801ddf0669";
        let token = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlIn0.c2lnbmF0dXJl";
        for (text, secret) in [
            (format!("PrivateKey = {SECRET}\n"), SECRET),
            (format!("x{SECRET}"), "zlMNq+hd2rYUIgJBgB3fBmk="),
            (format!("{SECRET} {SECRET}"), SECRET),
            (format!("private_key={hex}\npreshared_key={hex}\n"), hex),
            (hex.to_owned(), hex),
            (format!("Authorization: Bearer {token}"), token),
            (format!("the token is {token}!"), token),
            ("kubeadm join --token abcdef.0123456789abcdef".to_owned(), "0123456789abcdef"),
            ("https://who:hunter2@proxy:3128/".to_owned(), "hunter2"),
            ("{\"password\": \"hunter2\"}".to_owned(), "hunter2"),
            ("K3S_TOKEN=hunter2".to_owned(), "hunter2"),
            (format!("K10{}::server:hunter2", "0a".repeat(32)), "hunter2"),
            ("client-key-data: LS0tLS1CRUdJTiBSU0EgUFJJ".to_owned(), "LS0tLS1CRUdJTiBSU0EgUFJJ"),
            ("{\"password\": \"one, two\\\" hunter2\"}".to_owned(), "hunter2"),
            ("msg=\"{\\\"password\\\": \\\"one hunter2\\\"}\"".to_owned(), "hunter2"),
            ("password: 'one hunter2'".to_owned(), "hunter2"),
            ("-----BEGIN EC PRIVATE KEY-----\nhunter2\n-----END EC PRIVATE KEY-----".to_owned(), "hunter2"),
        ] {
            let shown = redactor.text(&text);
            assert!(!shown.contains(secret) && shown.contains("<removed>"), "{text} became {shown}");
        }
    }

    #[test]
    fn objects_lose_secrets_and_annotations_of_others() {
        let applied = format!("{{\"spec\": {{\"presharedKey\": \"{SECRET}\"}}}}");
        let mut peer = json!({
            "metadata": {"name": "laptop", "managedFields": [1], "annotations": {
                "kubectl.kubernetes.io/last-applied-configuration": applied, "kilo.squat.ai/key": PUBLIC,
            }},
            "spec": {"publicKey": PUBLIC, "presharedKey": SECRET, "allowedIPs": ["10.5.0.1/32"],
                "containers": [{"env": [{"name": "WHO", "value": "knows"}, {"name": "NODE", "valueFrom": {}}]}]},
        });
        object(&mut peer);
        assert_eq!(
            peer,
            json!({
                "metadata": {"name": "laptop", "annotations": {"kilo.squat.ai/key": PUBLIC}},
                "spec": {"publicKey": PUBLIC, "presharedKey": REMOVED, "allowedIPs": ["10.5.0.1/32"],
                    "containers": [{"env": [{"name": "WHO", "value": REMOVED}, {"name": "NODE", "valueFrom": {}}]}]},
            })
        );
    }
}
