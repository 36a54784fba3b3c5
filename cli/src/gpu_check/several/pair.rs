//! Accesses of one rank to the memory of its peers, by kernels and by copy engines.

use std::ffi::c_void;

use cudarc::driver::{result, CudaSlice, DevicePtr as _};
use fast_allreduce::device::cuda::api;
use fast_allreduce::{Communicator, Cuda, SymmetricMemory};

use super::findings::{
    title, Findings, COPY_READS, COPY_WRITES, KERNEL_READS, KERNEL_WRITES, LOAD, ONE_MULTIPROCESSOR,
    OWN_LOAD, SIGNAL, SMALL_COPY_READS, SMALL_COPY_WRITES, TOGETHER, TO_ALL,
};
use super::ordinal;
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};
use crate::gpu_check::probe::{median, median_ns, ring, synchronize, Block, ProbeRunner, Workload};
use crate::gpu_check::ranks::rank_settings;
use crate::harness::session::Session;

const LINE: usize = 128;
/// Signals: a line for each peer.
const FLAGS: usize = 0;
/// A ring of offsets, which fits into the second-level cache.
const RING: usize = 64 << 10;
const RING_LINES: usize = 2048;
const RING_STRIDE: usize = 4 * LINE;
/// A slot for each peer, whose content its owner checks: half written by a kernel, half by a copy.
const CHECK: usize = 2 << 20;
const CHECK_BYTES: usize = 64 << 10;
/// A part for each peer, for rates.
const AREA: usize = 4 << 20;

/// Fences that are timed with stores to a peer outstanding.
const FENCES: [(&str, &str); 2] = [
    ("cost_fence_system", "fence of system scope"),
    ("cost_fence_sc", "sequentially consistent fence of system scope"),
];

/// A rank's memory and that of its peers.
pub struct Peers<'a> {
    session: &'a Session,
    options: &'a GpuCheck,
    way: &'a str,
    probes: ProbeRunner,
    /// Bytes of a part of the area.
    part: usize,
    memory: SymmetricMemory<u8, Cuda>,
    _communicator: Communicator<Cuda>,
}

impl<'a> Peers<'a> {
    /// Shares memory. Collective.
    pub fn new(session: &'a Session, options: &'a GpuCheck, way: &'a str) -> Result<Self, Failure> {
        let gpu = ordinal(options, session.rank());
        let mut settings = rank_settings(options, gpu, 1 << 20)?;
        settings.set("sharing", way)?;
        let device = settings.cuda(gpu)?.one_at_a_time();
        let communicator = session.build(device, settings.builder()?)?;
        let area: usize = if options.small { 1 << 20 } else { 64 << 20 };
        let part = (area / session.world_size()) / LINE * LINE;
        let memory = communicator.symmetric_memory::<u8>(AREA + part * session.world_size())?;
        let probes = ProbeRunner::on(gpu, options.small)?;
        probes.warm_clock()?;
        let own = Self { session, options, way, probes, part, memory, _communicator: communicator };
        own.write(own.memory.address() + RING as u64, &ring(RING_LINES, RING_STRIDE))?;
        Ok(own)
    }

    /// Frees the memory. Collective.
    pub fn free(self) -> Result<(), Failure> {
        Ok(self.memory.free()?)
    }

    fn name(&self, rank: usize) -> String {
        format!("GPU {}", ordinal(self.options, rank))
    }

    fn address(&self, rank: usize, offset: usize) -> Result<u64, Failure> {
        let address = self.memory.peer_address(rank);
        let address = address.ok_or_else(|| Failure::Ranks(format!("rank {rank} has no memory")))?;
        Ok(address + offset as u64)
    }

    /// Returns what an iteration of a kernel of one thread takes: the median of several runs.
    fn each(&self, name: &str, workload: Workload, of: fn(&Block) -> f64) -> Result<f64, Failure> {
        let run =
            |_| Ok(of(&self.probes.run(name, (1, 1), workload, false)?[0]) / f64::from(workload.iterations));
        Ok(median((0..3).map(run).collect::<Result<_, Failure>>()?))
    }

    /// Measures signals between two ranks: both of them call this. Returns whether all signals have arrived, if the
    /// kernel ran.
    pub fn signals(&self, (first, second): (usize, usize), found: &mut Findings) -> Result<bool, Failure> {
        let own = self.session.rank();
        let (peer, kernel) = match own {
            _ if own == first => (second, "cost_signal_first"),
            _ if own == second => (first, "cost_signal_second"),
            _ => return Ok(true),
        };
        let workload = Workload {
            memory: self.address(own, FLAGS + peer * LINE)?,
            count: self.address(peer, FLAGS + own * LINE)?,
            iterations: self.probes.iterations(1000),
        };
        let name = format!("{} and {}", self.name(first), self.name(second));
        // The other rank waits for the fence that follows, whatever happens here.
        let outcome = self.probes.run(kernel, (1, 1), workload, false).map(|blocks| blocks[0]);
        let arrived = !matches!(outcome, Ok(Block { cycles: 0.0, .. }));
        if let (Ok(block), true, true) = (&outcome, arrived, own == first) {
            let one_way = block.ns() / f64::from(workload.iterations) / 2.0;
            found.figure(&title(SIGNAL, self.way), self.name(first), self.name(second), one_way);
        }
        found.outcome(&name, outcome.map(|_| u64::from(arrived && own == first)));
        Ok(arrived)
    }

    /// Accesses the memory of a peer in every way. Returns the number of cases checked.
    pub fn measure(&self, to: usize, found: &mut Findings) -> Result<u64, Failure> {
        let own = self.session.rank();
        let mut put = |table: &str, value: f64| {
            found.figure(&title(table, self.way), format!("from {}", self.name(own)), self.name(to), value);
        };
        let iterations = self.probes.iterations(2048);
        let chase = |rank: usize| {
            let workload = Workload { memory: self.address(rank, RING)?, iterations, ..Workload::default() };
            self.each("cost_load_relaxed", workload, Block::ns)
        };
        put(LOAD, chase(to)?);
        let (ring, mut at) = (ring(RING_LINES, RING_STRIDE), 0);
        for _ in 0..2 * iterations {
            at = ring[at as usize / 8];
        }
        let reached = self.probes.sink(1)?[0];
        if reached != at {
            return Err(wrong("a kernel followed a ring of offsets", &[reached], &[at]));
        }

        let (area, own_area) =
            (self.address(to, AREA + own * self.part)?, self.address(own, AREA + own * self.part)?);
        let blocks = self.probes.multiprocessors;
        put(KERNEL_WRITES, self.rate("rate_peers_store", &[area], LINE, blocks)?);
        put(KERNEL_READS, self.rate("rate_peers_load", &[area], LINE, blocks)?);
        let one = self.access("rate_peers_store", &[area], LINE, 1)?;
        put(ONE_MULTIPROCESSOR, one.bytes / one.blocks[0].cycles);
        let gbps = |to, from| Ok::<_, Failure>(self.part as f64 / self.copy_ns(to, from, self.part)?);
        put(COPY_WRITES, gbps(area, own_area)?);
        put(COPY_READS, gbps(own_area, area)?);
        put(SMALL_COPY_WRITES, self.copy_ns(area, own_area, 8)?);
        put(SMALL_COPY_READS, self.copy_ns(own_area, area, 8)?);

        // Its owner checks what is written here.
        let slot = self.address(to, CHECK + own * CHECK_BYTES)?;
        let half = CHECK_BYTES / 2;
        let table = self.table(&[slot], LINE, pattern(own, to, 1))?;
        let memory = table.device_ptr(&self.probes.stream).0;
        let workload = Workload { memory, count: (half / LINE / 4) as u64, iterations: 1 };
        self.probes.run("rate_peers_store", (4, 512), workload, false)?;
        let staged = own_area;
        self.write(staged, &vec![words(pattern(own, to, 2)); half / 8])?;
        self.copy(slot + half as u64, staged, half)?;
        synchronize(&self.probes.stream)?;
        // And this rank checks what a copy reads.
        self.copy(own_area, self.address(to, RING)?, RING_STRIDE * 8)?;
        let read = self.read(own_area, RING_STRIDE)?;
        if read[..] != ring[..RING_STRIDE] {
            return Err(wrong("a copy read a ring of offsets", &read, &ring[..RING_STRIDE]));
        }
        if own == 0 && to == 1 {
            self.fences(area, found)?;
        }
        Ok(2)
    }

    /// Checks what a peer has written to this rank's memory. Returns the number of cases.
    pub fn verify(&self, from: usize) -> Result<u64, Failure> {
        let own = self.session.rank();
        let half = CHECK_BYTES / 2 / 8;
        let read = self.read(self.address(own, CHECK + from * CHECK_BYTES)?, 2 * half)?;
        for (what, part, number) in [("a kernel wrote", &read[..half], 1), ("a copy wrote", &read[half..], 2)]
        {
            let expected = words(pattern(from, own, number));
            if let Some(&found) = part.iter().find(|&&word| word != expected) {
                return Err(wrong(what, &[found], &[expected]));
            }
        }
        Ok(2)
    }

    /// Times fences with stores to a peer outstanding. Their kernels count cycles without those of the stores.
    fn fences(&self, area: u64, found: &mut Findings) -> Result<(), Failure> {
        // Measured here, because the clock falls while a GPU is idle between its turns.
        let (ghz, _) = self.probes.warm_clock()?;
        let iterations = self.probes.iterations(500);
        for (kernel, fence) in FENCES {
            for count in [1, 16, 64] {
                let workload = Workload { memory: area, count, iterations };
                let ns = self.each(kernel, workload, |block| block.cycles)? / ghz;
                let table = title("Nanoseconds of a fence", self.way);
                found.figure(&table, fence, format!("{count} stores to a peer outstanding"), ns);
            }
        }
        self.probes.check_clock(ghz)
    }

    /// Accesses all peers while the other ranks wait.
    pub fn measure_all(&self, found: &mut Findings) -> Result<u64, Failure> {
        let own = self.session.rank();
        let (peers, blocks) = self.all_peers()?;
        for (table, payload) in TO_ALL.iter().zip([LINE, 32, 16]) {
            let rate = self.rate("rate_peers_store", &peers, payload, blocks)?;
            found.figure(&title(table, self.way), self.name(own), "GB/s", rate);
        }
        let workload = Workload {
            memory: self.address(own, RING)?,
            iterations: self.probes.iterations(2048),
            ..Workload::default()
        };
        let ns = self.each("cost_load_relaxed", workload, Block::ns)?;
        found.figure(&title(OWN_LOAD, self.way), self.name(own), "ns", ns);
        Ok(0)
    }

    /// Accesses all peers while the other ranks do so too.
    pub fn measure_together(&self, found: &mut Findings) -> Result<u64, Failure> {
        let (peers, blocks) = self.all_peers()?;
        for (kernel, column) in [("rate_peers_store", "written"), ("rate_peers_load", "read")] {
            let rate = self.rate(kernel, &peers, LINE, blocks);
            self.session.fence()?;
            let name = self.name(self.session.rank());
            found.figure(&title(TOGETHER, self.way), name, column, rate?);
        }
        Ok(0)
    }

    /// Returns the areas of all peers, and a number of blocks that is a multiple of theirs.
    fn all_peers(&self) -> Result<(Vec<u64>, u32), Failure> {
        let own = self.session.rank();
        let peers = (0..self.session.world_size()).filter(|&rank| rank != own);
        let peers: Vec<_> =
            peers.map(|rank| self.address(rank, AREA + own * self.part)).collect::<Result<_, _>>()?;
        let count = peers.len() as u32;
        Ok((peers, self.probes.multiprocessors / count * count))
    }

    /// Returns the payload's GB/s: the median of several runs.
    fn rate(&self, kernel: &str, peers: &[u64], payload: usize, blocks: u32) -> Result<f64, Failure> {
        let run = |_| {
            let Access { bytes, blocks } = self.access(kernel, peers, payload, blocks)?;
            let start = blocks.iter().map(|block| block.start_ns).fold(f64::INFINITY, f64::min);
            let end = blocks.iter().map(|block| block.end_ns).fold(0.0, f64::max);
            Ok(bytes / (end - start))
        };
        Ok(median((0..3).map(run).collect::<Result<_, Failure>>()?))
    }

    /// Accesses `payload` bytes of each line of this rank's parts of the peers' areas.
    fn access(&self, kernel: &str, peers: &[u64], payload: usize, blocks: u32) -> Result<Access, Failure> {
        let table = self.table(peers, payload, 0)?;
        let memory = table.device_ptr(&self.probes.stream).0;
        let of_peer = blocks as usize / peers.len();
        let lines = (self.part / LINE / of_peer).max(1);
        let iterations = self.probes.iterations(20);
        let workload = Workload { memory, count: lines as u64, iterations };
        let blocks = self.probes.run(kernel, (blocks, 512), workload, false)?;
        let bytes = (blocks.len() * lines * payload) as f64 * f64::from(iterations);
        Ok(Access { bytes, blocks })
    }

    /// Uploads the table of peers that the kernels read.
    fn table(&self, peers: &[u64], payload: usize, value: u32) -> Result<CudaSlice<u64>, Failure> {
        let mut words = vec![peers.len() as u64, payload as u64, value.into()];
        words.extend(peers);
        words.resize(3 + fast_allreduce::MAX_RANKS, 0);
        let table = self.probes.stream.clone_htod(&words).map_err(driver("cuMemcpyHtoDAsync"))?;
        synchronize(&self.probes.stream)?;
        Ok(table)
    }

    /// Returns the ns of a copy, of several in a row.
    fn copy_ns(&self, to: u64, from: u64, bytes: usize) -> Result<f64, Failure> {
        let copies = if self.probes.small { 2 } else { 20 };
        let all = || (0..copies).try_for_each(|_| self.copy(to, from, bytes));
        Ok(median_ns(&self.probes.stream, 3, all)? / f64::from(copies))
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), Failure> {
        self.probes.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        // SAFETY: both addresses are of symmetric memory with that many bytes, which is freed after the stream has been
        // waited for.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.probes.stream.cu_stream()) }
            .map_err(driver("cuMemcpyDtoDAsync"))
    }

    /// Writes words to this rank's memory.
    fn write(&self, to: u64, words: &[u64]) -> Result<(), Failure> {
        self.probes.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let from = words.as_ptr().cast::<c_void>();
        let (bytes, stream) = (size_of_val(words), self.probes.stream.cu_stream());
        // SAFETY: callers pass an address with that many bytes; the words live until the stream has been waited for.
        unsafe { api::cuMemcpyHtoDAsync_v2(to, from, bytes, stream) }.map_err(driver("cuMemcpyHtoDAsync"))?;
        synchronize(&self.probes.stream)
    }

    /// Reads words of this rank's memory.
    fn read(&self, from: u64, count: usize) -> Result<Vec<u64>, Failure> {
        self.probes.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let mut words = vec![0_u64; count];
        let (to, stream) = (words.as_mut_ptr().cast::<c_void>(), self.probes.stream.cu_stream());
        // SAFETY: callers pass an address with that many words, which are read before the stream has been waited for.
        unsafe { api::cuMemcpyDtoHAsync_v2(to, from, 8 * count, stream) }
            .map_err(driver("cuMemcpyDtoHAsync"))?;
        synchronize(&self.probes.stream)?;
        Ok(words)
    }
}

/// Payload and times of a kernel.
struct Access {
    bytes: f64,
    blocks: Vec<Block>,
}

/// Returns a word that only one rank writes to one other rank in one way.
fn pattern(from: usize, to: usize, number: u32) -> u32 {
    0xA500_0000 | (from as u32) << 16 | (to as u32) << 8 | number
}

/// Returns two equal words as one.
fn words(word: u32) -> u64 {
    u64::from(word) << 32 | u64::from(word)
}

fn wrong(what: &str, found: &[u64], expected: &[u64]) -> Failure {
    let pairs = found.iter().zip(expected);
    let first = pairs.clone().position(|(found, expected)| found != expected).unwrap_or(0);
    broken(&format!(
        "{what}, and {:#x} was found instead of {:#x}",
        found.get(first).copied().unwrap_or_default(),
        expected.get(first).copied().unwrap_or_default()
    ))
}

/// Returns the failure of a link that does not do what it must, with the way out.
pub fn broken(what: &str) -> Failure {
    Failure::Ranks(format!(
        "{what}: peer access is broken, try another way of sharing (the setting sharing), or turn ACS and the IOMMU off"
    ))
}
