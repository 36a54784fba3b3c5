//! A communicator of any device behind one pointer, with the groups that threads have open.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicUsize, Ordering};

use fast_allreduce::{this_thread, AnyCommunicator, DeviceId, Exclusive, Scale, Transfer};

use crate::status::{argument, Failure};

/// One rank of a world. It is made by fast_allreduce_init and freed by fast_allreduce_free.
pub struct fast_allreduce_communicator {
    pub any: AnyCommunicator,
    /// Groups that are open, of all threads: what a call looks at first.
    open: AtomicUsize,
    /// By the numbers of their threads.
    groups: Exclusive<HashMap<u64, Group>>,
    /// The scales that have been made and not destroyed, by code: see `scales.rs`.
    pub scales: Exclusive<Vec<Option<Scale>>>,
    /// What is told of it in words.
    pub plan_source: CString,
    pub binding: CString,
}

/// A group that a thread has open.
#[derive(Default)]
struct Group {
    transfers: Vec<Transfer>,
    /// The streams other than null that its messages were given.
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

    /// What a caller's pointer points to, for a call that may wait.
    ///
    /// # Errors
    ///
    /// [`Failure::Within`] where this thread is in a call of it already.
    ///
    /// # Safety
    ///
    /// Null, or a communicator that has not been freed and is not while the reference lives.
    pub unsafe fn of<'a>(pointer: *const Self) -> Result<&'a Self, Failure> {
        // SAFETY: the caller's.
        let handle = unsafe { Self::at_any_time(pointer)? };
        match handle.is_in_call() {
            false => Ok(handle),
            true => Err(Failure::Within),
        }
    }

    /// [`Self::of`] for a function that waits for nothing, within another call of the thread too.
    ///
    /// # Safety
    ///
    /// As [`Self::of`].
    pub unsafe fn at_any_time<'a>(pointer: *const Self) -> Result<&'a Self, Failure> {
        // SAFETY: the caller's.
        unsafe { pointer.as_ref() }.ok_or_else(|| argument("the communicator is null"))
    }

    /// Whether this thread is in a call of it.
    pub fn is_in_call(&self) -> bool {
        self.any.is_in_call() || self.groups.is_mine() || self.scales.is_mine()
    }

    pub fn begin_group(&self) -> Result<(), Failure> {
        let mut groups = self.groups.lock();
        if groups.contains_key(&this_thread()) {
            return Err(argument("this thread has a group of this communicator open already"));
        }
        groups.insert(this_thread(), Group::default());
        self.open.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The messages of this thread's group, which is closed. They go on one stream.
    pub fn end_group(&self, stream: u64) -> Result<Vec<Transfer>, Failure> {
        let group = self.groups.lock().remove(&this_thread());
        let Group { transfers, streams } =
            group.ok_or_else(|| argument("this thread has no group of this communicator open"))?;
        self.open.fetch_sub(1, Ordering::Relaxed);
        match streams.iter().find(|&&given| given != stream) {
            None => Ok(transfers),
            Some(other) => Err(argument(format!(
                "a message of the group was given the stream {other:#x}, and its end {stream:#x}, on which all go: nothing was sent"
            ))),
        }
    }

    /// Puts a message into this thread's group, if it has one open.
    pub fn gathered(&self, transfer: Transfer, stream: u64) -> Result<bool, Failure> {
        // Relaxed: a thread that has a group open has counted it itself.
        if self.open.load(Ordering::Relaxed) == 0 {
            return Ok(false);
        }
        let mut groups = self.groups.lock();
        let Some(group) = groups.get_mut(&this_thread()) else { return Ok(false) };
        if self.any.device_id() == DeviceId::Cpu {
            // SAFETY: the host's is compared with null. That of a GPU is compared with the one of the group's end.
            unsafe { self.any.check_stream(stream) }?;
        }
        group.transfers.push(transfer);
        if stream != 0 {
            group.streams.push(stream);
        }
        Ok(true)
    }
}
