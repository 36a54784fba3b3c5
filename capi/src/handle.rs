//! A communicator of any device behind one pointer, with the groups that threads have open.

use std::collections::HashMap;
use std::ffi::{c_void, CString};
use std::sync::atomic::{AtomicUsize, Ordering};

#[cfg(feature = "cuda")]
use fast_allreduce::Cuda;
use fast_allreduce::{this_thread, Collective, Communicator, DType, Exclusive, Host, Transfer};

use crate::scales::Scales;
use crate::status::{argument, Failure};

/// One rank of a world. It is made by fast_allreduce_init and freed by fast_allreduce_free.
pub struct fast_allreduce_communicator {
    pub any: Any,
    /// Groups that are open, of all threads: what a call looks at first.
    open: AtomicUsize,
    /// By the numbers of their threads.
    groups: Exclusive<HashMap<u64, Group>>,
    pub scales: Scales,
    /// What is told of it in words.
    pub plan_source: CString,
    pub binding: CString,
}

/// A group that a thread has open.
#[derive(Default)]
struct Group {
    transfers: Vec<Transfer>,
    /// The streams other than null that its messages were given.
    streams: Vec<*mut c_void>,
}

// SAFETY: streams are handles, which any thread may have.
unsafe impl Send for Group {}

/// A communicator of one of the devices.
pub enum Any {
    Host(Communicator<Host>),
    #[cfg(feature = "cuda")]
    Cuda(Communicator<Cuda>),
}

/// Does the same with the communicator of whichever device.
macro_rules! on_any {
    ($any:expr, $communicator:ident => $done:expr) => {
        match $any {
            $crate::handle::Any::Host($communicator) => $done,
            #[cfg(feature = "cuda")]
            $crate::handle::Any::Cuda($communicator) => $done,
        }
    };
}
pub(crate) use on_any;

impl fast_allreduce_communicator {
    pub fn new(any: Any) -> Self {
        let words = |text: String| CString::new(text.replace('\0', " ")).unwrap_or_default();
        let plan_source = words(on_any!(&any, communicator => communicator.plan_source().to_string()));
        let binding = words(match &any {
            Any::Host(communicator) => communicator.device().binding().to_string(),
            #[cfg(feature = "cuda")]
            Any::Cuda(_) => "none".into(),
        });
        Self {
            any,
            open: AtomicUsize::new(0),
            groups: Exclusive::default(),
            scales: Scales::default(),
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
        match handle.is_entered_here() {
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
    pub fn is_entered_here(&self) -> bool {
        on_any!(&self.any, communicator => communicator.is_entered_here())
            || self.groups.is_mine()
            || self.scales.is_mine()
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
    pub fn end_group(&self, stream: *mut c_void) -> Result<Vec<Transfer>, Failure> {
        let group = self.groups.lock().remove(&this_thread());
        let Group { transfers, streams } =
            group.ok_or_else(|| argument("this thread has no group of this communicator open"))?;
        self.open.fetch_sub(1, Ordering::Relaxed);
        match streams.iter().find(|&&given| given != stream) {
            None => Ok(transfers),
            Some(other) => Err(argument(format!(
                "a message of the group was given the stream {other:?}, and its end {stream:?}, on which all go: nothing was sent"
            ))),
        }
    }

    /// Puts a message into this thread's group, if it has one open.
    pub fn gathered(&self, transfer: Transfer, stream: *mut c_void) -> Result<bool, Failure> {
        // Relaxed: a thread that has a group open has counted it itself.
        if self.open.load(Ordering::Relaxed) == 0 {
            return Ok(false);
        }
        let mut groups = self.groups.lock();
        let Some(group) = groups.get_mut(&this_thread()) else { return Ok(false) };
        match self.any {
            Any::Host(_) => no_stream(stream)?,
            #[cfg(feature = "cuda")]
            Any::Cuda(_) => {}
        }
        group.transfers.push(transfer);
        if !stream.is_null() {
            group.streams.push(stream);
        }
        Ok(true)
    }
}

impl Any {
    /// # Safety
    ///
    /// As `collective_raw` of the device; `stream` is null for the host.
    pub unsafe fn collective(
        &self,
        stream: *mut c_void,
        collective: Collective<'_>,
        [input, output]: [*mut c_void; 2],
        count: usize,
        dtype: DType,
    ) -> Result<(), Failure> {
        match self {
            Self::Host(communicator) => {
                no_stream(stream)?;
                // SAFETY: the caller's.
                Ok(unsafe { communicator.collective_raw(collective, input, output, count, dtype) }?)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(communicator) => {
                let (input, output) = (input as u64, output as u64);
                // SAFETY: the caller's.
                Ok(unsafe {
                    communicator.check_raw_stream(stream.cast())?;
                    communicator.collective_raw(stream.cast(), collective, input, output, count, dtype)
                }?)
            }
        }
    }

    /// Waits for what is on the stream, and says whether the calls so far succeeded.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of any context.
    pub unsafe fn synchronize(&self, stream: *mut c_void) -> Result<(), Failure> {
        match self {
            Self::Host(communicator) => {
                no_stream(stream)?;
                Ok(communicator.check()?)
            }
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            Self::Cuda(communicator) => Ok(unsafe { communicator.synchronize_raw(stream.cast()) }?),
        }
    }

    /// # Safety
    ///
    /// As `transfer_raw` of the device; `stream` is null for the host.
    pub unsafe fn transfer(&self, stream: *mut c_void, transfers: &[Transfer]) -> Result<(), Failure> {
        match self {
            Self::Host(communicator) => {
                no_stream(stream)?;
                // SAFETY: the caller's.
                Ok(unsafe { communicator.transfer_raw(transfers) }?)
            }
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            Self::Cuda(communicator) => Ok(unsafe {
                communicator.check_raw_stream(stream.cast())?;
                communicator.transfer_raw(stream.cast(), transfers)
            }?),
        }
    }
}

fn no_stream(stream: *mut c_void) -> Result<(), Failure> {
    match stream.is_null() {
        true => Ok(()),
        false => Err(argument(
            "the stream must be null: the communicator is the host's, whose calls are not ordered by streams",
        )),
    }
}
