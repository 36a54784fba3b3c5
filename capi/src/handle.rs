//! The communicator behind the C pointer: one of any device, with the open groups of threads.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicUsize, Ordering};

use fast_allreduce::{this_thread, AnyCommunicator, DeviceId, Exclusive, Scale, Transfer};

use crate::status::{argument, Failure};

/// One rank of a world. Created by fast_allreduce_init, freed by fast_allreduce_free.
pub struct fast_allreduce_communicator {
    pub any: AnyCommunicator,
    /// Number of open groups of all threads. Calls check it first, to avoid the lock of `groups`.
    open: AtomicUsize,
    /// Open groups, by thread number.
    groups: Exclusive<HashMap<u64, Group>>,
    /// Scales that have been created and not destroyed, by code: see `scales.rs`.
    pub scales: Exclusive<Vec<Option<Scale>>>,
    /// Description of the source of the plans.
    pub plan_source: CString,
    /// Description of the threads' binding.
    pub binding: CString,
}

/// The open group of a thread.
#[derive(Default)]
struct Group {
    transfers: Vec<Transfer>,
    /// Streams other than null that were passed with its messages.
    streams: Vec<u64>,
}

impl fast_allreduce_communicator {
    pub fn new(any: AnyCommunicator) -> Self {
        let words = |text: String| CString::new(text.replace('\0', " ")).unwrap_or_default();
        let plan_source = words(any.plan_source().to_string());
        let binding = words(any.binding().map_or_else(|| "none".into(), ToString::to_string));
        Self {
            any,
            open: AtomicUsize::new(0),
            groups: Exclusive::default(),
            scales: Exclusive::default(),
            plan_source,
            binding,
        }
    }

    /// Borrows the communicator at a caller's pointer, for a call that may wait.
    ///
    /// # Errors
    ///
    /// [`Failure::Argument`] for null, [`Failure::Nested`] if this thread is already in a call of the communicator.
    ///
    /// # Safety
    ///
    /// `pointer` is null, or a communicator that has not been freed, and is not freed while the reference lives.
    pub unsafe fn of<'a>(pointer: *const Self) -> Result<&'a Self, Failure> {
        // SAFETY: the caller guarantees it.
        let handle = unsafe { Self::at_any_time(pointer)? };
        match handle.is_in_call() {
            false => Ok(handle),
            true => Err(Failure::Nested),
        }
    }

    /// Borrows the communicator at a caller's pointer, for a function that does not wait. It also works during another
    /// call of this thread.
    ///
    /// # Safety
    ///
    /// That of [`Self::of`].
    pub unsafe fn at_any_time<'a>(pointer: *const Self) -> Result<&'a Self, Failure> {
        // SAFETY: the caller guarantees it.
        unsafe { pointer.as_ref() }.ok_or_else(|| argument("the communicator is null"))
    }

    /// Returns whether this thread is in a call of the communicator.
    pub fn is_in_call(&self) -> bool {
        self.any.is_in_call() || self.groups.is_mine() || self.scales.is_mine()
    }

    pub fn begin_group(&self) -> Result<(), Failure> {
        let mut groups = self.groups.lock();
        if groups.contains_key(&this_thread()) {
            return Err(argument("this thread already has an open group of this communicator"));
        }
        groups.insert(this_thread(), Group::default());
        self.open.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Closes this thread's group, and returns its messages, which all use one stream.
    pub fn end_group(&self, stream: u64) -> Result<Vec<Transfer>, Failure> {
        let group = self.groups.lock().remove(&this_thread());
        let Group { transfers, streams } =
            group.ok_or_else(|| argument("this thread has no open group of this communicator"))?;
        self.open.fetch_sub(1, Ordering::Relaxed);
        match streams.iter().find(|&&given| given != stream) {
            None => Ok(transfers),
            Some(other) => Err(argument(format!(
                "a message of the group has the stream {other:#x}, but the end of the group has {stream:#x}: all \
                 messages of a group use the stream of its end; nothing was sent"
            ))),
        }
    }

    /// Adds a message to this thread's open group. Returns false if there is none.
    pub fn add_to_group(&self, transfer: Transfer, stream: u64) -> Result<bool, Failure> {
        // Relaxed: a thread with an open group has counted it itself.
        if self.open.load(Ordering::Relaxed) == 0 {
            return Ok(false);
        }
        let mut groups = self.groups.lock();
        let Some(group) = groups.get_mut(&this_thread()) else { return Ok(false) };
        if self.any.device_id() == DeviceId::Cpu {
            // SAFETY: on the host, the stream is only compared with null. On a GPU, it is compared at the end of the
            // group.
            unsafe { self.any.check_stream(stream) }?;
        }
        group.transfers.push(transfer);
        if stream != 0 {
            group.streams.push(stream);
        }
        Ok(true)
    }
}
