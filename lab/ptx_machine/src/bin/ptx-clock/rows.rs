//! Operands of rows other than those of a fused allreduce: experts' rows, gathered rows, and rows that are divided
//! among ranks.

use crate::abi::*;
use crate::job::Call;
use crate::messages::bytes_of;
use crate::world::{Bytes, World};

/// Experts from whose rows an input is computed. A row has an entry of the table for each of its experts.
#[derive(Clone, Copy)]
pub struct Experts {
    rows: usize,
    row_bytes: usize,
    of_each: usize,
}

impl Experts {
    /// Returns the experts of a call; `None` if it has none.
    pub fn of(call: &Call) -> Option<Self> {
        let row_bytes = call.row as usize * call.dtype.bytes;
        let experts = Self { rows: call.bytes / row_bytes, row_bytes, of_each: call.experts as usize };
        (call.experts != 0).then_some(experts)
    }

    fn entries(&self) -> usize {
        self.rows * self.of_each
    }

    /// Returns the bytes of the table, and of the weights.
    fn table_bytes(&self) -> usize {
        (self.entries() * 4).next_multiple_of(128)
    }

    /// Returns a rank's table, weights and rows, which are sorted by expert. Each row belongs to one entry. Those of
    /// expert k are 2^k times the rank's input, with a weight such that the sum is the input.
    pub fn memory(&self, rank: usize, one: fn(u32) -> u32) -> Bytes {
        let Self { rows, row_bytes, of_each } = *self;
        let weights = self.table_bytes();
        let mut memory = Bytes::new(2 * weights + self.entries() * row_bytes);
        for (row, expert) in (0..self.entries()).map(|entry| (entry / of_each, entry % of_each)) {
            let (at, from) = (4 * (row * of_each + expert), expert * rows + row);
            memory.put(at, &(from as i32).to_le_bytes());
            memory.put(weights + at, &(0.5f32.powi(expert as i32) / of_each as f32).to_le_bytes());
            let word = one((rank as u32 + 1) << expert).to_le_bytes();
            memory.put(2 * weights + from * row_bytes, &word.repeat(row_bytes / 4));
        }
        memory
    }

    /// Returns the address of the rows in the memory.
    pub fn input(&self, memory: &Bytes) -> u64 {
        memory.address() + 2 * self.table_bytes() as u64
    }

    pub fn operands(&self, memory: &Bytes) -> FaExperts {
        FaExperts {
            table: memory.address(),
            weights: memory.address() + self.table_bytes() as u64,
            shared: 0,
            first_entry: 0,
            top_k: self.of_each as u32,
            rows: self.entries() as u32,
            weights_dtype: FA_F32,
            routed_scale: 1.0,
        }
    }
}

/// Returns the scales of a call's rows, row by row.
pub fn scales(call: &Call, scales: u64) -> FaScales {
    let group = call.group.unwrap_or(0);
    FaScales {
        scales,
        stride: 0,
        first_row: 0,
        group,
        groups: if group == 0 { 1 } else { call.row.div_ceil(group) },
        rule: if group == 32 { FA_RULE_E8M0_FLOOR } else { FA_RULE_F32 },
        layout: FA_LAYOUT_ROWS,
    }
}

/// Returns the bytes of the scales of a row.
fn scale_bytes(call: &Call) -> u32 {
    let FaScales { groups, rule, .. } = scales(call, 0);
    groups * if rule == FA_RULE_F32 { 4 } else { 1 }
}

/// Returns the operands of a gather of rows. A rank's scales follow its numbers.
pub fn gathered(world: &World, call: &Call, rank: usize) -> Vec<u8> {
    let own = world.data.inputs[rank].address() + call.share() as u64;
    bytes_of(&FaGatheredRows {
        from: scales(call, own),
        to: scales(call, world.scales[rank].address()),
        row_bytes: call.row,
        words: scale_bytes(call).div_ceil(4),
    })
}

/// Returns whether every rank has all shares, and the scales of their rows.
pub fn is_gathered(world: &World, call: &Call) -> bool {
    let (ranks, share) = (world.regions.len(), call.share());
    let scales = if call.gathers_rows() { share / call.row as usize * scale_bytes(call) as usize } else { 0 };
    (0..ranks * ranks).map(|pair| (pair / ranks, pair % ranks)).all(|(from, to)| {
        let placed = &world.scales[to].bytes()[from * scales..(from + 1) * scales];
        let first = world.data.inputs[from].bytes()[0];
        world.data.came_from(from, to, from * share, share) && placed.iter().all(|&byte| byte == first)
    })
}

/// Returns the operands of a norm of rows that are divided among ranks: equal numbers of columns.
pub fn sharded(world: &World, call: &Call, rank: usize) -> Vec<u8> {
    let row = call.row / call.ranks as u32;
    let stride = u64::from(row) * call.dtype.bytes as u64;
    // SAFETY: `FaShardedNorm` has only integers and floats, for which zero is valid.
    let mut norm: FaShardedNorm = unsafe { std::mem::zeroed() };
    norm.part[0] = FaShardedRows {
        from: world.data.inputs[rank].address(),
        to: world.data.outputs[rank].address(),
        weight: world.weights[rank].address(),
        from_stride: stride,
        to_stride: stride,
        row,
        total: row * call.ranks as u32,
        epsilon: 0.0,
        unit_offset: 0,
    };
    norm.parts = 1;
    norm.rows = (call.bytes / (call.row as usize * call.dtype.bytes)) as u32;
    bytes_of(&norm)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Dtype, Op};
    use crate::world::word_of;

    /// Returns a call of four rows of 64 floats.
    fn call(algorithm: &str) -> Call {
        Call {
            algorithm: algorithm.to_owned(),
            dtype: Dtype::named("f32").unwrap(),
            ranks: 2,
            bytes: 4 * 64 * 4,
            row: 64,
            layer: false,
            group: Some(32),
            experts: 8,
            op: Op::named("sum").unwrap(),
            any: false,
        }
    }

    #[test]
    fn the_sum_of_experts_rows_is_the_input() {
        let experts = Experts::of(&call("one_shot_push_norm")).unwrap();
        let memory = experts.memory(2, word_of(FA_F32));
        let word = |at: usize| u32::from_le_bytes(memory.bytes()[at..at + 4].try_into().unwrap());
        let weights = experts.table_bytes();
        let mut named = [false; 4 * 8];
        for row in 0..4 {
            let weighted = (row * 8..row * 8 + 8).map(|entry| {
                let from = word(4 * entry) as usize;
                assert!(!std::mem::replace(&mut named[from], true), "row {from} belongs to one entry");
                f32::from_bits(word(weights + 4 * entry))
                    * f32::from_bits(word(2 * weights + from * 256 + 252))
            });
            assert_eq!(weighted.sum::<f32>(), 3.0);
        }
    }

    #[test]
    fn a_wrong_gather_is_found() {
        let call = call("all_gather_rows");
        let mut world = World::new(&call, word_of(FA_I8));
        assert!(!is_gathered(&world, &call), "nothing is gathered");
        for to in 0..2 {
            for (from, byte) in [(0, 1), (1, 2)] {
                world.data.outputs[to].put(from * 512, &[byte; 512]);
                // Eight rows with two scales each.
                world.scales[to].put(from * 16, &[byte; 16]);
            }
        }
        assert!(is_gathered(&world, &call));
        world.scales[1].put(31, &[1]);
        assert!(!is_gathered(&world, &call), "a scale is wrong");
    }

    #[test]
    fn a_wrong_norm_of_parts_is_found() {
        let call = call("sharded_rms_norm");
        let (one, value) = (word_of(FA_F32), f32::from_bits);
        let mut world = World::new(&call, one);
        assert!(!world.data.are_normed_together(value), "nothing is normalised");
        // The mean of the squares of 1 and 2 is 2.5.
        for rank in 0..2 {
            world.data.outputs[rank].fill_words(((rank + 1) as f32 / 2.5f32.sqrt()).to_bits());
        }
        assert!(world.data.are_normed_together(value));
        world.data.outputs[1].fill_words(one(1));
        assert!(!world.data.are_normed_together(value), "a rank has left out the other's squares");
    }
}
