//! How calls end: statuses, the last error of a thread, and the border that no panic crosses.

use std::any::Any;
use std::cell::Cell;
use std::ffi::c_char;
use std::panic::{catch_unwind, AssertUnwindSafe};

use fast_allreduce::Error;

/// How a call ended.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum fast_allreduce_status {
    /// It succeeded.
    Ok = 0,
    /// A pointer that must not be null is, or a code is none of its enum.
    InvalidArgument = 1,
    /// More ranks than are supported, or none.
    WorldSize = 2,
    /// A rank is not below the number of ranks.
    RankOutOfRange = 3,
    /// Input and output have different lengths.
    LengthMismatch = 4,
    /// A buffer is null, misaligned, or of another device.
    InvalidPointer = 5,
    /// Buffers overlap in another way than in place.
    Overlap = 6,
    /// A setting is out of its range.
    InvalidSetting = 7,
    /// A tuning file cannot be used.
    Tuning = 8,
    /// Shared memory could not be allocated.
    Allocation = 9,
    /// Ranks did not come in time.
    Timeout = 10,
    /// A rank's process has ended, or its communicator was freed.
    PeerLost = 11,
    /// A step failed on another rank.
    PeerFailed = 12,
    /// This process is a fork of the one that made the communicator.
    Forked = 13,
    /// fast_allreduce_abort was called.
    Aborted = 14,
    /// The ranks could not meet.
    Rendezvous = 15,
    /// The rendezvous refused this process.
    Refused = 16,
    /// A rank sent something that does not decode.
    Malformed = 17,
    /// Ranks make different calls, or have different settings.
    Disagreement = 18,
    /// This library or this machine cannot do it.
    Unavailable = 19,
    /// The stream is of another device than the communicator.
    InvalidStream = 20,
    /// The CUDA driver refused a call.
    Driver = 21,
    /// A system call failed.
    System = 22,
    /// An error that this header has no name for.
    Other = 23,
    /// A fault of the library; the communicator must not be used any more.
    Internal = 24,
}

type Status = fast_allreduce_status;

/// Why a call failed.
pub enum Failure {
    /// The library's.
    Library(Error),
    /// An argument that never came to the library.
    Argument(String),
    /// This thread is in a call of the communicator.
    Within,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

/// What a call comes to.
pub type Outcome = Result<(), Failure>;

/// An error about an argument.
pub fn argument(text: impl Into<String>) -> Failure {
    Failure::Argument(text.into())
}

/// The error of a call that a thread makes within another one, of the same communicator.
pub const WITHIN: &str = "this thread is in a call of the communicator, and would wait for itself: a signal handler or a callback \
    has made this call";

/// The last error of a thread. It needs no destructor and no memory of the heap: it is there in a thread that ends, and in a signal
/// handler.
struct Last {
    /// Ends with a zero byte. What is longer is cut.
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

/// Runs a call, and makes a status of what comes of it. A panic is a status too.
pub fn guarded(call: impl FnOnce() -> Outcome) -> Status {
    // What a call that panicked has left half done is not touched again: the caller is told so.
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
        Ok(Err(Failure::Within)) => {
            record(WITHIN, 0);
            Status::Unavailable
        }
        Err(panic) => {
            record(&format!("a fault of the library: {}", message_of(&*panic)), 0);
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
        // An argument of calls, not of a config.
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

/// The ranks that an error names, a bit for each.
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

/// What went wrong in the last call of this thread that failed, in words; "" if none has. It is valid until the next one
/// fails, and belongs to the library.
#[no_mangle]
pub extern "C" fn fast_allreduce_last_error() -> *const c_char {
    LAST.with(|last| last.text.as_ptr().cast())
}

/// The ranks that are to blame for the last error of this thread, bit r for rank r: those that did not come, the one that
/// has gone or failed, the one that makes another call. 0 where no rank is.
#[no_mangle]
pub extern "C" fn fast_allreduce_last_error_ranks() -> u32 {
    LAST.with(|last| last.ranks.get())
}
