//! `ncclAllReduce` on GPUs' memory, from a `libnccl.so.2` that is loaded at run time.
//!
//! cudarc has bindings too, but looks for other names of the library than the one that it is installed by, and panics where it
//! finds none.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::mpsc;
use std::time::Duration;

use cudarc::driver::{DevicePtr, DevicePtrMut, DeviceSlice};
use fast_allreduce::{CallKind, DType, ReduceOp};
use libloading::Library;

use crate::failure::Failure;
use crate::harness::contender::{Placement, Rival};
use crate::harness::device::cuda::{Gpu, Memory};
use crate::harness::device::Endpoint;
use crate::harness::session::Session;
use crate::harness::work::Work;

/// Lets several ranks share a GPU, from [`SHARED_GPU_VERSION`] on.
pub const SHARED_GPU: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
const SHARED_GPU_VERSION: Version = Version(2, 30, 0);
/// Of the library, as it is installed to run programs and to build them.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The first with every type and operation here.
const OLDEST_VERSION: Version = Version(2, 10, 0);

/// How long a communicator may take to come up.
const LIMIT: Duration = Duration::from_secs(60);

type Comm = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// The functions that are called, as nccl.h declares them. The library stays loaded until the process ends.
#[derive(Clone, Copy)]
struct Functions {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    comm_init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int,
}

impl Functions {
    fn load([name, other]: [&str; 2]) -> Result<Self, String> {
        // SAFETY: its initialisers are NCCL's own, which may run at any time.
        let library = unsafe { Library::new(name).or_else(|error| Library::new(other).map_err(|_| error)) };
        let library = library.map_err(|error| format!("{name} cannot be loaded: {error}"))?;
        let library = Box::leak(Box::new(library));
        let missing = |error: libloading::Error| format!("{name} is not what it should be: {error}");
        // SAFETY: the fields have the types that nccl.h gives these names.
        unsafe {
            Ok(Self {
                get_version: *library.get(b"ncclGetVersion\0").map_err(missing)?,
                get_error_string: *library.get(b"ncclGetErrorString\0").map_err(missing)?,
                get_unique_id: *library.get(b"ncclGetUniqueId\0").map_err(missing)?,
                comm_init_rank: *library.get(b"ncclCommInitRank\0").map_err(missing)?,
                all_reduce: *library.get(b"ncclAllReduce\0").map_err(missing)?,
            })
        }
    }

    fn check(&self, call: &str, status: c_int) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it returns a constant text for any number.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(status)) }.to_string_lossy();
        Err(format!("{call} failed: {text} (NCCL_DEBUG=WARN says more)"))
    }

    fn version(&self) -> Result<Version, String> {
        let mut code = 0;
        // SAFETY: it writes a number.
        self.check("ncclGetVersion", unsafe { (self.get_version)(&mut code) })?;
        Ok(Version::of(code))
    }

    fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: it writes 128 bytes.
        self.check("ncclGetUniqueId", unsafe { (self.get_unique_id)(&mut id) })?;
        Ok(id)
    }
}

/// Major, minor and patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version(c_int, c_int, c_int);

impl Version {
    /// `NCCL_VERSION_CODE`, whose digits moved with 2.9.
    fn of(code: c_int) -> Self {
        match code {
            code if code < 10_000 => Self(code / 1000, code / 100 % 10, code % 100),
            code => Self(code / 10_000, code / 100 % 100, code % 100),
        }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// A communicator of NCCL between this crate's ranks.
///
/// It is not destroyed: that waits for the others, who may have failed, and the process ends with its run.
pub struct Nccl {
    functions: Functions,
    version: Version,
    comm: Comm,
}

impl Nccl {
    /// Collective. What a rank lacks, no other waits for.
    pub fn new(gpu: &Gpu, session: &Session) -> Result<Self, String> {
        let ready = Self::ready(gpu, session.rank());
        let (is_ready, said) = match &ready {
            Ok((_, _, id)) => (1, id.0.to_vec()),
            Err(reason) => (0, reason.clone().into_bytes()),
        };
        let all = session.exchange(&[&[is_ready], &said[..]].concat()).map_err(|error| error.to_string())?;
        let (functions, version, _) = ready?;
        if let Some(rank) = all.iter().position(|theirs| theirs.first() != Some(&1)) {
            return Err(format!("rank {rank} has no NCCL"));
        }
        let id = all[0][1..].try_into().map(UniqueId).map_err(|_| "rank 0 gave no id")?;
        let comm = connect(functions, gpu, session, id)?;
        let nccl = Self { functions, version, comm };
        nccl.first_call(gpu).map_err(|failure| failure.to_string())?;
        Ok(nccl)
    }

    /// The library, where it can do what is asked for; the first rank's id.
    fn ready(gpu: &Gpu, rank: usize) -> Result<(Functions, Version, UniqueId), String> {
        let functions = Functions::load(NAMES)?;
        let version = functions.version()?;
        check_version(version, gpu.ranks_per_gpu())?;
        let id = if rank == 0 { functions.unique_id()? } else { UniqueId([0; 128]) };
        Ok((functions, version, id))
    }

    /// What a first call allocates cannot be allocated during a capture.
    fn first_call(&self, gpu: &Gpu) -> Result<(), Failure> {
        let mut memory = gpu.allocate(DType::F32, 1, false)?;
        gpu.write(&mut memory, &mut |bytes| bytes.fill(0))?;
        let work = Work::new(CallKind::AllReduce, DType::F32, ReduceOp::Sum, 0, 1, 0, 1);
        self.start_in_place(gpu, &work, &mut memory)?;
        gpu.read(&memory, &mut |_| ())
    }

    /// # Safety
    ///
    /// `input` and `output` are memory of the message on the GPU, which live until the stream has done this.
    unsafe fn call(&self, gpu: &Gpu, work: &Work, input: u64, output: u64) -> Result<(), Failure> {
        let (Some(dtype), Some(op)) = (work.dtype.nccl(), work.op.nccl()) else {
            return Err(Failure::Usage(format!("NCCL has no {} of {}", work.op, work.dtype)));
        };
        let count = work.shares[0];
        let stream = gpu.stream().cu_stream().cast();
        // SAFETY: the memory is the caller's promise, `dtype` is its type, the communicator is up and lives.
        let status = unsafe {
            (self.functions.all_reduce)(input as _, output as _, count, dtype, op, self.comm, stream)
        };
        let checked = self.functions.check("ncclAllReduce", status);
        checked.map_err(|reason| Failure::Driver("ncclAllReduce", reason))
    }
}

fn check_version(version: Version, ranks_per_gpu: usize) -> Result<(), String> {
    if version < OLDEST_VERSION {
        return Err(format!("this is NCCL {version}: install {OLDEST_VERSION} or newer"));
    }
    if ranks_per_gpu > 1 && version < SHARED_GPU_VERSION {
        return Err(format!(
            "NCCL {version} refuses several ranks on one GPU: install {SHARED_GPU_VERSION} or newer, or give each rank a GPU"
        ));
    }
    Ok(())
}

/// In a thread of its own: NCCL waits for all ranks without a limit.
fn connect(functions: Functions, gpu: &Gpu, session: &Session, id: UniqueId) -> Result<Comm, String> {
    /// The communicator may be used from any thread.
    struct Up(Comm);
    // SAFETY: it is moved once, from the thread that made it to the one that uses it.
    unsafe impl Send for Up {}

    let (rank, world_size) = (session.rank() as c_int, session.world_size() as c_int);
    let context = gpu.stream().context().clone();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let bound = context.bind_to_thread().map_err(|error| error.to_string());
        let outcome = bound.and_then(|()| {
            let mut comm = std::ptr::null_mut();
            // SAFETY: the id is the first rank's, the ranks differ, and the GPU is this thread's.
            let status = unsafe { (functions.comm_init_rank)(&mut comm, world_size, id, rank) };
            functions.check("ncclCommInitRank", status).map(|()| Up(comm))
        });
        // Nobody listens after the limit.
        let _ = sender.send(outcome);
    });
    let outcome = receiver.recv_timeout(LIMIT);
    outcome
        .map_err(|_| format!("ncclCommInitRank has not come back within {} s", LIMIT.as_secs()))?
        .map(|up| up.0)
}

impl Rival<Gpu> for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn library(&self) -> String {
        format!("NCCL {}", self.version)
    }

    fn refusal(&self, kind: CallKind, dtype: DType, op: ReduceOp) -> Option<&'static str> {
        match (dtype.nccl(), op.nccl()) {
            _ if kind != CallKind::AllReduce => Some("only its allreduce is called here"),
            (None, _) => Some("NCCL has no such type"),
            (_, None) => Some("NCCL has no such operation"),
            _ if op == ReduceOp::Avg && !dtype.is_float() => {
                Some("NCCL's averages of integers divide a sum that wraps")
            }
            _ => None,
        }
    }

    fn has(&self, kind: CallKind, _: Placement) -> bool {
        kind == CallKind::AllReduce
    }

    fn start(&self, gpu: &Gpu, work: &Work, input: &Memory, output: &mut Memory) -> Result<(), Failure> {
        let bytes = work.bytes(work.elements());
        assert!(bytes <= input.len() && bytes <= output.len());
        let (input, _input_guard) = input.device_ptr(gpu.stream());
        let (output, _output_guard) = output.device_ptr_mut(gpu.stream());
        // SAFETY: two buffers of as many elements, which are freed in the order of the stream.
        unsafe { self.call(gpu, work, input, output) }
    }

    fn start_in_place(&self, gpu: &Gpu, work: &Work, data: &mut Memory) -> Result<(), Failure> {
        assert!(work.bytes(work.elements()) <= data.len());
        let (data, _guard) = data.device_ptr_mut(gpu.stream());
        // SAFETY: a buffer that is freed in the order of the stream; NCCL allows in place where both are one.
        unsafe { self.call(gpu, work, data, data) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared() {
        assert_eq!(Version::of(2_304), Version(2, 3, 4));
        assert_eq!(Version::of(22_304), Version(2, 23, 4));
        assert_eq!(Version::of(23_203).to_string(), "2.32.3");
        assert!(Version::of(23_004) >= SHARED_GPU_VERSION && Version::of(22_907) < SHARED_GPU_VERSION);
    }

    #[test]
    fn what_a_version_cannot_do_is_refused() {
        assert!(check_version(Version(2, 29, 7), 2).unwrap_err().contains("2.30.0"));
        assert!(check_version(Version(2, 9, 9), 1).unwrap_err().contains("2.10.0"));
        assert_eq!(check_version(Version(2, 29, 7), 1), Ok(()));
        assert_eq!(check_version(Version(2, 30, 0), 2), Ok(()));
    }

    #[test]
    fn a_library_that_is_missing_or_another_is_refused() {
        for (name, expected) in
            [("libnccl-of-nobody.so.2", "cannot be loaded"), ("libc.so.6", "not what it should be")]
        {
            let reason = Functions::load([name; 2]).err().unwrap();
            assert!(reason.contains(name) && reason.contains(expected), "{reason}");
        }
    }

    #[test]
    #[ignore = "needs libnccl.so.2 in the library path"]
    fn the_library_says_its_version() {
        assert!(Functions::load(NAMES).unwrap().version().unwrap() >= OLDEST_VERSION);
    }
}
