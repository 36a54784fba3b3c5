//! Calls of one communicator on several streams, kept in their order.

use std::sync::{Arc, PoisonError};

use cudarc::driver::sys::{CUstream, CUstreamCaptureStatus};
use cudarc::driver::CudaStream;

use super::api::{self, Code};
use super::capture::capture_of;
use super::driver::{driver, Event, Relaxed};
use super::Cuda;
use crate::error::{Error, Result};
use crate::exclusive::{this_thread, Held};

/// The handles of the legacy default stream, besides null, and of the calling thread's own default stream.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// The last call, and what tells that the calls so far have ended.
#[derive(Default)]
pub(super) struct LastCall {
    stream: Option<Stream>,
    /// Keeps the stream alive until the next call.
    owner: Option<Arc<CudaStream>>,
    /// Recorded after the last call on a default stream that is not captured: nobody else can ask those streams, or only at
    /// the price of waiting for others. And after the last call on another stream, when the next came to be on yet another.
    event: Option<Event>,
    /// Whether it was ever recorded.
    marked: bool,
    /// A call on a default stream came after it that it could not be recorded after.
    unmarked: bool,
}

/// A stream, told from others by more than its handle.
#[derive(Clone, Copy, PartialEq)]
enum Stream {
    Made(CUstream),
    /// The one that waits for the blocking ones, and they for it.
    Legacy,
    /// A thread's own default stream, under a handle that is another stream in each.
    PerThread(u64),
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Stream {}

impl Stream {
    fn of(handle: CUstream) -> Self {
        match handle as usize {
            0 | LEGACY => Self::Legacy,
            PER_THREAD => Self::PerThread(this_thread()),
            _ => Self::Made(handle),
        }
    }

    /// The handle that this thread has for the stream, of those that can be asked without other streams being waited for.
    fn handle(self) -> Option<CUstream> {
        match self {
            Self::Made(handle) => Some(handle),
            Self::PerThread(thread) if thread == this_thread() => Some(PER_THREAD as CUstream),
            Self::PerThread(_) | Self::Legacy => None,
        }
    }
}

impl Cuda {
    /// Orders a call on `stream` after the last call: where that was on another stream, through an event. `owner` keeps the
    /// stream alive until the next call.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] for calls in an order that a capture does not admit; nothing has changed then. [`Error::Driver`].
    ///
    /// # Safety
    ///
    /// `stream` is a stream of this context, which is current. Without an `owner`, it lives until the next call of the
    /// communicator, or its end.
    pub(crate) unsafe fn order(&self, stream: CUstream, owner: Option<&Arc<CudaStream>>) -> Result<()> {
        let mut last = self.last_call.lock().unwrap_or_else(PoisonError::into_inner);
        let next = Stream::of(stream);
        if let Some(previous) = last.stream {
            if previous == next {
                return Ok(());
            }
            // SAFETY: both streams are live: the caller's, for this one and, then, for the previous.
            unsafe { self.wait_for(&mut last, previous, stream) }?;
        }
        last.stream = Some(next);
        last.owner = owner.cloned();
        Ok(())
    }

    /// Orders `next` after what is on `previous` now.
    ///
    /// # Safety
    ///
    /// Both are live streams of this context, which is current.
    unsafe fn wait_for(&self, last: &mut LastCall, previous: Stream, next: CUstream) -> Result<()> {
        // SAFETY: the caller's.
        let next_captured = unsafe { is_captured(next)? };
        let refused = || {
            Error::Unavailable {
            what: "a call on another stream than the last".into(),
            reason: "one of the two is being captured, and a graph cannot wait for what is outside it; \
                     synchronise the last call's stream first, and capture the communicator's calls on one stream"
                .into(),
        }
        };
        if let Some(handle) = previous.handle() {
            // SAFETY: the caller's. A captured stream is not asked whether it has ended: that would end the capture.
            unsafe {
                if is_captured(handle)?
                    || (next_captured && !self.has_ended(|| api::cuStreamQuery(handle))?)
                {
                    return Err(refused());
                }
                if next_captured {
                    self.progress.set_ended(self.progress.ran());
                    return Ok(());
                }
                self.event(last)?.record(handle)?;
            }
            last.marked = true;
        }
        let Some(event) = last.event.as_ref().filter(|_| last.marked) else {
            // What was called on a default stream was captured, all of it, or there would be a mark.
            return Ok(());
        };
        if next_captured {
            if !self.has_ended(|| event.query())? {
                return Err(refused());
            }
            self.progress.set_ended(self.progress.ran());
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { event.hold(next) }
    }

    /// Whether something is done, asked while a stream is captured. `false` if that cannot be told.
    fn has_ended(&self, query: impl FnOnce() -> Result<(), Code>) -> Result<bool> {
        match asked_in_capture(query) {
            Some(Err(code)) if code != Code::NOT_READY && !code.is_of_captures() => {
                Err(driver("the state of the last call's stream")(code))
            }
            answer => Ok(answer == Some(Ok(()))),
        }
    }

    /// Comes after each call, also one that has failed: what it has launched on a default stream is found by an event.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    ///
    /// # Safety
    ///
    /// As [`Cuda::order`], with the same stream and in the same thread.
    pub(crate) unsafe fn mark(&self, stream: CUstream) -> Result<()> {
        if stream as usize > PER_THREAD {
            return Ok(());
        }
        let mut last = self.last_call.lock().unwrap_or_else(PoisonError::into_inner);
        last.unmarked = true;
        // SAFETY: the caller's.
        unsafe {
            if !is_captured(stream)? {
                self.event(&mut last)?.record(stream)?;
                last.marked = true;
            }
        }
        last.unmarked = false;
        Ok(())
    }

    /// The context is current.
    fn event<'a>(&self, last: &'a mut LastCall) -> Result<&'a Event> {
        let event = match last.event.take() {
            Some(event) => event,
            None => Event::new(&self.context)?,
        };
        Ok(last.event.insert(event))
    }

    /// Waits until the kernels of the last call have ended, and with it those of all calls before; not for those of other ranks
    /// on the same GPU, which may wait for this rank.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] while the last call's stream is captured: what ran on it before the capture may still run, and
    /// the driver lets nobody wait for it. (Another stream's calls have ended: a captured call follows no others.)
    /// [`Error::Driver`].
    pub(super) fn wait_for_last_call(&self) -> Result<()> {
        let ran = self.progress.ran();
        self.wait_for_stream_of_last_call()?;
        self.progress.set_ended(ran);
        Ok(())
    }

    fn wait_for_stream_of_last_call(&self) -> Result<()> {
        let last = self.last_call.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(stream) = last.stream else {
            return Ok(());
        };
        self.bind()?;
        let _relaxed = Relaxed::enter();
        let unknown = |reason: &str| Error::Unavailable {
            what: "the memory that calls use".into(),
            reason: reason.into(),
        };
        match stream.handle() {
            // SAFETY: the stream is live until the next call, or the end of the communicator, by the contract of `order`.
            Some(handle) => unsafe {
                if is_captured(handle)? {
                    return Err(unknown(
                        "the last call's stream is being captured, and what ran before on it may still run; end the \
                         capture first",
                    ));
                }
                api::cuStreamSynchronize(handle).map_err(driver("cuStreamSynchronize"))
            },
            None if last.unmarked => Err(unknown(
                "the last call's stream cannot be waited for from here, as an event could not be recorded",
            )),
            None => match last.event.as_ref().filter(|_| last.marked) {
                Some(event) => event.wait(),
                None => Ok(()),
            },
        }
    }

    /// Makes `next` wait for what is on `earlier` now, if that is another stream.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where one of the two is captured and the other is not; the capture goes on. [`Error::Driver`].
    ///
    /// # Safety
    ///
    /// Both are live streams of this context, which is current.
    pub(crate) unsafe fn order_streams(&self, earlier: CUstream, next: CUstream) -> Result<()> {
        if Stream::of(earlier) == Stream::of(next) {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe {
            if is_captured(earlier)? != is_captured(next)? {
                return Err(Error::Unavailable {
                    what: "a call on another stream than its buffer's".into(),
                    reason: "one of the two is being captured, and a graph cannot wait for what is outside it, nor that for a graph; \
                             use the buffer on the stream of the call"
                        .into(),
                });
            }
            join(self, earlier, next)
        }
    }

    /// Before a wait for the work on a stream: how many launches have ended with it, if the last call was there.
    pub(crate) fn runs_on(&self, stream: CUstream) -> Result<Option<u64>> {
        // No call is between its launches and their count.
        let _calls = self.calls()?;
        let last = self.last_call.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((last.stream == Some(Stream::of(stream))).then(|| self.progress.ran()))
    }

    /// The last call's stream, where this keeps it alive.
    pub(super) fn owner_of_last_call(&self) -> Option<Arc<CudaStream>> {
        self.last_call.lock().unwrap_or_else(PoisonError::into_inner).owner.clone()
    }

    /// The capture that the last call's stream is in, by its number.
    pub(super) fn capture_of_last_call(&self) -> Option<u64> {
        let last = self.last_call.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = last.stream.and_then(Stream::handle).filter(|_| self.bind().is_ok())?;
        // SAFETY: the stream is live until the next call, or the end of the communicator, by the contract of `order`.
        unsafe { capture_of(handle) }.map(|(capture, _)| capture)
    }

    /// Whether work on the stream is being captured into a graph.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this context, which is current.
    pub(crate) unsafe fn capturing(&self, stream: CUstream) -> Result<bool> {
        // SAFETY: the caller's.
        unsafe { is_captured(stream) }
    }

    /// Held for the whole of a call, so that no other thread's gets between its ordering and its launch.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where this thread is in a call already.
    pub(crate) fn calls(&self) -> Result<Held<'_, ()>> {
        self.calls.enter()
    }
}

/// # Safety
///
/// `stream` is a live stream of the current context.
pub(super) unsafe fn is_captured(stream: CUstream) -> Result<bool> {
    // The legacy stream never is, and asking it fails while a blocking stream is captured.
    if Stream::of(stream) == Stream::Legacy {
        return Ok(false);
    }
    const NONE: u32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
    let mut status = NONE;
    // SAFETY: the stream is the caller's; the driver writes one number.
    unsafe { api::cuStreamIsCapturing(stream, &mut status) }.map_err(driver("cuStreamIsCapturing"))?;
    Ok(status != NONE)
}

/// The answer to a question that a capture forbids to its thread, as answers are not captured. `None` if it cannot be asked.
pub(super) fn asked_in_capture(query: impl FnOnce() -> Result<(), Code>) -> Option<Result<(), Code>> {
    let _relaxed = Relaxed::enter()?;
    Some(query())
}

/// Makes `next` wait for what is on `previous` now. Both are captured, into one graph, or neither is.
///
/// # Safety
///
/// Both are live streams of this context, which is current.
pub(super) unsafe fn join(device: &Cuda, previous: CUstream, next: CUstream) -> Result<()> {
    let event = Event::new(&device.context)?;
    // SAFETY: the streams are the caller's. An event that is destroyed while a stream waits for it is kept by the driver until
    // then.
    unsafe {
        event.record(previous)?;
        event.hold(next)
    }
}
