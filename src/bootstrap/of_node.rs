//! The ranks of one node, in steps that all nodes make at the same time.

use std::path::Path;
use std::time::Duration;

use super::Bootstrap;
use crate::error::{Error, Result};

/// The ranks of this rank's node as a world, which gathers through the whole world's bootstrap. All nodes make the same
/// gathers. Whether a step succeeded is decided among all ranks, through that bootstrap.
pub(crate) struct OfNode<'a> {
    bootstrap: &'a dyn Bootstrap,
    /// The node's ranks in the whole world, ascending.
    pub members: Vec<usize>,
    rank: usize,
}

impl<'a> OfNode<'a> {
    /// Finds the ranks of this node.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] if the bootstrap does not say the node of each rank.
    pub fn new(bootstrap: &'a dyn Bootstrap) -> Result<Self> {
        let (nodes, own) = (bootstrap.nodes(), bootstrap.rank());
        if nodes.len() != bootstrap.world_size() {
            let reason = format!("it names {} nodes for {} ranks", nodes.len(), bootstrap.world_size());
            return Err(Error::Rendezvous { reason });
        }
        let members: Vec<_> = (0..nodes.len()).filter(|&rank| nodes[rank] == nodes[own]).collect();
        // This rank is a member.
        let rank = members.iter().position(|&rank| rank == own).unwrap_or_default();
        Ok(Self { bootstrap, members, rank })
    }

    /// Returns whether all ranks are on this node.
    pub fn is_whole_world(&self) -> bool {
        self.members.len() == self.bootstrap.world_size()
    }
}

impl Bootstrap for OfNode<'_> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut all = self.bootstrap.all_gather(bytes, timeout)?;
        Ok(self
            .members
            .iter()
            .map(|&rank| all.get_mut(rank).map(std::mem::take).unwrap_or_default())
            .collect())
    }

    fn socket_directory(&self) -> Option<&Path> {
        self.bootstrap.socket_directory()
    }
}
