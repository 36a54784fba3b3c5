//! A world of ranks in the test's own memory.

use std::mem::size_of;
use std::sync::Mutex;
use std::time::Duration;

use fast_allreduce_ptx_machine::{
    coverage, Launch, LaunchError, Memory, Program, Range, Settings, MOST_PARTS,
};

use crate::abi::*;

/// Elements of a normalised row.
const ROW: u32 = 64;

/// Zeroed, 128-byte aligned bytes with a stable address.
pub struct Bytes(Vec<Line>);

#[repr(C, align(128))]
#[derive(Clone)]
struct Line([u8; 128]);

impl Bytes {
    pub fn new(bytes: usize) -> Self {
        Self(vec![Line([0; 128]); bytes.div_ceil(128)])
    }

    pub fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub fn range(&self) -> Range {
        Range { low: self.address(), bytes: self.0.len() as u64 * 128 }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: lines consist of bytes, and no kernel runs while a test reads.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * size_of::<Line>()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe {
            std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * size_of::<Line>())
        }
    }

    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        self.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub fn fill(&mut self, byte: u8) {
        self.bytes_mut().fill(byte);
    }

    pub fn read(&self) -> &[u8] {
        self.bytes()
    }
}

/// Allocations that kernels may access, and the windows that a multicast address stands for.
pub struct Ranges {
    pub plain: Mutex<Vec<Range>>,
    windows: Vec<u64>,
    /// Reserved addresses, without memory of their own.
    multicast: Range,
}

impl Memory for Ranges {
    fn find(&self, address: u64) -> Option<Range> {
        let ranges = self.plain.lock().unwrap();
        ranges.iter().copied().find(|range| address >= range.low && address - range.low < range.bytes)
    }

    fn multicast(&self, address: u64, bytes: u32, parts: &mut [u64; MOST_PARTS]) -> usize {
        let offset = address.wrapping_sub(self.multicast.low);
        if offset.saturating_add(bytes.into()) > self.multicast.bytes {
            return 0;
        }
        parts.iter_mut().zip(&self.windows).for_each(|(part, window)| *part = window + offset);
        self.windows.len()
    }
}

/// No launch of these tests takes this long, unless it never ends.
const LIMIT: Duration = Duration::from_secs(120);

/// Bytes of the mailboxes of tagged packets of one generation.
pub const MAILBOX: usize = 384 << 10;
const STAGING: usize = 64 << 10;
/// Bytes of a message that fit into a slot of a channel.
pub const CHUNK: usize = 256;
const SLOTS: usize = 2;
pub const STRIPES: usize = 2;
/// Parts of messages of up to this number of bytes are sent as packets.
pub const PACKETS: usize = 64;
const CHUNK_SLOT: usize = size_of::<FaChunk>() + 2 * PACKETS + CHUNK;

/// Regions, inputs and outputs of all ranks.
pub struct World {
    pub regions: Vec<Bytes>,
    pub inputs: Vec<Bytes>,
    pub outputs: Vec<Bytes>,
    table: Bytes,
    pub windows: Vec<Bytes>,
    multicast: Bytes,
    mailbox: usize,
    pub memory: Ranges,
}

impl World {
    pub fn new(ranks: usize, bytes: usize) -> Self {
        Self::with_mailbox(ranks, bytes, MAILBOX)
    }

    pub fn with_mailbox(ranks: usize, bytes: usize, mailbox: usize) -> Self {
        let head = size_of::<FaRegionHead>().next_multiple_of(128);
        let all = |bytes: usize| (0..ranks).map(|_| Bytes::new(bytes)).collect::<Vec<_>>();
        let channels = ranks * STRIPES * SLOTS * CHUNK_SLOT;
        let region = head + 3 * mailbox + 2 * STAGING + channels;
        let (regions, inputs, outputs) = (all(region), all(bytes), all(bytes));
        let (windows, multicast) = (all(2 * STAGING), Bytes::new(2 * STAGING));
        // Every input is registered as the first of two buffers; the second buffer has no addresses.
        let mut table = Bytes::new(2 * FA_MAX_RANKS as usize * 8);
        for (rank, input) in inputs.iter().enumerate() {
            table.write(rank * 8, &input.address().to_le_bytes());
        }
        let all = [&regions, &inputs, &outputs, &windows].into_iter().flatten().chain([&table]);
        let memory = Ranges {
            plain: Mutex::new(all.map(Bytes::range).collect()),
            windows: windows.iter().map(Bytes::address).collect(),
            multicast: multicast.range(),
        };
        Self { regions, inputs, outputs, table, windows, multicast, mailbox, memory }
    }

    pub fn launch_of(&self, rank: usize, algorithm: FaAlgorithm, dtype: FaDtype, count: u64) -> FaLaunch {
        let head = size_of::<FaRegionHead>().next_multiple_of(128) as u64;
        // SAFETY: `FaLaunch` has only integer fields, for which zero is valid.
        let mut launch: FaLaunch = unsafe { std::mem::zeroed() };
        for (r, region) in self.regions.iter().enumerate() {
            launch.regions[r] = region.address();
        }
        launch.input = self.inputs[rank].address();
        launch.output = self.outputs[rank].address();
        launch.count = count;
        launch.buffers = self.table.address();
        launch.buffer_count = 1;
        launch.status = launch.regions[rank] + std::mem::offset_of!(FaRegionHead, status) as u64;
        launch.mailbox_offset = head;
        launch.mailbox_bytes = self.mailbox as u64;
        // After the mailboxes of sentinel packets.
        launch.staging_offset = head + 3 * self.mailbox as u64;
        launch.staging_bytes = STAGING as u64;
        launch.staging_slot_bytes = STAGING as u64;
        launch.channel_offset = launch.staging_offset + 2 * STAGING as u64;
        launch.channel_bytes = (self.regions.len() * STRIPES * SLOTS * CHUNK_SLOT) as u64;
        launch.channel_stripes = STRIPES as u32;
        launch.packet_bytes = PACKETS as u32;
        launch.channel_slots = SLOTS as u32;
        launch.chunk_bytes = CHUNK as u64;
        for (share, r) in launch.shares.iter_mut().zip(0..self.regions.len() as u64) {
            *share = FaShare { first: r * count, count };
        }
        launch.window = self.windows[rank].address();
        launch.multicast = self.multicast.address();
        launch.timeout_ns = 5_000_000_000;
        launch.rank = rank as u32;
        launch.own = launch.regions[rank];
        launch.world = self.regions.len() as u32;
        launch.dtype = dtype;
        launch.op = FA_SUM;
        launch.algorithm = algorithm;
        launch
    }

    /// Returns a message of `bytes` bytes, from offset `skipped` on, from the first rank's input to the
    /// second rank's output. `posted`: its offset, if it is posted.
    pub fn message(&self, rank: usize, tag: u32, bytes: usize, skipped: usize, posted: u64) -> FaTransfers {
        // SAFETY: `FaTransfers` has only integer fields, for which zero is valid.
        let mut messages: FaTransfers = unsafe { std::mem::zeroed() };
        let channel = if rank == 0 { 2 } else { 1 };
        let memory = if rank == 0 { &self.inputs[0] } else { &self.outputs[1] };
        let part = bytes.div_ceil(STRIPES).div_ceil(FA_PART_ALIGNMENT as usize).max(1);
        messages.first[channel + 1..].fill(1);
        messages.stripes[channel + 1..].fill(bytes.div_ceil(part * FA_PART_ALIGNMENT as usize).max(1) as u32);
        messages.transfer[0].address = memory.address() + skipped as u64;
        messages.transfer[0].bytes = bytes as u64;
        messages.transfer[0].tag = tag;
        messages.transfer[0].part = part as u32;
        messages.transfer[0].source = if rank == 0 { posted } else { 0 };
        messages
    }

    /// Runs all ranks with a message each, in turns.
    pub fn transfer_together(
        &self,
        program: &Program,
        kernel: &str,
        launches: &[(FaLaunch, FaTransfers)],
        blocks: u32,
    ) -> Result<(), LaunchError> {
        self.run_with(program, kernel, launches, (blocks, 64), 3)
    }

    /// Runs all ranks on this thread, in turns chosen by the seed. Each launch has an additional parameter.
    pub fn run_with<T>(
        &self,
        program: &Program,
        kernel: &str,
        launches: &[(FaLaunch, T)],
        shape: (u32, u32),
        seed: u64,
    ) -> Result<(), LaunchError> {
        let bytes = |(launch, operands): &(FaLaunch, T)| [bytes_of(launch), bytes_of(operands)].concat();
        let params: Vec<_> = launches.iter().map(bytes).collect();
        let launches: Vec<_> = launches
            .iter()
            .zip(&params)
            .map(|((launch, _), params)| Launch { params, ..self.as_launch(kernel, shape, launch) })
            .collect();
        let settings = Settings { limit: LIMIT, seed, race: program.is_observed(), ..Settings::default() };
        let result = program.launch(&launches, settings);
        coverage::note(program, kernel);
        result
    }

    /// Returns why a kernel of the rank gave up.
    pub fn failure_of(&self, rank: usize) -> FaFailure {
        self.status_of(rank, std::mem::offset_of!(FaStatus, failure))
    }

    /// Returns the bits of the ranks that a kernel of the rank holds responsible.
    pub fn missing_of(&self, rank: usize) -> u32 {
        self.status_of(rank, std::mem::offset_of!(FaStatus, missing))
    }

    /// Returns how often kernels of the rank waited long for `peer`.
    pub fn waits_of(&self, rank: usize, peer: usize) -> u32 {
        self.status_of(rank, std::mem::offset_of!(FaStatus, waits) + 4 * peer)
    }

    fn status_of(&self, rank: usize, at: usize) -> u32 {
        let at = std::mem::offset_of!(FaRegionHead, status) + at;
        let bytes = &self.regions[rank].read()[at..at + 4];
        u32::from_le_bytes(bytes.try_into().unwrap())
    }

    /// Runs all ranks concurrently, each on a host thread.
    pub fn run(
        &self,
        program: &Program,
        kernel: &str,
        shape: (u32, u32),
        launches: &[FaLaunch],
    ) -> Vec<Result<(), LaunchError>> {
        std::thread::scope(|scope| {
            let run = |rank| move || self.run_one(program, kernel, shape, &launches[rank], rank as u64 + 1);
            let ranks: Vec<_> = (0..launches.len()).map(|rank| scope.spawn(run(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Runs one rank alone, on this thread.
    pub fn run_one(
        &self,
        program: &Program,
        kernel: &str,
        shape: (u32, u32),
        launch: &FaLaunch,
        seed: u64,
    ) -> Result<(), LaunchError> {
        let settings = Settings { seed, limit: LIMIT, ..Settings::default() };
        let result = program.launch(&[self.as_launch(kernel, shape, launch)], settings);
        coverage::note(program, kernel);
        result
    }

    /// Runs all ranks on this thread, in turns chosen by the seed.
    pub fn run_together(
        &self,
        program: &Program,
        kernel: &str,
        shape: (u32, u32),
        launches: &[FaLaunch],
        settings: Settings,
    ) -> Result<(), LaunchError> {
        self.run_each(program, &vec![kernel; launches.len()], shape, launches, settings)
    }

    /// Runs all ranks on this thread in turns, with a kernel for each rank.
    pub fn run_each(
        &self,
        program: &Program,
        kernels: &[&str],
        shape: (u32, u32),
        launches: &[FaLaunch],
        settings: Settings,
    ) -> Result<(), LaunchError> {
        let operands: Vec<_> = launches.iter().map(|launch| self.with_operands(launch)).collect();
        let launches: Vec<_> = launches
            .iter()
            .zip(kernels)
            .zip(&operands)
            .map(|((launch, kernel), params)| Launch { params, ..self.as_launch(kernel, shape, launch) })
            .collect();
        let result = program.launch(&launches, Settings { limit: LIMIT, ..settings });
        kernels.iter().for_each(|kernel| coverage::note(program, kernel));
        result
    }

    /// Returns the mailboxes of sentinel packets: both generations of all ranks.
    pub fn sentinels(&self) -> impl Iterator<Item = &[u8]> {
        let first = size_of::<FaRegionHead>().next_multiple_of(128) + 2 * self.mailbox;
        self.regions.iter().map(move |region| &region.read()[first..first + self.mailbox])
    }

    /// Returns a kernel's parameters: the launch, and those of rows. Rows that are normalised replace the input,
    /// which is also the residual. Rows that are gathered are bytes without scales.
    fn with_operands(&self, launch: &FaLaunch) -> Vec<u8> {
        let mut params = bytes_of(launch).to_vec();
        let norms = matches!(launch.algorithm, FA_ONE_SHOT_PULL_NORM..=FA_REDUCE_SCATTER_NORM);
        if norms {
            // SAFETY: `FaFused` has only number fields, for which zero is valid.
            let mut norm: FaFused = unsafe { std::mem::zeroed() };
            (norm.residual, norm.normed) = (launch.input, launch.input);
            norm.norm = FA_NORM_RMS;
            (norm.row, norm.rows, norm.total) = (ROW, launch.count as u32 / ROW, ROW);
            (norm.epsilon, norm.dtype) = (1e-5, launch.dtype);
            params.extend_from_slice(bytes_of(&norm));
        }
        if launch.algorithm == FA_ALL_GATHER_ROWS {
            // SAFETY: as above.
            let mut rows: FaGatheredRows = unsafe { std::mem::zeroed() };
            rows.row_bytes = 1;
            params.extend_from_slice(bytes_of(&rows));
        }
        params
    }

    fn as_launch<'a>(
        &'a self,
        kernel: &'a str,
        (blocks, threads): (u32, u32),
        launch: &'a FaLaunch,
    ) -> Launch<'a> {
        let (grid, block) = ([blocks, 1, 1], [threads, 1, 1]);
        Launch {
            kernel,
            grid,
            block,
            cluster: [1; 3],
            dynamic_shared: 0,
            params: bytes_of(launch),
            memory: &self.memory,
        }
    }
}

/// Returns the bytes of a struct of the kernels.
fn bytes_of<T>(parameter: &T) -> &[u8] {
    // SAFETY: these structs consist of integers without padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(parameter).cast::<u8>(), size_of::<T>()) }
}
