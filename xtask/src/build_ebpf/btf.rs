//! Brings the forward declarations of BTF into the order of their names. LLVM writes them in the order of its own
//! objects' addresses (`FixupDerivedTypes`, llvm/lib/Target/BPF/BTFDebug.h), which differs from build to build.
//! The format: Documentation/bpf/btf.rst of the kernel.

use anyhow::{Context as _, Result};
use object::{Object as _, ObjectSection as _};

/// Bytes of a type without what its kind adds.
const TYPE: usize = 12;
/// Where a type has the id of the one it refers to, or its size.
const REFERENCE: usize = 8;
/// `BTF_KIND_FWD`.
const DECLARATION: u32 = 7;

/// Sorts the declarations at the end of the types of an ELF object.
///
/// # Errors
/// When it is no ELF object with BTF.
pub fn sort_declarations(elf: &mut [u8]) -> Result<()> {
    let section = object::File::parse(&*elf)?;
    let section = section.section_by_name(".BTF").context("the object has no BTF")?;
    let (start, length) = section.file_range().context("its BTF is empty")?;
    let range = usize::try_from(start)?..usize::try_from(start + length)?;
    let btf = elf.get_mut(range).context("its BTF is outside of the file")?;
    sort(btf).context("its BTF cannot be read")
}

/// A type: where it begins, its kind, and its number of members.
#[derive(Clone, Copy)]
struct Type {
    at: usize,
    kind: u32,
    members: usize,
}

impl Type {
    /// Bytes after the first [`TYPE`]; `None`: an unknown kind.
    const fn more(self) -> Option<usize> {
        Some(match self.kind {
            1 | 14 | 17 => 4,
            3 => 12,
            4 | 5 | 15 | 19 => 12 * self.members,
            6 | 13 => 8 * self.members,
            2 | 7..=12 | 16 | 18 => 0,
            _ => return None,
        })
    }

    /// Where ids of other types are.
    fn references(self) -> Vec<usize> {
        let each = |size: usize, at: usize| (0..self.members).map(move |n| self.at + TYPE + size * n + at);
        let own = self.at + REFERENCE;
        match self.kind {
            // pointer, typedef, volatile, const, restrict, function, variable, declaration tag, type tag
            2 | 8..=12 | 14 | 17 | 18 => vec![own],
            // array: of what, and the type of its index
            3 => vec![self.at + TYPE, self.at + TYPE + 4],
            // struct, union
            4 | 5 => each(12, 4).collect(),
            // function prototype
            13 => each(8, 4).chain([own]).collect(),
            // section
            15 => each(12, 0).collect(),
            _ => Vec::new(),
        }
    }
}

fn word(btf: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(btf.get(at..at + 4)?.try_into().ok()?))
}

fn number(btf: &[u8], at: usize) -> Option<usize> {
    usize::try_from(word(btf, at)?).ok()
}

/// `None`: it is no BTF, or of a newer format.
fn sort(btf: &mut [u8]) -> Option<()> {
    let header = number(btf, 4)?;
    let (begin, strings) = (header + number(btf, 8)?, header + number(btf, 16)?);
    let end = begin + number(btf, 12)?;
    let (mut types, mut at) = (Vec::new(), begin);
    while at < end {
        let info = word(btf, at + 4)?;
        let found = Type { at, kind: info >> 24 & 31, members: (info & 0xffff) as usize };
        at += TYPE + found.more()?;
        types.push(found);
    }
    let first = types.iter().rposition(|found| found.kind != DECLARATION).map_or(0, |last| last + 1);
    let name = |index: &usize| -> Option<Vec<u8>> {
        let from = strings + number(btf, types.get(*index)?.at)?;
        Some(btf.get(from..)?.iter().copied().take_while(|byte| *byte != 0).collect())
    };
    let mut order: Vec<usize> = (first..types.len()).collect();
    order.sort_by_key(name);
    let records: Option<Vec<Vec<u8>>> =
        order.iter().map(|&index| Some(btf.get(types[index].at..)?.get(..TYPE)?.to_vec())).collect();
    for (to, record) in types[first..].iter().zip(records?) {
        btf.get_mut(to.at..to.at + TYPE)?.copy_from_slice(&record);
    }
    sort_names(btf, strings, &types[first..])?;
    // Ids count from 1.
    for at in types.iter().flat_map(|found| found.references()) {
        let id = number(btf, at)?;
        if let Some(moved) = order.iter().position(|index| index + 1 == id) {
            let id = u32::try_from(first + moved + 1).ok()?;
            btf.get_mut(at..at + 4)?.copy_from_slice(&id.to_le_bytes());
        }
    }
    Some(())
}

/// Puts the names of sorted declarations in their order, where these names follow each other in the strings.
fn sort_names(btf: &mut [u8], strings: usize, declarations: &[Type]) -> Option<()> {
    let mut names = Vec::new();
    for declaration in declarations {
        let offset = number(btf, declaration.at)?;
        let name: Vec<u8> =
            btf.get(strings + offset..)?.iter().copied().take_while(|byte| *byte != 0).collect();
        names.push((offset, name));
    }
    let mut by_offset = names.clone();
    by_offset.sort_unstable();
    let is_followed = |pair: &[(usize, Vec<u8>)]| pair[0].0 + pair[0].1.len() + 1 == pair[1].0;
    let Some((mut offset, _)) = by_offset.first().cloned().filter(|_| by_offset.windows(2).all(is_followed))
    else {
        return Some(());
    };
    for (declaration, (_, name)) in declarations.iter().zip(&names) {
        let to = strings + offset;
        btf.get_mut(to..to + name.len())?.copy_from_slice(name);
        *btf.get_mut(to + name.len())? = 0;
        let written = u32::try_from(offset).ok()?.to_le_bytes();
        btf.get_mut(declaration.at..declaration.at + 4)?.copy_from_slice(&written);
        offset += name.len() + 1;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    /// A pointer, a struct with a member of each of these types, and two declarations with these names, at 1 and 4
    /// of the strings.
    fn btf(members: [u32; 2], declarations: [u32; 2]) -> Vec<u8> {
        with_strings(b"\0as\0bs\0", members, declarations)
    }

    fn with_strings(strings: &[u8], members: [u32; 2], declarations: [u32; 2]) -> Vec<u8> {
        let types: Vec<u32> = [
            vec![0, 2 << 24, members[0]],
            vec![0, 4 << 24 | 2, 16, 0, members[0], 0, 0, members[1], 64],
            vec![declarations[0], 7 << 24, 0],
            vec![declarations[1], 7 << 24, 0],
        ]
        .concat();
        let length = types.len() as u32 * 4;
        let header = [0x1_eb9f, 24, 0, length, length, strings.len() as u32];
        let words = header.into_iter().chain(types);
        words.flat_map(u32::to_le_bytes).chain(strings.iter().copied()).collect()
    }

    #[test]
    fn the_order_in_which_declarations_were_written_does_not_show() {
        let wanted = btf([3, 4], [1, 4]);
        for mut written in [wanted.clone(), btf([4, 3], [4, 1])] {
            sort(&mut written).unwrap();
            assert_eq!(written, wanted);
        }
        assert_ne!(wanted, btf([4, 3], [1, 4]), "another meaning");
    }

    #[test]
    fn the_order_of_their_names_does_not_show() {
        let wanted = btf([3, 4], [1, 4]);
        for (members, declarations) in [([3, 4], [4, 1]), ([4, 3], [1, 4])] {
            let mut written = with_strings(b"\0bs\0as\0", members, declarations);
            sort(&mut written).unwrap();
            assert_eq!(written, wanted);
        }
        // Names that do not follow each other stay where they are.
        let mut apart = with_strings(b"\0bs\0x\0as\0", [3, 4], [1, 6]);
        sort(&mut apart).unwrap();
        assert_eq!(apart, with_strings(b"\0bs\0x\0as\0", [4, 3], [6, 1]));
    }

    #[test]
    fn what_is_no_btf_is_left_alone() {
        for length in 0..60 {
            let mut cut = btf([3, 4], [4, 1])[..length].to_vec();
            assert!(sort(&mut cut).is_none(), "{length}");
        }
        assert!(sort_declarations(&mut [0; 64]).is_err());
    }
}
