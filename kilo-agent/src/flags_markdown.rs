//! Generates Markdown tables of a program's flags, for docs/ (tests/unit/docs.rs).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use clap::{Arg, ArgAction, Command};

/// First argument that makes a program print its tables and exit.
pub const ARGUMENT: &str = "flags-as-markdown";

/// The tables of all visible commands if the program was started with [`ARGUMENT`]; never in a release build.
/// Each is a block between `<!-- flags: COMMAND -->` and `<!-- /flags -->`.
pub fn if_asked(command: impl FnOnce() -> Command) -> Option<String> {
    (std::env::args_os().nth(1)? == ARGUMENT).then(|| {
        let command = command();
        let mut text = String::new();
        blocks(&command, command.get_name(), &mut text);
        text
    })
}

fn blocks(command: &Command, path: &str, text: &mut String) {
    let mut shared = BTreeMap::new();
    of_commands(command, path, text, &mut shared);
    for (heading, rows) in shared {
        let _ = write!(text, "<!-- flags: {path} ({heading}) -->\n{HEAD}{rows}<!-- /flags -->\n");
    }
}

/// Writes the blocks of a command and its subcommands; collects rows that several commands share by heading.
fn of_commands(command: &Command, path: &str, text: &mut String, shared: &mut BTreeMap<String, String>) {
    if let Some(table) = table(command) {
        let _ = write!(text, "<!-- flags: {path} -->\n{table}<!-- /flags -->\n");
    }
    for heading in headings(command) {
        // Not every command has all flags of a heading: the longest list is kept.
        let rows: String = shown(command, Some(heading)).map(row).collect();
        let known = shared.entry(heading.to_owned()).or_default();
        if rows.len() > known.len() {
            *known = rows;
        }
    }
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        of_commands(subcommand, &format!("{path} {}", subcommand.get_name()), text, shared);
    }
}

fn shown<'a>(command: &'a Command, heading: Option<&'a str>) -> impl Iterator<Item = &'a Arg> {
    command.get_arguments().filter(move |arg| !arg.is_hide_set() && arg.get_help_heading() == heading)
}

fn headings(command: &Command) -> BTreeSet<&str> {
    let all = command.get_arguments().filter(|arg| !arg.is_hide_set());
    all.filter_map(Arg::get_help_heading).collect()
}

const HEAD: &str = "| flag | default | meaning |\n|---|---|---|\n";

/// One row per flag or argument of this command, without its subcommands, followed by the headings of shared
/// flags and the examples; `None` when there is nothing to show.
pub fn table(command: &Command) -> Option<String> {
    let rows: String = shown(command, None).map(row).collect();
    let headings: Vec<_> = headings(command).into_iter().collect();
    let mut text = if rows.is_empty() { rows } else { format!("{HEAD}{rows}") };
    if !headings.is_empty() {
        if !text.is_empty() {
            text += "\n";
        }
        let _ = writeln!(text, "Shared flags: {}.", headings.join(", "));
    }
    if let Some(examples) = command.get_after_help().map(ToString::to_string)
        && let Some(examples) = examples.strip_prefix("Examples:\n")
    {
        let lines: String =
            examples.lines().map(|line| format!("{}\n", line.trim_start_matches("  "))).collect();
        let gap = if text.is_empty() { "" } else { "\n" };
        let _ = write!(text, "{gap}Examples:\n\n```text\n{lines}```\n");
    }
    (!text.is_empty()).then_some(text)
}

fn row(arg: &Arg) -> String {
    let mut flag = String::new();
    if let Some(short) = arg.get_short() {
        let _ = write!(flag, "-{short}, ");
    }
    let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    // `--flag` alone means `--flag=true`.
    let is_switch = arg.get_num_args().is_some_and(|range| range.min_values() == 0);
    let given = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    let derived = arg.get_id().as_str().to_uppercase();
    let _ = match (arg.get_long(), given) {
        (Some(long), Some(name)) if is_switch && name != derived => write!(flag, "--{long}[={name}]"),
        (Some(long), _) if is_switch => write!(flag, "--{long}[=BOOL]"),
        (Some(long), _) if !takes_value => write!(flag, "--{long}"),
        (Some(long), Some(name)) if name != derived => write!(flag, "--{long} {name}"),
        (Some(long), _) => write!(flag, "--{long} VALUE"),
        (None, name) => write!(flag, "{}", name.unwrap_or(derived)),
    };
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = match defaults.join(",") {
        default if default.is_empty() || !takes_value => String::new(),
        default => format!("`{default}`"),
    };
    let mut meaning = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let values: Vec<_> = arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    let all_named = values.iter().all(|value| meaning.contains(value.as_str()));
    if takes_value && !is_switch && !all_named {
        let _ = write!(meaning, ": {}", values.join(", "));
    }
    if let Some(variable) = arg.get_env() {
        let _ = write!(meaning, " (environment: `{}`)", variable.to_string_lossy());
    }
    format!("| `{flag}` | {default} | {} |\n", meaning.replace('|', "\\|").replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shows_what_help_shows() {
        let command = Command::new("x")
            .arg(Arg::new("name").required(true).help("A name."))
            .arg(Arg::new("port").long("port").short('p').default_value("1").help("A | port."))
            .arg(Arg::new("quiet").long("quiet").action(ArgAction::SetTrue).help("Be quiet."))
            .arg(Arg::new("hidden").long("hidden").hide(true));
        let expected = "| flag | default | meaning |\n|---|---|---|\n\
                        | `NAME` |  | A name. |\n\
                        | `-p, --port VALUE` | `1` | A \\| port. |\n\
                        | `--quiet` |  | Be quiet. |\n";
        assert_eq!(table(&command).as_deref(), Some(expected));
        let shown = Command::new("x").after_help("Examples:\n  x a\n  x b");
        assert_eq!(table(&shown).as_deref(), Some("Examples:\n\n```text\nx a\nx b\n```\n"));
        let shared = Arg::new("to").long("to").help("Receiver.").help_heading("Server");
        let text = |command: &Command| {
            let mut text = String::new();
            blocks(command, "x", &mut text);
            text
        };
        let both = Command::new("x")
            .subcommand(Command::new("a").arg(shared.clone()))
            .subcommand(Command::new("b").arg(shared));
        let text = text(&both);
        assert!(text.contains("<!-- flags: x a -->\nShared flags: Server.\n<!-- /flags -->\n"), "{text}");
        assert_eq!(text.matches("| `--to VALUE` |  | Receiver. |").count(), 1, "{text}");
        assert!(text.contains("<!-- flags: x (Server) -->\n"), "{text}");
    }
}
