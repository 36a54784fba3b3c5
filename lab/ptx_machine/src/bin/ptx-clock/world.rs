//! Memory of a world of ranks, and kernel launches in it.

use crate::job::{Call, Team};
use crate::rows::{self, Experts};
use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::mem::{offset_of, size_of};

use fast_allreduce_ptx_machine::{Memory, Range, MOST_PARTS};

use crate::abi::*;
use crate::export::Expected;
use crate::messages::bytes_of;

/// Zeroed memory, 128-byte aligned. Untouched pages use no physical memory.
pub struct Bytes {
    address: *mut u8,
    layout: Layout,
}

impl Bytes {
    pub fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes.max(1).next_multiple_of(128), 128).expect("a size");
        // SAFETY: the layout's size is not 0.
        let address = unsafe { alloc_zeroed(layout) };
        assert!(!address.is_null(), "no memory for {bytes} bytes");
        Self { address, layout }
    }

    pub fn address(&self) -> u64 {
        self.address as u64
    }

    pub fn range(&self) -> Range {
        Range { low: self.address(), bytes: self.layout.size() as u64 }
    }

    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.layout.size());
        // SAFETY: the range is within the allocation, and no kernel runs.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address.add(at), bytes.len()) };
    }
}

impl Bytes {
    pub fn fill_words(&mut self, word: u32) {
        (0..self.layout.size() / 4).for_each(|i| self.put(i * 4, &word.to_le_bytes()));
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: as for `words`.
        unsafe { std::slice::from_raw_parts(self.address, self.layout.size()) }
    }

    fn words(&self) -> &[u32] {
        // SAFETY: the range is within the allocation, the allocation is aligned, and no kernel runs.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.layout.size() / 4) }
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout.
        unsafe { dealloc(self.address, self.layout) };
    }
}

/// Memory that every rank reaches: each rank's allocations, and multicast windows, one address of which
/// stands for the same offset in all ranks' memory.
pub struct Reach {
    pub homes: Vec<(Range, usize)>,
    pub multicast: Vec<(Range, Vec<u64>)>,
}

impl Memory for Reach {
    fn find(&self, address: u64) -> Option<Range> {
        let holds = |range: &Range| address >= range.low && address - range.low < range.bytes;
        self.homes.iter().map(|(range, _)| *range).find(holds)
    }

    fn multicast(&self, address: u64, bytes: u32, parts: &mut [u64; MOST_PARTS]) -> usize {
        let holds = |(range, _): &&(Range, _)| {
            let offset = address.wrapping_sub(range.low);
            offset.saturating_add(bytes.into()) <= range.bytes
        };
        let Some((range, windows)) = self.multicast.iter().find(holds) else { return 0 };
        for (part, window) in parts.iter_mut().zip(windows) {
            *part = window + (address - range.low);
        }
        windows.len()
    }
}

/// Returns the rank of each allocation, from a list of allocations by rank.
pub fn homes(all: &[&[Bytes]]) -> Vec<(Range, usize)> {
    let of =
        |bytes: &&[Bytes]| bytes.iter().map(Bytes::range).enumerate().map(|(r, range)| (range, r)).collect();
    all.iter().map(of).collect::<Vec<Vec<_>>>().concat()
}

fn copies(all: &[Bytes], word: u32) -> Vec<Expected> {
    all.iter().map(|bytes| Expected { range: bytes.range(), value: word.to_le_bytes().into() }).collect()
}

/// Inputs and outputs of all ranks. Every element of rank r's input is r + 1.
pub struct Data {
    pub inputs: Vec<Bytes>,
    pub outputs: Vec<Bytes>,
    one: fn(u32) -> u32,
}

/// Returns the function that fills a word with elements equal to a small number.
pub fn word_of(dtype: FaDtype) -> fn(u32) -> u32 {
    fn f32(value: u32) -> u32 {
        (value as f32).to_bits()
    }
    fn bf16(value: u32) -> u32 {
        let high = f32(value) >> 16;
        high << 16 | high
    }
    fn f16(value: u32) -> u32 {
        // Valid for normal numbers: exponent and fraction move by 13 bits.
        let half = ((f32(value) - (112 << 23)) >> 13) & 0xFFFF;
        half << 16 | half
    }
    match dtype {
        FA_BF16 => bf16,
        FA_F16 => f16,
        FA_I8 => |value| (value & 0xFF) * 0x0101_0101,
        // For i64 each half is a word; in sums both are equal.
        FA_I32 | FA_I64 => |value| value,
        _ => f32,
    }
}

impl Data {
    pub fn new(ranks: usize, bytes: usize, one: fn(u32) -> u32) -> Self {
        let all = || (0..ranks).map(|_| Bytes::new(bytes)).collect::<Vec<_>>();
        let mut data = Self { inputs: all(), outputs: all(), one };
        for (rank, input) in data.inputs.iter_mut().enumerate() {
            input.fill_words(one(rank as u32 + 1));
        }
        data
    }

    /// Returns what the outputs are if all elements are written.
    pub fn expected(&self, result: fn(u32) -> u32) -> Vec<Expected> {
        copies(&self.outputs, (self.one)(result(self.inputs.len() as u32)))
    }

    /// Returns whether at least one element of the outputs has been written, and every written element is
    /// `result` of the number of ranks.
    pub fn is_right(&self, result: fn(u32) -> u32) -> bool {
        self.outputs_are(result, |word, result| word == result)
    }

    /// Returns whether the written elements are within the error bound of int8 transport.
    pub fn is_near(&self, value: fn(u32) -> f32) -> bool {
        self.outputs_are(sum, |word, sum| (value(word) / value(sum) - 1.0).abs() < 0.012)
    }

    /// Returns whether every rank's written elements are its input's, divided by the root of the mean of all ranks'
    /// squares.
    pub fn are_normed_together(&self, value: fn(u32) -> f32) -> bool {
        let ranks = self.outputs.len() as f32;
        let mean = (ranks + 1.0) * (2.0 * ranks + 1.0) / 6.0;
        self.outputs.iter().enumerate().all(|(rank, output)| {
            let right = (rank + 1) as f32 / mean.sqrt();
            let mut written = output.words().iter().filter(|&&word| word != 0).peekable();
            written.peek().is_some() && written.all(|&word| (value(word) / right - 1.0).abs() < 0.004)
        })
    }

    /// Returns whether a part of a rank's output equals another rank's input.
    pub fn came_from(&self, from: usize, to: usize, at: usize, bytes: usize) -> bool {
        let word = (self.one)(from as u32 + 1);
        self.outputs[to].words()[at / 4..(at + bytes) / 4].iter().all(|&written| written == word)
    }

    fn outputs_are(&self, result: fn(u32) -> u32, right: impl Fn(u32, u32) -> bool) -> bool {
        let result = (self.one)(result(self.inputs.len() as u32));
        let all_right = |output: &Bytes| {
            let written = output.words().iter().filter(|&&word| word != 0);
            written.clone().count() > 0 && written.clone().all(|&word| right(word, result))
        };
        self.outputs.iter().all(all_right)
    }
}

/// Returns 1 + 2 + ... + ranks.
fn sum(ranks: u32) -> u32 {
    ranks * (ranks + 1) / 2
}

/// Returns the function that reads the upper element of a word.
pub fn value_of(dtype: FaDtype) -> fn(u32) -> f32 {
    match dtype {
        FA_BF16 => |word| f32::from_bits(word & 0xFFFF_0000),
        // Valid for normal numbers, as above.
        FA_F16 => |word| f32::from_bits(((word >> 16) << 13) + (112 << 23)),
        _ => f32::from_bits,
    }
}

/// Memory for calls of our kernels.
pub struct World {
    pub regions: Vec<Bytes>,
    pub data: Data,
    tables: Vec<Bytes>,
    /// Residuals are zeros, weights are ones; normalised rows are written to the last.
    residuals: Vec<Bytes>,
    pub weights: Vec<Bytes>,
    normed: Vec<Bytes>,
    /// Quantised rows.
    numbers: Vec<Bytes>,
    pub scales: Vec<Bytes>,
    /// Experts' rows, of calls that have experts.
    experts: Vec<Bytes>,
    /// Multicast windows of staging: reserved addresses without memory.
    windows: Vec<Bytes>,
    multicast: Bytes,
    mailbox: usize,
    staging: usize,
    pub channels: Channels,
}

/// Message rings, as src/region.rs sizes them for GPUs and 8 MiB.
#[derive(Debug, Clone, Copy)]
pub struct Channels {
    stripes: usize,
    slots: usize,
    chunk: usize,
    packets: usize,
}

impl Channels {
    fn new(ranks: usize) -> Self {
        let (stripes, packets, slots) = (if ranks <= 9 { 16 } else { 8 }, 4 << 10, 2);
        let room = (16 << 20) / (ranks - 1).max(1) / stripes / slots - size_of::<FaChunk>();
        let chunk = ((room - 2 * packets) / 128 * 128).min(256 << 10);
        Self { stripes, slots, chunk, packets }
    }

    /// Returns the bytes of all channels to a rank.
    fn bytes(&self, ranks: usize) -> usize {
        (ranks - 1) * self.stripes * self.slots * (size_of::<FaChunk>() + 2 * self.packets + self.chunk)
    }

    /// Returns how a message is split into parts for stripes: units of FA_PART_ALIGNMENT per part, and
    /// number of stripes with a part.
    pub fn parts(&self, bytes: usize) -> (u32, u32) {
        let part = bytes.div_ceil(self.stripes).max(4 << 10).div_ceil(FA_PART_ALIGNMENT as usize);
        (part as u32, bytes.div_ceil(part * FA_PART_ALIGNMENT as usize).max(1) as u32)
    }
}

impl World {
    pub fn new(call: &Call, one: fn(u32) -> u32) -> Self {
        let &Call { ranks, bytes, .. } = call;
        let head = size_of::<FaRegionHead>().next_multiple_of(128);
        // A two-shot has two parts of every sender's share, each with room for a message.
        let slots = bytes.div_ceil(FA_CUDA_PACK_BYTES as usize).max(64) * FA_CUDA_SLOT_BYTES as usize;
        // Quantised slices and sums of all ranks take slightly more than a message.
        let staging = (bytes.max(1024) + bytes / 8 + 256 * ranks).next_multiple_of(128);
        let mailbox = 2 * slots * ranks;
        let all = |bytes: usize| (0..ranks).map(|_| Bytes::new(bytes)).collect::<Vec<_>>();
        let data = Data::new(ranks, bytes, one);
        let mut tables = all(FA_MAX_RANKS as usize * 8);
        for table in &mut tables {
            for (rank, input) in data.inputs.iter().enumerate() {
                table.put(rank * 8, &input.address().to_le_bytes());
            }
        }
        let channels = Channels::new(ranks);
        let regions = all(head + 3 * mailbox + 2 * staging + channels.bytes(ranks));
        let mut weights = all(bytes);
        weights.iter_mut().for_each(|weights| weights.fill_words(one(1)));
        let (residuals, normed) = (all(bytes), all(bytes));
        let (numbers, scales) = (all(bytes), all(bytes));
        let experts_of = |experts: Experts| (0..ranks).map(|rank| experts.memory(rank, one)).collect();
        let experts = Experts::of(call).map_or_else(Vec::new, experts_of);
        let (windows, multicast) = (all(2 * staging), Bytes::new(2 * staging));
        Self {
            regions,
            data,
            tables,
            residuals,
            weights,
            normed,
            numbers,
            scales,
            experts,
            windows,
            multicast,
            mailbox,
            staging,
            channels,
        }
    }

    pub fn reach(&self) -> Reach {
        let Self { regions, data, tables, residuals, weights, normed, numbers, scales, .. } = self;
        Reach {
            homes: homes(&[
                regions,
                &data.inputs,
                &data.outputs,
                tables,
                residuals,
                weights,
                normed,
                numbers,
                scales,
                &self.experts,
                &self.windows,
            ]),
            multicast: vec![(self.multicast.range(), self.windows.iter().map(Bytes::address).collect())],
        }
    }

    /// Returns the parameters of a rank's kernel. `registered`: peers read its input directly.
    pub fn params(
        &self,
        rank: usize,
        call: &Call,
        (algorithm, dtype): (FaAlgorithm, FaDtype),
        count: u64,
        registered: bool,
    ) -> Vec<u8> {
        let head = size_of::<FaRegionHead>().next_multiple_of(128) as u64;
        // SAFETY: `FaLaunch` has only integer fields, for which zero is valid.
        let mut launch: FaLaunch = unsafe { std::mem::zeroed() };
        for (r, region) in self.regions.iter().enumerate() {
            launch.regions[r] = region.address();
        }
        // Only gathers and reduce-scatters have shares.
        for (r, share) in launch.shares.iter_mut().enumerate() {
            *share = FaShare { first: r as u64 * count, count };
        }
        let input = self.data.inputs[rank].address();
        launch.input = Experts::of(call).map_or(input, |experts| experts.input(&self.experts[rank]));
        launch.output = self.data.outputs[rank].address();
        launch.count = count;
        launch.buffers = self.tables[rank].address();
        launch.buffer_count = 1;
        launch.status = launch.regions[rank] + offset_of!(FaRegionHead, status) as u64;
        launch.mailbox_offset = head;
        launch.mailbox_bytes = self.mailbox as u64;
        // After the mailboxes of sentinel packets.
        launch.staging_offset = head + 3 * self.mailbox as u64;
        launch.staging_bytes = self.staging as u64;
        launch.staging_slot_bytes = self.staging as u64;
        launch.channel_offset = launch.staging_offset + 2 * self.staging as u64;
        launch.channel_bytes = self.channels.bytes(self.regions.len()) as u64;
        launch.channel_slots = self.channels.slots as u32;
        launch.chunk_bytes = self.channels.chunk as u64;
        launch.window = self.windows[rank].address();
        launch.multicast = self.multicast.address();
        launch.channel_stripes = self.channels.stripes as u32;
        launch.packet_bytes = self.channels.packets as u32;
        // Kernels read the host's clock, and a simulation takes long: the limit is never reached.
        launch.timeout_ns = 3_600_000_000_000;
        launch.rank = rank as u32;
        launch.own = launch.regions[rank];
        launch.world = self.regions.len() as u32;
        launch.dtype = dtype;
        launch.op = call.op.code;
        launch.algorithm = algorithm;
        if registered {
            launch.source = 1 << FA_SOURCE_ID_SHIFT;
        }
        bytes_of(&launch)
    }

    /// Returns the additional parameters of a kernel that normalises rows.
    pub fn norm(&self, rank: usize, call: &Call, count: u64, team: Team) -> Vec<u8> {
        let row = call.row;
        let scaling = match call.group {
            None => FA_NOT_SCALED,
            Some(0) => FA_SCALE_PER_ROW,
            Some(32) => FA_SCALE_MXFP8,
            Some(_) => FA_SCALE_PER_GROUP,
        };
        // SAFETY: `FaExperts` has only integers and a float, for which zero is valid.
        let no_experts = unsafe { std::mem::zeroed() };
        let is_scaled = call.group.is_some();
        bytes_of(&FaFused {
            residual: self.residuals[rank].address(),
            residual_out: 0,
            normed: self.normed[rank].address(),
            numbers: if is_scaled { self.numbers[rank].address() } else { 0 },
            // Equal elements become the bias in a LayerNorm, and 1 in an RMSNorm.
            bias: if call.layer { self.weights[rank].address() } else { 0 },
            norm: if call.layer { FA_NORM_LAYER } else { FA_NORM_RMS },
            number_bits: if is_scaled { 8 } else { 0 },
            weight: self.weights[rank].address(),
            scales: rows::scales(call, self.scales[rank].address()),
            global_scale: 0,
            row,
            rows: (count / u64::from(row)) as u32,
            unit_offset: 0,
            epsilon: if call.layer { 1.0 } else { 0.0 },
            scaling,
            dtype: if is_scaled { FA_F8E4M3 } else { call.dtype.code },
            team: team.blocks,
            team_inverse: team.inverse(),
            block_packs: team.share,
            chunks: team.chunks,
            turns: team.turns,
            total: row,
            checked: 0,
            experts: Experts::of(call).map_or(no_experts, |experts| experts.operands(&self.experts[rank])),
        })
    }

    /// Returns what normalised rows are if all elements are written.
    pub fn expected_norm(&self) -> Vec<Expected> {
        copies(&self.normed, (self.data.one)(1))
    }

    /// Returns whether all written elements of normalised rows are 1, the result for rows of equal
    /// elements.
    pub fn is_normed(&self) -> bool {
        let one = (self.data.one)(1);
        self.normed.iter().all(|rows| {
            let mut written = rows.words().iter().filter(|&&word| word != 0).peekable();
            written.peek().is_some() && written.all(|&word| word == one)
        })
    }
}
