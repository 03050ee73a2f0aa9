//! The page's files, embedded in the agent: nothing is loaded from elsewhere.

use hyper::{
    StatusCode,
    header::{CACHE_CONTROL, HeaderValue},
};

use crate::http::{Answer, respond};

/// One file.
struct File {
    path: &'static str,
    media_type: &'static str,
    bytes: &'static [u8],
}

macro_rules! files {
    ($($name:literal is $media_type:expr,)*) => {
        &[$(File { path: concat!("/page/", $name), media_type: $media_type, bytes: include_bytes!(concat!("files/", $name)) },)*]
    };
}

const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

const FILES: &[File] = files! {
    "app.js" is SCRIPT,
    "cards.js" is SCRIPT,
    "layout.js" is SCRIPT,
    "live.js" is SCRIPT,
    "map.js" is SCRIPT,
    "search.js" is SCRIPT,
    "tables.js" is SCRIPT,
    "text.js" is SCRIPT,
    "view.js" is SCRIPT,
    "map.css" is STYLE,
    "style.css" is STYLE,
    "icon.svg" is "image/svg+xml",
};

/// The page's template; together with the other files it is all that a browser loads.
pub const TEMPLATE: &str = include_str!("files/page.html");

/// Whether the path is that of a file.
pub fn is_file(path: &str) -> bool {
    FILES.iter().any(|file| file.path == path)
}

/// The response with the file at this path.
pub fn answer(path: &str) -> Option<Answer> {
    let file = FILES.iter().find(|file| file.path == path)?;
    let mut answer = respond(StatusCode::OK, file.media_type, file.bytes);
    // An updated agent may have other content under the same names.
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maximum total bytes that a browser loads.
    const MOST: usize = 150 << 10;

    #[test]
    fn the_page_stays_small_and_loads_nothing_from_elsewhere() {
        let all = FILES.iter().map(|file| file.bytes.len()).sum::<usize>() + TEMPLATE.len();
        assert!(all <= MOST, "{all} bytes");
        let texts = FILES.iter().map(|file| String::from_utf8_lossy(file.bytes).into_owned());
        for text in texts.chain([TEMPLATE.to_owned()]) {
            let text = text.replace("http://www.w3.org/", "").replace("`http://", "");
            assert!(
                !text.contains("http://") && !text.contains("https://") && !text.contains("\"//"),
                "{text}"
            );
            assert!(
                !text.contains("innerHTML") && !text.contains("eval("),
                "text of others is never markup: {text}"
            );
        }
        assert!(
            !TEMPLATE.contains(" style=") && !TEMPLATE.contains("<style") && !TEMPLATE.contains(" onclick")
        );
    }
}
