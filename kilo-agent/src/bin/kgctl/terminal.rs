//! Text as a terminal shows it: cut to its width, and with colours. A pipe gets it whole and plain.

use std::io::{IsTerminal as _, stdout};

const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const BOLD: &str = "\x1b[1m";
const PLAIN: &str = "\x1b[0m";

/// What standard output can do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terminal {
    /// Columns; `None` = any number.
    pub width: Option<usize>,
    /// Colours are wanted.
    pub colour: bool,
}

impl Terminal {
    /// That of standard output.
    pub fn of_stdout() -> Self {
        if !stdout().is_terminal() {
            return Self::default();
        }
        let dumb = std::env::var("TERM").is_ok_and(|term| term == "dumb");
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let width = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
        Self { width, colour: !dumb && !unwanted }
    }

    /// Tables and sentences for this terminal. `wide`: nothing is cut.
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

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "Not healthy, 1 problem.\n\nNODE   READY   REASON\nb2     False   it last checked in long ago\n";

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
