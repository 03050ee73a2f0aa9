//! Explains an API server's refusal and what to do about it: plain text, without I/O.

use kilo_agent::{AGENTS_NAMESPACE, backend::kubernetes::Server, status::ask::TooLong};
use kilo_core::errors::error_chain;

/// A request to an API server, in Kubernetes terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked<'a> {
    verb: &'a str,
    resource: &'a str,
    namespace: Option<&'a str>,
}

impl<'a> Asked<'a> {
    /// A request without a namespace, or for all of them.
    pub const fn new(verb: &'a str, resource: &'a str) -> Self {
        Self { verb, resource, namespace: None }
    }

    /// Verb and resource.
    pub fn words(self) -> String {
        format!("{} {}", self.verb, self.resource)
    }

    /// Limits the request to this namespace.
    pub const fn within(self, namespace: &'a str) -> Self {
        Self { namespace: Some(namespace), ..self }
    }
}

/// The role in the manifests that grants a request, and how to bind it to a user.
fn remedy(asked: Asked<'_>, who: &str) -> String {
    let bound = |kind: &str, role: &str| {
        let namespace = asked.namespace.unwrap_or(AGENTS_NAMESPACE);
        let binding = role.trim_start_matches("kilo-");
        format!(
            "ask for the {kind} {role}: kubectl --namespace {namespace} create rolebinding {binding} \
             --{}={role} --user={who}",
            kind.to_lowercase()
        )
    };
    match (asked.resource, asked.verb) {
        ("nodes" | "peers", "get" | "list" | "watch") => format!(
            "ask for the ClusterRole kilo-kgctl: kubectl create clusterrolebinding kgctl-reader \
             --clusterrole=kilo-kgctl --user={who}"
        ),
        ("peers", _) => format!(
            "ask for the ClusterRole kilo-peers-edit: kubectl create clusterrolebinding kgctl-editor \
             --clusterrole=kilo-peers-edit --user={who}"
        ),
        ("pods", "list") | ("pods/proxy", _) => bound("Role", "kilo-kgctl-agents"),
        ("pods/exec" | "pods/log", _) => bound("Role", "kilo-kgctl-nodes"),
        // Without a namespace they are those of the whole cluster.
        ("daemonsets" | "events", "get" | "list") if asked.namespace.is_some() => {
            bound("ClusterRole", "kilo-kgctl-sysdump")
        }
        _ => "ask for the ClusterRole cluster-admin, or have an administrator run this".to_owned(),
    }
}

/// Explains an error. `page`: the response of a server that is not an API server.
pub fn explain(error: &kube::Error, asked: Asked<'_>, server: &Server, page: Option<&str>) -> String {
    if let Some(page) = page {
        return no_api_server(page, server);
    }
    let kube::Error::Api(status) = error else {
        return match error {
            kube::Error::SerdeError(_) => {
                format!("the answer of the API server {server} is not understood: {}", error_chain(error))
            }
            kube::Error::Service(cause) if cause.is::<TooLong>() => {
                format!("{cause}; the rest of the response was not read (through the API server {server})")
            }
            kube::Error::Auth(_) => {
                format!("no credentials for the API server {server}: {}", error_chain(error))
            }
            // Without kube's own name for it, `ServiceError`.
            kube::Error::Service(cause) => {
                format!("cannot reach the API server {server}: {}", error_chain(cause.as_ref()))
            }
            _ => format!("cannot reach the API server {server}: {}", error_chain(error)),
        };
    };
    if is_html(&status.message) {
        return format!("{} (HTTP {})", no_api_server(&status.message, server), status.code);
    }
    let Asked { verb, resource, namespace } = asked;
    let place = namespace.map(|namespace| format!(" in namespace {namespace}")).unwrap_or_default();
    match status.code {
        401 => format!(
            "the API server {server} does not accept the credentials (401): log in again, or choose others with \
             --context, --user or --kubeconfig"
        ),
        403 => {
            let user = quoted_user(&status.message).or(server.impersonated.as_deref());
            format!(
                "not allowed to {verb} {resource}{place} at the API server {server}: {}; {}",
                status.message,
                remedy(asked, user.unwrap_or("USER"))
            )
        }
        404 if resource == "peers" && status.reason != "NotFound" => format!(
            "the API server {server} does not know Peer objects: Kilo is not installed there, or this is another \
             cluster than you mean; to install: kubectl apply -f manifests/crds.yaml"
        ),
        code @ (429 | 500..) => {
            format!(
                "the API server {server} cannot {verb} {resource}{place} now ({code}): {}",
                status.message
            )
        }
        code => format!("{verb} {resource}{place}: {} ({code}, from {server})", status.message),
    }
}

/// The user that the API server authenticated: `User "jane" cannot list ...`.
fn quoted_user(message: &str) -> Option<&str> {
    message.split_once("User \"")?.1.split('"').next().filter(|user| !user.is_empty())
}

fn is_html(text: &str) -> bool {
    let start: String = text.trim_start().chars().take(200).collect::<String>().to_ascii_lowercase();
    start.starts_with("<!doctype html") || start.contains("<html")
}

fn no_api_server(page: &str, server: &Server) -> String {
    let found = match (is_html(page), title(page)) {
        (true, Some(title)) => format!("it returned a web page titled {title:?}"),
        (true, None) => "it returned a web page".to_owned(),
        (false, _) => "it returned something else".to_owned(),
    };
    let check = match &server.proxy {
        Some(_) => {
            "check the cluster's server and proxy-url in the kubeconfig, and $HTTPS_PROXY and $NO_PROXY"
        }
        None => {
            "check the cluster's server in the kubeconfig, and whether a login page or a proxy stands between"
        }
    };
    format!("{server} is not an API server: {found}; {check}")
}

/// The title of an HTML page.
fn title(page: &str) -> Option<String> {
    // Offsets stay valid: only ASCII letters change.
    let lower = page.to_ascii_lowercase();
    let start = lower.find("<title")?;
    let start = start + lower[start..].find('>')? + 1;
    let end = start + lower[start..].find("</title")?;
    let words: Vec<_> = page[start..end].split_whitespace().collect();
    let title: String = words.join(" ").chars().take(80).collect();
    (!title.is_empty()).then_some(title)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn server() -> Server {
        Server {
            url: "https://192.0.2.1:6443".to_owned(),
            context: Some("prod".to_owned()),
            user: Some("jane".to_owned()),
            files: vec!["/home/jane/.kube/config".into()],
            ..Server::default()
        }
    }

    fn status(code: u16, message: &str, reason: &str) -> kube::Error {
        kube::Error::Api(Box::new(kube::core::Status::failure(message, reason).with_code(code)))
    }

    fn said(error: &kube::Error, asked: Asked<'_>) -> String {
        let text = explain(error, asked, &server(), None);
        for named in ["https://192.0.2.1:6443", "context \"prod\"", "/home/jane/.kube/config"] {
            assert!(text.contains(named), "{named} is missing from {text}");
        }
        text
    }

    #[test]
    fn a_refusal_names_verb_resource_and_the_role_to_ask_for() {
        let forbidden = |message: &str| status(403, message, "Forbidden");
        let text = said(
            &forbidden("peers is forbidden: User \"eve\" cannot list resource \"peers\""),
            Asked::new("list", "peers"),
        );
        assert!(
            text.contains("not allowed to list peers") && text.contains("--clusterrole=kilo-kgctl"),
            "{text}"
        );
        assert!(text.contains("--user=eve"), "{text}");
        let text = said(&forbidden("Forbidden"), Asked::new("create", "peers"));
        assert!(text.contains("not allowed to create peers") && text.contains("kilo-peers-edit"), "{text}");
        let text = said(&forbidden("no"), Asked::new("list", "pods").within("kube-system"));
        assert!(
            text.contains("pods in namespace kube-system") && text.contains("kilo-kgctl-agents"),
            "{text}"
        );
        let text = said(&forbidden("no"), Asked::new("get and create", "pods/exec").within("kube-system"));
        assert!(text.contains("not allowed to get and create pods/exec in"), "{text}");
        assert!(text.contains("--role=kilo-kgctl-nodes"), "{text}");
        for asked in [Asked::new("create", "daemonsets"), Asked::new("list", "daemonsets")] {
            let text = said(&forbidden("no"), asked);
            assert!(text.contains(" daemonsets at") && text.contains("cluster-admin"), "{text}");
        }
        for (resource, kind, role) in [
            ("daemonsets", "ClusterRole", "kilo-kgctl-sysdump"),
            ("events", "ClusterRole", "kilo-kgctl-sysdump"),
            ("pods", "Role", "kilo-kgctl-agents"),
            ("pods/log", "Role", "kilo-kgctl-nodes"),
        ] {
            let text = said(&forbidden("no"), Asked::new("list", resource).within("net"));
            let binding = role.trim_start_matches("kilo-");
            let command = format!("kubectl --namespace net create rolebinding {binding} --");
            assert!(text.contains(&format!("ask for the {kind} {role}: {command}")), "{text}");
            assert!(text.contains(&format!(" --{}={role} --user=", kind.to_lowercase())), "{text}");
        }
    }

    #[test]
    fn what_is_no_api_server_is_distinguished_from_one_that_is_busy() {
        let page = "<!DOCTYPE html>\n<html><head><TITLE>Sign in\n to Corp</TITLE></head>";
        for text in [
            said(&status(403, page, ""), Asked::new("list", "nodes")),
            explain(&status(200, "", ""), Asked::new("list", "nodes"), &server(), Some(page)),
        ] {
            assert!(text.contains("is not an API server") && text.contains("\"Sign in to Corp\""), "{text}");
            assert!(!text.contains('<'), "{text}");
        }
        let busy = said(&status(503, "etcd leader changed", ""), Asked::new("list", "nodes"));
        assert!(busy.contains("cannot list nodes now (503): etcd leader changed"), "{busy}");
        let login = said(&status(401, "Unauthorized", "Unauthorized"), Asked::new("list", "nodes"));
        assert!(login.contains("401") && login.contains("--user"), "{login}");
        let unknown = said(&status(404, "404 page not found", ""), Asked::new("list", "peers"));
        assert!(unknown.contains("kubectl apply -f manifests/crds.yaml"), "{unknown}");
        let gone = said(&status(404, "peers \"x\" not found", "NotFound"), Asked::new("delete", "peers"));
        assert!(gone.contains("delete peers: peers \"x\" not found"), "{gone}");
    }
}
