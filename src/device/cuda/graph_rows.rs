//! The rows of captured inputs in the table of registered buffers: given, filled, and given back with the graphs that name them.

use std::collections::HashMap;
use std::sync::Arc;

use super::capture::GraphLife;
use super::memory::Memory;
use crate::abi::MAX_RANKS;
use crate::error::Result;
use crate::region::{source_word, TableRow, FIRST_GRAPH_ROW, TABLE_ROWS};

/// A captured input: its address, and the driver's number of the allocation. The number is part of it: another allocation may come
/// to lie at the same address, and peers would go on reading the old one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Input {
    pub address: u64,
    pub allocation: u64,
}

/// What is known of a row that was given to an input.
#[derive(Debug)]
struct Row {
    input: Input,
    /// Graphs whose launches name it.
    graphs: usize,
    /// Not in the tables of all ranks yet, and to be entered.
    is_due: bool,
    /// In the tables of some ranks, or of all.
    is_entered: bool,
}

/// A graph that names rows.
struct Graph {
    /// Of the graphs whose captures cannot be told apart: `None`. They live for ever.
    capture: Option<u64>,
    life: GraphLife,
    rows: Vec<usize>,
}

/// Rows for captured inputs. They are this rank's own: peers look a row up in this rank's column.
#[derive(Default)]
pub(super) struct GraphRows {
    /// The row of each input, unless the peers are to forget it.
    inputs: HashMap<Input, usize>,
    rows: HashMap<usize, Row>,
    graphs: Vec<Graph>,
    /// Rows given so far, those that came back too.
    given: usize,
    /// In no rank's table and named by no graph.
    free: Vec<usize>,
    /// What the device's table holds, for all ranks' columns.
    table: HashMap<usize, TableRow>,
    /// The allocations behind it, by row and rank: open as long as graphs may replay.
    memory: HashMap<(usize, usize), Arc<Memory>>,
    has_warned: bool,
}

/// What changes in the table by what the ranks have told.
#[derive(Default)]
pub(super) struct Changes {
    pub rows: Vec<(usize, TableRow)>,
    /// No longer in it, once all of the above is written.
    closed: Vec<(usize, usize)>,
}

impl GraphRows {
    /// The source word for an input of a capture; `life` makes that of its graph, once for each capture. The same input captured
    /// again has the same row. `None` where there is no row left.
    pub fn capture(
        &mut self,
        input: Input,
        capture: Option<u64>,
        life: impl FnOnce() -> GraphLife,
    ) -> Option<u64> {
        let row = match self.inputs.get(&input) {
            Some(&row) => row,
            None => self.give(input)?,
        };
        // The latest is the likeliest.
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

    fn give(&mut self, input: Input) -> Option<usize> {
        self.forget_graphs();
        let fresh = FIRST_GRAPH_ROW + self.given;
        let row = match self.free.pop() {
            Some(row) => row,
            None if fresh < TABLE_ROWS => {
                self.given += 1;
                fresh
            }
            None => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    tracing::warn!(
                        inputs = self.given,
                        "no row is left for another input of a graph: its calls copy it instead of having it read where it is; \
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

    /// Takes back the rows of graphs that have gone, unless they are in tables.
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

    /// A row that is in no table.
    fn remove(&mut self, row: usize) {
        if let Some(Row { input, .. }) = self.rows.remove(&row) {
            self.forget_input(input, row);
            self.free.push(row);
        }
    }

    /// The input has this row no longer. It may have another by now.
    fn forget_input(&mut self, input: Input, row: usize) {
        if self.inputs.get(&input) == Some(&row) {
            self.inputs.remove(&input);
        }
    }

    /// Rows in tables that no graph names any more, for the peers to forget. From now on no capture has one of them, until
    /// [`GraphRows::finish`] says that they have.
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

    /// The inputs that are due, with their rows, which count as entered from now on. Inputs that were freed are passed over, once
    /// and for all; `allocation` tells which one is at an address now.
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

    /// Enters what ranks have at rows, and takes out what they have released. The memory of what is entered stays, whether or not
    /// the rows come to be written on all ranks: where one is, kernels may read it.
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

    /// This rank's table is written: it names nothing any more that is closed.
    pub fn close(&mut self, changes: Changes) {
        for at in changes.closed {
            self.memory.remove(&at);
        }
    }

    /// All ranks have written what this one has offered and released.
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

        /// Registers all, and has the peers forget what is released. What was offered, and what was released.
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
    fn inputs_that_were_freed_are_passed_over_and_their_rows_stay_with_their_graphs() {
        let mut bench = Bench::default();
        bench.capture(input(0x1000, 1), 1);
        let kept = bench.capture(input(0x2000, 2), 1);
        bench.capture(input(0x3000, 3), 1);
        // Nothing is forgotten that could not be asked about.
        let unknown = |_| Err(Error::Unavailable { what: String::new(), reason: String::new() });
        assert!(bench.rows.offer(unknown).is_err());
        // The first is gone, and another allocation lies where the third was.
        let now =
            |address| Ok([(0x2000, 2), (0x3000, 4)].into_iter().find(|at| at.0 == address).map(|at| at.1));
        assert_eq!(bench.rows.offer(now), Ok(vec![(FIRST_GRAPH_ROW + 1, 0x2000)]));
        assert_eq!(bench.capture(input(0x2000, 2), 1), kept);
        let fresh = bench.capture(input(0x3000, 4), 1);
        assert_eq!(row_of(fresh), FIRST_GRAPH_ROW + 3);
        bench.destroy(1);
        bench.capture(input(0x9000, 9), 2);
        assert_eq!(bench.rows.free.len(), 2, "of what no peer has heard of, one is in use again");
    }

    #[test]
    fn rows_come_back_with_their_graphs() {
        let mut bench = Bench::default();
        let (first, second) = (bench.capture(input(0x1000, 1), 1), bench.capture(input(0x2000, 2), 1));
        bench.capture(input(0x2000, 2), 2);
        assert_eq!(bench.exchange(), (vec![row_of(first), row_of(second)], vec![]));
        bench.destroy(1);
        // In the peers' tables still.
        assert_eq!(row_of(bench.capture(input(0x3000, 3), 2)), FIRST_GRAPH_ROW + 2);
        assert_eq!(bench.exchange(), (vec![FIRST_GRAPH_ROW + 2], vec![row_of(first)]));
        assert_eq!(bench.capture(input(0x4000, 4), 3), first, "it is free");
        // A graph that goes before its inputs were registered leaves nothing to be told.
        bench.destroy(3);
        assert_eq!(bench.exchange(), (vec![], vec![]));
        bench.destroy(2);
        assert_eq!(bench.exchange(), (vec![], vec![row_of(second), FIRST_GRAPH_ROW + 2]));
        assert_eq!(bench.rows.rows.len() + bench.rows.inputs.len(), 0);
    }

    #[test]
    fn a_row_that_peers_are_to_forget_is_not_given_again_before_they_have() {
        let mut bench = Bench::default();
        let first = bench.capture(input(0x1000, 1), 1);
        bench.exchange();
        bench.destroy(1);
        // Captured again in time: it stays.
        assert_eq!(bench.capture(input(0x1000, 1), 2), first);
        assert_eq!(bench.exchange(), (vec![], vec![]));
        bench.destroy(2);
        // A step that fails on some rank.
        assert_eq!(bench.rows.released(), [row_of(first)]);
        assert_ne!(bench.capture(input(0x1000, 1), 3), first);
        assert_eq!(bench.exchange(), (vec![FIRST_GRAPH_ROW + 1], vec![row_of(first)]));
        assert_eq!(bench.capture(input(0x5000, 5), 3), first);
    }

    #[test]
    fn without_a_row_there_is_none_until_a_graph_goes() {
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
