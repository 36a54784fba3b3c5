//! Statuses, the last error of a thread, and the boundary that no panic crosses.

use std::any::Any;
use std::cell::Cell;
use std::ffi::c_char;
use std::panic::{catch_unwind, AssertUnwindSafe};

use fast_allreduce::Error;

/// Result of a call.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum fast_allreduce_status {
    /// The call succeeded.
    Ok = 0,
    /// A required pointer is null, or a code is not in its enum.
    InvalidArgument = 1,
    /// The number of ranks is 0 or above FAST_ALLREDUCE_MAX_RANKS.
    WorldSize = 2,
    /// A rank is not below the number of ranks.
    RankOutOfRange = 3,
    /// Input and output have different lengths.
    LengthMismatch = 4,
    /// A buffer is null, misaligned, or on another device; in a fused call also: it overlaps another one.
    InvalidPointer = 5,
    /// Buffers overlap, and the call is not in place.
    Overlap = 6,
    /// A setting is unknown or out of range.
    InvalidSetting = 7,
    /// A tuning file cannot be used.
    Tuning = 8,
    /// Shared memory could not be allocated.
    Allocation = 9,
    /// Ranks did not come within the time limit.
    Timeout = 10,
    /// A rank's process has ended, or its communicator was freed.
    PeerLost = 11,
    /// A step failed on another rank.
    PeerFailed = 12,
    /// This process is a fork of the one that created the communicator.
    Forked = 13,
    /// fast_allreduce_abort was called.
    Aborted = 14,
    /// The ranks could not meet.
    Rendezvous = 15,
    /// The rendezvous refused this process.
    Refused = 16,
    /// A rank sent an invalid message.
    Malformed = 17,
    /// Ranks make different calls, or have different settings.
    Disagreement = 18,
    /// This library or this machine does not support the call.
    Unavailable = 19,
    /// The stream belongs to another device than the communicator.
    InvalidStream = 20,
    /// A call of the CUDA driver failed.
    Driver = 21,
    /// A system call failed.
    System = 22,
    /// An error that has no name in this header.
    Other = 23,
    /// An internal error of the library; the communicator must not be used any more.
    Internal = 24,
}

type Status = fast_allreduce_status;

/// Why a call failed.
pub enum Failure {
    /// An error of the library.
    Library(Error),
    /// An argument that was refused before it was passed to the library.
    Argument(String),
    /// A nested call: this thread is already in a call of the communicator.
    Nested,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

/// Result of a call.
pub type Outcome = Result<(), Failure>;

/// Creates an error about an argument.
pub fn argument(text: impl Into<String>) -> Failure {
    Failure::Argument(text.into())
}

/// The error of a call that is nested in another call of the same communicator.
pub const WITHIN: &str =
    "this thread is in a call of the communicator, and would wait for itself: a signal handler or a \
    callback has made this call";

/// The last error of a thread. It has no destructor and uses no heap, so that it can be accessed while the thread ends,
/// and in a signal handler.
struct Last {
    /// Null-terminated; longer texts are truncated.
    text: [Cell<u8>; Self::BYTES],
    ranks: Cell<u32>,
}

impl Last {
    const BYTES: usize = 2048;

    fn record(&self, text: &str, ranks: u32) {
        let mut length = text.find('\0').unwrap_or(text.len()).min(Self::BYTES - 1);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        self.text.iter().zip(&text.as_bytes()[..length]).for_each(|(cell, byte)| cell.set(*byte));
        self.text[length].set(0);
        self.ranks.set(ranks);
    }
}

thread_local! {
    static LAST: Last = const { Last { text: [const { Cell::new(0) }; Last::BYTES], ranks: Cell::new(0) } };
}

fn record(text: &str, ranks: u32) {
    LAST.with(|last| last.record(text, ranks));
}

/// Runs a call, and converts its result, or its panic, to a status.
pub fn guarded(call: impl FnOnce() -> Outcome) -> Status {
    // Unwind safety: after a panic, the caller must not use the communicator any more: see `Status::Internal`.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => Status::Ok,
        Ok(Err(Failure::Library(error))) => {
            record(&error.to_string(), ranks_of(&error));
            status_of(&error)
        }
        Ok(Err(Failure::Argument(text))) => {
            record(&text, 0);
            Status::InvalidArgument
        }
        Ok(Err(Failure::Nested)) => {
            record(WITHIN, 0);
            Status::Unavailable
        }
        Err(panic) => {
            record(&format!("internal error of the library: {}", message_of(&*panic)), 0);
            Status::Internal
        }
    }
}

fn message_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

fn status_of(error: &Error) -> Status {
    match error {
        Error::WorldSize { .. } => Status::WorldSize,
        Error::RankOutOfRange { .. } => Status::RankOutOfRange,
        Error::LengthMismatch { .. } => Status::LengthMismatch,
        Error::InvalidPointer { .. } => Status::InvalidPointer,
        Error::Overlap { .. } => Status::Overlap,
        // An argument of calls, not a setting.
        Error::InvalidSetting { name: "stream", .. } => Status::InvalidArgument,
        Error::InvalidSetting { .. } => Status::InvalidSetting,
        Error::Tuning { .. } => Status::Tuning,
        Error::Allocation { .. } => Status::Allocation,
        Error::Timeout { .. } => Status::Timeout,
        Error::PeerLost { .. } => Status::PeerLost,
        Error::PeerFailed { .. } => Status::PeerFailed,
        Error::Forked => Status::Forked,
        Error::Aborted => Status::Aborted,
        Error::Rendezvous { .. } => Status::Rendezvous,
        Error::Refused { .. } => Status::Refused,
        Error::Malformed { .. } => Status::Malformed,
        Error::Disagreement { .. } => Status::Disagreement,
        Error::Unavailable { .. } => Status::Unavailable,
        Error::InvalidStream { .. } => Status::InvalidStream,
        Error::Driver { .. } => Status::Driver,
        Error::System { .. } => Status::System,
        _ => Status::Other,
    }
}

/// Returns the mask of the ranks in an error.
fn ranks_of(error: &Error) -> u32 {
    let mask = |ranks: &[usize]| {
        ranks.iter().fold(0, |mask, &rank| mask | 1_u32.checked_shl(rank as u32).unwrap_or(0))
    };
    match error {
        Error::Timeout { missing, .. } => mask(missing),
        Error::PeerLost { rank, .. }
        | Error::PeerFailed { rank, .. }
        | Error::Malformed { rank, .. }
        | Error::Disagreement { rank, .. } => mask(&[*rank]),
        _ => 0,
    }
}

/// Returns the text of this thread's last error; "" if no call has failed. The string is valid until the next call of
/// this thread fails, and belongs to the library.
#[no_mangle]
pub extern "C" fn fast_allreduce_last_error() -> *const c_char {
    LAST.with(|last| last.text.as_ptr().cast())
}

/// Returns the mask of the ranks that caused this thread's last error (bit r for rank r): those that did not come, the
/// one that has gone or failed, or the one that makes a different call. Returns 0 if no rank caused it.
#[no_mangle]
pub extern "C" fn fast_allreduce_last_error_ranks() -> u32 {
    LAST.with(|last| last.ranks.get())
}
