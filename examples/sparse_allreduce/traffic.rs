//! The collectives of a rank, with a count of the bytes that they send.

use std::cell::Cell;

use fast_allreduce::{Communicator, Element, Host, ReduceOp, Result};

use crate::sparse::{Part, Sparse};

/// How bytes are counted, whatever the memory does: it is printed with the results.
pub const RULE: &str =
    "bytes of the arguments that leave a rank if each element goes straight from the rank that has it to \
                        each that needs it; an all_reduce of S bytes counts 2 (n - 1)/n S";

/// Tags of the two messages that a sparse vector is.
const INDEXES: u32 = 0;
const VALUES: u32 = 1;

/// A communicator that counts.
pub struct Traffic<'a> {
    communicator: &'a Communicator<Host>,
    sent: Cell<usize>,
}

impl<'a> Traffic<'a> {
    pub fn new(communicator: &'a Communicator<Host>) -> Self {
        Self { communicator, sent: Cell::new(0) }
    }

    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    pub fn ranks(&self) -> usize {
        self.communicator.world_size()
    }

    /// Bytes sent so far.
    pub fn sent(&self) -> usize {
        self.sent.get()
    }

    fn count<T>(&self, elements: usize) {
        self.sent.set(self.sent.get() + elements * size_of::<T>());
    }

    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.count::<T>(2 * (self.ranks() - 1) * data.len() / self.ranks());
        self.communicator.all_reduce_in_place(data, op)
    }

    /// The ranks' parts of one length, in rank order.
    pub fn all_gather<T: Element + Default>(&self, own: &[T]) -> Result<Vec<T>> {
        self.count::<T>((self.ranks() - 1) * own.len());
        let mut all = vec![T::default(); self.ranks() * own.len()];
        self.communicator.all_gather(own, &mut all)?;
        Ok(all)
    }

    /// How many elements each rank has.
    fn all_gather_lengths(&self, own: usize) -> Result<Vec<usize>> {
        Ok(self.all_gather(&[own as u64])?.into_iter().map(|length| length as usize).collect())
    }

    /// The ranks' parts of any length, rank after rank, and their lengths.
    pub fn all_gather_v<T: Element + Default>(&self, own: &[T]) -> Result<(Vec<T>, Vec<usize>)> {
        let lengths = self.all_gather_lengths(own.len())?;
        self.count::<T>((self.ranks() - 1) * own.len());
        let mut all = vec![T::default(); lengths.iter().sum()];
        self.communicator.all_gather_v(own, &mut all, &lengths)?;
        Ok((all, lengths))
    }

    /// The ranks' entries, rank after rank: first how many each has, then as many.
    pub fn all_gather_sparse(&self, own: &Sparse) -> Result<Sparse> {
        let counts = self.all_gather_lengths(own.len())?;
        self.count::<(u32, f32)>((self.ranks() - 1) * own.len());
        let mut all = Sparse::zeros(counts.iter().sum());
        self.communicator.all_gather_v(&own.indexes, &mut all.indexes, &counts)?;
        self.communicator.all_gather_v(&own.values, &mut all.values, &counts)?;
        Ok(all)
    }

    /// One number for each rank, and from each.
    pub fn all_to_all(&self, own: &[u32]) -> Result<Vec<u32>> {
        self.count::<u32>(self.ranks() - 1);
        let mut all = vec![0; self.ranks()];
        self.communicator.all_to_all(own, &mut all)?;
        Ok(all)
    }

    /// The entries that each rank is sent, in rank order, for those that each sends.
    pub fn all_to_all_sparse(&self, own: &Sparse, send: &[usize], receive: &[usize]) -> Result<Sparse> {
        self.count::<(u32, f32)>(own.len() - send[self.rank()]);
        let mut all = Sparse::zeros(receive.iter().sum());
        self.communicator.all_to_all_v(&own.indexes, send, &mut all.indexes, receive)?;
        self.communicator.all_to_all_v(&own.values, send, &mut all.values, receive)?;
        Ok(all)
    }

    pub fn broadcast_sparse(&self, entries: &mut Sparse, root: usize) -> Result<()> {
        if self.rank() == root {
            self.count::<(u32, f32)>((self.ranks() - 1) * entries.len());
        }
        self.communicator.broadcast(&mut entries.indexes, root)?;
        self.communicator.broadcast(&mut entries.values, root)
    }

    /// Sends to some ranks and receives from some, all at the same time. Both sides know the lengths; of nothing,
    /// nothing is sent.
    pub fn exchange<'v>(
        &self,
        outgoing: impl IntoIterator<Item = (usize, Part<'v>)>,
        incoming: impl IntoIterator<Item = (usize, &'v mut Sparse)>,
    ) -> Result<()> {
        self.communicator.group(|group| {
            for (to, part) in outgoing.into_iter().filter(|(_, part)| !part.indexes.is_empty()) {
                self.count::<(u32, f32)>(part.indexes.len());
                group.send(part.indexes, to, INDEXES).send(part.values, to, VALUES);
            }
            for (from, entries) in incoming.into_iter().filter(|(_, entries)| entries.len() > 0) {
                group.recv(&mut entries.indexes, from, INDEXES).recv(&mut entries.values, from, VALUES);
            }
            Ok(())
        })
    }
}
