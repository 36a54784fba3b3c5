//! `libnccl.so.2`, loaded at run time, and its nonblocking communicators.
//!
//! cudarc also has bindings, but it searches for other file names than the installed one, and panics if it finds none.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libloading::Library;

use crate::error::{Error, Result};
use crate::thread::{self, DEEP_STACK};

/// The first version with nonblocking communicators.
const OLDEST_VERSION: Version = Version(2, 14, 0);

/// Pause between two queries of a busy communicator.
const PAUSE: Duration = Duration::from_micros(100);

/// `ncclSuccess` and `ncclInProgress`.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// `ncclComm_t`.
pub type Handle = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// The first version of `ncclConfig_t`: NCCL uses defaults for later fields, depending on size and version.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    const NOT_BLOCKING: Self =
        Self { size: size_of::<Self>(), magic: 0xCAFE_BEEF, version: OLDEST_VERSION.code(), blocking: 0 };
}

/// The functions that are used, as declared in nccl.h. The library stays loaded until the process ends.
pub struct Nccl {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    /// `ncclCommInitRank`: waits for all ranks, without a time limit.
    pub comm_init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int,
    comm_init_rank_config: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int,
    comm_get_async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    comm_finalize: unsafe extern "C" fn(Handle) -> c_int,
    comm_destroy: unsafe extern "C" fn(Handle) -> c_int,
    comm_abort: unsafe extern "C" fn(Handle) -> c_int,
    /// `ncclAllReduce`: enqueues on a stream.
    pub all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int,
}

impl Nccl {
    /// Loads the library.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if it is not installed or too old.
    pub fn get() -> Result<&'static Self> {
        static LOADED: OnceLock<Result<Nccl>> = OnceLock::new();
        LOADED.get_or_init(|| Self::load("libnccl.so.2")).as_ref().map_err(Clone::clone)
    }

    fn load(name: &str) -> Result<Self> {
        let unavailable = |reason| Error::Unavailable { what: "NCCL".into(), reason };
        // SAFETY: NCCL's initialisers may run at any time.
        let library = unsafe { Library::new(name) };
        let library = library.map_err(|error| {
            unavailable(format!(
                "{name} cannot be loaded: {error}; install it, or name its folder in LD_LIBRARY_PATH"
            ))
        })?;
        let library = Box::leak(Box::new(library));
        let missing = |error| unavailable(format!("{name} is not NCCL {OLDEST_VERSION} or newer: {error}"));
        // SAFETY: the fields have the types of these functions in nccl.h.
        let nccl = unsafe {
            Self {
                get_version: *library.get(b"ncclGetVersion\0").map_err(missing)?,
                get_error_string: *library.get(b"ncclGetErrorString\0").map_err(missing)?,
                get_unique_id: *library.get(b"ncclGetUniqueId\0").map_err(missing)?,
                comm_init_rank: *library.get(b"ncclCommInitRank\0").map_err(missing)?,
                comm_init_rank_config: *library.get(b"ncclCommInitRankConfig\0").map_err(missing)?,
                comm_get_async_error: *library.get(b"ncclCommGetAsyncError\0").map_err(missing)?,
                comm_finalize: *library.get(b"ncclCommFinalize\0").map_err(missing)?,
                comm_destroy: *library.get(b"ncclCommDestroy\0").map_err(missing)?,
                comm_abort: *library.get(b"ncclCommAbort\0").map_err(missing)?,
                all_reduce: *library.get(b"ncclAllReduce\0").map_err(missing)?,
            }
        };
        match nccl.version()? {
            version if version < OLDEST_VERSION => {
                Err(unavailable(format!("this is NCCL {version}: install {OLDEST_VERSION} or newer")))
            }
            _ => Ok(nccl),
        }
    }

    /// Converts a status to a result. `ncclInProgress` is not an error.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`] with NCCL's description.
    pub fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: the function accepts any number, and returns a constant text.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(status)) }.to_string_lossy();
        Err(Error::Nccl { call, message: format!("{text} (set NCCL_DEBUG=WARN for details)") })
    }

    /// Returns its version.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`] if the call fails.
    pub fn version(&self) -> Result<Version> {
        let mut code = 0;
        // SAFETY: the call writes one number.
        self.check("ncclGetVersion", unsafe { (self.get_version)(&mut code) })?;
        Ok(Version::of(code))
    }

    /// Creates the id of a new communicator.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`] if the call fails.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the call writes 128 bytes.
        self.check("ncclGetUniqueId", unsafe { (self.get_unique_id)(&mut id) })?;
        Ok(id)
    }
}

/// An NCCL communicator.
///
/// It ends only by [`Comm::finish`] or [`Comm::abort`]; dropping it does not end it.
pub(super) struct Comm {
    nccl: &'static Nccl,
    handle: Handle,
    node: usize,
    nodes: usize,
}

// SAFETY: NCCL allows any thread to use a communicator, one at a time.
unsafe impl Send for Comm {}

impl Comm {
    /// Creates a communicator on this thread's GPU. Collective among the nodes with the same id.
    pub fn connect(id: [u8; 128], node: usize, nodes: usize, limit: Duration) -> Result<Self> {
        let nccl = Nccl::get()?;
        let in_range = c_int::try_from(nodes).ok().zip(c_int::try_from(node).ok());
        let (size, rank) = in_range
            .filter(|(size, rank)| rank < size)
            .ok_or(Error::RankOutOfRange { rank: node, world_size: nodes })?;
        let mut comm = Self { nccl, handle: std::ptr::null_mut(), node, nodes };
        let mut config = Config::NOT_BLOCKING;
        // SAFETY: the call writes the handle, and reads the configuration before it returns.
        let status =
            unsafe { (nccl.comm_init_rank_config)(&mut comm.handle, size, UniqueId(id), rank, &mut config) };
        let ready = nccl.check("ncclCommInitRankConfig", status);
        match ready.and_then(|()| comm.settle("ncclCommInitRankConfig", limit)) {
            Ok(()) => Ok(comm),
            Err(error) => {
                comm.abort();
                Err(error)
            }
        }
    }

    /// Enqueues an in-place allreduce on a stream.
    ///
    /// # Safety
    ///
    /// `address` points to `count` elements of the type on the communicator's GPU, and `stream` belongs to that GPU;
    /// both are valid until the stream has completed the allreduce.
    pub unsafe fn all_reduce(
        &self,
        address: u64,
        count: usize,
        datatype: c_int,
        operation: c_int,
        stream: *mut c_void,
        limit: Duration,
    ) -> Result<()> {
        let (input, output) = (address as *const c_void, address as *mut c_void);
        // SAFETY: the caller guarantees the memory and the stream; the communicator is valid; NCCL allows input ==
        // output.
        let status =
            unsafe { (self.nccl.all_reduce)(input, output, count, datatype, operation, self.handle, stream) };
        self.nccl.check("ncclAllReduce", status)?;
        // The first call connects, and enqueues the kernel later: later work must not be enqueued before it.
        if status == IN_PROGRESS {
            self.settle("ncclAllReduce", limit)?;
        }
        Ok(())
    }

    /// Returns whether no operation is in progress on the host.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`] if an operation, a kernel or a connection has failed.
    pub fn is_settled(&self) -> Result<bool> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is valid; the call writes one number.
        let status = unsafe { (self.nccl.comm_get_async_error)(self.handle, &mut state) };
        self.nccl.check("ncclCommGetAsyncError", status)?;
        self.nccl.check("an NCCL operation", state)?;
        Ok(state == SUCCESS)
    }

    /// Polls until no operation is in progress on the host.
    fn settle(&self, operation: &'static str, limit: Duration) -> Result<()> {
        let since = Instant::now();
        while !self.is_settled()? {
            if since.elapsed() >= limit {
                return Err(self.late(operation, since.elapsed()));
            }
            thread::pause(PAUSE);
        }
        Ok(())
    }

    /// Returns the error of a wait that has exceeded its limit.
    pub fn late(&self, operation: &'static str, waited: Duration) -> Error {
        let missing = (0..self.nodes).filter(|&other| other != self.node).collect();
        let last_seen = "NCCL does not report which of them are missing".into();
        Error::Timeout { operation, epoch: 0, missing, waited, last_seen }
    }

    /// Ends the communicator after all nodes have received what this one sends; aborts it after the limit.
    pub fn finish(self, limit: Duration) {
        // SAFETY: the communicator is valid.
        let status = unsafe { (self.nccl.comm_finalize)(self.handle) };
        let done = self.nccl.check("ncclCommFinalize", status);
        match done.and_then(|()| self.settle("ncclCommFinalize", limit)) {
            // An error is ignored: nobody uses the communicator any more.
            // SAFETY: the communicator has been finalised, and is not used again.
            Ok(()) => drop(unsafe { (self.nccl.comm_destroy)(self.handle) }),
            Err(_) => self.abort(),
        }
    }

    /// Aborts everything that still runs, including kernels. It runs on a separate thread, since it has no time limit.
    pub fn abort(self) {
        if self.handle.is_null() {
            return;
        }
        // If no thread can be started, the communicator stays, and its kernels wait until the process ends.
        let _ = thread::spawn("ncclCommAbort".into(), DEEP_STACK, move || {
            let comm = self;
            // SAFETY: the communicator is valid, and not used again. An error is ignored: nobody could handle it.
            let _ = unsafe { (comm.nccl.comm_abort)(comm.handle) };
        });
    }
}

/// Major, minor and patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub c_int, pub c_int, pub c_int);

impl Version {
    /// Decodes `NCCL_VERSION_CODE`, whose format changed in 2.9.
    fn of(code: c_int) -> Self {
        match code {
            code if code < 10_000 => Self(code / 1000, code / 100 % 10, code % 100),
            code => Self(code / 10_000, code / 100 % 100, code % 100),
        }
    }

    /// Encodes a version of 2.9 or newer.
    const fn code(self) -> u32 {
        (self.0 * 10_000 + self.1 * 100 + self.2) as u32
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::{DType, ReduceOp};

    /// The lists are in the order of the enums in nccl.h.
    #[test]
    fn types_and_operations_have_nccls_numbers() {
        let types = ["i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"];
        for dtype in DType::ALL {
            assert_eq!(dtype.nccl().map(|code| types[code as usize]), Some(dtype.name()));
        }
        let operations = ["sum", "prod", "max", "min", "avg"];
        for op in ReduceOp::ARITHMETIC {
            assert_eq!(op.nccl().map(|code| operations[code as usize]), Some(op.name()));
        }
    }

    #[test]
    fn versions_are_read_and_compared() {
        assert_eq!(Version::of(2_304), Version(2, 3, 4));
        assert_eq!(Version::of(21_400), OLDEST_VERSION);
        assert_eq!(Version::of(23_203).to_string(), "2.32.3");
        assert!(Version::of(2_804) < OLDEST_VERSION && OLDEST_VERSION < Version::of(23_004));
        assert_eq!(Version(2, 30, 7).code(), 23_007);
    }

    /// `ncclConfig_v21400`: NCCL copies `size` bytes, and refuses another magic number.
    #[test]
    fn the_configuration_is_the_first_that_nccl_had() {
        assert_eq!((size_of::<Config>(), std::mem::offset_of!(Config, blocking)), (24, 16));
        assert_eq!((Config::NOT_BLOCKING.version, Config::NOT_BLOCKING.size), (21_400, 24));
    }

    #[test]
    fn a_missing_or_wrong_library_is_refused() {
        for (name, expected) in [("libnccl-of-nobody.so.2", "cannot be loaded"), ("libc.so.6", "2.14.0")] {
            let Err(error) = Nccl::load(name) else { panic!("{name} is no NCCL") };
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
            assert!(error.to_string().contains(name) && error.to_string().contains(expected), "{error}");
        }
    }

    /// The library has a version, and connecting fails within the limit without a GPU or without the peer.
    #[test]
    #[ignore = "needs libnccl.so.2 in the library path"]
    fn the_library_has_a_version_and_fails_in_time() {
        let nccl = Nccl::get().unwrap();
        assert!(nccl.version().unwrap() >= OLDEST_VERSION);
        let refused = Comm::connect([0; 128], 2, 2, Duration::ZERO).map(|_| ());
        assert_eq!(refused, Err(Error::RankOutOfRange { rank: 2, world_size: 2 }));
        let (since, limit) = (Instant::now(), Duration::from_secs(5));
        let id = nccl.unique_id().unwrap();
        let Err(error) = Comm::connect(id.0, 0, 2, limit) else { panic!("nobody is node 1") };
        println!("{error}");
        assert!(matches!(error, Error::Nccl { .. } | Error::Timeout { .. }), "{error}");
        assert!(since.elapsed() < 4 * limit);
    }
}
