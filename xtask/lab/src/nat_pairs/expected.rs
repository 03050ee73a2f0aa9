//! By which path ends behind each pair of kinds of NAT must connect; docs/nat.md shows the same table.

use kilo_core::tunnel_path::TunnelPath::{self, Punched, Relayed};

use crate::nat::Kind;

/// The path for each pair, in the order of [`Kind::ALL`], where a third leader offers to relay. Holes are punched
/// where both NATs keep one port for all destinations, or one lets in answers from any port.
const PATHS: [[TunnelPath; 4]; 4] = [
    [Punched, Punched, Punched, Punched],
    [Punched, Punched, Punched, Punched],
    [Punched, Punched, Punched, Relayed],
    [Punched, Punched, Relayed, Relayed],
];

/// The path by which these two must connect.
pub(super) fn path([x, y]: [Kind; 2]) -> TunnelPath {
    PATHS[x as usize][y as usize]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_the_two_ends_does_not_matter() {
        for (row, x) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(x as usize, row, "kinds are listed in their order");
            assert!(Kind::ALL.into_iter().all(|y| path([x, y]) == path([y, x])), "{x:?}");
        }
    }

    #[test]
    fn the_page_for_operators_shows_the_same_paths() {
        let page = std::fs::read_to_string(crate::workspace_root().join("docs/nat.md")).unwrap();
        let (_, seen) = page.split_once("## What was seen").unwrap();
        for x in Kind::ALL {
            let row = seen.lines().find(|line| line.starts_with(&format!("| {} |", x.name()))).unwrap();
            let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).skip(1).collect();
            assert_eq!(cells.len(), Kind::ALL.len(), "{row}");
            for (y, cell) in Kind::ALL.into_iter().zip(cells) {
                let wanted =
                    if (y as usize) < x as usize { String::new() } else { format!("{}, ", path([x, y])) };
                assert!(cell.starts_with(&wanted) && cell.is_empty() == wanted.is_empty(), "{wanted}: {row}");
            }
        }
    }
}
