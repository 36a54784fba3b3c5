//! The codes of types, operations and settings, and what they mean.

use fast_allreduce::device::host::Bind;
use fast_allreduce::{Algorithm, DType, Order, ReduceOp, Transport, Wait};

use crate::catalogue;
use crate::status::{argument, Failure};

/// What an allreduce with quantised transport moves instead of elements.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum fast_allreduce_transport {
    /// 8-bit integers in groups of 32 with a scale.
    Int8 = 0,
    /// 8-bit floats e4m3 in such groups.
    F8E4M3 = 1,
}

/// Where buffers are.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_device {
    /// Memory of the process.
    Host = 0,
    /// Memory of a CUDA GPU. The library must have been built with the feature `cuda`.
    Cuda = 1,
}

/// In which order the ranks' elements are added up.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_order {
    /// As the environment variable FAST_ALLREDUCE_ORDER says; without it, in that of the ranks.
    Default = 0,
    /// In that of the ranks: the same bits in every run, by every algorithm that adds in this order.
    Fixed = 1,
    /// In any, where that is expected to be faster: the switch between GPUs may add up. All ranks still have the same bits.
    Any = 2,
}

/// Whether other communicators of the process may be in use on the GPU at the same time.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_residency {
    /// They may: each has multiprocessors of its own, from when it is made until it is freed.
    Shared = 0,
    /// The program promises that they are not, on any rank: that all calls of a process on this GPU are on one stream, say. The
    /// communicator may then use all multiprocessors, and takes none from others. Where the promise is broken, calls may wait for
    /// each other until they time out.
    OneAtATime = 1,
}

/// Whether calls are launched with the attribute of programmatic dependent launch.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_programmatic_launch {
    /// They are not.
    Off = 0,
    /// They are, where GPU and driver can: a kernel may become resident before the one in front of it has ended. The program promises
    /// that every other kernel that it launches so on the streams of calls executes griddepcontrol.wait before it ends.
    On = 1,
}

/// What a waiting rank of the host does with its core.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_wait {
    /// Spins where every rank can have a core of its own, else yields.
    Auto = 0,
    /// Polls for some tens of microseconds before it gives up its core.
    Spin = 1,
    /// Polls a few times, then gives its core to others.
    Yield = 2,
}

/// What the threads of a rank of the host are bound to.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_bind {
    /// Nothing: they run wherever the process may.
    None = 0,
    /// A core for each thread. Threads that it starts later inherit it.
    Core = 1,
    /// A NUMA node for each rank.
    Numa = 2,
}

/// Whether the host may measure for some milliseconds what its cores cost, to choose between its built-in plans.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_calibrate {
    /// As the environment variable FAST_ALLREDUCE_CALIBRATE says; without it, it may.
    Default = 0,
    /// It may.
    On = 1,
    /// It may not.
    Off = 2,
}

/// Whether large messages in private memory of the host are read directly by a receiver in another process.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_direct_reads {
    /// As the environment variable FAST_ALLREDUCE_DIRECT_READS says; without it, where that has been faster so far.
    Default = 0,
    /// They are, of any size, wherever the kernel permits it.
    On = 1,
    /// They are not.
    Off = 2,
}

/// cbindgen:rename-all=ScreamingSnakeCase
/// Whether ranks compare their calls by a barrier of its own before each.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(
    dead_code,
    clippy::enum_variant_names,
    reason = "names for the header, where fast_allreduce_check is a function"
)]
pub enum fast_allreduce_check_mode {
    /// As the environment variable FAST_ALLREDUCE_CHECK says.
    FastAllreduceCheckDefault = 0,
    /// They do.
    FastAllreduceCheckOn = 1,
    /// They do not. On the host they still compare by what their signals carry.
    FastAllreduceCheckOff = 2,
}

/// The enum's value of a code, by its place in `all`.
fn looked_up<T: Copy>(what: &str, code: u32, all: &[T]) -> Result<T, Failure> {
    let found = all.get(code as usize).copied();
    found.ok_or_else(|| argument(format!("{what} {code} is none: codes are 0 to {}", all.len() - 1)))
}

macro_rules! same_codes {
    ($ours:ident, $theirs:ident: $($name:ident),*) => {$(
        const _: () = assert!($ours::$name as u32 == $theirs::$name as u32);
    )*};
}

same_codes!(fast_allreduce_transport, Transport: Int8, F8E4M3);

/// The row of a code, or an error that lists the codes there are.
fn row<T>(what: &str, code: u32, of: fn(u32) -> Option<T>) -> Result<T, Failure> {
    of(code).ok_or_else(|| {
        let codes: Vec<_> =
            (0..=64).filter(|&code| of(code).is_some()).map(|code| code.to_string()).collect();
        argument(format!("{what} {code} is not one of {}", codes.join(", ")))
    })
}

pub fn dtype(code: u32) -> Result<DType, Failure> {
    row("dtype", code, catalogue::dtype_of)
}

pub fn op(code: u32) -> Result<ReduceOp, Failure> {
    row("op", code, catalogue::op_of)
}

pub fn transport(code: u32) -> Result<Transport, Failure> {
    looked_up("transport", code, &Transport::ALL)
}

pub fn algorithm(code: u32) -> Result<Option<Algorithm>, Failure> {
    match code {
        0 => Ok(None),
        code => row("algorithm", code, catalogue::algorithm_of).map(Some),
    }
}

pub fn wait(code: u32) -> Result<Wait, Failure> {
    looked_up("wait", code, &[Wait::Auto, Wait::Spin, Wait::Yield])
}

pub fn check(code: u32) -> Result<Option<bool>, Failure> {
    looked_up("check", code, &[None, Some(true), Some(false)])
}

pub fn bind(code: u32) -> Result<Bind, Failure> {
    looked_up("bind", code, &[Bind::None, Bind::Core, Bind::Numa])
}

pub fn calibrate(code: u32) -> Result<Option<bool>, Failure> {
    looked_up("calibrate", code, &[None, Some(true), Some(false)])
}

pub fn order(code: u32) -> Result<Option<Order>, Failure> {
    looked_up("order", code, &[None, Some(Order::Fixed), Some(Order::Any)])
}

pub fn direct_reads(code: u32) -> Result<Option<bool>, Failure> {
    looked_up("direct_reads", code, &[None, Some(true), Some(false)])
}

pub fn is_one_at_a_time(code: u32) -> Result<bool, Failure> {
    looked_up("residency", code, &[false, true])
}

pub fn is_programmatic(code: u32) -> Result<bool, Failure> {
    looked_up("programmatic_launch", code, &[false, true])
}

/// Whether the device is CUDA.
pub fn is_cuda(code: u32) -> Result<bool, Failure> {
    looked_up("device", code, &[false, true])
}
