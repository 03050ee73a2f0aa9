//! Each command on the pages is run by a test that docs/commands.md names, or is marked on its page.

use std::{collections::BTreeSet, fs};

use super::{pages, root};

/// Start of the paragraph below a block with commands that no test runs.
const MARK: &str = "*Not run by a test";

/// A row of docs/commands.md.
struct Row {
    /// Words; `*` matches any text within a word, `...` at the end any further words.
    pattern: String,
    function: String,
    file: String,
}

/// Text between backquotes in the cells of a row.
fn cells(line: &str) -> Vec<String> {
    // A bar within a cell is written `\|`.
    let cells = line.replace("\\|", "\u{0}");
    let text = |cell: &str| cell.trim().trim_matches('`').replace('\u{0}', "|");
    cells.trim_matches('|').split('|').map(text).collect()
}

fn rows() -> Vec<Row> {
    let page = fs::read_to_string(root().join("docs/commands.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `")).map(|line| {
        let row: [String; 4] = cells(line).try_into().unwrap_or_else(|cells| panic!("{cells:?}"));
        let [pattern, function, file, _] = row;
        Row { pattern, function, file }
    });
    rows.collect()
}

impl Row {
    fn is_for(&self, command: &str) -> bool {
        let mut words = command.split_whitespace();
        for wanted in self.pattern.split_whitespace() {
            if wanted == "..." {
                return true;
            }
            let Some(word) = words.next() else { return false };
            let fits = match wanted.split_once('*') {
                // A flag is not a name.
                Some(("", "")) => !word.starts_with('-'),
                Some((before, after)) => word.starts_with(before) && word.ends_with(after),
                None => word == wanted,
            };
            if !fits {
                return false;
            }
        }
        words.next().is_none()
    }
}

/// Commands of one block of a page.
struct Block {
    /// Its first line, from 1.
    line: usize,
    commands: Vec<String>,
    is_marked: bool,
}

/// The command of a line that begins with a prompt: `$ `, `# `, `host$ ` or `host# `.
fn behind_prompt(line: &str) -> Option<&str> {
    let at = line.find(['$', '#'])?;
    let is_name = line[..at].chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '-');
    line[at + 1..].strip_prefix(' ').filter(|_| is_name)
}

/// The command without a remark at its end.
fn without_remark(command: &str) -> &str {
    command.split_once(" # ").map_or(command, |(command, _)| command).trim()
}

/// All blocks of a page except those between `flags` marks, whose examples `kgctl` parses itself.
fn blocks(page: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut lines = page.lines().enumerate().peekable();
    let mut is_generated = false;
    while let Some((number, line)) = lines.next() {
        if line.starts_with("<!-- flags: ") || line.starts_with("<!-- /flags ") {
            is_generated = line.starts_with("<!-- flags: ");
        }
        let Some(language) = line.trim_start().strip_prefix("```") else { continue };
        let mut commands = Vec::new();
        while let Some((_, line)) = lines.next().filter(|(_, line)| !line.trim_start().starts_with("```")) {
            // In YAML a comment looks like a prompt.
            let Some(command) = behind_prompt(line).filter(|_| language != "yaml") else { continue };
            let mut command = command.to_owned();
            while command.ends_with('\\') {
                command.pop();
                command += lines.next().map_or("", |(_, line)| line);
            }
            commands.push(without_remark(&command).to_owned());
        }
        while lines.next_if(|(_, line)| line.is_empty()).is_some() {}
        let is_marked = lines.peek().is_some_and(|(_, line)| line.starts_with(MARK));
        if !is_generated && !commands.is_empty() {
            found.push(Block { line: number + 1, commands, is_marked });
        }
    }
    found
}

#[test]
fn every_command_is_run_by_a_test_or_marked() {
    let rows = rows();
    let mut used = BTreeSet::<usize>::new();
    let mut wrong = Vec::new();
    let mut count = 0;
    for (path, text) in pages() {
        for block in blocks(&text) {
            let place = format!("{}:{}", path.file_name().unwrap().display(), block.line);
            let mut all_are_run = true;
            for command in &block.commands {
                count += 1;
                let fitting: Vec<_> = (0..rows.len()).filter(|row| rows[*row].is_for(command)).collect();
                used.extend(&fitting);
                all_are_run &= !fitting.is_empty();
                if fitting.is_empty() && !block.is_marked {
                    wrong.push(format!(
                        "{place}: `{command}`: name its test in docs/commands.md, or write \"{MARK}: why.*\" below the block"
                    ));
                }
            }
            if block.is_marked && all_are_run {
                wrong.push(format!("{place}: is marked, but docs/commands.md has a test for each command"));
            }
        }
    }
    let idle = rows.iter().enumerate().filter(|(at, _)| !used.contains(at));
    wrong.extend(idle.map(|(_, row)| format!("docs/commands.md: no page shows `{}`", row.pattern)));
    assert!(count > 80, "only {count} commands were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_test_that_the_table_of_commands_names_is_there() {
    for Row { pattern, function, file } in rows() {
        let text = fs::read_to_string(root().join(&file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let is_there = ["(", "<"].iter().any(|end| text.contains(&format!("fn {function}{end}")));
        assert!(is_there, "{file} has no function {function}, which docs/commands.md names for `{pattern}`");
    }
}
