//! Runs the conformance suite on GPUs: all ranks in one launch, ranks as threads with a stream each, and as processes.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use fast_allreduce::{Buffer, Communicator, Cuda, DType, Plan, Result};

use crate::fixtures::fixture::{download, upload, Plain};
use crate::fixtures::gpu::{context, gpu, Gpus};
use crate::fixtures::one_launch::OneLaunch;
use crate::runner::{Found, Trial};
use crate::suite::launch::{InThreads, Launch, LocalProcesses, Rank};
use crate::suite::message::{MemoryKind, Message};
use crate::suite::ranks::{Part, Ranks, Side};
use crate::suite::scenario::Setup;
use crate::suite::world::{Device, Launched};

pub fn tests() -> Vec<Trial> {
    [one_launch::tests(), threads::tests(), processes::tests()].into_iter().flatten().collect()
}

/// Runs every case in full. In one cooperative launch CUDA guarantees that all ranks make progress.
mod one_launch {
    conformance_where_found! { |_| super::gpu().map(super::OneLaunch::new) }
}

/// Ranks as threads, all on one GPU.
mod threads {
    conformance_where_found! { |_| super::launched(super::InThreads, Some(1)) }
}

/// Ranks as processes, distributed round-robin over all GPUs.
mod processes {
    conformance_where_found! { |test| super::launched(super::LocalProcesses::new(test), None) }
}

/// Returns a world whose ranks are started separately. It runs the first two sizes of each case, and one in three of
/// its calls: these include every type, operation and algorithm. On one GPU few grids are resident at a time, and
/// processes are time-sliced.
fn launched<L: Launch>(launch: L, devices: Option<usize>) -> Found<Launched<L, CudaDevice>> {
    let gpus = gpu()?;
    let devices = devices.unwrap_or(gpus.count);
    Ok(Launched::some(launch, CudaDevice { devices, _gpus: gpus }, 2, 3))
}

/// The first `devices` GPUs; ranks are assigned to them round-robin.
struct CudaDevice {
    devices: usize,
    _gpus: Gpus,
}

impl Device for CudaDevice {
    type Ranks = CudaRank;

    fn join(&self, rank: &Rank, setup: &Setup) -> CudaRank {
        let device = Cuda::new(context(rank.rank() % self.devices)).unwrap();
        let communicator = Communicator::builder()
            .algorithm(setup.algorithm)
            .max_bytes(setup.max_bytes)
            .first_epoch(setup.first_epoch)
            .timeout(setup.timeout)
            .build(device, Arc::clone(rank))
            .unwrap();
        let stream = communicator.device().context().new_stream().unwrap();
        CudaRank { memory: None, communicator, stream }
    }
}

/// A rank with a stream, and buffers of each kind of memory.
struct CudaRank {
    memory: Option<Memory>,
    communicator: Communicator<Cuda>,
    stream: Arc<CudaStream>,
}

/// Buffers of each kind of memory, by side.
struct Memory {
    plain: [Plain; 2],
    pool: [CudaSlice<u8>; 2],
    registered: [Buffer<u8, Cuda>; 2],
}

impl Ranks for CudaRank {
    const PACK_BYTES: usize = 16;

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
        self.memory = None;
        let context = self.communicator.device().context();
        self.memory = Some(Memory {
            plain: [(); 2].map(|()| Plain::new(context, bytes)),
            pool: [(); 2].map(|()| self.stream.alloc_zeros(bytes).unwrap()),
            registered: [(); 2].map(|()| self.communicator.alloc::<u8>(bytes).unwrap()),
        });
        self.stream.synchronize().unwrap();
        // Ensures that no rank's kernel spins while another rank still allocates.
        self.communicator.barrier().unwrap();
    }

    fn base(&mut self, _rank: usize, kind: MemoryKind, side: Side) -> u64 {
        let memory = self.memory.as_ref().expect("make_room comes first");
        match kind {
            MemoryKind::Plain => memory.plain[side as usize].address,
            MemoryKind::Pool => memory.pool[side as usize].device_ptr(&self.stream).0,
            MemoryKind::Registered => memory.registered[side as usize].device_ptr(&self.stream).0,
        }
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        upload(&self.stream, address, bytes);
    }

    fn read(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        download(&self.stream, address, bytes)
    }

    fn call(&mut self, message: &Message, parts: &[Part]) -> Result<()> {
        let Part { input, output, .. } = parts[0];
        let (stream, count, dtype) = (self.stream.cu_stream(), message.count, message.dtype);
        let rank = self.communicator.rank();
        // SAFETY: the memory is this rank's, is large enough and aligned to the element, and lives until the stream is
        // synchronised.
        unsafe {
            match message.collective.call(rank) {
                Some(collective) => {
                    self.communicator.collective_raw(stream, collective, input, output, count, dtype)?;
                }
                None => {
                    let items = message.collective.items(rank).iter();
                    let transfers: Vec<_> = items.map(|item| item.transfer(input, output, dtype)).collect();
                    self.communicator.transfer_raw(stream, &transfers)?;
                }
            }
        }
        self.communicator.synchronize(&self.stream)
    }
}
