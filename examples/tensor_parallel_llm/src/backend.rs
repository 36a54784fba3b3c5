//! The libraries that ranks reduce with, and the time that allreduces take.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use fast_allreduce::{Collective, DType};
use fast_allreduce_candle::Collectives;

/// The backends of a world, one of which is in use.
pub struct Backends {
    backends: Vec<(&'static str, Box<dyn Collectives>)>,
    current: AtomicUsize,
    nanoseconds: AtomicU64,
    calls: AtomicU64,
    bytes: AtomicU64,
}

/// Time, calls and bytes of allreduces.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spent {
    pub seconds: f64,
    pub calls: u64,
    pub bytes: u64,
}

impl Spent {
    pub fn since(self, before: Self) -> Self {
        Self {
            seconds: self.seconds - before.seconds,
            calls: self.calls - before.calls,
            bytes: self.bytes - before.bytes,
        }
    }
}

impl Backends {
    /// Creates the set from at least one backend, all with the same ranks.
    pub fn new(backends: Vec<(&'static str, Box<dyn Collectives>)>) -> Self {
        let (current, nanoseconds, calls, bytes) = Default::default();
        Self { backends, current, nanoseconds, calls, bytes }
    }

    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.backends.iter().map(|(name, _)| *name)
    }

    /// Selects the backend of later calls.
    pub fn choose(&self, index: usize) {
        self.current.store(index, Ordering::Relaxed);
    }

    pub fn spent(&self) -> Spent {
        Spent {
            seconds: self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9,
            calls: self.calls.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }

    fn backend(&self) -> &dyn Collectives {
        &*self.backends[self.current.load(Ordering::Relaxed)].1
    }
}

impl Collectives for Backends {
    fn rank(&self) -> usize {
        self.backend().rank()
    }

    fn world_size(&self) -> usize {
        self.backend().world_size()
    }

    unsafe fn collective(
        &self,
        stream: u64,
        collective: Collective<'_>,
        addresses: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> fast_allreduce::Result<()> {
        let start = Instant::now();
        // SAFETY: the caller's contract.
        let result = unsafe { self.backend().collective(stream, collective, addresses, count, dtype) };
        if matches!(collective, Collective::AllReduce(_)) {
            self.nanoseconds.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            self.calls.fetch_add(1, Ordering::Relaxed);
            self.bytes.fetch_add((count * dtype.size()) as u64, Ordering::Relaxed);
        }
        result
    }
}

/// The collectives of MPI that this program uses.
#[cfg(feature = "mpi")]
pub mod mpi {
    use std::ffi::{c_int, c_void};

    use fast_allreduce::{bootstrap, Collective, DType, Error, ReduceOp, Result};
    use fast_allreduce_candle::Collectives;
    use mpi::datatype::Equivalence as _;
    use mpi::ffi;
    use mpi::raw::AsRaw as _;

    pub struct Mpi {
        rank: usize,
        world_size: usize,
        /// `MPI_IN_PLACE`, as an address.
        in_place: usize,
    }

    impl Mpi {
        /// Wraps the world that a launcher started.
        pub fn new(rank: usize, world_size: usize) -> Result<Self> {
            // A macro of mpi.h, for which the bindings have no constant.
            let library = bootstrap::Mpi::library();
            let in_place = match &library {
                name if name.starts_with("Open MPI") => 1,
                name if name.starts_with("MPICH") => usize::MAX,
                _ => {
                    return Err(refused(format!(
                        "MPI_IN_PLACE of {library} is unknown: use Open MPI or MPICH"
                    )))
                }
            };
            Ok(Self { rank, world_size, in_place })
        }
    }

    fn refused(message: String) -> Error {
        Error::Mpi { call: "MPI", message }
    }

    impl Collectives for Mpi {
        fn rank(&self) -> usize {
            self.rank
        }

        fn world_size(&self) -> usize {
            self.world_size
        }

        unsafe fn collective(
            &self,
            _stream: u64,
            collective: Collective<'_>,
            addresses: [u64; 2],
            count: usize,
            dtype: DType,
        ) -> Result<()> {
            let (dtype, dtype_name) = match dtype {
                DType::F32 => (f32::equivalent_datatype().as_raw(), dtype),
                DType::F64 => (f64::equivalent_datatype().as_raw(), dtype),
                dtype => return Err(refused(format!("{dtype} is not implemented"))),
            };
            let count =
                c_int::try_from(count).map_err(|_| refused(format!("{count} {dtype_name} are too many")))?;
            let [input, output] = addresses.map(|address| address as *mut c_void);
            let input = if input == output { self.in_place as *const c_void } else { input.cast_const() };
            // SAFETY: the caller guarantees the buffers and their type. The bootstrap has initialised MPI, which is
            // finalised when this process ends, and all calls of MPI are made by the thread that initialised it.
            let status = unsafe {
                match collective {
                    Collective::AllReduce(ReduceOp::Sum) => {
                        let sum = ffi::RSMPI_SUM;
                        ffi::MPI_Allreduce(input, output, count, dtype, sum, ffi::RSMPI_COMM_WORLD)
                    }
                    Collective::AllGather => {
                        ffi::MPI_Allgather(input, count, dtype, output, count, dtype, ffi::RSMPI_COMM_WORLD)
                    }
                    other => return Err(refused(format!("{} is not implemented", other.name()))),
                }
            };
            match status {
                0 => Ok(()),
                status => Err(refused(format!("MPI returned {status}"))),
            }
        }
    }
}
