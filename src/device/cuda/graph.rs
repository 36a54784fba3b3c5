//! The inputs of pulled calls that were captured into graphs: each has a row of the table, filled after capture.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use super::handle::{Handle, Sharing};
use super::memory::Memory;
use super::{driver, Cuda};
use crate::abi::MAX_RANKS;
use crate::bootstrap::{all_succeeded, Bootstrap};
use crate::error::{Error, Result};
use crate::region::{source_word, TableRow, FIRST_GRAPH_ROW, TABLE_ROWS};

/// A captured input: its address, and the driver's number of the allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Input {
    address: u64,
    allocation: u64,
}

/// Rows for captured inputs. Rows are this rank's own: peers look a row up in this rank's column.
#[derive(Default)]
pub(super) struct GraphRows {
    /// The row of each. The allocation is part of the key: another one may come to lie at the same address, and peers would
    /// go on reading the old.
    inputs: HashMap<Input, usize>,
    /// Rows given so far. None is given twice, as a graph may still name it.
    given: usize,
    /// Captured, and not registered on all ranks yet.
    pending: Vec<(usize, Input)>,
    /// What the device's table holds, for all ranks' columns.
    table: HashMap<usize, TableRow>,
    /// Own and peers' allocations, open as long as graphs may replay: until the device goes.
    memory: Vec<Arc<Memory>>,
}

impl GraphRows {
    /// The source word for a captured input. The same input captured again has the same row.
    fn capture(&mut self, input: Input) -> Result<u64> {
        if let Some(row) = self.inputs.get(&input) {
            return Ok(source_word(*row, 0));
        }
        let row = FIRST_GRAPH_ROW + self.given;
        if row >= TABLE_ROWS {
            return Err(Error::Unavailable {
                what: "another graph buffer".into(),
                reason: format!("{} different inputs have been captured", self.given),
            });
        }
        self.given += 1;
        self.inputs.insert(input, row);
        self.pending.push((row, input));
        Ok(source_word(row, 0))
    }

    /// Forgets inputs that are not registered and that were freed, and returns those that are there. `allocation` tells which one
    /// is at an address now.
    fn take_stock(&mut self, allocation: impl Fn(u64) -> Result<Option<u64>>) -> Result<Vec<(usize, u64)>> {
        let (mut there, mut gone) = (Vec::new(), Vec::new());
        for &(row, input) in &self.pending {
            match allocation(input.address)? == Some(input.allocation) {
                true => there.push((row, input.address)),
                false => gone.push(input),
            }
        }
        self.pending.retain(|(_, input)| !gone.contains(input));
        for input in gone {
            tracing::warn!(
                ?input,
                "a captured input was freed before it was registered: its graph cannot be replayed"
            );
            self.inputs.remove(&input);
        }
        Ok(there)
    }

    /// Enters what ranks have at rows, and returns those rows. The memory stays, whether or not the rows come to be written on
    /// all ranks: where one is, kernels may read it.
    fn enter(
        &mut self,
        entries: impl Iterator<Item = (usize, usize, u64, Arc<Memory>)>,
    ) -> Vec<(usize, TableRow)> {
        let mut changed = Vec::new();
        for (row, rank, address, memory) in entries {
            self.table.entry(row).or_insert([0; MAX_RANKS])[rank] = address;
            self.memory.push(memory);
            changed.push(row);
        }
        changed.sort_unstable();
        changed.dedup();
        changed.into_iter().map(|row| (row, self.table[&row])).collect()
    }
}

/// Row and handle of each captured input of a rank, as they travel.
fn encode(rows: &[(usize, Handle)]) -> Vec<u8> {
    rows.iter()
        .flat_map(|(row, handle)| [(*row as u16).to_le_bytes().to_vec(), handle.encode()].concat())
        .collect()
}

fn decode(rank: usize, bytes: &[u8]) -> Result<Vec<(usize, Handle)>> {
    let one = |bytes: &[u8]| {
        let (row, handle) = bytes.split_first_chunk().ok_or_else(|| Error::Malformed {
            rank,
            reason: "its list of graph buffers is cut short".into(),
        })?;
        let row = usize::from(u16::from_le_bytes(*row));
        if !(FIRST_GRAPH_ROW..TABLE_ROWS).contains(&row) {
            return Err(Error::Malformed { rank, reason: format!("graph buffers do not have row {row}") });
        }
        Ok((row, Handle::decode(rank, handle)?))
    };
    bytes.chunks(2 + Handle::BYTES).map(one).collect()
}

impl Cuda {
    fn graph_rows(&self) -> MutexGuard<'_, GraphRows> {
        self.graph_rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The source word for a captured input: a row if peers can map it, else 0, staging, which captures as it is.
    pub(crate) fn capture_input(&self, address: u64) -> Result<u64> {
        let shared = match self.world.same_device_and_process() {
            true => true,
            false => driver::is_exportable(address),
        };
        if !self.graph_registration || !shared {
            return Ok(0);
        }
        match driver::allocation_number(address)? {
            Some(allocation) => self.graph_rows().capture(Input { address, allocation }),
            None => Ok(0),
        }
    }

    /// Swaps the handles of what has been captured since the last time, and hands the rows that changed to `write`. Collective:
    /// after an error of any rank the next time has all of it to do again.
    pub(crate) fn exchange_graph_rows(
        &self,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
        write: impl FnOnce(&[(usize, TableRow)]) -> Result<()>,
    ) -> Result<()> {
        let sharing = if self.world.same_process { Sharing::Pointers } else { Sharing::Ipc };
        // On all ranks or on none, before anything has changed.
        all_succeeded(self.wait_for_last_call(), bootstrap, timeout)?;
        let export = |(row, address): (usize, u64)| -> Result<_> {
            let memory = Memory::foreign(&self.context, address)?;
            let handle = memory.handle(self.process, address - memory.address(), sharing)?;
            Ok((row, address, handle, memory))
        };
        let inputs = self.graph_rows().take_stock(driver::allocation_number);
        let exported = inputs.and_then(|inputs| inputs.into_iter().map(export).collect::<Result<Vec<_>>>());
        let exported = all_succeeded(exported, bootstrap, timeout)?;
        let mine: Vec<_> = exported.iter().map(|(row, _, handle, _)| (*row, handle.clone())).collect();
        let all = bootstrap.all_gather(&encode(&mine), timeout)?;

        if sharing == Sharing::Ipc && all.iter().any(|rows| !rows.is_empty()) {
            self.exports.begin();
        }
        let own_rank = bootstrap.rank();
        let import = |(rank, bytes): (usize, &Vec<u8>)| -> Result<Vec<_>> {
            let peers = if rank == own_rank { Vec::new() } else { decode(rank, bytes)? };
            let open = |(row, handle): (usize, Handle)| {
                let memory = Memory::import(&self.context, rank, &handle, self.process, None)?;
                Ok((row, rank, memory.address() + handle.offset, memory))
            };
            peers.into_iter().map(open).collect()
        };
        let imported = all.iter().enumerate().map(import).collect::<Result<Vec<_>>>();
        let imported = all_succeeded(imported, bootstrap, timeout)?;

        let registered: Vec<_> = exported.iter().map(|(row, ..)| *row).collect();
        let own = exported.into_iter().map(|(row, address, _, memory)| (row, own_rank, address, memory));
        // Not held while the rows are written: a captured call locks the endpoint first, and then this.
        let changed = self.graph_rows().enter(own.chain(imported.into_iter().flatten()));
        // No rank replays before all have the rows.
        all_succeeded(write(&changed), bootstrap, timeout)?;
        self.graph_rows().pending.retain(|(row, _)| !registered.contains(row));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::abi::FA_SOURCE_ID_SHIFT;
    use crate::damaged::damaged;
    use crate::device::cuda::handle::Payload;

    #[test]
    fn an_input_captured_again_keeps_its_row() {
        let mut rows = GraphRows::default();
        let input = |address, allocation| Input { address, allocation };
        let first = rows.capture(input(0x1000, 1)).unwrap();
        let second = rows.capture(input(0x2000, 1)).unwrap();
        assert_ne!(first, second);
        assert_eq!(rows.capture(input(0x1000, 1)), Ok(first));
        assert_eq!(rows.pending.len(), 2);
        let reallocated = rows.capture(input(0x1000, 2)).unwrap();
        assert_ne!(reallocated, first, "another allocation at the same address");
        assert_eq!(rows.pending.len(), 3);
        assert_eq!(first >> FA_SOURCE_ID_SHIFT, FIRST_GRAPH_ROW as u64 + 1);
    }

    #[test]
    fn inputs_that_were_freed_are_forgotten_and_their_rows_are_not_given_again() {
        let mut rows = GraphRows::default();
        let input = |address, allocation| Input { address, allocation };
        rows.capture(input(0x1000, 1)).unwrap();
        let kept = rows.capture(input(0x2000, 2)).unwrap();
        rows.capture(input(0x3000, 3)).unwrap();
        // The first is gone, and another allocation lies where the third was.
        let now =
            |address| Ok([(0x2000, 2), (0x3000, 4)].into_iter().find(|at| at.0 == address).map(|at| at.1));
        assert_eq!(rows.take_stock(now), Ok(vec![(FIRST_GRAPH_ROW + 1, 0x2000)]));
        assert_eq!(rows.pending.len(), 1);
        assert_eq!(rows.capture(input(0x2000, 2)), Ok(kept));
        let fresh = rows.capture(input(0x3000, 4)).unwrap();
        assert_eq!(fresh >> FA_SOURCE_ID_SHIFT, FIRST_GRAPH_ROW as u64 + 4);
        // Nothing is forgotten that could not be asked about.
        let unknown = |_| Err(Error::Unavailable { what: String::new(), reason: String::new() });
        assert!(rows.take_stock(unknown).is_err());
        assert_eq!(rows.pending.len(), 2);
    }

    #[test]
    fn rows_run_out_with_an_error() {
        let mut rows = GraphRows::default();
        for input in 0..(TABLE_ROWS - FIRST_GRAPH_ROW) as u64 {
            rows.capture(Input { address: input * 4096 + 4096, allocation: 1 }).unwrap();
        }
        assert!(matches!(rows.capture(Input { address: 1, allocation: 1 }), Err(Error::Unavailable { .. })));
    }

    fn rows() -> Vec<(usize, Handle)> {
        let handle =
            Handle { process: [1; 16], export: 2, bytes: 300, offset: 4, payload: Payload::Ipc([9; 64]) };
        vec![(FIRST_GRAPH_ROW, handle.clone()), (TABLE_ROWS - 1, handle)]
    }

    #[test]
    fn lists_travel_and_corrupt_ones_are_refused() {
        let rows = rows();
        let handle = rows[0].1.clone();
        let bytes = encode(&rows);
        assert_eq!(decode(1, &bytes), Ok(rows));
        for cut in 1..bytes.len() {
            let cut_short = decode(1, &bytes[..cut]);
            assert!(cut_short.is_err() || cut % (2 + Handle::BYTES) == 0, "{cut}");
        }
        assert!(decode(1, &encode(&[(FIRST_GRAPH_ROW - 1, handle)])).is_err());
    }

    proptest! {
        #[test]
        fn any_list_is_refused_or_of_graph_rows(bytes in damaged(vec![encode(&rows())])) {
            match decode(1, &bytes) {
                Ok(list) => prop_assert!(list.iter().all(|(row, _)| (FIRST_GRAPH_ROW..TABLE_ROWS).contains(row))),
                Err(error) => prop_assert!(matches!(error, Error::Malformed { rank: 1, .. }), "{}", error),
            }
        }
    }
}
