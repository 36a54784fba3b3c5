//! Tests the end of communicators and buffers: memory that peers have open by CUDA IPC is freed after they have closed
//! it, in whatever order objects are dropped. The stand-in driver ends a process that frees too early.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};
use fast_allreduce::bootstrap::{Bootstrap as _, Local};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, Buffer, Collective, Communicator, Cuda, DType, Error, ReduceOp, Result};

use crate::fixtures::fixture::Setup;
use crate::fixtures::gpu::{context, stand_in, Gpus, LIMIT};
use crate::fixtures::injection::live;
use crate::fixtures::processes::{ranks, reports};

tests! {
    stand_in =>
        buffers_outlive_their_communicator,
        buffers_outlive_a_raw_stream,
        memory_stays_for_a_rank_that_is_late,
        a_communicator_that_failed_leaves_nothing,
        a_rank_that_is_killed_leaves_nothing_on_the_others,
        what_was_left_for_a_late_rank_is_freed_with_the_next_communicator;
}

/// Creates a communicator and two buffers, and uses them.
fn open(local: Local) -> (Communicator<Cuda>, [Buffer<f32, Cuda>; 2]) {
    let setup = Setup { sharing: Some(Sharing::Ipc), ..Setup::with(Algorithm::TwoShotPull) };
    let communicator = setup.try_build(context(0), local).unwrap();
    let [mut first, mut second] = [(); 2].map(|()| communicator.alloc::<f32>(5000).unwrap());
    let stream = communicator.device().context().new_stream().unwrap();
    communicator.all_reduce(&stream, &first, &mut second, ReduceOp::Sum).unwrap();
    communicator.all_reduce_in_place(&stream, &mut first, ReduceOp::Sum).unwrap();
    communicator.synchronize(&stream).unwrap();
    communicator.barrier().unwrap();
    (communicator, [first, second])
}

fn buffers_outlive_their_communicator() {
    let test = "memory::closing::buffers_outlive_their_communicator";
    const PAUSE: Duration = Duration::from_millis(300);
    // Each rank drops different objects first, at different times.
    ranks(test, "communicator first", 2, &[], |local| {
        let rank = local.rank();
        let (communicator, buffers) = open(local);
        drop(communicator);
        if rank == 0 {
            std::thread::sleep(PAUSE);
        }
        drop(buffers);
    });
    ranks(test, "one each way", 3, &[], |local| {
        let rank = local.rank();
        let (communicator, [first, second]) = open(local);
        if rank == 1 {
            drop((first, second));
            std::thread::sleep(PAUSE);
            return drop(communicator);
        }
        drop((first, communicator));
        std::thread::sleep(PAUSE * rank as u32);
        drop(second);
    });
}

/// Tests that a raw stream need not live longer than the communicator, however that ends.
fn buffers_outlive_a_raw_stream() {
    const COUNT: usize = 5000;
    for (name, is_suspended, is_captured) in
        [("in its world", false, false), ("suspended", true, false), ("in a capture", false, true)]
    {
        ranks("memory::closing::buffers_outlive_a_raw_stream", name, 2, &[], |local| {
            let communicator = Setup::default().try_build(context(0), local).unwrap();
            let buffer = communicator.alloc::<f32>(COUNT).unwrap();
            let stream = communicator.device().context().new_stream().unwrap();
            let (raw, address) = (stream.cu_stream(), buffer.device_ptr(&stream).0);
            let sum = Collective::AllReduce(ReduceOp::Sum);
            // SAFETY: the stream lives until the communicator has been dropped. The buffer is registered memory of this
            // GPU, which nothing else uses.
            let call =
                || unsafe { communicator.collective_raw(raw, sum, address, address, COUNT, DType::F32) };
            call().unwrap();
            if is_captured {
                stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
                call().unwrap();
            }
            if is_suspended {
                communicator.suspend().unwrap();
            }
            drop(communicator);
            if is_captured {
                drop(stream.end_capture(CUgraphInstantiate_flags(0)).unwrap());
            }
            drop(stream);
            drop(buffer);
        });
    }
}

/// Tests that memory stays valid for a peer that closes late.
fn memory_stays_for_a_rank_that_is_late() {
    ranks("memory::closing::memory_stays_for_a_rank_that_is_late", "late", 2, &[], |local| {
        let rank = local.rank();
        let (communicator, buffers) = open(local);
        if rank == 0 {
            std::thread::sleep(Duration::from_secs(4));
        }
        let started = Instant::now();
        drop(communicator);
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "the buffers still exist, so nothing is closed yet"
        );
        drop(buffers);
        assert!(started.elapsed() < Duration::from_secs(20), "closing is bounded");
        if rank == 1 {
            // Its memory outlives the other rank's mappings, but not the process.
            std::thread::sleep(Duration::from_secs(3));
        }
    });
}

/// The way in which a communicator ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// All ranks drop it.
    Dropped,
    AllAbort,
    OneAborts,
    /// A call of one rank times out.
    TimedOut,
    /// One rank drops it, and the other calls.
    OneIsGone,
}

/// A rank of two that creates and ends several communicators with one bootstrap.
struct Rank {
    local: Arc<Local>,
    stream: Arc<CudaStream>,
    data: CudaSlice<f32>,
}

impl Rank {
    fn new(local: Local, devices: usize) -> Self {
        let context = context(local.rank() % devices);
        let stream = context.new_stream().unwrap();
        let data = stream.clone_htod(&[1f32; 5000]).unwrap();
        stream.synchronize().unwrap();
        Self { local: Arc::new(local), stream, data }
    }

    fn rank(&self) -> usize {
        self.local.rank()
    }

    fn communicator(&self, setup: Setup) -> Communicator<Cuda> {
        setup.try_build(Arc::clone(self.stream.context()), Arc::clone(&self.local)).unwrap()
    }

    fn call(&mut self, communicator: &Communicator<Cuda>) -> Result<()> {
        communicator.all_reduce_in_place(&self.stream, &mut self.data, ReduceOp::Max)?;
        communicator.synchronize(&self.stream)
    }

    /// Creates one communicator, uses it and ends it.
    fn round(&mut self, outer: &Communicator<Cuda>, sharing: Sharing, end: End) {
        // Long enough for the steps of creating it, and short enough for a test to wait.
        let timeout = if end == End::TimedOut { Duration::from_secs(3) } else { LIMIT };
        let part = match end {
            // An abort breaks the bootstrap, so this communicator has a separate one.
            End::AllAbort | End::OneAborts => outer.split(Some(0), 0).unwrap().unwrap(),
            _ => self.communicator(Setup { sharing: Some(sharing), timeout, ..Setup::default() }),
        };
        let buffer = part.alloc::<f32>(1000).unwrap();
        self.call(&part).unwrap();
        outer.barrier().unwrap();
        match end {
            End::AllAbort => part.abort(),
            End::OneAborts if self.rank() == 0 => part.abort(),
            End::TimedOut => {
                if self.rank() == 0 {
                    let error = self.call(&part).unwrap_err();
                    assert!(matches!(error, Error::Timeout { .. }), "{error}");
                }
                outer.barrier().unwrap();
            }
            End::OneIsGone if self.rank() == 1 => {
                let error = self.call(&part).unwrap_err();
                assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{error}");
            }
            _ => {}
        }
        drop(part);
        drop(buffer);
    }
}

/// Tests that a communicator releases all its resources, however it ends.
fn a_communicator_that_failed_leaves_nothing(gpus: Gpus) {
    const ROUNDS: usize = 3;
    for sharing in [Sharing::Ipc, Sharing::Descriptor] {
        for end in [End::Dropped, End::AllAbort, End::OneAborts, End::TimedOut, End::OneIsGone] {
            let name = format!("{end:?}, {sharing:?}");
            ranks("memory::closing::a_communicator_that_failed_leaves_nothing", &name, 2, &[], |local| {
                let mut rank = Rank::new(local, gpus.count.min(2));
                let outer = rank.communicator(Setup { sharing: Some(sharing), ..Setup::default() });
                let mut before = None;
                for round in 0..ROUNDS {
                    rank.round(&outer, sharing, end);
                    // All ranks have dropped theirs. Objects that a slow machine left for later are freed with another
                    // communicator.
                    outer.barrier().unwrap();
                    let context = Arc::clone(rank.stream.context());
                    drop(Setup::default().try_build(context, crate::faults::errors::alone()).unwrap());
                    let held = live();
                    let first = before.get_or_insert_with(|| held.clone());
                    assert_eq!(held, *first, "{name}: round {round} leaks objects");
                    outer.barrier().unwrap();
                }
            });
        }
    }
}

/// Tests that a killed rank leaks nothing on the others: its mappings ended with its process.
fn a_rank_that_is_killed_leaves_nothing_on_the_others() {
    let test = "memory::closing::a_rank_that_is_killed_leaves_nothing_on_the_others";
    let ends = reports(test, "killed", 2, &[], |local| {
        let mut rank = Rank::new(local, 1);
        let before = live();
        let communicator = rank.communicator(Setup { sharing: Some(Sharing::Ipc), ..Setup::default() });
        rank.call(&communicator).unwrap();
        communicator.barrier().unwrap();
        if rank.rank() == 1 {
            // SAFETY: kills this process, which is the subject of the test.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        assert!(rank.call(&communicator).is_err());
        drop(communicator);
        assert_eq!(live(), before);
    });
    if let [survivor, killed] = &ends[..] {
        assert_eq!(*survivor, Ok(()));
        assert!(killed.as_ref().is_err_and(|report| report.contains("signal: 9")), "{killed:?}");
    }
}

/// Tests a rank that closes after its peers' timeout: they keep the memory, and free it later.
fn what_was_left_for_a_late_rank_is_freed_with_the_next_communicator() {
    let test = "memory::closing::what_was_left_for_a_late_rank_is_freed_with_the_next_communicator";
    ranks(test, "late", 2, &[], |local| {
        let mut rank = Rank::new(local, 1);
        let before = live();
        let communicator = rank.communicator(Setup { sharing: Some(Sharing::Ipc), ..Setup::default() });
        rank.call(&communicator).unwrap();
        communicator.barrier().unwrap();
        let meet = || rank.local.barrier(LIMIT).unwrap();
        if rank.rank() == 1 {
            // Waits until the other rank has timed out.
            meet();
            drop(communicator);
            meet();
        } else {
            drop(communicator);
            assert_ne!(live(), before, "freed while the other rank has it open");
            meet();
            meet();
            drop(
                Setup::default()
                    .try_build(Arc::clone(rank.stream.context()), crate::faults::errors::alone())
                    .unwrap(),
            );
        }
        assert_eq!(live(), before);
    });
}
