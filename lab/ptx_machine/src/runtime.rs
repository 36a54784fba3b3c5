//! Functions that compiled code calls: checks that its fast path did not decide, and operations that it has
//! no instruction for.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::context::{Context, Site, MOST_PARTS};
use crate::errors::Fault;
use crate::launch::run::Run;
use crate::types::Space;

/// Encoding of accesses.
pub(crate) mod what {
    use crate::ir::Access;
    use crate::types::{Order, Scope};

    pub const READ: u32 = 0;
    pub const WRITE: u32 = 1;
    pub const UPDATE: u32 = 2;
    pub const FENCE: u32 = 3;
    /// For the clock: a block begins, or a guarded instruction is executed.
    pub const REACHED: u32 = 1 << 8;
    pub const TAKEN: u32 = 1 << 9;

    const ORDERS: [Order; 7] = [
        Order::Weak,
        Order::Volatile,
        Order::Relaxed,
        Order::Acquire,
        Order::Release,
        Order::AcqRel,
        Order::SeqCst,
    ];
    const SCOPES: [Scope; 4] = [Scope::Cta, Scope::Cluster, Scope::Gpu, Scope::Sys];

    pub fn code(kind: u32, order: Order, scope: Scope) -> u32 {
        kind | (order as u32) << 2 | (scope as u32) << 5
    }

    pub fn decode(code: u32) -> (Order, Scope) {
        (ORDERS[(code >> 2 & 7) as usize % 7], SCOPES[(code >> 5 & 3) as usize])
    }

    pub fn access(kind: u32, access: &Access) -> u32 {
        code(kind, access.order, access.scope)
    }

    pub fn fence(order: Order, scope: Scope) -> u32 {
        code(FENCE, order, scope)
    }

    pub fn kind(code: u32) -> u32 {
        code & 3
    }
}

/// Device memory, as the driver knows it.
pub trait Memory {
    /// Returns the allocation that contains an address, if the launching device reaches it.
    fn find(&self, address: u64) -> Option<Range>;

    /// Resolves a multicast address for an access of `bytes` bytes: writes the unicast addresses to
    /// `parts`, each in memory that outlives a launch, and returns their number. Returns 0 if the address
    /// is not a multicast address.
    fn multicast(&self, _address: u64, _bytes: u32, _parts: &mut [u64; MOST_PARTS]) -> usize {
        0
    }
}

/// Address range of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub low: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl Range {
    pub(crate) fn holds(&self, address: u64, bytes: u32) -> bool {
        address >= self.low
            && address - self.low <= self.bytes.wrapping_sub(bytes.into())
            && self.bytes >= bytes.into()
    }
}

pub(crate) fn record(context: &mut Context, fault: Fault, bytes: u32, at: u64, address: u64) -> u32 {
    context.record = crate::context::Record { fault: fault as u32, bytes, at, address };
    1
}

/// Checks an access that the fast path did not allow.
///
/// # Safety
///
/// For all functions here: compiled code passes the context that it was called with, which `Run` set up and
/// holds. The context's `run` is that `Run`, which nothing else uses during a step.
pub(crate) unsafe extern "C" fn access(
    context: *mut Context,
    address: u64,
    bytes: u32,
    code: u32,
    site: *mut Site,
    at: u64,
) -> u32 {
    // SAFETY: see above.
    let context = unsafe { &mut *context };
    // SAFETY: see above.
    let run = unsafe { &mut *context.run.cast::<Run>() };
    if !address.is_multiple_of(bytes.into()) {
        return record(context, Fault::Misaligned, bytes, at, address);
    }
    let writes = what::kind(code) != what::READ;
    if run.shared_range(context).holds(address, bytes) {
        let offset = address - context.shared;
        return shared_of(context, run, offset, bytes, code, at);
    }
    if run.local_range().holds(address, bytes) {
        return 0;
    }
    if let Some(fault) =
        run.use_cluster(context.cluster_rank, address, bytes, what::kind(code) == what::WRITE)
    {
        return fault.map_or(0, |fault| record(context, fault, bytes, at, address));
    }
    let Some((range, writable)) = run.find(address, bytes) else {
        return record(context, Fault::IllegalAddress, bytes, at, address);
    };
    if writes && !writable {
        return record(context, Fault::ReadOnly, bytes, at, address);
    }
    // SAFETY: `site` is in a table of this kernel or its functions, which only this launch uses.
    unsafe { *site = Site { low: range.low, span: range.bytes - u64::from(bytes) } };
    0
}

/// Checks an access to shared memory, by its offset.
///
/// # Safety
///
/// See `access`.
pub(crate) unsafe extern "C" fn shared(
    context: *mut Context,
    offset: u64,
    bytes: u32,
    code: u32,
    at: u64,
) -> u32 {
    // SAFETY: see `access`.
    let context = unsafe { &mut *context };
    // SAFETY: see `access`.
    let run = unsafe { &mut *context.run.cast::<Run>() };
    if !offset.is_multiple_of(bytes.into()) {
        return record(context, Fault::Misaligned, bytes, at, offset);
    }
    shared_of(context, run, offset, bytes, code, at)
}

fn shared_of(context: &mut Context, run: &mut Run, offset: u64, bytes: u32, code: u32, at: u64) -> u32 {
    match run.use_shared(context, offset, bytes, code, at) {
        None => 0,
        Some(fault) => record(context, fault, bytes, at, offset),
    }
}

/// Processes every access and fence of an observed program.
///
/// # Safety
///
/// See `access`.
pub(crate) unsafe extern "C" fn observe(
    context: *mut Context,
    address: u64,
    bytes: u32,
    code: u32,
    at: u64,
) -> u32 {
    // SAFETY: see `access`.
    let context = unsafe { &mut *context };
    // SAFETY: see `access`.
    let run = unsafe { &mut *context.run.cast::<Run>() };
    match run.observe(address, bytes, code, at) {
        None => 0,
        Some(fault) => record(context, fault, bytes, at, address),
    }
}

/// Processes a relaxed store of one word in an observed program. Returns 1 if the store is held back;
/// compiled code must not perform it then.
///
/// # Safety
///
/// See `access`.
pub(crate) unsafe extern "C" fn hold(context: *mut Context, address: u64, bytes: u32, value: u64) -> u32 {
    // SAFETY: see `access`.
    let context = unsafe { &mut *context };
    // SAFETY: see `access`.
    let run = unsafe { &mut *context.run.cast::<Run>() };
    run.hold(address, bytes, value).into()
}

pub(crate) unsafe extern "C" fn fault(context: *mut Context, fault: u32, at: u64) {
    // SAFETY: see `access`.
    let context = unsafe { &mut *context };
    context.record = crate::context::Record { fault, bytes: 0, at, address: 0 };
}

/// Implements `isspacep`.
///
/// # Safety
///
/// See `access`.
pub(crate) unsafe extern "C" fn is_in(context: *mut Context, address: u64, space: u32) -> u32 {
    // SAFETY: see `access`.
    let context = unsafe { &mut *context };
    // SAFETY: see `access`.
    let run = unsafe { &mut *context.run.cast::<Run>() };
    let shared = run.shared_range(context).holds(address, 1);
    let local = run.local_range().holds(address, 1);
    let in_cluster = run.own_cluster().holder(address, 1).is_some();
    u32::from(match space {
        s if s == Space::Shared as u32 => shared,
        s if s == Space::SharedCluster as u32 => in_cluster,
        s if s == Space::Local as u32 => local,
        s if s == Space::Global as u32 => !in_cluster && !local && !run.is_parameter(address),
        _ => run.is_parameter(address),
    })
}

/// Returns the host's time in nanoseconds.
pub(crate) extern "C" fn timer() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}
