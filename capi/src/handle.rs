//! A communicator of any device behind one pointer, with the groups that threads have open.

use std::collections::HashMap;
use std::ffi::{c_void, CString};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

#[cfg(feature = "cuda")]
use fast_allreduce::Cuda;
use fast_allreduce::{Collective, Communicator, DType, Host, Transfer};

use crate::scales::Scales;
use crate::status::{argument, Failure};

/// One rank of a world. It is made by fast_allreduce_init and freed by fast_allreduce_free.
pub struct fast_allreduce_communicator {
    pub any: Any,
    /// Groups that are open, of all threads: what a call looks at first.
    open: AtomicUsize,
    groups: Mutex<HashMap<ThreadId, Vec<Transfer>>>,
    pub scales: Scales,
    /// What is told of it in words.
    pub plan_source: CString,
    pub binding: CString,
}

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
            groups: Mutex::default(),
            scales: Scales::default(),
            plan_source,
            binding,
        }
    }

    /// What a caller's pointer points to.
    ///
    /// # Safety
    ///
    /// Null, or a communicator that has not been freed and is not while the reference lives.
    pub unsafe fn of<'a>(pointer: *const Self) -> Result<&'a Self, Failure> {
        // SAFETY: the caller's.
        unsafe { pointer.as_ref() }.ok_or_else(|| argument("the communicator is null"))
    }

    fn groups(&self) -> MutexGuard<'_, HashMap<ThreadId, Vec<Transfer>>> {
        // No change of it can panic midway.
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn begin_group(&self) -> Result<(), Failure> {
        let mut groups = self.groups();
        if groups.contains_key(&thread::current().id()) {
            return Err(argument("this thread has a group of this communicator open already"));
        }
        groups.insert(thread::current().id(), Vec::new());
        self.open.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The messages of this thread's group, which is closed.
    pub fn end_group(&self) -> Result<Vec<Transfer>, Failure> {
        let transfers = self.groups().remove(&thread::current().id());
        let transfers =
            transfers.ok_or_else(|| argument("this thread has no group of this communicator open"))?;
        self.open.fetch_sub(1, Ordering::Relaxed);
        Ok(transfers)
    }

    /// Puts a message into this thread's group, if it has one open.
    pub fn gathered(&self, transfer: Transfer) -> bool {
        // Relaxed: a thread that has a group open has counted it itself.
        if self.open.load(Ordering::Relaxed) == 0 {
            return false;
        }
        match self.groups().get_mut(&thread::current().id()) {
            Some(group) => {
                group.push(transfer);
                true
            }
            None => false,
        }
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
