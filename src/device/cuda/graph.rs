//! Captured inputs of pulled calls: each has a row of the table, which all ranks fill after the capture.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::CUstream;

use super::capture::{capture_of, GraphLife};
use super::graph_rows::{GraphRows, Input};
use super::handle::{Handle, Sharing};
use super::memory::Memory;
use super::{driver, Cuda};
use crate::bootstrap::{all_succeeded, Bootstrap};
use crate::error::{Error, Result};
use crate::region::{TableRow, FIRST_GRAPH_ROW, TABLE_ROWS};

/// What a rank tells of its rows: those that it has released, and row and handle of each captured input that is new.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    released: Vec<usize>,
    entered: Vec<(usize, Handle)>,
}

impl Told {
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
    fn graph_rows(&self) -> MutexGuard<'_, GraphRows> {
        self.graph_rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The source word for an input that is captured on a stream: a row if peers can map it and there is one left, else 0, staging,
    /// which captures as it is.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this context, which is current.
    pub(crate) unsafe fn capture_input(&self, stream: CUstream, address: u64) -> Result<u64> {
        let shared = match self.world.same_device_and_process() {
            true => true,
            false => driver::is_exportable(address),
        };
        if !self.graph_registration || !shared {
            return Ok(0);
        }
        let Some(allocation) = driver::allocation_number(address)? else { return Ok(0) };
        // SAFETY: the caller's.
        let (capture, graph) = unsafe { capture_of(stream) }.unzip();
        let life = || graph.map_or_else(GraphLife::default, GraphLife::of);
        let source = self.graph_rows().capture(Input { address, allocation }, capture, life);
        Ok(source.unwrap_or(0))
    }

    /// Tells the peers the handles of what has been captured since the last time, and the rows whose graphs have gone, and hands the
    /// rows that changed to `write`. Collective: after an error of any rank the next time has all of it to do again.
    pub(crate) fn exchange_graph_rows(
        &self,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
        write: impl FnOnce(&[(usize, TableRow)]) -> Result<()>,
    ) -> Result<()> {
        let sharing = if self.world.same_process { Sharing::Pointers } else { Sharing::Ipc };
        // On all ranks or on none, before anything has changed.
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
        let told = Told { released: released.clone(), entered }.encode();
        let all = bootstrap.all_gather(&told, timeout)?;
        let nothing = Told { released: Vec::new(), entered: Vec::new() }.encode();
        if sharing == Sharing::Ipc && all.iter().any(|told| *told != nothing) {
            self.exports.begin();
        }

        let own_rank = bootstrap.rank();
        let of_peers = all.iter().enumerate().filter(|(rank, _)| *rank != own_rank);
        let told = of_peers.map(|(rank, bytes)| Ok((rank, Told::decode(rank, bytes)?)));
        let imported = told.collect::<Result<Vec<_>>>().and_then(|told| {
            let of_rank = |(rank, told): &(usize, Told)| {
                let open = |(row, handle): &(usize, Handle)| {
                    let memory = Memory::import(&self.context, *rank, handle, self.process, None)?;
                    Ok((*row, *rank, memory.address() + handle.offset, memory))
                };
                told.entered.iter().map(open).collect::<Result<Vec<_>>>()
            };
            let opened = told.iter().map(of_rank).collect::<Result<Vec<_>>>()?;
            Ok((told, opened))
        });
        let (told, opened) = all_succeeded(imported, bootstrap, timeout)?;

        let own = exported.into_iter().map(|(row, address, _, memory)| (row, own_rank, address, memory));
        let entries = own.chain(opened.into_iter().flatten());
        let released_by = |(rank, told): (usize, Told)| told.released.into_iter().map(move |row| (row, rank));
        let all_released =
            told.into_iter().flat_map(released_by).chain(released.iter().map(|&row| (row, own_rank)));
        // Not held while the rows are written: a captured call locks the endpoint first, and then this.
        let changes = self.graph_rows().enter(entries, all_released);
        let written = write(&changes.rows);
        if written.is_ok() {
            // Kernels that read through these rows ended with the launches of the graphs that named them.
            self.graph_rows().close(changes);
        }
        // No rank replays before all have the rows, and none gives a row again that another has still.
        all_succeeded(written, bootstrap, timeout)?;
        self.graph_rows().finish(&offered, &released);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::cuda::handle::Payload;
    use crate::testing::damaged::damaged;

    fn told() -> Told {
        let handle =
            Handle { process: [1; 16], export: 2, bytes: 300, offset: 4, payload: Payload::Ipc([9; 64]) };
        let entered = vec![(FIRST_GRAPH_ROW, handle.clone()), (TABLE_ROWS - 1, handle)];
        Told { released: vec![FIRST_GRAPH_ROW + 7], entered }
    }

    #[test]
    fn lists_travel_and_corrupt_ones_are_refused() {
        let (mut told, bytes) = (told(), told().encode());
        assert_eq!(Told::decode(1, &bytes), Ok(self::told()));
        let before_handles = 2 + 2 * told.released.len();
        for cut in 0..bytes.len() {
            let cut_short = Told::decode(1, &bytes[..cut]);
            let is_whole = cut >= before_handles && (cut - before_handles) % (2 + Handle::BYTES) == 0;
            assert!(cut_short.is_err() || is_whole, "{cut}");
        }
        told.entered[0].0 = FIRST_GRAPH_ROW - 1;
        assert!(Told::decode(1, &told.encode()).is_err());
        let released = Told { released: vec![TABLE_ROWS], entered: vec![] };
        assert!(Told::decode(1, &released.encode()).is_err());
    }

    proptest! {
        #[test]
        fn any_list_is_refused_or_of_graph_rows(bytes in damaged(vec![told().encode()])) {
            match Told::decode(1, &bytes) {
                Ok(told) => {
                    let mut rows = told.released.iter().chain(told.entered.iter().map(|(row, _)| row));
                    prop_assert!(rows.all(|row| (FIRST_GRAPH_ROW..TABLE_ROWS).contains(row)));
                }
                Err(error) => prop_assert!(matches!(error, Error::Malformed { rank: 1, .. }), "{}", error),
            }
        }
    }
}
