//! Order of a communicator's calls on several streams.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUstream;
use cudarc::driver::{CudaContext, CudaStream};

use super::progress::{epoch_after, Progress};
use crate::abi::FA_MAX_BLOCKS;
use crate::device::cuda::driver::capture::{capture_of, is_captured, query_in_capture, LEGACY};
use crate::device::cuda::driver::{
    api::{self, Code},
    bind, check_context, driver, Event, Relaxed,
};
use crate::device::cuda::memory::Copies;
use crate::device::cuda::parts::Parts;
use crate::device::sealed::Probe;
use crate::error::{Error, Result};
use crate::exclusive::{this_thread, Exclusive, Held};

/// Handle of the calling thread's default stream.
const PER_THREAD: usize = 2;

/// Serialises the calls of one communicator: one at a time, in order across streams. Also tracks their progress.
pub(crate) struct Calls {
    context: Arc<CudaContext>,
    copies: Arc<Copies>,
    /// Held from the ordering of a call to its launch. Locked before the endpoint's lock and before `last`.
    exclusive: Exclusive<()>,
    last: Mutex<LastCall>,
    pub progress: Progress,
}

/// The last call, and how to find out that the calls so far have ended.
#[derive(Default)]
struct LastCall {
    stream: Option<Stream>,
    /// Keeps the stream alive until the next call.
    owner: Option<Arc<CudaStream>>,
    /// Event recorded after the last uncaptured call on a default stream: other threads cannot query those streams,
    /// or only by waiting for other streams too. Also recorded after the last call on another stream, when the next
    /// call moves to a different stream.
    event: Option<Event>,
    /// Whether the event was ever recorded.
    marked: bool,
    /// A later call on a default stream could not be followed by an event, or calls may still run on a stream that is
    /// forgotten.
    unmarked: bool,
}

/// Identity of a stream, where the handle alone is ambiguous.
#[derive(Clone, Copy, PartialEq)]
enum Stream {
    Made(CUstream),
    /// The legacy default stream, which synchronises with all blocking streams.
    Legacy,
    /// The default stream of this thread; its handle means a different stream in each thread.
    PerThread(u64),
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Stream {}

impl Stream {
    fn of(handle: CUstream) -> Self {
        match handle as usize {
            0 | LEGACY => Self::Legacy,
            PER_THREAD => Self::PerThread(this_thread()),
            _ => Self::Made(handle),
        }
    }

    /// Returns this thread's handle for the stream, if the stream can be queried without waiting for other streams.
    fn handle(self) -> Option<CUstream> {
        match self {
            Self::Made(handle) => Some(handle),
            Self::PerThread(thread) if thread == this_thread() => Some(PER_THREAD as CUstream),
            Self::PerThread(_) | Self::Legacy => None,
        }
    }
}

impl Calls {
    pub(crate) fn new(context: &Arc<CudaContext>, copies: &Arc<Copies>) -> Self {
        let (exclusive, last, progress) = Default::default();
        Self { context: Arc::clone(context), copies: Arc::clone(copies), exclusive, last, progress }
    }

    /// Orders a call on `stream` after the last call: by an event if that was on another stream. `owner` keeps the
    /// stream alive until the next call.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if the order would need a capture to wait for uncaptured work, or the reverse; nothing
    /// has changed then. [`Error::InvalidStream`] for a stream of another context. [`Error::Driver`].
    ///
    /// # Safety
    ///
    /// `stream` is live, and this context is current. Without an `owner`, it lives until the next call of
    /// the communicator, or until the communicator is dropped.
    pub unsafe fn order(&self, stream: CUstream, owner: Option<&Arc<CudaStream>>) -> Result<()> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let next = Stream::of(stream);
        if last.stream == Some(next) {
            return Ok(());
        }
        // A stream of another context is not remembered: its context may end before this communicator.
        if matches!(next, Stream::Made(_)) {
            // SAFETY: the stream is live by the caller's contract.
            unsafe { check_context(&self.context, stream) }?;
        }
        if let Some(previous) = last.stream {
            // SAFETY: both streams are live by the caller's contract, the previous one by that of the previous call.
            unsafe { self.wait_for(&mut last, previous, stream) }?;
        }
        last.stream = Some(next);
        last.owner = owner.cloned();
        Ok(())
    }

    /// Orders `next` after the work that is on `previous` now.
    ///
    /// # Safety
    ///
    /// Both are live streams of this context, which is current.
    unsafe fn wait_for(&self, last: &mut LastCall, previous: Stream, next: CUstream) -> Result<()> {
        // SAFETY: by the caller's contract, the stream is live.
        let next_captured = unsafe { is_captured(next)? };
        let refused = || {
            Error::Unavailable {
            what: "a call on another stream than the last".into(),
            reason: "one of the two is being captured, and a graph cannot wait for work outside it; \
                     synchronise the last call's stream first, and capture the communicator's calls on one stream"
                .into(),
        }
        };
        if let Some(handle) = previous.handle() {
            // SAFETY: both streams are live by the caller's contract. A captured stream is not queried: that would
            // invalidate the capture.
            unsafe {
                // Other work on the stream does not matter if a wait has shown that the calls have ended.
                let have_ended =
                    || Ok(self.progress.have_ended() || self.has_ended(|| api::cuStreamQuery(handle))?);
                if is_captured(handle)? || (next_captured && !have_ended()?) {
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
            // All calls on the default stream were captured: else the event would have been recorded.
            return Ok(());
        };
        if next_captured {
            if !self.has_ended(|| event.query())? {
                return Err(refused());
            }
            self.progress.set_ended(self.progress.ran());
            return Ok(());
        }
        // SAFETY: by the caller's contract, the stream is live.
        unsafe { event.hold(next) }
    }

    /// Runs a query of completion during a capture. Returns false if the answer is unknown.
    fn has_ended(&self, query: impl FnOnce() -> Result<(), Code>) -> Result<bool> {
        match query_in_capture(query) {
            Some(Err(code)) if code != Code::NOT_READY && !code.is_capture_error() => {
                Err(driver("the state of the last call's stream")(code))
            }
            answer => Ok(answer == Some(Ok(()))),
        }
    }

    /// Records the event after a call on a default stream. To be called after each call, failed or not, since a
    /// failed call may have launched kernels.
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
        // SAFETY: by the caller's contract, the stream is live.
        unsafe {
            if !is_captured(stream)? {
                self.event(&mut last)?.record(stream)?;
                last.marked = true;
            }
        }
        last.unmarked = false;
        Ok(())
    }

    /// Returns the event, and creates it on first use. The context must be current.
    fn event<'a>(&self, last: &'a mut LastCall) -> Result<&'a Event> {
        let event = match last.event.take() {
            Some(event) => event,
            None => Event::new(&self.context)?,
        };
        Ok(last.event.insert(event))
    }

    /// Waits until the kernels of the last call, and so of all calls, have ended. Does not wait for kernels of other
    /// ranks on the same GPU, which may wait for this rank.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] while the last call's stream is captured: work that ran on it before the capture may
    /// still run, and the driver does not let anybody wait for it. (Calls on other streams have ended: a captured
    /// call is only ordered after calls that have.) [`Error::Driver`].
    pub(crate) fn wait_for_last_call(&self) -> Result<()> {
        let ran = self.progress.ran();
        self.wait_for_stream_of_last_call()?;
        self.progress.set_ended(ran);
        Ok(())
    }

    /// Forgets the last call's stream, which its owner may then destroy. Unless the calls have ended, every later wait
    /// for them fails.
    pub(crate) fn forget_streams(&self, have_ended: bool) {
        let forgotten = LastCall { unmarked: !have_ended, ..LastCall::default() };
        let last =
            std::mem::replace(&mut *self.last.lock().unwrap_or_else(PoisonError::into_inner), forgotten);
        // Without the lock: this may destroy a stream.
        drop(last);
    }

    fn wait_for_stream_of_last_call(&self) -> Result<()> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let unknown = |reason: &str| Error::Unavailable {
            what: "the memory that calls use".into(),
            reason: reason.into(),
        };
        let Some(stream) = last.stream else {
            return match last.unmarked {
                true => Err(unknown("the communicator was closed before its calls had ended")),
                false => Ok(()),
            };
        };
        bind(&self.context)?;
        let _relaxed = Relaxed::enter();
        match stream.handle() {
            // SAFETY: by the contract of `order`, the stream is live until the next call or until the communicator is
            // dropped.
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

    /// Makes `next` wait for the work that is on `earlier` now, if that is another stream.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if one of the two is captured and the other is not; the capture stays valid.
    /// [`Error::Driver`].
    ///
    /// # Safety
    ///
    /// Both are live streams of this context, which is current.
    pub unsafe fn order_streams(&self, earlier: CUstream, next: CUstream) -> Result<()> {
        if Stream::of(earlier) == Stream::of(next) {
            return Ok(());
        }
        // SAFETY: by the caller's contract, the stream is live.
        unsafe {
            if is_captured(earlier)? != is_captured(next)? {
                return Err(Error::Unavailable {
                    what: "a call on another stream than its buffer's".into(),
                    reason: "one of the two is being captured, and a graph cannot wait for work outside it, nor the \
                             reverse; use the buffer on the stream of the call"
                        .into(),
                });
            }
            join(&self.context, earlier, next)
        }
    }

    /// Returns the number of launches that will have ended after a wait for `stream`, if the last call was on it. To
    /// be called before the wait.
    pub fn runs_on(&self, stream: CUstream) -> Result<Option<u64>> {
        // Held so that no call is between its launches and their count.
        let _calls = self.enter()?;
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((last.stream == Some(Stream::of(stream))).then(|| self.progress.ran()))
    }

    /// Returns the ID of the capture that the last call's stream is in.
    fn capture_of_last_call(&self) -> Option<u64> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = last.stream.and_then(Stream::handle).filter(|_| bind(&self.context).is_ok())?;
        // SAFETY: by the contract of `order`, the stream is live until the next call or until the communicator is
        // dropped.
        unsafe { capture_of(handle) }.map(|(capture, _)| capture)
    }

    /// Locks the communicator for a whole call, so that no call of another thread comes between the ordering and the
    /// launch.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if this thread is already in a call.
    pub fn enter(&self) -> Result<Held<'_, ()>> {
        self.exclusive.enter()
    }

    /// Counts a captured call.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this context, which is current.
    pub unsafe fn count_captured(&self, stream: CUstream) {
        // SAFETY: by the caller's contract, the stream is live.
        self.progress.count_captured(unsafe { capture_of(stream) }.map(|(capture, _)| capture));
    }

    /// Returns a probe that says whether all launches so far have ended, including graph replays. The epochs of the
    /// region's blocks are in `memory` at address `epochs`; they were `first` after `runs` launches that were not
    /// captured.
    pub(crate) fn ended_probe(&self, memory: Arc<Parts>, epochs: u64, (first, runs): (u32, u64)) -> Probe {
        // Replays advance epochs too, so with replays the expected epoch may be reached before the last call has
        // ended.
        let has_replays = self.progress.has_replays(self.capture_of_last_call());
        if !has_replays && self.progress.have_ended() {
            return Box::new(|| true);
        }
        let copies = Arc::clone(&self.copies);
        let owner = self.last.lock().unwrap_or_else(PoisonError::into_inner).owner.clone();
        let expected = epoch_after(first, self.progress.ran().saturating_sub(runs));
        Box::new(move || {
            if owner.as_ref().is_some_and(|stream| is_idle(stream)) || copies.is_broken() {
                return true;
            }
            if has_replays {
                return false;
            }
            let _kept = &memory;
            let mut now = [0u32; FA_MAX_BLOCKS as usize];
            // SAFETY: the epochs are in `memory`. Kernels that write them meanwhile write whole words.
            let read = unsafe { copies.read(epochs, &mut now) };
            // The last kernel writes its epochs after all its sends. Those stores may still be in flight for
            // microseconds, while the notice that this rank has left passes through a socket and a thread, and its
            // receiver checks once more. If the notice overtook the stores all the same, a peer's call would end with
            // an error although its data arrives, never with wrong data.
            read.is_ok() && now.iter().all(|&epoch| epoch == expected)
        })
    }
}

/// Makes `next` wait for the work that is on `previous` now. Both are captured into one graph, or neither is
/// captured.
///
/// # Safety
///
/// Both are live streams of this context, which is current.
pub(super) unsafe fn join(context: &Arc<CudaContext>, previous: CUstream, next: CUstream) -> Result<()> {
    let event = Event::new(context)?;
    // SAFETY: the streams are live by the caller's contract. If an event is destroyed while a stream waits for it,
    // the driver keeps it until then.
    unsafe {
        event.record(previous)?;
        event.hold(next)
    }
}

/// Returns whether a stream is not captured and has no work left; false if that is unknown.
fn is_idle(stream: &CudaStream) -> bool {
    let Ok(()) = bind(stream.context()) else { return false };
    // SAFETY: the stream is live, and its context current.
    let is_free = matches!(unsafe { is_captured(stream.cu_stream()) }, Ok(false));
    // SAFETY: as above.
    is_free && query_in_capture(|| unsafe { api::cuStreamQuery(stream.cu_stream()) }) == Some(Ok(()))
}
