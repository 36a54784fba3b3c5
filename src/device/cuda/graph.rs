//! Registration of captured inputs: each gets a row of the table of registered buffers, which all ranks fill after
//! the capture.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::CUstream;

use super::driver::capture::{capture_of, GraphLife};
use super::launch::graph_rows::{GraphRows, Input};
use super::memory::{Handle, Memory, Sharing};
use super::{driver, Cuda};
use crate::bootstrap::{all_succeeded, Bootstrap};
use crate::error::{Error, Result};
use crate::region::{TableRow, FIRST_GRAPH_ROW, TABLE_ROWS};

/// Changes that a rank announces: the rows that it released, and row and handle of each new captured input.
#[derive(Debug, PartialEq, Eq)]
struct Announcement {
    released: Vec<usize>,
    entered: Vec<(usize, Handle)>,
}

impl Announcement {
    fn encode(&self) -> Vec<u8> {
        let word = |number: usize| (number as u16).to_le_bytes();
        let mut bytes = word(self.released.len()).to_vec();
        bytes.extend(self.released.iter().flat_map(|&row| word(row)));
        for (row, handle) in &self.entered {
            bytes.extend(word(*row));
            bytes.extend(handle.encode());
        }
        bytes
    }

    fn decode(rank: usize, bytes: &[u8]) -> Result<Self> {
        let malformed = |reason: String| Error::Malformed { rank, reason };
        let word = |bytes: &mut &[u8]| {
            let (word, rest) = bytes
                .split_first_chunk()
                .ok_or_else(|| malformed("its list of graph buffers is cut short".into()))?;
            *bytes = rest;
            Ok(usize::from(u16::from_le_bytes(*word)))
        };
        let row = |bytes: &mut &[u8]| match word(bytes)? {
            row if (FIRST_GRAPH_ROW..TABLE_ROWS).contains(&row) => Ok(row),
            row => Err(malformed(format!("graph buffers do not have row {row}"))),
        };
        let mut bytes = bytes;
        let released = (0..word(&mut bytes)?).map(|_| row(&mut bytes)).collect::<Result<_>>()?;
        let one = |mut bytes: &[u8]| Ok((row(&mut bytes)?, Handle::decode(rank, bytes)?));
        Ok(Self { released, entered: bytes.chunks(2 + Handle::BYTES).map(one).collect::<Result<_>>()? })
    }
}

impl Cuda {
    pub(super) fn graph_rows(&self) -> MutexGuard<'_, GraphRows> {
        self.graph_rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the source word for an input that is captured on a stream: a row if peers can map the input and a row
    /// is left. Otherwise it is 0, which stands for staging and works in captures without registration.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this context, which is current.
    pub(crate) unsafe fn capture_input(&self, stream: CUstream, address: u64) -> Result<u64> {
        let shared = match self.world.same_device_and_process() {
            true => true,
            false => {
                !self.world.several_nodes && !self.shares_host_memory() && driver::is_exportable(address)
            }
        };
        if !self.graph_registration || !shared {
            return Ok(0);
        }
        let Some(allocation) = driver::allocation_number(address)? else { return Ok(0) };
        // SAFETY: by the caller's contract.
        let (capture, graph) = unsafe { capture_of(stream) }.unzip();
        let life = || graph.map_or_else(GraphLife::default, GraphLife::of);
        let source = self.graph_rows().capture(Input { address, allocation }, capture, life);
        Ok(source.unwrap_or(0))
    }

    /// Announces to the peers the handles of inputs captured since the last exchange and the rows whose graphs have
    /// been destroyed, and passes the rows that changed to `write`. Collective. After an error of any rank, the next
    /// exchange repeats all of it.
    pub(crate) fn exchange_graph_rows(
        &self,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
        write: impl FnOnce(&[(usize, TableRow)]) -> Result<()>,
    ) -> Result<()> {
        let sharing = if self.world.same_process { Sharing::Pointers } else { Sharing::Ipc };
        // On all ranks or on none, before anything changes.
        all_succeeded(self.calls.wait_for_last_call(), bootstrap, timeout)?;
        let export = |(row, address): (usize, u64)| -> Result<_> {
            let memory = Memory::foreign(&self.context, address)?;
            let handle = memory.handle(self.process, address - memory.address(), sharing)?;
            Ok((row, address, handle, memory))
        };
        let (released, offered) = {
            let mut rows = self.graph_rows();
            (rows.released(), rows.offer(driver::allocation_number))
        };
        let exported = offered.and_then(|inputs| inputs.into_iter().map(export).collect::<Result<Vec<_>>>());
        let exported = all_succeeded(exported, bootstrap, timeout)?;
        let entered: Vec<_> = exported.iter().map(|(row, _, handle, _)| (*row, handle.clone())).collect();
        let offered: Vec<_> = exported.iter().map(|(row, ..)| *row).collect();
        let announced = Announcement { released: released.clone(), entered }.encode();
        let all = bootstrap.all_gather(&announced, timeout)?;
        let nothing = Announcement { released: Vec::new(), entered: Vec::new() }.encode();
        if sharing == Sharing::Ipc && all.iter().any(|announced| *announced != nothing) {
            self.exports.set_exchanged();
        }

        let own_rank = bootstrap.rank();
        let of_peers = all.iter().enumerate().filter(|(rank, _)| *rank != own_rank);
        let announced = of_peers.map(|(rank, bytes)| Ok((rank, Announcement::decode(rank, bytes)?)));
        let imported = announced.collect::<Result<Vec<_>>>().and_then(|announced| {
            let of_rank = |(rank, announced): &(usize, Announcement)| {
                let open = |(row, handle): &(usize, Handle)| {
                    let memory = Memory::import(&self.context, *rank, handle, self.process, None)?;
                    Ok((*row, *rank, memory.address() + handle.offset, memory))
                };
                announced.entered.iter().map(open).collect::<Result<Vec<_>>>()
            };
            let opened = announced.iter().map(of_rank).collect::<Result<Vec<_>>>()?;
            Ok((announced, opened))
        });
        let (announced, opened) = all_succeeded(imported, bootstrap, timeout)?;

        let own = exported.into_iter().map(|(row, address, _, memory)| (row, own_rank, address, memory));
        let entries = own.chain(opened.into_iter().flatten());
        let released_by = |(rank, announced): (usize, Announcement)| {
            announced.released.into_iter().map(move |row| (row, rank))
        };
        let all_released =
            announced.into_iter().flat_map(released_by).chain(released.iter().map(|&row| (row, own_rank)));
        // The lock is not held while the rows are written: a captured call locks the endpoint first, then this.
        let changes = self.graph_rows().enter(entries, all_released);
        let written = write(&changes.rows);
        if written.is_ok() {
            // Kernels that read through the closed rows ended with the launches of the graphs that used them.
            self.graph_rows().close(changes);
        }
        // No rank replays before all have the rows, and none reuses a row that another still has.
        all_succeeded(written, bootstrap, timeout)?;
        self.graph_rows().finish(&offered, &released);
        Ok(())
    }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_graph_rows, |bytes| Announcement::decode(1, bytes));

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::cuda::memory::handle::Payload;
    use crate::testing::damaged::damaged;

    fn announcement() -> Announcement {
        let handle =
            Handle { process: [1; 16], export: 2, bytes: 300, offset: 4, payload: Payload::Ipc([9; 64]) };
        let entered = vec![(FIRST_GRAPH_ROW, handle.clone()), (TABLE_ROWS - 1, handle)];
        Announcement { released: vec![FIRST_GRAPH_ROW + 7], entered }
    }

    #[test]
    fn lists_travel_and_corrupt_ones_are_refused() {
        let (mut announced, bytes) = (announcement(), announcement().encode());
        assert_eq!(Announcement::decode(1, &bytes), Ok(self::announcement()));
        let before_handles = 2 + 2 * announced.released.len();
        for cut in 0..bytes.len() {
            let cut_short = Announcement::decode(1, &bytes[..cut]);
            let is_whole = cut >= before_handles && (cut - before_handles) % (2 + Handle::BYTES) == 0;
            assert!(cut_short.is_err() || is_whole, "{cut}");
        }
        announced.entered[0].0 = FIRST_GRAPH_ROW - 1;
        assert!(Announcement::decode(1, &announced.encode()).is_err());
        let released = Announcement { released: vec![TABLE_ROWS], entered: vec![] };
        assert!(Announcement::decode(1, &released.encode()).is_err());
    }

    proptest! {
        #[test]
        fn any_list_is_refused_or_of_graph_rows(bytes in damaged(vec![announcement().encode()])) {
            match Announcement::decode(1, &bytes) {
                Ok(announced) => {
                    let mut rows = announced.released.iter().chain(announced.entered.iter().map(|(row, _)| row));
                    prop_assert!(rows.all(|row| (FIRST_GRAPH_ROW..TABLE_ROWS).contains(row)));
                }
                Err(error) => prop_assert!(matches!(error, Error::Malformed { rank: 1, .. }), "{}", error),
            }
        }
    }
}
