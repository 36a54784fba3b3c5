//! Making communicators, and communicators of some of the ranks; ending them.

use std::ffi::{c_char, c_void, CStr};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::AnyCommunicator;

use crate::bootstrap::{fast_allreduce_all_gather_function, Caller};
use crate::handle::fast_allreduce_communicator;
use crate::pointers::{give, list, wanted};
use crate::settings::fast_allreduce_settings;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// Names a world: one rank makes it, all are given it. It is plain bytes, which may be sent in any way.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fast_allreduce_unique_id {
    /// Of no meaning to the program. They let whoever knows them, of the same user, join the world.
    pub bytes: [u8; 128],
}

/// # Safety
///
/// `place` is null or valid for a write.
unsafe fn give_communicator(
    place: *mut *mut fast_allreduce_communicator,
    any: AnyCommunicator,
) -> Result<(), Failure> {
    let handle = Box::into_raw(Box::new(fast_allreduce_communicator::new(any)));
    // SAFETY: the caller's.
    unsafe { give(place, handle) }
}

/// Makes an id, once for each world. The process that made it must run until all ranks have met.
///
/// # Safety
///
/// `id` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_get_unique_id(
    id: *mut fast_allreduce_unique_id,
) -> fast_allreduce_status {
    guarded(|| {
        wanted(id)?;
        // SAFETY: the caller's.
        unsafe { give(id, fast_allreduce_unique_id { bytes: *UniqueId::new()?.as_bytes() }) }
    })
}

/// Makes an id of the 256 hexadecimal digits that fast-allreduce prints ids as, such as those of the environment
/// variable FAST_ALLREDUCE_UNIQUE_ID.
///
/// # Safety
///
/// `text` is a string that ends with a zero byte, and `id` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_unique_id_from_text(
    text: *const c_char,
    id: *mut fast_allreduce_unique_id,
) -> fast_allreduce_status {
    guarded(|| {
        if text.is_null() {
            return Err(argument("the text is null"));
        }
        // SAFETY: the caller's.
        let parsed: UniqueId = unsafe { CStr::from_ptr(text) }.to_string_lossy().parse()?;
        // SAFETY: the caller's.
        unsafe { give(id, fast_allreduce_unique_id { bytes: *parsed.as_bytes() }) }
    })
}

/// Joins the world of `id` as `rank`, and makes its communicator when all `nranks` ranks have come. Ranks are processes or
/// threads of one user on one machine. `settings` may be null: the defaults. Like all functions it leaves the CUDA context
/// current that is; in a thread that has none, that of the communicator's GPU becomes current.
///
/// # Safety
///
/// `id` is valid for reads, `settings` null or live, `communicator` valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_init(
    id: *const fast_allreduce_unique_id,
    rank: usize,
    nranks: usize,
    settings: *const fast_allreduce_settings,
    communicator: *mut *mut fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        wanted(communicator)?;
        // SAFETY: the caller's.
        let (id, settings) = unsafe { (id.as_ref(), fast_allreduce_settings::read(settings)) };
        let id = id.ok_or_else(|| argument("the id is null"))?;
        // Before the rank joins.
        settings.check()?;
        let local =
            Local::connect(&UniqueId::from_bytes(id.bytes)?, rank, nranks, settings.meeting_timeout())?;
        // SAFETY: the caller's.
        unsafe { give_communicator(communicator, settings.build(local)?) }
    })
}

/// The same for ranks that meet by a function of the caller's instead of an id: one over MPI, a key-value store, or whatever
/// started the ranks.
///
/// # Safety
///
/// As fast_allreduce_init; `all_gather` is as its type says, with this `context`.
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
        wanted(communicator)?;
        // SAFETY: the caller's.
        let settings = unsafe { fast_allreduce_settings::read(settings) };
        let function = all_gather.ok_or_else(|| argument("the all-gather function is null"))?;
        let caller = Caller { function, context, rank, world_size: nranks };
        // SAFETY: the caller's.
        unsafe { give_communicator(communicator, settings.build(caller)?) }
    })
}

/// Makes a communicator of the ranks that give the same `color`, ordered by `key`, then by rank. Collective: every rank
/// calls it. A color below 0 gives none: `part` is set to null.
///
/// # Safety
///
/// `communicator` is live, and `part` valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_split(
    communicator: *const fast_allreduce_communicator,
    color: i32,
    key: i64,
    part: *mut *mut fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        wanted(part)?;
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        let color = u32::try_from(color).ok();
        match handle.any.split(color, key)? {
            // SAFETY: the caller's.
            Some(any) => unsafe { give_communicator(part, any) },
            // SAFETY: the caller's.
            None => unsafe { give(part, std::ptr::null_mut()) },
        }
    })
}

/// Makes a communicator of the `count` ranks in `survivors`, in ascending order, after others have died or left; this rank
/// is among them. Collective among them. The old communicator may have failed; it is freed as any other.
///
/// # Safety
///
/// `communicator` is live, `survivors` valid for reads of `count` numbers, and `part` valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_shrink(
    communicator: *const fast_allreduce_communicator,
    survivors: *const usize,
    count: usize,
    part: *mut *mut fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        wanted(part)?;
        // SAFETY: the caller's.
        let (handle, survivors) =
            unsafe { (fast_allreduce_communicator::of(communicator)?, list("survivors", survivors, count)?) };
        // SAFETY: the caller's.
        unsafe { give_communicator(part, handle.any.shrink(survivors)?) }
    })
}

/// The ranks that are left, bit r for rank r: whose processes run and whose communicators have not been freed, as far as this
/// rank has noticed. 0 for a null communicator.
///
/// # Safety
///
/// `communicator` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_survivors(communicator: *const fast_allreduce_communicator) -> u32 {
    let mut mask = 0;
    guarded(|| {
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::at_any_time(communicator)? };
        mask = handle.any.survivors().into_iter().fold(0, |mask, rank| mask | 1 << rank);
        Ok(())
    });
    mask
}

/// Frees a communicator; null is nothing. No other thread may be in a call of it: fast_allreduce_abort ends those. Buffers
/// may be freed before or after it. It does nothing where the calling thread is in a call of the communicator, as in a signal handler
/// or a callback: fast_allreduce_last_error says so then.
///
/// # Safety
///
/// `communicator` is null, or live and not used any more.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_free(communicator: *mut fast_allreduce_communicator) {
    guarded(|| {
        if !communicator.is_null() {
            // SAFETY: the caller's: it is live.
            unsafe { fast_allreduce_communicator::of(communicator)? };
            // SAFETY: a box's pointer, which the caller gives back, and no call of this thread uses it.
            drop(unsafe { Box::from_raw(communicator) });
        }
        Ok(())
    });
}

/// Makes a call that waits in another thread give up with FAST_ALLREDUCE_STATUS_ABORTED. The communicator fails each later
/// call, and ranks that wait for this one have an error at once.
///
/// # Safety
///
/// `communicator` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_abort(
    communicator: *const fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::at_any_time(communicator)? };
        handle.any.abort();
        Ok(())
    })
}
