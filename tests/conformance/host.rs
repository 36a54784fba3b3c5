//! Ranks on the host device.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use fast_allreduce::device::host::Isa;
use fast_allreduce::plan::{Choice, DeviceKind, Step, Table};
use fast_allreduce::topology::LinkClass;
use fast_allreduce::{Algorithm, Buffer, Communicator, DType, Host, Order, Plan, Result, Wait};

use crate::suite::launch::{Rank, LIMIT};
use crate::suite::message::{MemoryKind, Message};
use crate::suite::ranks::{Part, Ranks, Side};
use crate::suite::scenario::Setup;
use crate::suite::world::Device;

/// Creates communicators with the settings of a setup.
pub trait Build {
    fn build_with(&self, isa: Isa, rank: &Rank) -> Result<Communicator<Host>>;

    fn try_build(&self, rank: &Rank) -> Result<Communicator<Host>> {
        self.build_with(Isa::best(), rank)
    }

    fn build(&self, rank: &Rank) -> Communicator<Host> {
        self.try_build(rank).unwrap()
    }
}

impl Build for Setup {
    fn build_with(&self, isa: Isa, rank: &Rank) -> Result<Communicator<Host>> {
        let mut device = Host::new().isa(isa)?.workers(self.workers)?.wait(Wait::Yield);
        if let Some(ranks) = rank.world_size().checked_div(self.sockets) {
            device = device.ranks_of_socket(ranks);
        }
        Communicator::builder()
            .algorithm(self.algorithm)
            .order(if self.sockets > 0 { Order::Any } else { Order::Fixed })
            .table(if self.every_algorithm { every_algorithm(rank.world_size()) } else { BUILT_IN })
            .max_bytes(self.max_bytes)
            .first_epoch(self.first_epoch)
            .timeout(self.timeout)
            // Ranks may differ, and get the same bits.
            .stream_from(if rank.rank() % 2 == 1 { 0 } else { usize::MAX })
            .build(device, Arc::clone(rank))
    }
}

const BUILT_IN: Table = Table::built_in(DeviceKind::Host);

/// Returns a table that uses each algorithm for a range of sizes, with few bytes for each block.
fn every_algorithm(world_size: usize) -> Table {
    let algorithms = [Algorithm::ALL, Algorithm::ALL].concat();
    let last = algorithms.len() - 1;
    let step = |(index, algorithm): (usize, Algorithm)| Step {
        max_bytes: if index == last { u64::MAX } else { 100 << index },
        choice: Choice::host(algorithm, 64, 64, 1 << 10),
    };
    let steps: Vec<_> = algorithms.into_iter().enumerate().map(step).collect();
    BUILT_IN.with_steps(world_size, LinkClass::Pcie, &steps).unwrap()
}

/// The host device, with instruction sets assigned to the ranks in turn.
pub struct HostDevice(pub Vec<Isa>);

impl Default for HostDevice {
    fn default() -> Self {
        Self(vec![Isa::best()])
    }
}

impl Device for HostDevice {
    type Ranks = HostRank;

    fn join(&self, rank: &Rank, setup: &Setup) -> HostRank {
        let isa = self.0[rank.rank() % self.0.len()];
        let communicator = setup.build_with(isa, rank).unwrap();
        assert_eq!(communicator.device().instruction_set(), isa);
        assert!(communicator.region_bytes() <= 6 * setup.max_bytes + (1 << 20));
        HostRank::new(communicator)
    }
}

/// Private memory, aligned to 64 bytes.
pub struct Private(Vec<[u64; 8]>, usize);

impl Private {
    pub fn new(bytes: usize) -> Self {
        let lines = Vec::from_iter(std::iter::repeat_n([0; 8], bytes.div_ceil(64) + 1));
        let skip = lines.as_ptr().cast::<u8>().align_offset(64);
        Self(lines, skip)
    }

    pub fn base(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast::<u8>().wrapping_add(self.1)
    }
}

/// A rank with memory for calls.
pub struct HostRank {
    pub communicator: Communicator<Host>,
    private: [Private; 2],
    registered: Option<[Buffer<u8>; 2]>,
}

impl HostRank {
    pub fn new(communicator: Communicator<Host>) -> Self {
        Self { communicator, private: [(); 2].map(|()| Private::new(0)), registered: None }
    }
}

impl Ranks for HostRank {
    const PACK_BYTES: usize = 64;

    fn ranks(&self) -> Range<usize> {
        self.communicator.rank()..self.communicator.rank() + 1
    }

    fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    fn plan(&self, count: usize, dtype: DType) -> Plan {
        self.communicator.plan(count, dtype)
    }

    fn make_room(&mut self, bytes: usize) {
        self.registered = None;
        self.private = [(); 2].map(|()| Private::new(bytes));
        self.registered = Some([(); 2].map(|()| self.communicator.alloc::<u8>(bytes).unwrap()));
    }

    fn base(&mut self, _rank: usize, kind: MemoryKind, side: Side) -> u64 {
        let base = match kind {
            MemoryKind::Plain | MemoryKind::Pool => self.private[side as usize].base(),
            MemoryKind::Registered => {
                self.registered.as_mut().expect("make_room comes first")[side as usize].as_mut_ptr()
            }
        };
        base as u64
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        // SAFETY: `check` writes within the memory that it requested, which nothing else uses.
        unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes.len()) }.copy_from_slice(bytes);
    }

    fn read(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        // SAFETY: as in `write`.
        unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }.to_vec()
    }

    fn call(&mut self, message: &Message, parts: &[Part]) -> Result<()> {
        let Part { input, output, .. } = parts[0];
        let (communicator, rank, dtype) = (&self.communicator, self.communicator.rank(), message.dtype);
        let Some(collective) = message.collective.call(rank) else {
            let items = message.collective.items(rank).iter();
            let transfers: Vec<_> = items.map(|item| item.transfer(input, output, dtype)).collect();
            // SAFETY: as in `write`; the input and the output are large enough for all items.
            return unsafe { communicator.transfer_raw(&transfers) };
        };
        let (input, output) = (input as *const _, output as *mut _);
        // SAFETY: as in `write`; both addresses are aligned to the element.
        unsafe { communicator.collective_raw(collective, input, output, message.count, dtype) }
    }
}

/// Waits until `reached` returns true, which another thread or process causes.
pub fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let started = Instant::now();
    while !reached() {
        assert!(started.elapsed() < LIMIT, "waited too long: {what}");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}
