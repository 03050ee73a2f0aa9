//! Accepts flags before the command, as kubectl does: `kgctl --context prod status` is `kgctl status
//! --context prod`, without giving each command flags that it ignores.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};

/// Moves flags from before the command to behind it. Unknown arguments stay where they are, so that clap
/// reports them.
pub fn behind_command(root: &Command, arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<_> = arguments.into_iter().collect();
    let mut at = 1;
    while let Some(text) = arguments.get(at).and_then(|argument| argument.to_str()) {
        let Some(flag) = text.strip_prefix("--").filter(|flag| !flag.is_empty()) else { break };
        let (name, inline) = flag.split_once('=').map_or((flag, false), |(name, _)| (name, true));
        let Some(known) = of_any_command(root, name) else { return arguments };
        let takes_next = !inline && matches!(known.get_action(), ArgAction::Set | ArgAction::Append);
        at += if takes_next { 2 } else { 1 };
    }
    // The name of the command, and of its subcommand.
    let (mut end, mut command) = (at, root);
    while let Some(below) = arguments.get(end).and_then(|name| command.find_subcommand(name)) {
        (end, command) = (end + 1, below);
    }
    if end > at {
        arguments[1..end].rotate_left(at - 1);
    }
    arguments
}

/// Finds a long flag of any subcommand.
fn of_any_command<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_subcommands().find_map(|below| {
        let own = below.get_arguments().find(|arg| arg.get_long() == Some(name));
        own.or_else(|| of_any_command(below, name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(line: &str) -> String {
        let flag = |name| Arg::new(name).long(name);
        let root = Command::new("k")
            .subcommand(Command::new("show").subcommand(Command::new("node").arg(flag("context"))))
            .subcommand(
                Command::new("status").arg(flag("context")).arg(flag("quiet").action(ArgAction::SetTrue)),
            );
        let arguments = line.split(' ').map(OsString::from);
        let arguments = behind_command(&root, arguments);
        arguments.iter().map(|argument| argument.to_str().unwrap_or_default()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn flags_go_behind_the_command_and_its_command() {
        for (given, wanted) in [
            ("k status", "k status"),
            ("k --context c status n1", "k status --context c n1"),
            ("k --quiet --context=c status --quiet", "k status --quiet --context=c --quiet"),
            ("k --context c show node n1", "k show node --context c n1"),
            // A value equal to the name of a command.
            ("k --context status status", "k status --context status"),
        ] {
            assert_eq!(moved(given), wanted, "{given}");
        }
        for left_alone in
            ["k", "k --help", "k --unknown x status", "k --context", "k --context c", "k -o x status"]
        {
            assert_eq!(moved(left_alone), left_alone);
        }
    }
}
