//! `/graph`: the mesh as Graphviz text, or drawn as SVG.

use std::{
    sync::{Arc, LazyLock, Weak},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use clap::ValueEnum;
use hyper::{
    StatusCode,
    body::Bytes,
    header::{CONTENT_SECURITY_POLICY, HeaderValue},
};
use kilo_core::{
    settings::{UnknownValue, parse_value},
    topology::{self, Mesh, TunnelPaths},
};
use sha2::{Digest as _, Sha256};
use tokio::{sync::Mutex, time::timeout};

use super::{Answer, drawing, respond, text};

/// `format=`: the names Kilo knows. The agent makes `svg`, and `dot` (also named `gv`); Graphviz
/// makes the others of `dot`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "names of Graphviz's formats")]
pub enum Format {
    #[default]
    Svg,
    Png,
    Bmp,
    Fig,
    Gif,
    Json,
    Ps,
    Dot,
    Gv,
}

/// `layout=`: known to Kilo's users, without effect here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "names of Graphviz's layout programs")]
pub enum Layout {
    Circo,
    Dot,
    Neato,
    Twopi,
    Fdp,
}

/// Allows only the picture's own style, by its digest.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let digest = STANDARD.encode(Sha256::digest(drawing::STYLE));
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'; \
         sandbox"
    );
    // The policy is ASCII; if it were not, nothing at all would be allowed.
    HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
});

/// Maximum number of lines written as text, at about 100 bytes each: reached with about 400 locations.
const MOST_LINES: usize = 100_000;

/// Draws meshes, one at a time, and caches the last results.
#[derive(Clone, Debug)]
pub struct Graph {
    limit: Duration,
    made: Arc<Mutex<Made>>,
}

/// Cached results for a mesh, valid until the mesh or the paths of its tunnels change.
#[derive(Debug, Default)]
struct Made {
    of: Weak<Mesh>,
    paths: TunnelPaths,
    dot: Option<Bytes>,
    svg: Option<Bytes>,
}

/// Kind of result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Text {
    Dot,
    Svg,
}

impl Default for Graph {
    fn default() -> Self {
        Self::new(Duration::from_secs(10))
    }
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
enum RenderError {
    #[error(
        "the agent draws svg only; for {0} pipe the text into Graphviz: curl .../graph?format=dot | dot -T{0}"
    )]
    NotDrawn(String),
    #[error(
        "the graph has {0} lines, at most {MOST_LINES} are written here; use format=svg or `kgctl graph`"
    )]
    TooManyEdges(usize),
    #[error("too many graphs are being drawn; try again")]
    Busy,
    #[error("drawing failed: {0}")]
    Failed(#[from] tokio::task::JoinError),
}

impl RenderError {
    const fn status(&self) -> StatusCode {
        match self {
            Self::NotDrawn(_) | Self::TooManyEdges(_) => StatusCode::NOT_IMPLEMENTED,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl Graph {
    /// Creates a graph where a client waits at most `limit` for its turn.
    pub fn new(limit: Duration) -> Self {
        Self { limit, made: Arc::default() }
    }

    /// Answers `/graph?format=..&layout=..`; unknown parameters are ignored. `paths`: paths of this node's
    /// tunnels that are not direct, drawn beside their lines.
    pub async fn answer(&self, query: &str, mesh: &Arc<Mesh>, paths: TunnelPaths) -> Answer {
        let format = match parameters(query) {
            Ok((format, _)) => format,
            Err(error) => return text(StatusCode::BAD_REQUEST, format!("{error}\n")),
        };
        let (media_type, made) = match format {
            Format::Svg => ("image/svg+xml", self.make(Text::Svg, mesh, paths).await),
            Format::Dot | Format::Gv => {
                ("text/vnd.graphviz; charset=utf-8", self.make(Text::Dot, mesh, paths).await)
            }
            other => {
                let name = other.to_possible_value().map(|value| value.get_name().to_owned());
                ("", Err(RenderError::NotDrawn(name.unwrap_or_default())))
            }
        };
        match made {
            Ok(picture) => {
                let mut answer = respond(StatusCode::OK, media_type, picture);
                // An SVG that is opened directly is a document: it must not run scripts or load anything.
                answer.headers_mut().insert(CONTENT_SECURITY_POLICY, POLICY.clone());
                answer
            }
            Err(error) => text(error.status(), format!("{error}\n")),
        }
    }

    /// Draws outside of the runtime's threads, one at a time; a request that has waited for the same result
    /// finds it cached.
    async fn make(&self, what: Text, mesh: &Arc<Mesh>, paths: TunnelPaths) -> Result<Bytes, RenderError> {
        let lines = lines(mesh);
        if what == Text::Dot && lines > MOST_LINES {
            return Err(RenderError::TooManyEdges(lines));
        }
        let made = timeout(self.limit, Arc::clone(&self.made).lock_owned()).await;
        let Ok(mut made) = made else { return Err(RenderError::Busy) };
        let mesh = Arc::clone(mesh);
        // Holds the lock until it is done, even if the client has gone.
        let work = move || {
            if !std::ptr::eq(made.of.as_ptr(), &raw const *mesh) || made.paths != paths {
                *made = Made { of: Arc::downgrade(&mesh), paths, ..Made::default() };
            }
            let Made { dot, svg, paths, .. } = &mut *made;
            match what {
                Text::Dot => dot.get_or_insert_with(|| topology::dot(&mesh, paths).into()).clone(),
                Text::Svg => svg.get_or_insert_with(|| drawing::svg(&mesh, paths).into()).clone(),
            }
        };
        Ok(tokio::task::spawn_blocking(work).await?)
    }
}

/// Number of lines between leaders, and from them to their nodes and the peers.
fn lines(mesh: &Mesh) -> usize {
    let locations = mesh.segments.len();
    locations * locations.saturating_sub(1) / 2 + locations * mesh.peers.len() + mesh.node_count()
}

fn parameters(query: &str) -> Result<(Format, Option<Layout>), UnknownValue> {
    let get = |name: &str| {
        form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == name).map(|(_, value)| value)
    };
    let format = get("format").map_or(Ok(Format::default()), |text| parse_value("format", &text))?;
    let layout = get("layout").map(|text| parse_value("layout", &text)).transpose()?;
    Ok((format, layout))
}

#[cfg(test)]
mod tests {
    use kilo_core::tunnel_path::{PathWithRelay, TunnelPath};

    use super::*;

    #[test]
    fn parameters_have_defaults_and_unknown_ones_list_the_possible() {
        assert_eq!(parameters(""), Ok((Format::Svg, None)));
        assert_eq!(parameters("layout=fdp&x=y&format=p%6eg"), Ok((Format::Png, Some(Layout::Fdp))));
        let message = parameters("format=pdf").unwrap_err().to_string();
        assert!(message.contains("svg, png, bmp, fig, gif, json, ps, dot, gv"), "{message}");
        assert!(parameters("layout=").unwrap_err().to_string().contains("circo, dot, neato, twopi, fdp"));
        assert!(parameters(&format!("format={}", "x".repeat(10_000))).unwrap_err().to_string().len() < 200);
    }

    #[tokio::test]
    async fn a_text_is_made_once_for_each_mesh_and_the_paths_in_it() {
        let graph = Graph::default();
        let (one, other) = (Arc::<Mesh>::default(), Arc::<Mesh>::default());
        let make =
            async |what, mesh, paths: &TunnelPaths| graph.make(what, mesh, paths.clone()).await.unwrap();
        let none = TunnelPaths::default();
        let first = make(Text::Svg, &one, &none).await;
        assert_eq!(make(Text::Svg, &one, &none).await.as_ptr(), first.as_ptr());
        assert_ne!(make(Text::Dot, &one, &none).await, first);
        let path = PathWithRelay { path: TunnelPath::Punched, relay: None };
        let punched: TunnelPaths = [(["a", "b"].map(str::to_owned), path)].into_iter().collect();
        assert_ne!(make(Text::Svg, &one, &punched).await.as_ptr(), first.as_ptr());
        assert_ne!(make(Text::Svg, &other, &none).await.as_ptr(), first.as_ptr());
    }

    #[tokio::test]
    async fn svg_and_text_are_made_and_other_formats_say_how_to_get_them() {
        let graph = Graph::default();
        let mesh = Arc::default();
        assert_eq!(graph.answer("", &mesh, TunnelPaths::default()).await.status(), StatusCode::OK);
        assert_eq!(
            graph.answer("format=png", &mesh, TunnelPaths::default()).await.status(),
            StatusCode::NOT_IMPLEMENTED
        );
        assert_eq!(
            graph.answer("format=dot&layout=circo", &mesh, TunnelPaths::default()).await.status(),
            StatusCode::OK
        );
        assert_eq!(
            graph.answer("format=pdf", &mesh, TunnelPaths::default()).await.status(),
            StatusCode::BAD_REQUEST
        );
    }
}
