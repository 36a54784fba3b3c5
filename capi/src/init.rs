//! Creating communicators, splitting and shrinking them, and ending them.

use std::ffi::{c_char, c_void, CStr};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::AnyCommunicator;

use crate::bootstrap::{fast_allreduce_all_gather_function, Caller};
use crate::handle::fast_allreduce_communicator;
use crate::pointers::{check_result, give, list};
use crate::settings::fast_allreduce_settings;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// Id of a world, like ncclUniqueId: one process creates it, and all ranks pass it to fast_allreduce_init. It is plain
/// bytes, which may be sent in any way.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fast_allreduce_unique_id {
    /// Opaque and secret: any process of the same user that knows them can join the world.
    pub bytes: [u8; 128],
}

/// Gives a communicator to the caller.
///
/// # Safety
///
/// `pointer` is null or valid for a write.
pub unsafe fn give_communicator(
    pointer: *mut *mut fast_allreduce_communicator,
    any: AnyCommunicator,
) -> Result<(), Failure> {
    let handle = Box::into_raw(Box::new(fast_allreduce_communicator::new(any)));
    // SAFETY: the caller guarantees it.
    unsafe { give(pointer, handle) }
}

/// Creates an id, for one world. The process that creates it serves the rendezvous: it must run until all ranks have
/// joined, and while they allocate or register memory.
///
/// # Safety
///
/// `id` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_get_unique_id(
    id: *mut fast_allreduce_unique_id,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(id)?;
        // SAFETY: the caller guarantees it.
        unsafe { give(id, fast_allreduce_unique_id { bytes: *UniqueId::new()?.as_bytes() }) }
    })
}

/// Parses an id from 256 hexadecimal digits, such as the value of the environment variable FAST_ALLREDUCE_UNIQUE_ID.
///
/// # Safety
///
/// `text` is a null-terminated string, and `id` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_unique_id_from_text(
    text: *const c_char,
    id: *mut fast_allreduce_unique_id,
) -> fast_allreduce_status {
    guarded(|| {
        if text.is_null() {
            return Err(argument("the text is null"));
        }
        // SAFETY: the caller guarantees it.
        let parsed: UniqueId = unsafe { CStr::from_ptr(text) }.to_string_lossy().parse()?;
        // SAFETY: the caller guarantees it.
        unsafe { give(id, fast_allreduce_unique_id { bytes: *parsed.as_bytes() }) }
    })
}

/// Joins the world of `id` as `rank`, and creates its communicator when all `nranks` ranks have joined. Ranks are
/// processes or threads of one user on one machine. If `settings` is null, defaults are used.
///
/// Like all functions, this does not change the current CUDA context; but if the thread has none, the context of the
/// communicator's GPU becomes current.
///
/// # Safety
///
/// `id` is valid for reads, `settings` is null or live, and `communicator` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_init(
    id: *const fast_allreduce_unique_id,
    rank: usize,
    nranks: usize,
    settings: *const fast_allreduce_settings,
    communicator: *mut *mut fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(communicator)?;
        // SAFETY: the caller guarantees it.
        let (id, settings) = unsafe { (id.as_ref(), fast_allreduce_settings::read(settings)) };
        let id = id.ok_or_else(|| argument("the id is null"))?;
        // Checked before the rank joins, so that the other ranks are not affected.
        settings.check()?;
        let local =
            Local::connect(&UniqueId::from_bytes(id.bytes)?, rank, nranks, settings.meeting_timeout())?;
        // SAFETY: the caller guarantees it.
        unsafe { give_communicator(communicator, settings.build(local)?) }
    })
}

/// Waits as a spare until ranks of the world that fast_allreduce_join_id is for call fast_allreduce_join or
/// fast_allreduce_grow, and creates the communicator of a place that they have for a new process, if one is left. The
/// limit of the wait is the setting join_timeout, else timeout, else 30 s; a spare usually sets join_timeout to 0 (no
/// limit). Otherwise it is as fast_allreduce_init.
///
/// # Safety
///
/// That of fast_allreduce_init.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_init_spare(
    id: *const fast_allreduce_unique_id,
    settings: *const fast_allreduce_settings,
    communicator: *mut *mut fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(communicator)?;
        // SAFETY: the caller guarantees it.
        let (id, settings) = unsafe { (id.as_ref(), fast_allreduce_settings::read(settings)) };
        let id = id.ok_or_else(|| argument("the id is null"))?;
        settings.check()?;
        let local = Local::spare(&UniqueId::from_bytes(id.bytes)?, settings.meeting_timeout())?;
        // SAFETY: the caller guarantees it.
        unsafe { give_communicator(communicator, settings.build(local)?) }
    })
}

/// Creates a communicator like fast_allreduce_init, but the ranks meet by the caller's all-gather function instead of
/// an id, for example over MPI or a key-value store.
///
/// # Safety
///
/// That of fast_allreduce_init; `all_gather` does what its type describes, with this `context`.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_init_with_all_gather(
    all_gather: fast_allreduce_all_gather_function,
    context: *mut c_void,
    rank: usize,
    nranks: usize,
    settings: *const fast_allreduce_settings,
    communicator: *mut *mut fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(communicator)?;
        // SAFETY: the caller guarantees it.
        let settings = unsafe { fast_allreduce_settings::read(settings) };
        let function = all_gather.ok_or_else(|| argument("the all-gather function is null"))?;
        let caller = Caller { function, context, rank, world_size: nranks };
        // SAFETY: the caller guarantees it.
        unsafe { give_communicator(communicator, settings.build(caller)?) }
    })
}

/// Creates a communicator of the ranks with the same `color`, ordered by `key` and then by rank. Collective: every rank
/// calls this. If `color` is negative, this rank gets no communicator: `part` is set to null.
///
/// # Safety
///
/// `communicator` is live, and `part` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_split(
    communicator: *const fast_allreduce_communicator,
    color: i32,
    key: i64,
    part: *mut *mut fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(part)?;
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        let color = u32::try_from(color).ok();
        match handle.any.split(color, key)? {
            // SAFETY: the caller guarantees it.
            Some(any) => unsafe { give_communicator(part, any) },
            // SAFETY: the caller guarantees it.
            None => unsafe { give(part, std::ptr::null_mut()) },
        }
    })
}

/// Creates a communicator of the `count` ranks in `survivors`, in ascending order, after other ranks have ended or
/// left. This rank is one of them. Collective among them. The old communicator may have failed; it still has to be
/// freed.
///
/// # Safety
///
/// `communicator` is live, `survivors` is valid for reads of `count` numbers, and `part` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_shrink(
    communicator: *const fast_allreduce_communicator,
    survivors: *const usize,
    count: usize,
    part: *mut *mut fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(part)?;
        // SAFETY: the caller guarantees it.
        let (handle, survivors) =
            unsafe { (fast_allreduce_communicator::of(communicator)?, list("survivors", survivors, count)?) };
        // SAFETY: the caller guarantees it.
        unsafe { give_communicator(part, handle.any.shrink(survivors)?) }
    })
}

/// Returns the mask of the ranks that are left (bit r for rank r): as far as this rank knows, their processes run and
/// their communicators have not been freed. Returns 0 for a null communicator, and while it is suspended.
///
/// # Safety
///
/// `communicator` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_survivors(communicator: *const fast_allreduce_communicator) -> u32 {
    let mut mask = 0;
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::at_any_time(communicator)? };
        mask = handle.any.survivors().into_iter().fold(0, |mask, rank| mask | 1 << rank);
        Ok(())
    });
    mask
}

/// Frees a communicator; does nothing for null. No other thread may be in a call of it; fast_allreduce_abort ends such
/// calls. Buffers may be freed before or after it. If the calling thread is in a call of the communicator, as in a
/// signal handler or a callback, this does nothing, and fast_allreduce_last_error has the reason.
///
/// # Safety
///
/// `communicator` is null, or live and not used afterwards.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_free(communicator: *mut fast_allreduce_communicator) {
    guarded(|| {
        if !communicator.is_null() {
            // SAFETY: the caller guarantees that it is live.
            unsafe { fast_allreduce_communicator::of(communicator)? };
            // SAFETY: the pointer comes from a box, the caller does not use it afterwards, and no call of this thread
            // uses it.
            drop(unsafe { Box::from_raw(communicator) });
        }
        Ok(())
    });
}

/// Aborts the communicator: a call that waits in another thread returns FAST_ALLREDUCE_STATUS_ABORTED, later calls
/// fail, and ranks that wait for this rank get an error at once. It also ends a split or shrink that another thread is
/// in. Communicators that were split off before are not aborted: to end all, abort each.
///
/// # Safety
///
/// `communicator` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_abort(
    communicator: *const fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::at_any_time(communicator)? };
        handle.any.abort();
        Ok(())
    })
}
