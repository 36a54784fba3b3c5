//! The ranks of one node, in steps that all nodes make at the same time.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{in_old_ranks, Bootstrap};
use crate::error::{Error, Result};

/// The ranks of this rank's node as a world, which gathers through the whole world's bootstrap. All nodes make the same
/// gathers. Whether a step succeeded is decided among all ranks, through that bootstrap.
pub(crate) struct OfNode<'a> {
    bootstrap: &'a dyn Bootstrap,
    /// The node's ranks in the whole world, ascending.
    pub members: Vec<usize>,
    rank: usize,
    /// Whether a gather has failed: all later steps return its error.
    has_failed: AtomicBool,
}

impl<'a> OfNode<'a> {
    /// Finds the ranks of this node. It fails on all ranks or on none: they have compared what their bootstraps say.
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
        Ok(Self { bootstrap, members, rank, has_failed: AtomicBool::new(false) })
    }

    /// Converts the ranks in an error of a step of this node to those of the whole world. Those in an error of a gather
    /// are such ranks already.
    pub fn in_world_ranks(&self, error: Error) -> Error {
        // Relaxed: the step was made by this thread.
        match self.has_failed.load(Ordering::Relaxed) {
            true => error,
            false => in_old_ranks(error, &self.members),
        }
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
        let all = self.bootstrap.all_gather(bytes, timeout);
        let mut all = all.inspect_err(|_| self.has_failed.store(true, Ordering::Relaxed))?;
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::exchange_descriptors;
    use super::*;

    /// Rank 2 of four ranks on two nodes, with the result of each gather.
    struct Third(Result<[&'static [u8]; 4]>);

    impl Bootstrap for Third {
        fn rank(&self) -> usize {
            2
        }

        fn world_size(&self) -> usize {
            4
        }

        fn all_gather(&self, _: &[u8], _: Duration) -> Result<Vec<Vec<u8>>> {
            Ok(self.0.clone()?.map(<[u8]>::to_vec).into())
        }

        fn nodes(&self) -> Vec<usize> {
            vec![0, 0, 1, 1]
        }
    }

    #[test]
    fn errors_name_ranks_of_the_whole_world() {
        let error = |gathered| {
            let bootstrap = Third(gathered);
            let node = OfNode::new(&bootstrap).unwrap();
            let exchanged = exchange_descriptors(&node, std::io::stderr().as_fd(), Duration::ZERO);
            node.in_world_ranks(exchanged.unwrap_err())
        };
        let lost = Error::PeerLost { rank: 0, reason: "it ended".into() };
        assert_eq!(error(Err(lost.clone())), lost);
        // The last rank could not begin.
        let error = error(Ok([b"", b"", b"an address", b""]));
        assert!(matches!(error, Error::PeerFailed { rank: 3, .. }), "{error}");
    }
}
