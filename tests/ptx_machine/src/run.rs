//! A launch: the threads of all blocks in turns, each until it waits, on the calling thread.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::context::{reason, Context, Record, Request, Site};
use crate::errors::{Fault, LaunchError};
use crate::lower::FRAME_HEAD;
use crate::program::{Kernel, Program};
use crate::runtime::{what, Memory, Range};
use crate::together::{self, Barriers};

/// What to launch.
pub struct Launch<'a> {
    pub kernel: &'a str,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// All parameters, each at its offset.
    pub params: &'a [u8],
    pub memory: &'a dyn Memory,
    pub settings: Settings,
}

/// How to run it.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Of the order in which threads and blocks take turns. 0: in their own order.
    pub seed: u64,
    /// How long a launch may take.
    pub limit: Duration,
    /// Whether threads also stop between the parts of strong vector stores.
    pub tear: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { seed: 0, limit: Duration::from_secs(120), tear: true }
    }
}

/// Backward jumps of a thread in one turn.
const QUANTUM: i64 = 1 << 14;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    AtBarrier,
    InWarp,
    Ended,
}

/// Threads of a block, each with its frame.
pub(crate) struct Block {
    pub index: [u32; 3],
    frames: Vec<u128>,
    pub states: Vec<State>,
    pub requests: Vec<Request>,
    pub results: Vec<[u64; 2]>,
    pub barriers: Barriers,
    shared: Vec<u128>,
    /// By byte of `shared`: whether it has been written.
    written: Vec<bool>,
    pub left: u32,
}

/// A launch that runs.
pub(crate) struct Run<'a> {
    program: &'a Program,
    kernel: Arc<Kernel>,
    launch: &'a Launch<'a>,
    params: Vec<u128>,
    /// What the memory has told of so far, in the order of addresses.
    ranges: Vec<Range>,
    /// Those of the thread that runs.
    local: Range,
    random: u64,
    written: *mut bool,
}

/// What a pass over threads came to.
#[derive(Default)]
struct Pass {
    steps: u32,
    progress: bool,
}

impl Program {
    /// Runs a grid to its end. Kernels of other launches, of other threads and processes, run meanwhile.
    ///
    /// # Errors
    ///
    /// What a GPU would trap on, or get wrong: see [`Fault`].
    pub fn launch(&self, launch: &Launch) -> Result<(), LaunchError> {
        let invalid =
            |what: String| LaunchError { fault: Fault::Launch, kernel: launch.kernel.to_owned(), what };
        let kernel = self.kernel(launch.kernel).map_err(|error| invalid(error.to_string()))?;
        let function = &self.module.functions[kernel.number];
        let threads = extent(launch.block).filter(|&threads| threads <= function.most_threads);
        let blocks = extent(launch.grid).filter(|&blocks| blocks <= 4096);
        let (Some(threads), Some(blocks)) = (threads, blocks) else {
            let most = function.most_threads;
            return Err(invalid(format!(
                "{:?} blocks of {:?} threads, where a block has at most {most}",
                launch.grid, launch.block
            )));
        };
        if function.exact_threads != [0; 3] && function.exact_threads != launch.block {
            return Err(invalid(format!(
                "blocks of {:?} threads, not {:?}",
                launch.block, function.exact_threads
            )));
        }
        if launch.params.len() != function.param_bytes as usize {
            return Err(invalid(format!(
                "{} bytes of parameters, not {}",
                launch.params.len(),
                function.param_bytes
            )));
        }
        let mut params = vec![0u128; launch.params.len().div_ceil(16)];
        for (word, chunk) in params.iter_mut().zip(launch.params.chunks(16)) {
            let mut bytes = [0; 16];
            bytes[..chunk.len()].copy_from_slice(chunk);
            *word = u128::from_le_bytes(bytes);
        }
        let run = Run {
            program: self,
            kernel,
            launch,
            params,
            ranges: Vec::new(),
            local: Range { low: 0, bytes: 0 },
            random: launch.settings.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            written: std::ptr::null_mut(),
        };
        run.all(threads, blocks)
    }
}

fn extent(sizes: [u32; 3]) -> Option<u32> {
    let product = sizes.iter().try_fold(1u32, |product, &size| product.checked_mul(size))?;
    (product > 0).then_some(product)
}

impl Run<'_> {
    fn all(mut self, threads: u32, count: u32) -> Result<(), LaunchError> {
        let grid = self.launch.grid;
        let mut blocks: Vec<Block> = (0..count)
            .map(|i| self.block([i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]], threads))
            .collect();
        let mut sites = vec![Site::NONE; self.kernel.facts.sites as usize];
        let mut function_sites = vec![Site::NONE; self.program.function_facts.sites as usize];
        let mut context = self.context(&mut sites, &mut function_sites, threads);
        let mut order: Vec<u32> = (0..threads).collect();
        let mut turns: Vec<usize> = (0..blocks.len()).collect();
        let mut idle = Idle::new(self.launch.settings.limit);
        loop {
            let mut all = Pass::default();
            self.shuffle(&mut turns);
            self.shuffle(&mut order);
            for &turn in &turns {
                let block = &mut blocks[turn];
                if block.left == 0 {
                    continue;
                }
                let pass = self.pass(&mut context, block, &order)?;
                if pass.steps == 0 {
                    return Err(self.stuck(block, Fault::Sync, ""));
                }
                all.steps += pass.steps;
                all.progress |= pass.progress;
            }
            if all.steps == 0 {
                return Ok(());
            }
            if !idle.rest(all.progress) {
                let block = blocks.iter().find(|block| block.left > 0).unwrap_or(&blocks[0]);
                return Err(self.stuck(block, Fault::Limit, &format!("{:?}; ", self.launch.settings.limit)));
            }
        }
    }

    fn block(&self, index: [u32; 3], threads: u32) -> Block {
        let count = threads as usize;
        let frame = self.frame_words();
        let shared = (self.program.module.shared_bytes as usize).div_ceil(16);
        Block {
            index,
            frames: vec![0; frame * count],
            states: vec![State::Ready; count],
            requests: vec![Request::default(); count],
            results: vec![[0; 2]; count],
            barriers: Barriers::default(),
            shared: vec![0xA5A5_A5A5_A5A5_A5A5_A5A5_A5A5_A5A5_A5A5; shared],
            written: vec![false; shared * 16],
            left: threads,
        }
    }

    fn frame_words(&self) -> usize {
        (self.kernel.facts.frame_bytes as usize).div_ceil(16)
    }

    fn context(&self, sites: &mut [Site], function_sites: &mut [Site], threads: u32) -> Context {
        Context {
            quantum: 0,
            tear: 0,
            lane: 0,
            warp: 0,
            warps: threads.div_ceil(32),
            tid: [0; 3],
            ntid: self.launch.block,
            ctaid: [0; 3],
            nctaid: self.launch.grid,
            params: self.params.as_ptr() as u64,
            shared: 0,
            data: self.program.data.address(),
            sites: sites.as_mut_ptr(),
            covered: self.kernel.covered.as_ptr().cast::<u8>().cast_mut(),
            function_sites: function_sites.as_mut_ptr(),
            function_covered: self.program.function_covered.as_ptr().cast::<u8>().cast_mut(),
            request: Request::default(),
            result: [0; 2],
            record: Record::default(),
            run: std::ptr::null_mut(),
        }
    }

    fn random(&mut self) -> u64 {
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        if self.launch.settings.seed != 0 {
            for i in (1..items.len()).rev() {
                let other = (self.random() % (i as u64 + 1)) as usize;
                items.swap(i, other);
            }
        }
    }

    /// A turn for every thread of a block that can go on.
    fn pass(&mut self, context: &mut Context, block: &mut Block, order: &[u32]) -> Result<Pass, LaunchError> {
        let mut pass = Pass::default();
        context.ctaid = block.index;
        context.shared = block.shared.as_mut_ptr() as u64;
        self.written = block.written.as_mut_ptr();
        for &thread in order {
            if block.states[thread as usize] != State::Ready {
                continue;
            }
            pass.steps += 1;
            pass.progress |= self.step(context, block, thread)?;
        }
        Ok(pass)
    }

    /// True unless the thread has only polled in vain.
    fn step(&mut self, context: &mut Context, block: &mut Block, thread: u32) -> Result<bool, LaunchError> {
        let [x, y, _] = self.launch.block;
        context.tid = [thread % x, thread / x % y, thread / x / y];
        (context.lane, context.warp) = (thread % 32, thread / 32);
        context.quantum = QUANTUM;
        context.tear =
            if self.launch.settings.tear { (self.random() >> 20) as u32 & self.tear_mask() } else { 0 };
        context.result = block.results[thread as usize];
        let words = self.frame_words();
        let frame = block.frames[thread as usize * words..].as_mut_ptr().cast::<u8>();
        let local = self.program.module.functions[self.kernel.number].local_bytes;
        self.local = Range { low: frame as u64 + u64::from(FRAME_HEAD), bytes: local.into() };
        context.run = std::ptr::from_mut(self).cast();
        // SAFETY: the frame has the size that the kernel asks for and begins with zeros; all that the context points to outlives
        // the step; `self` is reached through the context alone while the step runs.
        let why = unsafe { (self.kernel.step)(frame, context) };
        let i = thread as usize;
        match why {
            reason::POLL => return Ok(false),
            reason::QUANTUM => {}
            reason::TORN => block.results[i][0] = context.request.args[0],
            reason::BARRIER => {
                (block.states[i], block.requests[i]) = (State::AtBarrier, context.request);
                together::arrive(self.instr(context.request.at), block, i)
                    .map_err(|what| self.wrong(block, thread, what))?;
            }
            reason::WARP => {
                (block.states[i], block.requests[i]) = (State::InWarp, context.request);
                together::meet(self.instr(context.request.at), block, i)
                    .map_err(|what| self.wrong(block, thread, what))?;
            }
            reason::END => {
                block.states[i] = State::Ended;
                block.left -= 1;
            }
            _ => return Err(self.failed(context, block, thread)),
        }
        Ok(true)
    }

    /// One turn in eight stops between the parts of a store, half of them store the last part first.
    fn tear_mask(&mut self) -> u32 {
        if self.random() % 8 == 0 {
            3
        } else {
            2
        }
    }

    pub(crate) fn instr(&self, at: u64) -> &crate::ir::Instr {
        &self.program.module.functions[(at >> 32) as usize].code[at as u32 as usize]
    }

    /// The allocation of an address, and whether it may be written.
    pub(crate) fn find(&mut self, address: u64, bytes: u32) -> Option<(Range, bool)> {
        let params = Range { low: self.params.as_ptr() as u64, bytes: self.launch.params.len() as u64 };
        let data = Range { low: self.program.data.address(), bytes: self.program.module.data.len() as u64 };
        if params.holds(address, bytes) {
            return Some((params, false));
        }
        if data.holds(address, bytes) {
            return Some((data, true));
        }
        let after = self.ranges.partition_point(|range| range.low <= address);
        if let Some(&range) = after.checked_sub(1).and_then(|i| self.ranges.get(i)) {
            if range.holds(address, bytes) {
                return Some((range, true));
            }
        }
        let range = self.launch.memory.find(address).filter(|range| range.holds(address, bytes))?;
        self.ranges.insert(after, range);
        Some((range, true))
    }

    pub(crate) fn is_parameter(&self, address: u64) -> bool {
        Range { low: self.params.as_ptr() as u64, bytes: self.launch.params.len() as u64 }.holds(address, 1)
    }

    pub(crate) fn shared_range(&self, context: &Context) -> Range {
        Range { low: context.shared, bytes: self.program.module.shared_bytes.into() }
    }

    pub(crate) fn local_range(&self) -> Range {
        self.local
    }

    pub(crate) fn use_shared(
        &mut self,
        context: &Context,
        offset: u64,
        bytes: u32,
        code: u32,
        at: u64,
    ) -> Option<Fault> {
        let size = u64::from(self.program.module.shared_bytes);
        if offset > size || size - offset < u64::from(bytes) {
            return Some(Fault::IllegalAddress);
        }
        // SAFETY: of the block that runs, which has so many; nothing else refers to it during a step.
        let written =
            unsafe { std::slice::from_raw_parts_mut(self.written.add(offset as usize), bytes as usize) };
        if what::kind(code) != what::WRITE && written.contains(&false) {
            return Some(Fault::UndefinedShared);
        }
        written.fill(true);
        let _ = (context, at);
        None
    }

    pub(crate) fn observe(
        &mut self,
        _context: &Context,
        _address: u64,
        _bytes: u32,
        _code: u32,
        _at: u64,
    ) -> Option<Fault> {
        None
    }

    /// Where an instruction is.
    fn place(&self, at: u64) -> String {
        let instr = self.instr(at);
        let file = |number: u32| {
            self.program
                .module
                .files
                .get(&number)
                .map_or("?", |name| name.rsplit("csrc/").next().unwrap_or(name))
        };
        let loc = instr.loc;
        let mut text = format!("PTX line {}", instr.line);
        if loc.file != 0 {
            text += &format!(", {}:{}", file(loc.file), loc.line);
        }
        if loc.into.0 != 0 {
            text += &format!(" in {}:{}", file(loc.into.0), loc.into.1);
        }
        text
    }

    fn error(&self, fault: Fault, what: String) -> LaunchError {
        LaunchError { fault, kernel: self.launch.kernel.to_owned(), what }
    }

    fn who(block: &Block, thread: u32) -> String {
        format!("block {:?}, thread {thread}", block.index)
    }

    fn failed(&self, context: &Context, block: &Block, thread: u32) -> LaunchError {
        let record = context.record;
        let all = [
            Fault::Misaligned,
            Fault::IllegalAddress,
            Fault::ReadOnly,
            Fault::UndefinedRegister,
            Fault::UndefinedShared,
            Fault::Limit,
            Fault::Trap,
            Fault::Race,
        ];
        let fault = all.into_iter().find(|&fault| fault as u32 == record.fault).unwrap_or(Fault::Trap);
        let mut what = format!("{}, {}", self.place(record.at), Self::who(block, thread));
        if record.bytes > 0 {
            what += &format!(", {} bytes at {:#x}", record.bytes, record.address);
        }
        self.error(fault, what)
    }

    fn wrong(&self, block: &Block, thread: u32, what: String) -> LaunchError {
        self.error(
            Fault::Sync,
            format!(
                "{}, {}: {what}",
                self.place(block.requests[thread as usize].at),
                Self::who(block, thread)
            ),
        )
    }

    /// Says where all threads of a block wait.
    fn stuck(&self, block: &Block, fault: Fault, why: &str) -> LaunchError {
        let mut text = format!("{why}block {:?}:", block.index);
        let key = |i: usize| {
            (
                block.states[i],
                if matches!(block.states[i], State::Ready | State::Ended) { 0 } else { block.requests[i].at },
            )
        };
        let mut first = 0;
        for i in 1..=block.states.len() {
            if i < block.states.len() && key(i) == key(first) {
                continue;
            }
            let (state, at) = key(first);
            let does = match state {
                State::Ready => "run or poll".to_owned(),
                State::Ended => "have ended".to_owned(),
                State::AtBarrier => format!("wait at the barrier of {}", self.place(at)),
                State::InWarp => format!("wait for their warp at {}", self.place(at)),
            };
            text += &format!(" threads {first} to {} {does};", i - 1);
            first = i;
        }
        self.error(fault, text.trim_end_matches(';').to_owned())
    }
}

/// Between passes in which nothing happens, other threads and processes get the CPU.
struct Idle {
    end: Instant,
    limit: Duration,
    passes: u32,
}

impl Idle {
    fn new(limit: Duration) -> Self {
        Self { end: Instant::now() + limit, limit, passes: 0 }
    }

    /// False: the time is up.
    fn rest(&mut self, progress: bool) -> bool {
        self.passes = if progress { 0 } else { self.passes + 1 };
        match self.passes {
            0..2 => {}
            2..20 => std::thread::yield_now(),
            passes => std::thread::sleep(Duration::from_micros(u64::from(passes.min(200)))),
        }
        Instant::now() < self.end || self.limit.is_zero()
    }
}

/// Whether a coverage byte is set.
pub(crate) fn is_covered(byte: &std::sync::atomic::AtomicU8) -> bool {
    byte.load(Ordering::Relaxed) != 0
}
