//! `libnccl.so.2`, loaded at run time, and its communicators, whose calls do not block.
//!
//! cudarc has bindings too, but looks for other names of the library than the one that it is installed by, and panics
//! where it finds none.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libloading::Library;

use crate::error::{Error, Result};
use crate::thread::{self, DEEP_STACK};

/// The first whose communicators can be told not to block.
const OLDEST_VERSION: Version = Version(2, 14, 0);

/// Between two looks at a communicator that is busy.
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

/// `ncclConfig_t` as it began: NCCL takes later fields from its defaults, going by the size and the version.
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

/// The functions that are called, as nccl.h declares them. The library stays loaded until the process ends.
pub struct Nccl {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    /// Waits for all ranks, without a limit.
    pub comm_init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int,
    comm_init_rank_config: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int,
    comm_get_async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    comm_finalize: unsafe extern "C" fn(Handle) -> c_int,
    comm_destroy: unsafe extern "C" fn(Handle) -> c_int,
    comm_abort: unsafe extern "C" fn(Handle) -> c_int,
    /// On a stream.
    pub all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int,
}

impl Nccl {
    /// The library, where it is installed and new enough.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`].
    pub fn get() -> Result<&'static Self> {
        static LOADED: OnceLock<Result<Nccl>> = OnceLock::new();
        LOADED.get_or_init(|| Self::load("libnccl.so.2")).as_ref().map_err(Clone::clone)
    }

    fn load(name: &str) -> Result<Self> {
        let unavailable = |reason| Error::Unavailable { what: "NCCL".into(), reason };
        // SAFETY: its initialisers are NCCL's own, which may run at any time.
        let library = unsafe { Library::new(name) };
        let library = library.map_err(|error| {
            unavailable(format!(
                "{name} cannot be loaded: {error}; install it, or name its folder in LD_LIBRARY_PATH"
            ))
        })?;
        let library = Box::leak(Box::new(library));
        let missing = |error| unavailable(format!("{name} is not a NCCL {OLDEST_VERSION} or newer: {error}"));
        // SAFETY: the fields have the types that nccl.h gives these names.
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

    /// A call that goes on is no error.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`], of this communicator or of the library's other calls.
    pub fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: it returns a constant text for any number.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(status)) }.to_string_lossy();
        Err(Error::Nccl { call, message: format!("{text} (NCCL_DEBUG=WARN says more)") })
    }

    /// Its version.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`].
    pub fn version(&self) -> Result<Version> {
        let mut code = 0;
        // SAFETY: it writes a number.
        self.check("ncclGetVersion", unsafe { (self.get_version)(&mut code) })?;
        Ok(Version::of(code))
    }

    /// A name for a new communicator.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`].
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: it writes 128 bytes.
        self.check("ncclGetUniqueId", unsafe { (self.get_unique_id)(&mut id) })?;
        Ok(id)
    }
}

/// A communicator of NCCL.
///
/// Whoever drops it leaves it as it is: it ends by [`Comm::finish`] or [`Comm::abort`].
pub(super) struct Comm {
    nccl: &'static Nccl,
    handle: Handle,
    node: usize,
    nodes: usize,
}

// SAFETY: NCCL's communicators may be used from any thread, by one at a time.
unsafe impl Send for Comm {}

impl Comm {
    /// Of this thread's GPU. Collective among the nodes that have the same id.
    pub fn connect(id: [u8; 128], node: usize, nodes: usize, limit: Duration) -> Result<Self> {
        let nccl = Nccl::get()?;
        let in_range = c_int::try_from(nodes).ok().zip(c_int::try_from(node).ok());
        let (size, rank) = in_range
            .filter(|(size, rank)| rank < size)
            .ok_or(Error::RankOutOfRange { rank: node, world_size: nodes })?;
        let mut comm = Self { nccl, handle: std::ptr::null_mut(), node, nodes };
        let mut config = Config::NOT_BLOCKING;
        // SAFETY: it writes the handle; the configuration is read before it returns.
        let status =
            unsafe { (nccl.comm_init_rank_config)(&mut comm.handle, size, UniqueId(id), rank, &mut config) };
        let ready = nccl.check("ncclCommInitRankConfig", status);
        match ready
            .and_then(|()| comm.settle("ncclCommInitRankConfig, which does not say who is missing,", limit))
        {
            Ok(()) => Ok(comm),
            Err(error) => {
                comm.abort();
                Err(error)
            }
        }
    }

    /// Puts an allreduce in place on a stream.
    ///
    /// # Safety
    ///
    /// `address` points to `count` elements of the type on the communicator's GPU, and `stream` is one of that; both live until
    /// the stream has done this.
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
        // SAFETY: the memory is the caller's word; the communicator is up and lives; in place is input == output.
        let status =
            unsafe { (self.nccl.all_reduce)(input, output, count, datatype, operation, self.handle, stream) };
        self.nccl.check("ncclAllReduce", status)?;
        // A first call connects: what follows on the stream must come after the kernel, not before.
        if status == IN_PROGRESS {
            self.settle("ncclAllReduce, which does not say who is missing,", limit)?;
        }
        Ok(())
    }

    /// Whether nothing is under way on the host.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`] for a failure since, also of a kernel or a connection.
    pub fn is_settled(&self) -> Result<bool> {
        let mut state = SUCCESS;
        // SAFETY: the communicator lives; it writes a number.
        let status = unsafe { (self.nccl.comm_get_async_error)(self.handle, &mut state) };
        self.nccl.check("ncclCommGetAsyncError", status)?;
        self.nccl.check("an operation of NCCL", state)?;
        Ok(state == SUCCESS)
    }

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

    /// The error of a wait that was too long.
    pub fn late(&self, operation: &'static str, waited: Duration) -> Error {
        let missing = (0..self.nodes).filter(|&other| other != self.node).collect();
        Error::Timeout { operation, epoch: 0, missing, waited, last_seen: String::new() }
    }

    /// Ends it when all nodes have what this one sends; aborts it after the limit.
    pub fn finish(self, limit: Duration) {
        // SAFETY: the communicator lives.
        let status = unsafe { (self.nccl.comm_finalize)(self.handle) };
        let done = self.nccl.check("ncclCommFinalize", status);
        match done.and_then(|()| self.settle("ncclCommFinalize", limit)) {
            // Nobody is left to hear of an error, and the process may go on without this communicator.
            // SAFETY: it has been finalised, and is not used again.
            Ok(()) => drop(unsafe { (self.nccl.comm_destroy)(self.handle) }),
            Err(_) => self.abort(),
        }
    }

    /// Ends what still runs, kernels too. On a thread of its own: it has no limit in time.
    pub fn abort(self) {
        if self.handle.is_null() {
            return;
        }
        // Without a thread the communicator stays, and kernels wait for as long as the process lives.
        let _ = thread::spawn("ncclCommAbort".into(), DEEP_STACK, move || {
            let comm = self;
            // SAFETY: the communicator lives, and is not used again. Its error would be heard by nobody.
            let _ = unsafe { (comm.nccl.comm_abort)(comm.handle) };
        });
    }
}

/// Major, minor and patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub c_int, pub c_int, pub c_int);

impl Version {
    /// `NCCL_VERSION_CODE`, whose digits moved with 2.9.
    fn of(code: c_int) -> Self {
        match code {
            code if code < 10_000 => Self(code / 1000, code / 100 % 10, code % 100),
            code => Self(code / 10_000, code / 100 % 100, code % 100),
        }
    }

    /// The code of 2.9 or newer.
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

    /// The numbers of nccl.h, in its order.
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

    /// `ncclConfig_v21400`: NCCL copies as many bytes, and refuses another magic number.
    #[test]
    fn the_configuration_is_the_first_that_nccl_had() {
        assert_eq!((size_of::<Config>(), std::mem::offset_of!(Config, blocking)), (24, 16));
        assert_eq!((Config::NOT_BLOCKING.version, Config::NOT_BLOCKING.size), (21_400, 24));
    }

    #[test]
    fn a_library_that_is_missing_or_another_is_refused() {
        for (name, expected) in [("libnccl-of-nobody.so.2", "cannot be loaded"), ("libc.so.6", "2.14.0")] {
            let Err(error) = Nccl::load(name) else { panic!("{name} is no NCCL") };
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
            assert!(error.to_string().contains(name) && error.to_string().contains(expected), "{error}");
        }
    }

    /// That it is one, and that it fails within the limit without a GPU, or without its peer.
    #[test]
    #[ignore = "needs libnccl.so.2 in the library path"]
    fn the_library_says_its_version_and_fails_in_time() {
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
