//! Worlds of several machines: a communicator of each machine, and the caller's engine between machines.

use std::ffi::{c_char, c_int, c_void, CStr};

use fast_allreduce::bootstrap::{Bootstrap, Tcp, UniqueId};
use fast_allreduce::{DType, Error, Hierarchical, Host, InterNode, ReduceOp};

use crate::catalogue;
use crate::codes::{self, code_of};
use crate::handle::fast_allreduce_communicator;
use crate::init::{fast_allreduce_unique_id, give_communicator};
use crate::pointers::{check_result, give};
use crate::settings::fast_allreduce_settings;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// Engine between machines: MPI, gloo, UCX or any other, in a world of equally many ranks on each of `nodes` machines.
/// This rank's machine is number `node`.
///
/// `all_reduce` reduces `count` elements of a fast_allreduce_dtype by a fast_allreduce_op in place, among the ranks
/// with the same rank in the communicators of their machines. All of them get equal bits. The operation is sum, prod,
/// min, max, avg or a bitwise one. Nodes compare their calls by I64 and MIN, and these 8 KiB carry the data of small
/// calls. It returns 0, or another value if it fails; it must not wait without a limit. The library calls it in the
/// threads that call the world, one call at a time.
///
/// `exchange` may be null, on all ranks: if one machine has it and the other does not, both wait. Between two machines,
/// a call, or a piece of a large one, and its first 256 KiB are one message in each direction with it; the rest follows
/// in messages of at most 1 MiB. The library reduces the data, except 8-bit floats. It sends `bytes` bytes to the rank
/// with the same rank on the other machine, and at the same time receives a message of at most `capacity` bytes from
/// it, whose length it stores in `received`. MPI_Sendrecv does that. Its result and its limits are those of
/// `all_reduce`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fast_allreduce_inter_node {
    pub node: usize,
    pub nodes: usize,
    pub context: *mut c_void,
    pub all_reduce: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            data: *mut c_void,
            count: usize,
            dtype: u32,
            op: u32,
        ) -> c_int,
    >,
    pub exchange: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            message: *const c_void,
            bytes: usize,
            space: *mut c_void,
            capacity: usize,
            received: *mut usize,
        ) -> c_int,
    >,
}

/// A rank of a world of several machines. Created by fast_allreduce_hierarchical_new, freed by
/// fast_allreduce_hierarchical_free.
pub struct fast_allreduce_hierarchical {
    world: Hierarchical<Host, Engine>,
}

struct Engine {
    all_reduce: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, u32, u32) -> c_int,
    given: fast_allreduce_inter_node,
}

// SAFETY: the context is only passed to the caller's functions, which any thread may call, according to the header.
unsafe impl Send for Engine {}
// SAFETY: as for `Send`; besides, a world makes one call at a time.
unsafe impl Sync for Engine {}

impl InterNode<Host> for Engine {
    fn node(&self) -> usize {
        self.given.node
    }

    fn nodes(&self) -> usize {
        self.given.nodes
    }

    unsafe fn all_reduce(
        &self,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        (): (),
    ) -> fast_allreduce::Result<()> {
        let (dtype, op) = (code_of(&dtype, catalogue::dtype_of), code_of(&op, catalogue::op_of));
        // SAFETY: the caller guarantees that the memory has these elements, and that the function is of this type.
        done("allreduce", unsafe {
            (self.all_reduce)(self.given.context, address as *mut c_void, count, dtype, op)
        })
    }

    fn exchange(&self, message: &[u8], space: &mut [u8]) -> Option<fast_allreduce::Result<usize>> {
        let exchange = self.given.exchange?;
        let mut received = 0;
        // SAFETY: the caller guarantees that the function is of this type, and writes no more than the capacity.
        let code = unsafe {
            exchange(
                self.given.context,
                message.as_ptr().cast(),
                message.len(),
                space.as_mut_ptr().cast(),
                space.len(),
                &mut received,
            )
        };
        Some(done("exchange", code).map(|()| received))
    }
}

/// Converts what a function of the caller returned.
fn done(what: &str, code: c_int) -> fast_allreduce::Result<()> {
    match code {
        0 => Ok(()),
        _ => {
            Err(Error::Rendezvous { reason: format!("the caller's {what} between machines returned {code}") })
        }
    }
}

impl fast_allreduce_hierarchical {
    /// # Safety
    ///
    /// `pointer` is null, or a world that has not been freed, and is not freed while the reference lives.
    unsafe fn of<'a>(pointer: *const Self) -> Result<&'a Hierarchical<Host, Engine>, Failure> {
        // SAFETY: the caller guarantees it.
        let world = unsafe { pointer.as_ref() }.ok_or_else(|| argument("the world is null"))?;
        Ok(&world.world)
    }
}

/// Creates a rank of a world of several machines. Collective among all ranks, which check that each machine has the
/// same number of ranks. Ranks are numbered machine by machine.
///
/// The communicator of this machine's ranks, which is on the CPU, becomes part of the world, also if this fails after
/// it has checked its arguments: `local` is set to null then. Its buffers remain.
///
/// # Safety
///
/// `local` is valid for reads and writes, and what it points to is live, and not used afterwards; `engine` is valid for
/// reads, and does what its type describes until fast_allreduce_hierarchical_free has returned; `world` is valid for a
/// write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_hierarchical_new(
    local: *mut *mut fast_allreduce_communicator,
    engine: *const fast_allreduce_inter_node,
    world: *mut *mut fast_allreduce_hierarchical,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(world)?;
        check_result(local)?;
        // SAFETY: the caller guarantees it.
        let (handle, engine) = unsafe { (fast_allreduce_communicator::of(*local)?, engine.as_ref()) };
        let given = *engine.ok_or_else(|| argument("the engine is null"))?;
        let all_reduce = given.all_reduce.ok_or_else(|| argument("the engine's function is null"))?;
        if given.node >= given.nodes {
            return Err(argument(format!("the engine has node {} of {}", given.node, given.nodes)));
        }
        handle.any.as_host()?;
        // SAFETY: the pointer comes from a box, and the caller does not use it afterwards.
        let handle = unsafe { Box::from_raw(std::ptr::replace(local, std::ptr::null_mut())) };
        let made = Hierarchical::new(handle.any.into_host()?, Engine { all_reduce, given })?;
        // SAFETY: the caller guarantees it.
        unsafe { give(world, Box::into_raw(Box::new(fast_allreduce_hierarchical { world: made }))) }
    })
}

/// Reduces the inputs of all ranks of all machines, `count` elements each, element by element into every rank's output.
/// In place: input and output are the same pointer. Averages are those of floats; a premultiplied sum is refused.
///
/// All ranks get equal bits, which depend on how the ranks are distributed over machines. Machines compare their calls
/// before they combine data. An error other than that of an argument ends the world. fast_allreduce_last_error_ranks()
/// names ranks below 32 alone; the text of the error names all.
///
/// # Safety
///
/// `world` is live; the buffers are as for fast_allreduce_all_reduce on the host.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_hierarchical_all_reduce(
    world: *const fast_allreduce_hierarchical,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let world = unsafe { fast_allreduce_hierarchical::of(world)? };
        let op = codes::op(op)?;
        // SAFETY: the caller guarantees it.
        Ok(unsafe { world.all_reduce_raw(input, output, count, codes::dtype(dtype)?, op) }?)
    })
}

/// Returns this rank in the world; 0 for null.
///
/// # Safety
///
/// `world` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_hierarchical_rank(
    world: *const fast_allreduce_hierarchical,
) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { world.as_ref() }.map_or(0, |world| world.world.rank())
}

/// Returns the number of ranks on all machines; 0 for null.
///
/// # Safety
///
/// `world` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_hierarchical_nranks(
    world: *const fast_allreduce_hierarchical,
) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { world.as_ref() }.map_or(0, |world| world.world.world_size())
}

/// Aborts this machine's part of the world, like fast_allreduce_abort: calls in other threads end at once, except those
/// that are in the engine.
///
/// # Safety
///
/// `world` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_hierarchical_abort(
    world: *const fast_allreduce_hierarchical,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        unsafe { fast_allreduce_hierarchical::of(world)? }.local().abort();
        Ok(())
    })
}

/// Frees a world and the communicator of its machine; does nothing for null. No other thread may be in a call of it.
///
/// # Safety
///
/// `world` is null, or live and not used afterwards.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_hierarchical_free(world: *mut fast_allreduce_hierarchical) {
    guarded(|| {
        if !world.is_null() {
            // SAFETY: the caller guarantees that it is live.
            let live = unsafe { fast_allreduce_hierarchical::of(world)? };
            if live.is_in_call() {
                return Err(Failure::Nested);
            }
            // SAFETY: the pointer comes from a box, the caller does not use it afterwards, and no call of this thread
            // uses it.
            drop(unsafe { Box::from_raw(world) });
        }
        Ok(())
    });
}

/// Creates an id for one world of ranks on several machines, which join it by fast_allreduce_init_of_node. The process
/// that creates it serves the rendezvous at `address`, a host and a port, such as "node0:29600". The host must name
/// this machine on all machines, and port 0 is any free one. Connections are encrypted with the id's secret.
///
/// # Safety
///
/// `address` is a null-terminated string, and `id` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_unique_id_over_tcp(
    address: *const c_char,
    id: *mut fast_allreduce_unique_id,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(id)?;
        if address.is_null() {
            return Err(argument("the address is null"));
        }
        // SAFETY: the caller guarantees it.
        let made = UniqueId::over_tcp(&unsafe { CStr::from_ptr(address) }.to_string_lossy())?;
        // SAFETY: the caller guarantees it.
        unsafe { give(id, fast_allreduce_unique_id { bytes: *made.as_bytes() }) }
    })
}

/// Joins the world of an id of fast_allreduce_unique_id_over_tcp as `rank` of all `nranks` ranks, and creates the
/// communicator of this machine's ranks. `node` and `nodes` become this machine's number and that of all machines, as
/// an engine between them needs; ranks are numbered machine by machine.
///
/// # Safety
///
/// That of fast_allreduce_init; `node` and `nodes` are valid for writes.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_init_of_node(
    id: *const fast_allreduce_unique_id,
    rank: usize,
    nranks: usize,
    settings: *const fast_allreduce_settings,
    communicator: *mut *mut fast_allreduce_communicator,
    node: *mut usize,
    nodes: *mut usize,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(communicator)?;
        check_result(node)?;
        check_result(nodes)?;
        // SAFETY: the caller guarantees it.
        let (id, settings) = unsafe { (id.as_ref(), fast_allreduce_settings::read(settings)) };
        let id = id.ok_or_else(|| argument("the id is null"))?;
        settings.check()?;
        let limit = settings.meeting_timeout();
        let tcp = Tcp::join(&UniqueId::from_bytes(id.bytes)?, rank, nranks, limit)?;
        let mut firsts = tcp.nodes();
        firsts.sort_unstable();
        firsts.dedup();
        let own = firsts.binary_search(&tcp.node()).unwrap_or_default();
        let made = settings.build(tcp.of_node(limit)?)?;
        // The rendezvous may end with the process that serves it.
        tcp.barrier(limit)?;
        // SAFETY: the caller guarantees it.
        unsafe {
            give(node, own)?;
            give(nodes, firsts.len())?;
            give_communicator(communicator, made)
        }
    })
}
