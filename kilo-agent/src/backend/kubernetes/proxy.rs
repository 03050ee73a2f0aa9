//! The proxy for the API server, chosen as kubectl does: the cluster's own `proxy-url`, else `HTTPS_PROXY`
//! and `NO_PROXY` of the environment.

use hyper::http::{Uri, uri::InvalidUri};
use hyper_util::client::proxy::matcher::Matcher;
use kilo_core::errors::Explained;

/// The proxy for requests to `server`, if there is one. `own`: the `proxy-url` of the kubeconfig's cluster,
/// which overrides the environment.
pub(super) fn choose(
    own: Option<&str>,
    server: &Uri,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<Option<Uri>, Explained> {
    if let Some(own) = own.filter(|text| !text.is_empty()) {
        return parse("proxy-url", own).map(Some);
    }
    let read = |name: &str| {
        let variants = [name.to_owned(), name.to_lowercase()];
        let mut set = variants.into_iter().filter_map(|name| Some((environment(&name)?, name)));
        set.find(|(value, _)| !value.is_empty())
    };
    let variable = if server.scheme_str() == Some("http") { "HTTP_PROXY" } else { "HTTPS_PROXY" };
    let Some((proxy, name)) = read(variable) else { return Ok(None) };
    let exempt = read("NO_PROXY").map(|(value, _)| value).unwrap_or_default();
    if is_loopback(server) || is_exempt(server, &exempt) {
        return Ok(None);
    }
    parse(&format!("${name}"), &proxy).map(Some)
}

/// Parses a proxy's URL; without a scheme it is HTTP.
fn parse(from: &str, text: &str) -> Result<Uri, Explained> {
    let url = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    // `socks5h`, where the proxy resolves names, uses the same protocol.
    let url = url.replacen("socks5h://", "socks5://", 1);
    let wrong = |reason: &str| {
        format!(
            "{from} {text:?} is not the URL of a proxy: {reason}; write for example http://192.0.2.1:3128"
        )
    };
    let url: Uri =
        url.parse().map_err(|error: InvalidUri| Explained::of(wrong(&error.to_string()), error))?;
    match url.scheme_str() {
        Some("http" | "https" | "socks5") if url.host().is_some_and(|host| !host.is_empty()) => Ok(url),
        Some(scheme) => Err(wrong(&format!("{scheme} is not http, https or socks5")).into()),
        None => Err(wrong("it has no scheme").into()),
    }
}

fn is_loopback(server: &Uri) -> bool {
    let host = server.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
}

/// Reads `NO_PROXY` as Go does: `*`, domains with their subdomains, addresses, prefixes; a port limits an
/// entry to it.
fn is_exempt(server: &Uri, exempt: &str) -> bool {
    let default = if server.scheme_str() == Some("http") { 80 } else { 443 };
    let port = server.port_u16().unwrap_or(default).to_string();
    let without_port = |entry: &str| match entry.rsplit_once(':') {
        Some((host, wanted)) if !host.contains(':') || host.starts_with('[') => {
            (wanted == port).then(|| host.trim_matches(['[', ']']).to_owned())
        }
        _ => Some(entry.to_owned()),
    };
    let entries: Vec<_> = exempt.split(',').map(str::trim).filter_map(without_port).collect();
    if entries.iter().any(|entry| entry == "*") {
        return true;
    }
    // The proxy's address does not matter here, only whether it applies.
    let matcher = Matcher::builder().all("http://192.0.2.1").no(entries.join(",")).build();
    matcher.intercept(server).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(
        own: Option<&str>,
        server: &str,
        environment: &[(&str, &str)],
    ) -> Result<Option<String>, String> {
        let read = |name: &str| {
            environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let found = choose(own, &server.parse().unwrap(), read);
        found.map(|found| found.map(|url| url.to_string())).map_err(|error| error.to_string())
    }

    #[test]
    fn the_clusters_own_proxy_counts_before_the_environments() {
        let set = [("HTTPS_PROXY", "http://proxy.example:3128")];
        let server = "https://192.0.2.1:6443";
        assert_eq!(chosen(None, server, &[]), Ok(None));
        let from_environment = Some("http://proxy.example:3128/".to_owned());
        assert_eq!(chosen(None, server, &set), Ok(from_environment.clone()));
        assert_eq!(chosen(Some(""), server, &set), Ok(from_environment.clone()));
        assert_eq!(chosen(None, server, &[("https_proxy", "proxy.example:3128")]), Ok(from_environment));
        let own = chosen(Some("socks5h://192.0.2.9:1080"), server, &set);
        assert_eq!(own, Ok(Some("socks5://192.0.2.9:1080/".to_owned())));
        assert_eq!(chosen(None, "http://192.0.2.1", &set), Ok(None), "another scheme has another variable");
        let wrong = chosen(None, server, &[("HTTPS_PROXY", "ftp://x")]).unwrap_err();
        assert!(wrong.contains("$HTTPS_PROXY") && wrong.contains("ftp"), "{wrong}");
    }

    #[test]
    fn no_proxy_names_servers_and_not_proxies() {
        for (exempt, server, proxied) in [
            ("192.0.2.0/24", "https://192.0.2.1:6443", false),
            ("198.51.100.7", "https://192.0.2.1:6443", true),
            (".example.com", "https://api.example.com", false),
            ("example.com", "https://api.example.org", true),
            ("*", "https://192.0.2.1:6443", false),
            ("localhost, 192.0.2.1:6443", "https://192.0.2.1:6443", false),
            ("192.0.2.1:443,[2001:db8::1]:6443", "https://192.0.2.1:6443", true),
            ("192.0.2.1:443,[2001:db8::1]:6443", "https://[2001:db8::1]:6443", false),
            ("2001:db8::/32", "https://[2001:db8::1]:6443", false),
            ("", "https://127.0.0.1:6443", false),
            ("", "https://[::1]:6443", false),
            ("", "https://localhost:6443", false),
            ("proxy.example", "https://192.0.2.1:6443", true),
        ] {
            let set = [("HTTPS_PROXY", "http://proxy.example:3128"), ("NO_PROXY", exempt)];
            assert_eq!(chosen(None, server, &set).unwrap().is_some(), proxied, "{server} with {exempt:?}");
        }
    }
}
