//! Calls of one communicator on several streams, kept in their order.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUstream;
use cudarc::driver::{CudaContext, CudaStream};

use super::api::{self, Code};
use super::capture::{asked_in_capture, capture_of, is_captured, LEGACY};
use super::copies::Copies;
use super::driver::{bind, driver, Event, Relaxed};
use super::memory::Memory;
use super::progress::{epoch_after, Progress};
use crate::abi::FA_MAX_BLOCKS;
use crate::device::sealed::Probe;
use crate::error::{Error, Result};
use crate::exclusive::{this_thread, Exclusive, Held};

/// The handle of the calling thread's own default stream.
const PER_THREAD: usize = 2;

/// The calls of one communicator: one at a time, in their order on streams, and how far they have come.
pub(crate) struct Calls {
    context: Arc<CudaContext>,
    copies: Arc<Copies>,
    /// Held from the ordering of a call to its launch. Taken before the endpoint's lock and `last`.
    exclusive: Exclusive<()>,
    last: Mutex<LastCall>,
    pub progress: Progress,
}

/// The last call, and what tells that the calls so far have ended.
#[derive(Default)]
struct LastCall {
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

impl Calls {
    pub(super) fn new(context: &Arc<CudaContext>, copies: &Arc<Copies>) -> Self {
        let (exclusive, last, progress) = Default::default();
        Self { context: Arc::clone(context), copies: Arc::clone(copies), exclusive, last, progress }
    }

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
    pub unsafe fn order(&self, stream: CUstream, owner: Option<&Arc<CudaStream>>) -> Result<()> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
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
    /// As [`Calls::order`], with the same stream and in the same thread.
    pub unsafe fn mark(&self, stream: CUstream) -> Result<()> {
        if stream as usize > PER_THREAD {
            return Ok(());
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
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
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(stream) = last.stream else {
            return Ok(());
        };
        bind(&self.context)?;
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
    pub unsafe fn order_streams(&self, earlier: CUstream, next: CUstream) -> Result<()> {
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
            join(&self.context, earlier, next)
        }
    }

    /// Before a wait for the work on a stream: how many launches have ended with it, if the last call was there.
    pub fn runs_on(&self, stream: CUstream) -> Result<Option<u64>> {
        // No call is between its launches and their count.
        let _calls = self.enter()?;
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((last.stream == Some(Stream::of(stream))).then(|| self.progress.ran()))
    }

    /// The capture that the last call's stream is in, by its number.
    fn capture_of_last_call(&self) -> Option<u64> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = last.stream.and_then(Stream::handle).filter(|_| bind(&self.context).is_ok())?;
        // SAFETY: the stream is live until the next call, or the end of the communicator, by the contract of `order`.
        unsafe { capture_of(handle) }.map(|(capture, _)| capture)
    }

    /// Held for the whole of a call, so that no other thread's gets between its ordering and its launch.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where this thread is in a call already.
    pub fn enter(&self) -> Result<Held<'_, ()>> {
        self.exclusive.enter()
    }

    /// After a call that is captured.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this context, which is current.
    pub unsafe fn count_captured(&self, stream: CUstream) {
        // SAFETY: the caller's.
        self.progress.count_captured(unsafe { capture_of(stream) }.map(|(capture, _)| capture));
    }

    /// Tells whether the launches so far have ended, also those of replays. The epochs of the region's blocks are in `memory`
    /// at `epochs`, and were `first` before the first launch.
    pub(super) fn ended_probe(&self, memory: Arc<Memory>, epochs: u64, first: u32) -> Probe {
        // Replays advance epochs as well: with them, the expected epoch may be reached before the last call has ended.
        let has_replays = self.progress.has_replays(self.capture_of_last_call());
        if !has_replays && self.progress.have_ended() {
            return Box::new(|| true);
        }
        let copies = Arc::clone(&self.copies);
        let owner = self.last.lock().unwrap_or_else(PoisonError::into_inner).owner.clone();
        let expected = epoch_after(first, self.progress.ran());
        Box::new(move || {
            if owner.as_ref().is_some_and(|stream| is_idle(stream)) || copies.is_broken() {
                return true;
            }
            if has_replays {
                return false;
            }
            let _kept = &memory;
            let mut now = [0u32; FA_MAX_BLOCKS as usize];
            // SAFETY: the epochs lie in `memory`. Kernels that write them meanwhile write whole words.
            let read = unsafe { copies.read(epochs, &mut now) };
            // The last kernel writes its epochs after all that it sends. Those stores may be on their way for microseconds still, while
            // the word that this rank has left goes through a socket and a thread, and whoever hears it looks once more. If it
            // overtook them all the same, a peer's call would end with an error though its data comes, never with wrong data.
            read.is_ok() && now.iter().all(|&epoch| epoch == expected)
        })
    }
}

/// Makes `next` wait for what is on `previous` now. Both are captured, into one graph, or neither is.
///
/// # Safety
///
/// Both are live streams of this context, which is current.
pub(super) unsafe fn join(context: &Arc<CudaContext>, previous: CUstream, next: CUstream) -> Result<()> {
    let event = Event::new(context)?;
    // SAFETY: the streams are the caller's. An event that is destroyed while a stream waits for it is kept by the driver until
    // then.
    unsafe {
        event.record(previous)?;
        event.hold(next)
    }
}

/// Whether a stream is not captured and has nothing left to do; `false` where that cannot be told.
fn is_idle(stream: &CudaStream) -> bool {
    let Ok(()) = bind(stream.context()) else { return false };
    // SAFETY: the stream is live, and its context current.
    let is_free = matches!(unsafe { is_captured(stream.cu_stream()) }, Ok(false));
    // SAFETY: as above.
    is_free && asked_in_capture(|| unsafe { api::cuStreamQuery(stream.cu_stream()) }) == Some(Ok(()))
}
