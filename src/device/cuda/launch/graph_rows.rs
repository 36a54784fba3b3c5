//! Rows of captured inputs in the table of registered buffers. A row is allocated at capture, filled on all ranks
//! after it, and freed with the graphs that use it.

use std::collections::HashMap;
use std::sync::Arc;

use crate::abi::MAX_RANKS;
use crate::device::cuda::driver::capture::GraphLife;
use crate::device::cuda::memory::Memory;
use crate::error::Result;
use crate::region::{source_word, TableRow, FIRST_GRAPH_ROW, TABLE_ROWS};

/// A captured input: its address and the driver's ID of the allocation. The ID is needed because another allocation
/// may later get the same address, while peers still have the old one mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Input {
    pub address: u64,
    pub allocation: u64,
}

/// State of a row in use.
#[derive(Debug)]
struct Row {
    input: Input,
    /// Number of graphs whose launches use it.
    graphs: usize,
    /// Still to be written to the tables of all ranks.
    is_due: bool,
    /// Written to the tables of some or all ranks.
    is_entered: bool,
}

/// A graph that uses rows.
struct Graph {
    /// ID of its capture. `None` stands for all captures whose ID is unknown; those are assumed to live forever.
    capture: Option<u64>,
    life: GraphLife,
    rows: Vec<usize>,
}

/// Rows for the captured inputs of this rank: peers look them up in this rank's column of the table.
#[derive(Default)]
pub(crate) struct GraphRows {
    /// Row of each input, except rows that are being released.
    inputs: HashMap<Input, usize>,
    rows: HashMap<usize, Row>,
    graphs: Vec<Graph>,
    /// Number of rows ever used.
    used: usize,
    /// Rows in no rank's table and used by no graph.
    free: Vec<usize>,
    /// Contents of the device's table, for all ranks' columns.
    table: HashMap<usize, TableRow>,
    /// Allocations in the table, by row and rank: kept mapped as long as graphs may be replayed.
    memory: HashMap<(usize, usize), Arc<Memory>>,
    has_warned: bool,
}

/// Changes to the table that the ranks have announced.
#[derive(Default)]
pub(crate) struct Changes {
    pub rows: Vec<(usize, TableRow)>,
    /// Entries, by row and rank, that are no longer in the table once `rows` is written.
    closed: Vec<(usize, usize)>,
}

impl GraphRows {
    /// Returns the source word for an input of a captured call. The same input gets the same row in every capture.
    /// `life` is called once for each capture, to follow its graph. Returns `None` if no row is left.
    pub fn capture(
        &mut self,
        input: Input,
        capture: Option<u64>,
        life: impl FnOnce() -> GraphLife,
    ) -> Option<u64> {
        let row = match self.inputs.get(&input) {
            Some(&row) => row,
            None => self.allocate(input)?,
        };
        // The latest graph is the most likely one.
        let known = self.graphs.iter().rposition(|graph| graph.capture == capture);
        let at = known.unwrap_or_else(|| {
            self.graphs.push(Graph { capture, life: life(), rows: Vec::new() });
            self.graphs.len() - 1
        });
        let graph = &mut self.graphs[at];
        if !graph.rows.contains(&row) {
            graph.rows.push(row);
            self.rows.get_mut(&row)?.graphs += 1;
        }
        Some(source_word(row, 0))
    }

    /// Allocates a row for an input.
    fn allocate(&mut self, input: Input) -> Option<usize> {
        self.forget_graphs();
        let fresh = FIRST_GRAPH_ROW + self.used;
        let row = match self.free.pop() {
            Some(row) => row,
            None if fresh < TABLE_ROWS => {
                self.used += 1;
                fresh
            }
            None => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    tracing::warn!(
                        inputs = self.used,
                        "no row is left to register another captured input: its calls copy it to staging instead; \
                         destroy graphs that are not needed, and call register_graph_buffers"
                    );
                }
                return None;
            }
        };
        self.inputs.insert(input, row);
        self.rows.insert(row, Row { input, graphs: 0, is_due: true, is_entered: false });
        Some(row)
    }

    /// Frees the rows of destroyed graphs that are in no table.
    fn forget_graphs(&mut self) {
        let graphs = std::mem::take(&mut self.graphs).into_iter();
        let (gone, left): (Vec<_>, Vec<_>) = graphs.partition(|graph| graph.life.has_ended());
        self.graphs = left;
        for row in gone.into_iter().flat_map(|graph| graph.rows) {
            let Some(entry) = self.rows.get_mut(&row) else { continue };
            entry.graphs -= 1;
            if entry.graphs == 0 && !entry.is_entered {
                self.remove(row);
            }
        }
    }

    /// Frees a row that is in no table.
    fn remove(&mut self, row: usize) {
        if let Some(Row { input, .. }) = self.rows.remove(&row) {
            self.forget_input(input, row);
            self.free.push(row);
        }
    }

    /// Removes an input's row, unless the input has got another row since.
    fn forget_input(&mut self, input: Input, row: usize) {
        if self.inputs.get(&input) == Some(&row) {
            self.inputs.remove(&input);
        }
    }

    /// Returns the rows in tables that no graph uses any more, for the peers to remove. No capture gets one of them
    /// until [`GraphRows::finish`] says that the peers have removed it.
    pub fn released(&mut self) -> Vec<usize> {
        self.forget_graphs();
        let is_released = |entry: &Row| entry.graphs == 0 && entry.is_entered;
        let mut released: Vec<_> =
            self.rows.iter().filter(|(_, entry)| is_released(entry)).map(|(&row, _)| row).collect();
        released.sort_unstable();
        for row in &released {
            self.forget_input(self.rows[row].input, *row);
        }
        released
    }

    /// Returns the rows and addresses of inputs that are due, and marks them as entered. Inputs that were freed are
    /// skipped, now and later; `allocation` returns the ID of the allocation that is at an address now.
    pub fn offer(&mut self, allocation: impl Fn(u64) -> Result<Option<u64>>) -> Result<Vec<(usize, u64)>> {
        let (mut there, mut gone) = (Vec::new(), Vec::new());
        let is_due = |entry: &Row| entry.is_due && entry.graphs > 0;
        for (&row, entry) in self.rows.iter().filter(|(_, entry)| is_due(entry)) {
            match allocation(entry.input.address)? == Some(entry.input.allocation) {
                true => there.push((row, entry.input.address)),
                false => gone.push((row, entry.input)),
            }
        }
        for (row, input) in gone {
            tracing::warn!(
                ?input,
                "a captured input was freed before it was registered: its graph cannot be replayed"
            );
            self.forget_input(input, row);
            self.rows.entry(row).and_modify(|entry| entry.is_due = false);
        }
        there.sort_unstable();
        for (row, _) in &there {
            self.rows.entry(*row).and_modify(|entry| entry.is_entered = true);
        }
        Ok(there)
    }

    /// Returns the rows that are in the table, with all ranks' columns.
    pub fn table(&self) -> Vec<(usize, TableRow)> {
        let has_entries = |(_, bases): &(&usize, &TableRow)| bases.iter().any(|&base| base != 0);
        self.table.iter().filter(has_entries).map(|(&row, &bases)| (row, bases)).collect()
    }

    /// Enters the addresses of all ranks and removes the entries that they released. The memory of new entries is
    /// kept even if the rows are not written on all ranks in the end: where one is written, kernels may read it.
    pub fn enter(
        &mut self,
        entries: impl Iterator<Item = (usize, usize, u64, Arc<Memory>)>,
        released: impl Iterator<Item = (usize, usize)>,
    ) -> Changes {
        let (mut changed, mut closed) = (Vec::new(), Vec::new());
        for (row, rank) in released {
            if let Some(bases) = self.table.get_mut(&row) {
                bases[rank] = 0;
                changed.push(row);
                closed.push((row, rank));
            }
        }
        for (row, rank, address, memory) in entries {
            self.table.entry(row).or_insert([0; MAX_RANKS])[rank] = address;
            self.memory.insert((row, rank), memory);
            changed.push(row);
        }
        changed.sort_unstable();
        changed.dedup();
        let rows = changed.into_iter().map(|row| (row, self.table[&row])).collect();
        Changes { rows, closed }
    }

    /// Unmaps the closed entries, after this rank's table was written.
    pub fn close(&mut self, changes: Changes) {
        for at in changes.closed {
            self.memory.remove(&at);
        }
    }

    /// Ends an exchange, after all ranks have written the rows that this one offered and released.
    pub fn finish(&mut self, offered: &[usize], released: &[usize]) {
        for row in offered {
            self.rows.entry(*row).and_modify(|entry| entry.is_due = false);
        }
        released.iter().for_each(|&row| self.remove(row));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::FA_SOURCE_ID_SHIFT;
    use crate::error::Error;

    const fn input(address: u64, allocation: u64) -> Input {
        Input { address, allocation }
    }

    /// The row that a source word names.
    fn row_of(source: Option<u64>) -> usize {
        (source.unwrap() >> FA_SOURCE_ID_SHIFT) as usize - 1
    }

    /// Rows, with the graphs of some captures.
    #[derive(Default)]
    struct Bench {
        rows: GraphRows,
        lives: HashMap<u64, GraphLife>,
    }

    impl Bench {
        fn capture(&mut self, input: Input, capture: u64) -> Option<u64> {
            let life = self.lives.entry(capture).or_default();
            self.rows.capture(input, Some(capture), || life.clone())
        }

        fn destroy(&self, capture: u64) {
            self.lives[&capture].set_ended();
        }

        /// Registers all inputs, and lets the peers remove the released rows. Returns the offered and the released
        /// rows.
        fn exchange(&mut self) -> (Vec<usize>, Vec<usize>) {
            let released = self.rows.released();
            let offered = self.rows.offer(|address| Ok(Some(address / 0x1000))).unwrap();
            let offered: Vec<_> = offered.into_iter().map(|(row, _)| row).collect();
            self.rows.finish(&offered, &released);
            (offered, released)
        }
    }

    #[test]
    fn an_input_captured_again_keeps_its_row() {
        let mut bench = Bench::default();
        let first = bench.capture(input(0x1000, 1), 1);
        let second = bench.capture(input(0x2000, 1), 1);
        assert_ne!(first, second);
        assert_eq!(bench.capture(input(0x1000, 1), 1), first);
        assert_eq!(bench.capture(input(0x1000, 1), 2), first, "another graph");
        assert_ne!(bench.capture(input(0x1000, 2), 2), first, "another allocation at the same address");
        assert_eq!(row_of(first), FIRST_GRAPH_ROW);
        assert_eq!(bench.rows.rows.len(), 3);
    }

    #[test]
    fn freed_inputs_are_skipped_and_their_rows_stay_with_their_graphs() {
        let mut bench = Bench::default();
        bench.capture(input(0x1000, 1), 1);
        let kept = bench.capture(input(0x2000, 2), 1);
        bench.capture(input(0x3000, 3), 1);
        // A failed query forgets nothing.
        let unknown = |_| Err(Error::Unavailable { what: String::new(), reason: String::new() });
        assert!(bench.rows.offer(unknown).is_err());
        // The first was freed, and another allocation is at the address of the third.
        let now =
            |address| Ok([(0x2000, 2), (0x3000, 4)].into_iter().find(|at| at.0 == address).map(|at| at.1));
        assert_eq!(bench.rows.offer(now), Ok(vec![(FIRST_GRAPH_ROW + 1, 0x2000)]));
        assert_eq!(bench.capture(input(0x2000, 2), 1), kept);
        let fresh = bench.capture(input(0x3000, 4), 1);
        assert_eq!(row_of(fresh), FIRST_GRAPH_ROW + 3);
        bench.destroy(1);
        bench.capture(input(0x9000, 9), 2);
        assert_eq!(bench.rows.free.len(), 2, "of the rows in no peer's table, one is in use again");
    }

    #[test]
    fn rows_are_freed_with_their_graphs() {
        let mut bench = Bench::default();
        let (first, second) = (bench.capture(input(0x1000, 1), 1), bench.capture(input(0x2000, 2), 1));
        bench.capture(input(0x2000, 2), 2);
        assert_eq!(bench.exchange(), (vec![row_of(first), row_of(second)], vec![]));
        bench.destroy(1);
        // The first row is still in the peers' tables.
        assert_eq!(row_of(bench.capture(input(0x3000, 3), 2)), FIRST_GRAPH_ROW + 2);
        assert_eq!(bench.exchange(), (vec![FIRST_GRAPH_ROW + 2], vec![row_of(first)]));
        assert_eq!(bench.capture(input(0x4000, 4), 3), first, "it is free");
        // A graph that is destroyed before its inputs were registered leaves nothing to announce.
        bench.destroy(3);
        assert_eq!(bench.exchange(), (vec![], vec![]));
        bench.destroy(2);
        assert_eq!(bench.exchange(), (vec![], vec![row_of(second), FIRST_GRAPH_ROW + 2]));
        assert_eq!(bench.rows.rows.len() + bench.rows.inputs.len(), 0);
    }

    #[test]
    fn a_released_row_is_not_reused_before_the_peers_removed_it() {
        let mut bench = Bench::default();
        let first = bench.capture(input(0x1000, 1), 1);
        bench.exchange();
        bench.destroy(1);
        // Captured again before the exchange, it stays.
        assert_eq!(bench.capture(input(0x1000, 1), 2), first);
        assert_eq!(bench.exchange(), (vec![], vec![]));
        bench.destroy(2);
        // An exchange that fails on some rank.
        assert_eq!(bench.rows.released(), [row_of(first)]);
        assert_ne!(bench.capture(input(0x1000, 1), 3), first);
        assert_eq!(bench.exchange(), (vec![FIRST_GRAPH_ROW + 1], vec![row_of(first)]));
        assert_eq!(bench.capture(input(0x5000, 5), 3), first);
    }

    #[test]
    fn all_rows_are_in_use_until_a_graph_is_destroyed() {
        let mut bench = Bench::default();
        for number in 0..(TABLE_ROWS - FIRST_GRAPH_ROW) as u64 {
            bench.capture(input(number * 4096 + 4096, 1), number / 1024).unwrap();
        }
        assert_eq!(bench.capture(input(1, 1), 7), None);
        bench.destroy(1);
        assert!(bench.capture(input(1, 1), 8).is_some());
    }

    #[test]
    fn tables_forget_what_peers_release() {
        let mut rows = GraphRows::default();
        let changes = rows.enter(std::iter::empty(), [(5000, 1)].into_iter());
        assert!(changes.rows.is_empty() && changes.closed.is_empty(), "it was never there");
        rows.table.insert(3000, [7; MAX_RANKS]);
        let changes = rows.enter(std::iter::empty(), [(3000, 1)].into_iter());
        let mut left = [7; MAX_RANKS];
        left[1] = 0;
        assert_eq!((changes.rows, changes.closed), (vec![(3000, left)], vec![(3000, 1)]));
    }
}
