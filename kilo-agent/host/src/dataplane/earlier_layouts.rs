//! Takes over maps pinned by an agent of an earlier layout whose content still means the same: they are
//! pinned here, too, so that flows, tables and the words of `lead` survive a change of layout as they survive
//! a restart.

use std::{io, path::Path};

use aya::{EbpfError, maps::MapData};
use kilo_common::{map_table::MapSpec, maps::LAYOUT_VERSION};

use super::{
    DataplaneError,
    load::{Layout, fits, other_layouts, pinned},
};

/// Pins each map that `directory` lacks from the newest earlier layout that has it, down to
/// [`MapSpec::since`]. The old programs keep using the same maps until ours are on their hooks.
///
/// # Errors
/// When a pin cannot be checked or made: continuing without its content would cut the flows in it.
pub fn take_over(directory: &Path) -> Result<(), DataplaneError> {
    let mut earlier = other_layouts(directory);
    earlier.retain(|layout| layout.version < LAYOUT_VERSION);
    earlier.sort_unstable_by_key(|layout| std::cmp::Reverse(layout.version));
    for map in pinned().filter(|map| !directory.join(map.name).exists()) {
        let since = earlier.iter().take_while(|layout| layout.version >= map.since);
        for layout in since {
            if pin(map, layout, directory)? {
                break;
            }
        }
    }
    Ok(())
}

/// Pins one map of that layout; false when there is no such map, or one of another shape.
fn pin(map: &MapSpec, layout: &Layout, directory: &Path) -> Result<bool, DataplaneError> {
    let path = layout.path.join(map.name);
    if !path.exists() || !fits(map, &path)? {
        return Ok(false);
    }
    let data = MapData::from_pin(&path).map_err(EbpfError::from)?;
    let path = directory.join(map.name);
    data.pin(&path).map_err(|error| DataplaneError::Pin { path, source: io::Error::other(error) })?;
    tracing::info!(map = map.name, layout = layout.version, "taking over a map of an earlier layout");
    Ok(true)
}
