//! The mesh as one node sees it.

use std::{borrow::Cow, ops::Deref, sync::Arc};

use super::{Member, Mesh};
use crate::flat_map::sort_by_prefix;

/// The mesh as seen from one node, from which that node's plan and hop ids are computed. It is
/// the mesh as it is, except where each node has its own WireGuard device in the mesh
/// ([`Granularity::Cross`](crate::settings::Granularity::Cross)): there the nodes of its
/// location are one segment, which it leads itself.
#[derive(Clone, Debug)]
pub struct LocalMesh<'a> {
    mesh: Cow<'a, Mesh>,
    node: &'a str,
    own: Option<(usize, usize)>,
}

impl Deref for LocalMesh<'_> {
    type Target = Mesh;
    fn deref(&self) -> &Mesh {
        &self.mesh
    }
}

impl LocalMesh<'_> {
    /// Name of the node.
    pub const fn node(&self) -> &str {
        self.node
    }

    /// Where the node is, as [`Mesh::find`] returns it; `None`: it takes no part.
    pub const fn own(&self) -> Option<(usize, usize)> {
        self.own
    }

    /// The other nodes of its location, by name.
    pub fn others(&self) -> impl Iterator<Item = &Member> {
        let members = self.own.into_iter().flat_map(|(own, _)| &self.mesh.segments[own].members);
        members.filter(|member| member.name() != self.node)
    }
}

impl Mesh {
    /// This mesh as a node sees it.
    pub fn as_seen_from<'a>(&'a self, node: &'a str) -> LocalMesh<'a> {
        let mesh = self.joined_as_seen_from(node).map_or(Cow::Borrowed(self), Cow::Owned);
        let own = mesh.find(node);
        LocalMesh { mesh, node, own }
    }

    /// The mesh with the location of a node as one segment; `None`: it stays as it is.
    fn joined_as_seen_from(&self, node: &str) -> Option<Self> {
        let (own, _) = self.find(node)?;
        let lan = self.segments[own].lan.as_ref()?;
        let (mut near, far): (Vec<_>, Vec<_>) =
            self.segments.iter().cloned().partition(|segment| segment.lan.as_ref() == Some(lan));
        let at = near.iter().position(|segment| segment.leading().is_some_and(|own| own.name() == node))?;
        let mut segment = Arc::unwrap_or_clone(near.swap_remove(at));
        let own_ip = segment.wireguard_ip;
        for member in &mut segment.members {
            member.wireguard_ip = own_ip;
        }
        for other in near.into_iter().map(Arc::unwrap_or_clone) {
            segment.members.extend(
                other.members.into_iter().map(|member| Member { wireguard_ip: other.wireguard_ip, ..member }),
            );
            segment.allowed_ips.extend(other.allowed_ips);
            segment.reach.extend(other.reach);
            segment.allowed_location_ips.extend(other.allowed_location_ips);
        }
        segment.members.sort_by(|a, b| a.name().cmp(b.name()));
        segment.leader = segment.members.iter().position(|member| member.name() == node).unwrap_or(0);
        sort_by_prefix(&mut segment.reach, |reach| reach.prefix);
        Some(self.of_segments(far.into_iter().chain([segment.into()]).collect()))
    }
}
