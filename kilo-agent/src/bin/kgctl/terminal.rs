//! Fits text to a terminal: cut to its width, and with colours. A pipe gets all of it without colours. Text
//! from nodes and pods is untrusted: an attacker who controls one must not move the reader's cursor.

use std::io::{self, IsTerminal as _, Write, stdout};

use anyhow::{Context as _, Result};

const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const BOLD: &str = "\x1b[1m";
const PLAIN: &str = "\x1b[0m";

/// The reader of standard output has closed it, as `| head` does.
#[derive(Debug, thiserror::Error)]
#[error("standard output was closed")]
pub struct OutputClosed;

/// Writes to standard output.
///
/// # Errors
/// [`OutputClosed`] when the reader has closed the output, or any other write error.
pub fn print(text: &str) -> Result<()> {
    let mut output = stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        written => written.context("failed to write to standard output"),
    }
}

/// Capabilities of standard output.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terminal {
    /// Columns; `None` = unlimited.
    pub width: Option<usize>,
    /// Whether to use colours.
    pub colour: bool,
}

impl Terminal {
    /// Detects the capabilities of standard output.
    pub fn of_stdout() -> Self {
        if !stdout().is_terminal() {
            return Self::default();
        }
        let dumb = std::env::var("TERM").is_ok_and(|term| term == "dumb");
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let width = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
        Self { width, colour: !dumb && !unwanted }
    }

    /// Formats tables and sentences for this terminal. `wide`: nothing is cut.
    pub fn show(self, text: &str, wide: bool) -> String {
        let width = self.width.filter(|_| !wide);
        text.lines().map(|line| self.line(&cut(line, width)) + "\n").collect()
    }

    fn line(self, line: &str) -> String {
        if !self.colour {
            return line.to_owned();
        }
        let is_head =
            line.split("   ").all(|cell| cell.chars().all(|c| c.is_ascii_uppercase() || "- ".contains(c)));
        match () {
            () if line.starts_with("Healthy") => format!("{GREEN}{line}{PLAIN}"),
            () if line.starts_with("Not healthy") => format!("{RED}{line}{PLAIN}"),
            () if !line.is_empty() && is_head => format!("{BOLD}{line}{PLAIN}"),
            () => line
                .replace("   False   ", &format!("   {RED}False{PLAIN}   "))
                .replace("   True   ", &format!("   {GREEN}True{PLAIN}   ")),
        }
    }
}

fn cut(line: &str, width: Option<usize>) -> String {
    match width {
        Some(width) if line.chars().count() > width && width > 1 => {
            line.chars().take(width - 1).chain(['…']).collect()
        }
        _ => line.to_owned(),
    }
}

/// Replaces control characters in untrusted text, except newlines and tabs.
pub fn plain(text: &str) -> String {
    let shown =
        |c: char| if c.is_control() && !matches!(c, '\n' | '\t') { char::REPLACEMENT_CHARACTER } else { c };
    text.chars().map(shown).collect()
}

/// Writes untrusted text, with `?` and `¿` instead of control characters.
pub struct Plain<W> {
    to: W,
    /// The previous byte: two-byte control characters start with `LEAD`.
    before: u8,
}

impl<W: Write> Plain<W> {
    const LEAD: u8 = 0xc2;

    /// Writes to `to`.
    pub fn new(to: W) -> Self {
        Self { to, before: 0 }
    }
}

impl<W: Write> Write for Plain<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut shown = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            shown.push(match byte {
                b'\n' | b'\t' => byte,
                0..0x20 | 0x7f => b'?',
                0x80..0xa0 if self.before == Self::LEAD => 0xbf,
                _ => byte,
            });
            self.before = byte;
        }
        self.to.write_all(&shown)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const TEXT: &str =
        "Not healthy, 1 problem.\n\nNODE   READY   REASON\nb2     False   it last checked in long ago\n";

    #[test]
    fn what_others_say_is_text_and_moves_no_cursor() {
        let said = "a\tb é …\n\x1b]0;title\x07\x1b[2J\u{9b}2J\r\x7f";
        let text = "a\tb é …\n\u{fffd}]0;title\u{fffd}\u{fffd}[2J\u{fffd}2J\u{fffd}\u{fffd}";
        assert_eq!(plain(said), text);
        for size in 1..=said.len() {
            let mut written = Plain::new(Vec::new());
            for part in said.as_bytes().chunks(size) {
                written.write_all(part).unwrap();
            }
            let shown = String::from_utf8(written.to).unwrap();
            assert_eq!(shown, "a\tb é …\n?]0;title??[2J¿2J??", "{size}");
        }
    }

    #[test]
    fn a_pipe_gets_all_of_it_and_a_terminal_what_fits_in_colour() {
        assert_eq!(Terminal::default().show(TEXT, false), TEXT);
        let narrow = Terminal { width: Some(20), colour: false };
        assert!(narrow.show(TEXT, false).contains("b2     False   it l…\n"));
        assert_eq!(narrow.show(TEXT, true), TEXT);
        let colourful = Terminal { width: None, colour: true };
        let shown = colourful.show(TEXT, false);
        assert!(shown.starts_with("\x1b[31mNot healthy, 1 problem.\x1b[0m\n\n\x1b[1mNODE "), "{shown:?}");
        assert!(shown.contains("   \x1b[31mFalse\x1b[0m   it"), "{shown:?}");
    }
}
