//! Runs launches on the calling thread: threads of all blocks take turns, each until it waits.

use std::time::Duration;

use super::{report, together};
use crate::clock::Recorder;
use crate::context::{reason, Context, Record, Request, MOST_PARTS};
use crate::errors::{Fault, LaunchError};
use crate::ir::Op;
use crate::launch::block::{Block, State};
use crate::launch::cluster::Cluster;
use crate::launch::grid::Grid;
use crate::launch::idle::Idle;
use crate::lower::FRAME_HEAD;
use crate::memory::race::{Place, Race, Races};
use crate::memory::store_buffer::StoreBuffers;
use crate::program::Program;
use crate::runtime::{what, Memory, Range};

/// A kernel launch.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    /// Name of the kernel.
    pub kernel: &'a str,
    /// Number of blocks.
    pub grid: [u32; 3],
    /// Threads of each block.
    pub block: [u32; 3],
    /// Blocks of each cluster; `[1; 3]`: the kernel's own `.reqnctapercluster`, or no clusters.
    pub cluster: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: u32,
    /// All parameters, each at its offset.
    pub params: &'a [u8],
    /// Memory that the kernel may access.
    pub memory: &'a dyn Memory,
}

/// Settings of launches.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Seed of the order in which threads and blocks take turns. 0: in order of their numbers.
    pub seed: u64,
    /// Time limit of a launch.
    pub limit: Duration,
    /// Whether threads also stop between the parts of strong vector stores.
    pub tear: bool,
    /// Whether to detect races; the program must be observed.
    pub race: bool,
    /// Whether relaxed stores may become visible late and out of order; the program must be observed. Races
    /// are not detected then, as the detector would count a store as published before it is visible.
    pub late_stores: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { seed: 0, limit: Duration::from_secs(120), tear: true, race: false, late_stores: false }
    }
}

/// Backward jumps of a thread in one turn.
const QUANTUM: i64 = 1 << 14;
/// Maximum number of threads for race detection: each thread has a clock with an entry for every thread.
const MOST_RACING: u32 = 4096;

/// State of launches that run together.
pub(crate) struct Run<'a> {
    program: &'a Program,
    settings: Settings,
    grids: Vec<Grid<'a>>,
    pub(crate) clusters: Vec<Cluster>,
    /// State of the running thread: its grid; then its number among all threads, its local memory, and
    /// which bytes of its block's shared memory have been written.
    grid: usize,
    thread: u32,
    local: Range,
    written: *mut bool,
    pub(super) cluster: usize,
    random: u64,
    pub(super) races: Option<Races>,
    race: Option<Race>,
    late: Option<StoreBuffers>,
    /// Records the thread's actions for the clock.
    pub(crate) recorder: Option<Recorder>,
}

/// Result of one pass over a block's threads.
#[derive(Default)]
struct Pass {
    steps: u32,
    progress: bool,
}

impl Program {
    /// Runs grids to their end on the calling thread. All blocks run side by side, and kernels of other
    /// calls, threads and processes may run at the same time. Each grid of a call counts as one on a
    /// separate device.
    ///
    /// # Errors
    ///
    /// Errors that a GPU would trap on or compute wrongly: see [`Fault`].
    pub fn launch(&self, launches: &[Launch], settings: Settings) -> Result<(), LaunchError> {
        let mut blocks = Vec::new();
        let mut grids = Vec::new();
        let mut threads = 0;
        let mut clusters: Vec<Cluster> = Vec::new();
        for (number, launch) in launches.iter().enumerate() {
            let grid = Grid::new(self, launch)?;
            let first = clusters.len();
            let per_block = launch.block.iter().product::<u32>();
            let [x, y, z] = launch.grid;
            for i in 0..x * y * z {
                let index = [i % x, i / x % y, i / x / y];
                let frame = grid.kernel.facts.frame_bytes;
                let mut block = Block::new(number, index, threads, per_block, frame, grid.shared_bytes);
                block.cluster = first + grid.place(index).0 as usize;
                blocks.push(block);
                threads += per_block;
            }
            clusters.resize_with(first + (x * y * z / grid.cluster_blocks()) as usize, Cluster::default);
            let before = blocks.len() - (x * y * z) as usize;
            let mut ranks: Vec<&mut Block> = blocks[before..].iter_mut().collect();
            ranks.sort_by_key(|block| grid.place(block.index));
            ranks.into_iter().for_each(|block| clusters[block.cluster].add(block));
            grids.push(grid);
        }
        if self.is_timed() {
            let what = "the program was loaded for the clock".to_owned();
            return Err(LaunchError { fault: Fault::Launch, kernel: launches[0].kernel.to_owned(), what });
        }
        let mut run = Run::new(self, settings, grids);
        run.clusters = clusters;
        run.late = settings.late_stores.then(|| StoreBuffers::new(threads));
        if settings.race && run.late.is_none() {
            run.races = Some(races(launches, &blocks, threads)?);
        }
        run.all(blocks)
    }
}

fn races(launches: &[Launch], blocks: &[Block], threads: u32) -> Result<Races, LaunchError> {
    if threads > MOST_RACING {
        let what = format!("races can be detected among at most {MOST_RACING} threads, not {threads}");
        return Err(LaunchError { fault: Fault::Launch, kernel: launches[0].kernel.to_owned(), what });
    }
    // If one launch runs a whole world, its ranks (by `%ctaid.y`) count as devices too.
    let places = blocks.iter().enumerate().flat_map(|(number, block)| {
        let device = (block.launch as u32) << 16 | block.index[1];
        let place = Place { block: number as u32, cluster: block.cluster as u32, device };
        std::iter::repeat_n(place, block.states.len())
    });
    Ok(Races::new(places.collect()))
}

impl<'a> Run<'a> {
    pub(crate) fn new(program: &'a Program, settings: Settings, grids: Vec<Grid<'a>>) -> Self {
        Self {
            program,
            settings,
            grids,
            grid: 0,
            thread: 0,
            local: Range { low: 0, bytes: 0 },
            written: std::ptr::null_mut(),
            cluster: 0,
            clusters: Vec::new(),
            random: settings.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            races: None,
            race: None,
            recorder: None,
            late: None,
        }
    }
}

impl Run<'_> {
    fn all(mut self, mut blocks: Vec<Block>) -> Result<(), LaunchError> {
        let mut turns: Vec<usize> = (0..blocks.len()).collect();
        let mut idle = Idle::new(self.settings.limit);
        let mut order = Vec::new();
        loop {
            let mut all = Pass::default();
            self.shuffle(&mut turns);
            for &turn in &turns {
                let block = &mut blocks[turn];
                if block.left == 0 {
                    continue;
                }
                if order.len() != block.states.len() {
                    order = (0..block.states.len() as u32).collect();
                }
                self.shuffle(&mut order);
                let pass = self.pass(block, &order)?;
                if pass.steps == 0 && !block.states.contains(&State::InCluster) {
                    return Err(self.error(block, Fault::Sync, report::waiting(self.program, block)));
                }
                all.steps += pass.steps;
                all.progress |= pass.progress;
            }
            if all.steps == 0 {
                let left: Vec<&Block> = blocks.iter().filter(|block| block.left > 0).collect();
                let Some(&first) = left.first() else { return Ok(()) };
                let where_all: Vec<String> =
                    left.iter().map(|block| report::waiting(self.program, block)).collect();
                return Err(self.error(first, Fault::Sync, where_all.join("; ")));
            }
            if !idle.rest(all.progress) {
                let left: Vec<&Block> = blocks.iter().filter(|block| block.left > 0).collect();
                let where_all: Vec<String> =
                    left.iter().map(|block| report::waiting(self.program, block)).collect();
                let text = format!("{:?}; {}", self.settings.limit, where_all.join("; "));
                return Err(self.error(left.first().copied().unwrap_or(&blocks[0]), Fault::Limit, text));
            }
        }
    }

    fn random(&mut self) -> u64 {
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Rotates the order, and reverses it every other time: cheap, and as effective as a random
    /// permutation.
    fn shuffle<T>(&mut self, items: &mut [T]) {
        if self.settings.seed != 0 && items.len() > 1 {
            let random = self.random() >> 16;
            items.rotate_left((random >> 1) as usize % items.len());
            if random & 1 != 0 {
                items.reverse();
            }
        }
    }

    /// Gives a turn to every thread of a block that can run.
    fn pass(&mut self, block: &mut Block, order: &[u32]) -> Result<Pass, LaunchError> {
        let mut pass = Pass::default();
        let mut context = self.context(block);
        for &thread in order {
            self.leave_cluster_barrier(block, thread);
            if block.states[thread as usize] == State::Ready {
                pass.steps += 1;
                pass.progress |= self.step(&mut context, block, thread)?;
            }
        }
        Ok(pass)
    }

    /// Creates the context for running threads of a block.
    pub(crate) fn context(&mut self, block: &mut Block) -> Context {
        self.grid = block.launch;
        self.written = block.written.as_mut_ptr();
        self.cluster = block.cluster;
        let grid = &mut self.grids[block.launch];
        let cluster = grid.cluster;
        let parts = |f: fn(u32, u32) -> u32, of: [u32; 3]| std::array::from_fn(|i| f(of[i], cluster[i]));
        Context {
            quantum: 0,
            tear: 0,
            lane: 0,
            warp: 0,
            warps: (block.states.len() as u32).div_ceil(32),
            tid: [0; 3],
            ntid: grid.launch.block,
            ctaid: block.index,
            nctaid: grid.launch.grid,
            cluster_ctaid: parts(|index, cluster| index % cluster, block.index),
            cluster_nctaid: cluster,
            clusterid: parts(|index, cluster| index / cluster, block.index),
            nclusterid: parts(|grid, cluster| grid / cluster, grid.launch.grid),
            cluster_rank: grid.place(block.index).1,
            cluster_blocks: grid.cluster_blocks(),
            has_clusters: grid.has_clusters.into(),
            dynamic_shared: grid.launch.dynamic_shared,
            params: grid.params.as_ptr() as u64,
            shared: block.shared(),
            data: self.program.data.address(),
            sites: grid.sites.as_mut_ptr(),
            covered: grid.kernel.covered.as_ptr().cast::<u8>().cast_mut(),
            function_sites: grid.function_sites.as_mut_ptr(),
            function_covered: self.program.function_covered.as_ptr().cast::<u8>().cast_mut(),
            request: Request::default(),
            result: [0; 2],
            values: [0; 4],
            record: Record::default(),
            run: std::ptr::null_mut(),
        }
    }

    /// Runs a thread until it stops, and returns the reason.
    pub(crate) fn resume(&mut self, context: &mut Context, block: &mut Block, thread: u32) -> u32 {
        let grid = &self.grids[block.launch];
        let [x, y, _] = grid.launch.block;
        let step = grid.kernel.step;
        let local = self.program.module.functions[grid.kernel.number].local_bytes;
        let i = thread as usize;
        context.tid = [thread % x, thread / x % y, thread / x / y];
        (context.lane, context.warp) = (thread % 32, thread / 32);
        context.quantum = QUANTUM;
        context.tear = self.tear();
        context.result = block.results[i];
        self.thread = block.first_thread + thread;
        self.let_some_go();
        let frame = block.frame(thread);
        self.local = Range { low: frame as u64 + u64::from(FRAME_HEAD), bytes: local.into() };
        context.run = std::ptr::from_mut(self).cast();
        // SAFETY: the frame has the size that the kernel requires and is zero at first; everything that the
        // context points to outlives the step; while the step runs, `self` is accessed only through the
        // context.
        unsafe { step(frame, context) }
    }

    /// Runs a thread's turn. Returns false if the thread has only polled without success.
    fn step(&mut self, context: &mut Context, block: &mut Block, thread: u32) -> Result<bool, LaunchError> {
        let i = thread as usize;
        let why = self.resume(context, block, thread);
        if let (Some(late), reason::BARRIER | reason::WARP | reason::END) = (&mut self.late, why) {
            late.flush(self.thread);
        }
        match why {
            reason::POLL => return Ok(false),
            reason::QUANTUM => {}
            reason::TORN => block.results[i][0] = context.request.args[0],
            reason::BARRIER | reason::WARP => {
                block.requests[i] = context.request;
                block.states[i] = if why == reason::BARRIER { State::AtBarrier } else { State::InWarp };
                self.wait(block, thread)?;
            }
            reason::END => {
                block.states[i] = State::Ended;
                block.left -= 1;
                self.leave_cluster(block, thread);
            }
            _ => return Err(self.failed(context, block, thread)),
        }
        Ok(true)
    }

    /// Returns the error of a thread that has stopped because of one.
    pub(crate) fn failed(&self, context: &Context, block: &Block, thread: u32) -> LaunchError {
        let kernel = self.grids[block.launch].launch.kernel;
        report::failed(self.program, kernel, context.record, self.race, block, thread)
    }

    /// Releases half of the thread's held-back stores, at the beginning of its turn.
    fn let_some_go(&mut self) {
        if let Some(mut late) = self.late.take() {
            late.let_some_go(self.thread, || self.random() >> 20 & 1 != 0);
            self.late = Some(late);
        }
    }

    /// Chooses whether strong vector stores are torn: one turn in eight stops between the parts, and half
    /// of those store the last part first.
    fn tear(&mut self) -> u32 {
        if !self.settings.tear {
            return 0;
        }
        let random = self.random() >> 20;
        (random & 2) as u32 | u32::from(random & 0x70 == 0)
    }

    pub(crate) fn wait(&mut self, block: &mut Block, thread: u32) -> Result<(), LaunchError> {
        let at = block.requests[thread as usize].at;
        if let Op::ClusterBar { waits, releases, .. } = report::instr(self.program, at).op {
            return self.meet_cluster(block, thread, waits, releases).map_err(|what| {
                let place = report::place(self.program, at);
                self.error(block, Fault::Sync, format!("{place}, {}: {what}", report::who(block, thread)))
            });
        }
        let met = together::arrive(report::instr(self.program, at), block, thread as usize);
        let met = met.map_err(|what| {
            let place = report::place(self.program, at);
            self.error(block, Fault::Sync, format!("{place}, {}: {what}", report::who(block, thread)))
        })?;
        if let Some(races) = &mut self.races {
            match met {
                together::Met::Waits => {}
                together::Met::Arrived => races.arrive(block.first_thread + thread),
                together::Met::All(threads) => races.meet(&block.numbers(&threads)),
            }
        }
        Ok(())
    }

    /// Returns the number of a launch's kernel among the functions.
    pub(crate) fn kernel_of(&self, launch: usize) -> usize {
        self.grids[launch].kernel.number
    }

    /// Returns a launch's grid.
    pub(crate) fn grid_of(&self, launch: usize) -> &Grid<'_> {
        &self.grids[launch]
    }

    /// Returns the bytes of a thread's frame.
    pub(crate) fn frame_of(&self, launch: usize) -> u32 {
        self.grids[launch].kernel.facts.frame_bytes
    }

    fn error(&self, block: &Block, fault: Fault, what: String) -> LaunchError {
        LaunchError { fault, kernel: self.grids[block.launch].launch.kernel.to_owned(), what }
    }

    /// Returns the allocation of an address, and whether it is writable.
    pub(crate) fn find(&mut self, address: u64, bytes: u32) -> Option<(Range, bool)> {
        let params = self.parameters();
        let data = Range { low: self.program.data.address(), bytes: self.program.module.data.len() as u64 };
        if params.holds(address, bytes) {
            return Some((params, false));
        }
        if data.holds(address, bytes) {
            return Some((data, true));
        }
        let grid = &mut self.grids[self.grid];
        let after = grid.ranges.partition_point(|range| range.low <= address);
        if let Some(&range) = after.checked_sub(1).and_then(|i| grid.ranges.get(i)) {
            if range.holds(address, bytes) {
                return Some((range, true));
            }
        }
        let range = grid.launch.memory.find(address).filter(|range| range.holds(address, bytes))?;
        grid.ranges.insert(after, range);
        Some((range, true))
    }

    fn parameters(&self) -> Range {
        let grid = &self.grids[self.grid];
        Range { low: grid.params.as_ptr() as u64, bytes: grid.launch.params.len() as u64 }
    }

    pub(crate) fn is_parameter(&self, address: u64) -> bool {
        self.parameters().holds(address, 1)
    }

    pub(crate) fn shared_range(&self, context: &Context) -> Range {
        Range { low: context.shared, bytes: self.grids[self.grid].shared_bytes.into() }
    }

    pub(crate) fn local_range(&self) -> Range {
        self.local
    }

    /// Checks an access to shared memory, by its offset.
    pub(crate) fn use_shared(
        &mut self,
        context: &Context,
        offset: u64,
        bytes: u32,
        code: u32,
        at: u64,
    ) -> Option<Fault> {
        let size = u64::from(self.grids[self.grid].shared_bytes);
        if offset > size || size - offset < u64::from(bytes) {
            return Some(Fault::IllegalAddress);
        }
        // SAFETY: `written` belongs to the running block and has this length; nothing else refers to it
        // during a step.
        let written =
            unsafe { std::slice::from_raw_parts_mut(self.written.add(offset as usize), bytes as usize) };
        if what::kind(code) != what::WRITE && written.contains(&false) {
            return Some(Fault::UndefinedShared);
        }
        written.fill(true);
        self.observe(context.shared + offset, bytes, code, at)
    }

    /// Processes an access or a fence of the running thread.
    pub(crate) fn observe(&mut self, address: u64, bytes: u32, code: u32, at: u64) -> Option<Fault> {
        if let Some(recorder) = &mut self.recorder {
            recorder.note(address, bytes, code, at);
            return None;
        }
        if let Some(late) = &mut self.late {
            late.before(self.thread, address, bytes, code);
        }
        let race = self.races.as_mut()?.access(self.thread, address, bytes, code, at)?;
        self.race = Some(race);
        Some(Fault::Race)
    }

    /// Processes an access that compiled code does not report itself.
    pub(crate) fn observe_if_asked(&mut self, address: u64, bytes: u32, code: u32, at: u64) -> Option<Fault> {
        match self.program.is_observed() || self.program.is_timed() {
            true => self.observe(address, bytes, code, at),
            false => None,
        }
    }

    /// Resolves a multicast address.
    pub(crate) fn multicast(&self, address: u64, bytes: u32, parts: &mut [u64; MOST_PARTS]) -> usize {
        self.grids[self.grid].launch.memory.multicast(address, bytes, parts)
    }

    /// Holds back half of the relaxed stores of the running thread. Returns whether this one is held back.
    pub(crate) fn hold(&mut self, address: u64, bytes: u32, value: u64) -> bool {
        let holds = self.late.is_some() && self.random() >> 20 & 1 != 0;
        if let (true, Some(late)) = (holds, &mut self.late) {
            late.hold(self.thread, address, bytes, value);
        }
        holds
    }
}
