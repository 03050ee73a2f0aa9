//! `/graph`: the mesh drawn by Graphviz's `dot`; without it SVG of our own.

use std::{
    io,
    process::Stdio,
    str::FromStr,
    sync::{Arc, Weak},
    time::Duration,
};

use hyper::{StatusCode, body::Bytes};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::Command,
    sync::{Mutex, Semaphore},
    time::timeout,
};

use super::{Answer, drawing, respond, text};
use crate::topology::{self, Mesh, UnknownValue};

/// Declares an enum of the values a query parameter may have.
macro_rules! query_values {
    ($(#[$meta:meta])* $name:ident, $what:literal { $($variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $name { #[default] $(#[doc = $text] $variant,)* }

        impl $name {
            /// Possible values.
            pub const VALUES: &'static [&'static str] = &[$($text,)*];

            /// The value's text.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl FromStr for $name {
            type Err = UnknownValue;
            fn from_str(text: &str) -> Result<Self, UnknownValue> {
                match text {
                    $($text => Ok(Self::$variant),)*
                    _ => Err(UnknownValue {
                        what: $what,
                        value: text.chars().take(40).collect(),
                        possible: Self::VALUES.join(", "),
                    }),
                }
            }
        }
    };
}

query_values! {
    /// `format=`.
    Format, "format" {
        Svg = "svg",
        Png = "png",
        Bmp = "bmp",
        Fig = "fig",
        Gif = "gif",
        Json = "json",
        Ps = "ps",
        Dot = "dot",
        Gv = "gv",
    }
}

query_values! {
    /// `layout=`.
    Layout, "layout" {
        Circo = "circo",
        Dot = "dot",
        Neato = "neato",
        Twopi = "twopi",
        Fdp = "fdp",
    }
}

impl Format {
    /// Media type.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Svg => "image/svg+xml",
            Self::Png => "image/png",
            Self::Bmp => "image/bmp",
            Self::Fig => "application/x-xfig",
            Self::Gif => "image/gif",
            Self::Json => "application/json",
            Self::Ps => "application/postscript",
            Self::Dot | Self::Gv => "text/vnd.graphviz; charset=utf-8",
        }
    }
}

/// The largest picture in bytes.
const LARGEST: u64 = 32 << 20;
/// Larger texts in bytes are not given to Graphviz, whose memory is the node's:
/// about 200 locations.
const LARGEST_SOURCE: usize = 1 << 20;
/// More locations than this are drawn by ourselves unless a layout is asked for.
const MANY: usize = 25;
/// More lines than this are not written as text, a line of which is about 100 bytes:
/// about 400 locations.
const MOST_LINES: usize = 100_000;
/// How much of what `dot` complains is read.
const COMPLAINT: u64 = 4 << 10;

/// Runs Graphviz, one picture at a time.
#[derive(Clone, Debug)]
pub struct Graphviz {
    program: Arc<str>,
    limit: Duration,
    turn: Arc<Semaphore>,
    made: Arc<Mutex<Made>>,
}

/// What was made of a mesh, kept until the mesh is another one.
#[derive(Debug, Default)]
struct Made {
    of: Weak<Mesh>,
    dot: Option<Bytes>,
    svg: Option<Bytes>,
}

/// What is made of a mesh without Graphviz.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Text {
    Dot,
    Svg,
}

impl Default for Graphviz {
    fn default() -> Self {
        Self::new("dot", Duration::from_secs(10))
    }
}

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
enum RenderError {
    #[error("Graphviz is not installed on this node; install graphviz, or use format=svg or format=dot")]
    NotInstalled,
    #[error("Graphviz took longer than {} s; try layout=twopi, or format=svg or format=dot", .0.as_secs())]
    TooSlow(Duration),
    #[error("the picture is larger than {} MiB; use format=dot", LARGEST >> 20)]
    TooLarge,
    #[error("the mesh is too large for Graphviz; use format=svg or format=dot")]
    TooManyLines,
    #[error(
        "the graph has {0} lines, at most {MOST_LINES} are written here; use format=svg or `kgctl graph`"
    )]
    TooManyEdges(usize),
    #[error("other pictures are being drawn; try again")]
    Busy,
    #[error("Graphviz cannot do that: {0}")]
    Refused(String),
    #[error("Graphviz cannot be run: {0}")]
    Io(#[from] io::Error),
}

impl RenderError {
    const fn status(&self) -> StatusCode {
        match self {
            Self::NotInstalled | Self::TooManyLines | Self::TooManyEdges(_) | Self::Refused(_) => {
                StatusCode::NOT_IMPLEMENTED
            }
            Self::TooSlow(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Self::TooLarge | Self::Io(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl Graphviz {
    /// A program that takes `dot`'s arguments, and the time it may take.
    pub fn new(program: &str, limit: Duration) -> Self {
        Self { program: program.into(), limit, turn: Arc::new(Semaphore::new(1)), made: Arc::default() }
    }

    /// Answers `/graph?format=..&layout=..`; unknown parameters are ignored.
    pub async fn answer(&self, query: &str, mesh: &Arc<Mesh>) -> Answer {
        let (format, layout) = match parameters(query) {
            Ok(parameters) => parameters,
            Err(error) => return text(StatusCode::BAD_REQUEST, format!("{error}\n")),
        };
        match self.picture(format, layout, mesh).await {
            Ok(picture) => respond(StatusCode::OK, format.media_type(), picture),
            Err(error) => text(error.status(), format!("{error}\n")),
        }
    }

    async fn picture(
        &self,
        format: Format,
        layout: Option<Layout>,
        mesh: &Arc<Mesh>,
    ) -> Result<Bytes, RenderError> {
        // Circo needs seconds for 30 locations that are all joined, minutes for 50.
        let by_ourselves = layout.is_none() && mesh.segments.len() > MANY && format == Format::Svg;
        if by_ourselves {
            return self.make(Text::Svg, mesh).await;
        }
        let rendered = match self.make(Text::Dot, mesh).await {
            Ok(source) if matches!(format, Format::Dot | Format::Gv) => return Ok(source),
            Ok(source) => self.render(source, format, layout.unwrap_or_default()).await,
            Err(error) => Err(error),
        };
        match rendered {
            // An SVG there always is: Graphviz may be missing, or not up to thousands of edges.
            Err(_) if format == Format::Svg => self.make(Text::Svg, mesh).await,
            other => other.map(Bytes::from),
        }
    }

    /// Makes the text away from the runtime's threads, one at a time; whoever has
    /// waited for the same one finds it made.
    async fn make(&self, what: Text, mesh: &Arc<Mesh>) -> Result<Bytes, RenderError> {
        let lines = lines(mesh);
        if what == Text::Dot && lines > MOST_LINES {
            return Err(RenderError::TooManyEdges(lines));
        }
        let made = timeout(self.limit, Arc::clone(&self.made).lock_owned()).await;
        let Ok(mut made) = made else { return Err(RenderError::Busy) };
        let mesh = Arc::clone(mesh);
        // Holds the lock until it is done, also when the client has gone.
        let work = move || {
            if !std::ptr::eq(made.of.as_ptr(), &raw const *mesh) {
                *made = Made { of: Arc::downgrade(&mesh), ..Made::default() };
            }
            let Made { dot, svg, .. } = &mut *made;
            match what {
                Text::Dot => dot.get_or_insert_with(|| topology::dot(&mesh).into()).clone(),
                Text::Svg => svg.get_or_insert_with(|| drawing::svg(&mesh).into()).clone(),
            }
        };
        tokio::task::spawn_blocking(work).await.map_err(|ended| RenderError::Io(io::Error::other(ended)))
    }

    async fn render(&self, source: Bytes, format: Format, layout: Layout) -> Result<Vec<u8>, RenderError> {
        if source.len() > LARGEST_SOURCE {
            return Err(RenderError::TooManyLines);
        }
        let Ok(Ok(_turn)) = timeout(self.limit, self.turn.acquire()).await else {
            return Err(RenderError::Busy);
        };
        // Dropped when the time is over, and killed with that.
        let mut child = Command::new(&*self.program)
            .args([format!("-K{}", layout.as_str()), format!("-T{}", format.as_str())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => RenderError::NotInstalled,
                _ => error.into(),
            })?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let write = async {
            if let Some(mut stdin) = stdin {
                // A program that does not read to the end says why.
                let _ = stdin.write_all(&source).await;
            }
        };
        let (mut picture, mut complaint) = (Vec::new(), Vec::new());
        let read = async {
            match stdout {
                Some(stdout) => stdout.take(LARGEST + 1).read_to_end(&mut picture).await,
                None => Ok(0),
            }
        };
        let listen = async {
            match stderr {
                Some(stderr) => {
                    let mut stderr = stderr;
                    let heard = (&mut stderr).take(COMPLAINT).read_to_end(&mut complaint).await;
                    // Read on, so that it does not block.
                    let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
                    heard
                }
                None => Ok(0),
            }
        };
        let talk = async {
            let ((), read, _) = tokio::join!(write, read, listen);
            read?;
            child.wait().await
        };
        let status = timeout(self.limit, talk).await.map_err(|_| RenderError::TooSlow(self.limit))??;
        if picture.len() as u64 > LARGEST {
            return Err(RenderError::TooLarge);
        }
        if !status.success() || picture.is_empty() {
            return Err(RenderError::Refused(String::from_utf8_lossy(&complaint).trim().to_owned()));
        }
        Ok(picture)
    }
}

/// Lines between leaders, and from them to their nodes and the peers.
fn lines(mesh: &Mesh) -> usize {
    let locations = mesh.segments.len();
    locations * locations.saturating_sub(1) / 2 + locations * mesh.peers.len() + mesh.node_count()
}

fn parameters(query: &str) -> Result<(Format, Option<Layout>), UnknownValue> {
    let get = |name: &str| {
        form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == name).map(|(_, value)| value)
    };
    let format = get("format").map_or(Ok(Format::default()), |text| text.parse())?;
    let layout = get("layout").map(|text| text.parse()).transpose()?;
    Ok((format, layout))
}

#[cfg(test)]
mod tests {
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
    async fn a_program_that_hangs_is_ended_and_the_next_gets_its_turn() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("dot");
        std::fs::write(&program, "#!/bin/sh\necho $$ > \"$0.pid\"\nexec sleep 600\n").unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let graphviz = Graphviz::new(program.to_str().unwrap(), Duration::from_millis(500));
        for _ in 0..2 {
            let error = graphviz.render(Bytes::new(), Format::Png, Layout::Dot).await.unwrap_err();
            assert!(matches!(error, RenderError::TooSlow(_)), "{error}");
            let pid = std::fs::read_to_string(directory.path().join("dot.pid")).unwrap();
            let alive = || {
                let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
                stat.is_ok_and(|stat| !stat.contains(") Z "))
            };
            for _ in 0..50 {
                if alive() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
            assert!(!alive(), "process {pid} lives on");
        }
    }

    #[tokio::test]
    async fn a_mesh_beyond_measure_is_not_given_to_graphviz() {
        let graphviz = Graphviz::new("/nonexistent/dot", Duration::from_secs(5));
        let source = " ".repeat(LARGEST_SOURCE + 1);
        let error = graphviz.render(source.into(), Format::Png, Layout::Dot).await.unwrap_err();
        assert!(matches!(error, RenderError::TooManyLines), "{error}");
    }

    #[tokio::test]
    async fn a_text_is_made_once_for_each_mesh() {
        let graphviz = Graphviz::default();
        let (one, other) = (Arc::<Mesh>::default(), Arc::<Mesh>::default());
        let first = graphviz.make(Text::Svg, &one).await.unwrap();
        assert_eq!(graphviz.make(Text::Svg, &one).await.unwrap().as_ptr(), first.as_ptr());
        assert_ne!(graphviz.make(Text::Dot, &one).await.unwrap(), first);
        assert_ne!(graphviz.make(Text::Svg, &other).await.unwrap().as_ptr(), first.as_ptr());
    }

    #[tokio::test]
    async fn without_graphviz_svg_is_drawn_and_other_formats_say_what_to_install() {
        let graphviz = Graphviz::new("/nonexistent/dot", Duration::from_secs(5));
        let mesh = Arc::default();
        assert_eq!(graphviz.answer("", &mesh).await.status(), StatusCode::OK);
        assert_eq!(graphviz.answer("format=png", &mesh).await.status(), StatusCode::NOT_IMPLEMENTED);
        assert_eq!(graphviz.answer("format=dot", &mesh).await.status(), StatusCode::OK);
        assert_eq!(graphviz.answer("format=pdf", &mesh).await.status(), StatusCode::BAD_REQUEST);
    }
}
