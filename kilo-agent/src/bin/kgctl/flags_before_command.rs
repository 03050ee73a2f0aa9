//! Accepts flags before the command, as kubectl does: `kgctl --context prod status` is `kgctl status
//! --context prod`, without giving each command flags that it ignores. So does Kilo's own `kgctl`, also between
//! a command and its subcommand: `kgctl showconf --as-peer node a1`.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};

/// Moves flags from before commands to behind the last one. Where they do not lead to a command that does
/// something, all stay where they are, so that clap reports what is wrong.
pub fn behind_command(root: &Command, arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let given: Vec<_> = arguments.into_iter().collect();
    let mut arguments = given.clone();
    // `named` words are the names of the program and its commands; flags up to `at` follow them.
    let (mut named, mut at, mut command) = (1, 1, root);
    while let Some(text) = arguments.get(at).and_then(|argument| argument.to_str()) {
        if let Some(below) = command.find_subcommand(text) {
            arguments[named..=at].rotate_right(1);
            (named, at, command) = (named + 1, at + 1, below);
        } else if let Some(length) = length(command, text) {
            at += length;
        } else {
            break;
        }
    }
    if command.has_subcommands() { given } else { arguments }
}

/// Number of words of a flag that a command below this one has, with its value; `None`: there is no such flag.
fn length(command: &Command, text: &str) -> Option<usize> {
    let (arg, has_value) = match text.strip_prefix("--") {
        Some(flag) => {
            let (name, has_value) = flag.split_once('=').map_or((flag, false), |(name, _)| (name, true));
            (of_any_command(command, &|arg| arg.get_long() == Some(name))?, has_value)
        }
        None => {
            let mut letters = text.strip_prefix('-')?.chars();
            let letter = letters.next()?;
            let arg = of_any_command(command, &|arg| arg.get_short() == Some(letter))?;
            (arg, !letters.as_str().is_empty())
        }
    };
    let takes_next = !has_value
        && matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
        && !arg.is_require_equals_set();
    Some(if takes_next { 2 } else { 1 })
}

/// Finds a flag of any subcommand.
fn of_any_command<'a>(command: &'a Command, is_it: &dyn Fn(&Arg) -> bool) -> Option<&'a Arg> {
    command.get_subcommands().find_map(|below| {
        below.get_arguments().find(|arg| is_it(arg)).or_else(|| of_any_command(below, is_it))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(line: &str) -> String {
        let flag = |name| Arg::new(name).long(name);
        let root = Command::new("k")
            .subcommand(
                Command::new("show")
                    .subcommand(Command::new("node").arg(flag("context")).arg(flag("output").short('o'))),
            )
            .subcommand(
                Command::new("status")
                    .arg(flag("context"))
                    .arg(flag("quiet").action(ArgAction::SetTrue))
                    .arg(flag("agent").num_args(0..=1).require_equals(true)),
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
            ("k show --context c node n1", "k show node --context c n1"),
            ("k --context=c show -o yaml node n1", "k show node --context=c -o yaml n1"),
            ("k -oyaml show node n1", "k show node -oyaml n1"),
            // Alone it has a value, and takes none from the next word.
            ("k --agent status", "k status --agent"),
        ] {
            assert_eq!(moved(given), wanted, "{given}");
        }
        for left_alone in [
            "k",
            "k --help",
            "k --unknown x status",
            "k --context",
            "k --context c",
            "k -x status",
            "k - status",
            "k -- status",
            "k --context c show --unknown node",
            "k status show",
        ] {
            assert_eq!(moved(left_alone), left_alone);
        }
    }
}
