//! A thread that bounds the waits of NCCL's kernels, which have no limit themselves.
//!
//! Each call lies between two events on its stream. From when the stream has come to the first, the other nodes have the
//! limit to let it come to the second. After that the communicator is aborted, which ends the kernel, so that the stream
//! goes on; the failure is known before it does.

use std::collections::VecDeque;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUstream, CUstreamCaptureMode};
use cudarc::driver::CudaContext;

use super::library::Comm;
use crate::device::cuda::api::{self, Code};
use crate::device::cuda::driver::{driver, Event};
use crate::error::{Error, Result};
use crate::fork::ForkCheck;
use crate::thread::{self, DEEP_STACK};

/// Between two looks at the calls that are under way.
const PAUSE: Duration = Duration::from_millis(1);

/// A communicator whose calls are watched.
pub(super) struct Watched {
    state: Arc<State>,
    /// Calls that are under way; none from the end on.
    calls: Option<Sender<Call>>,
    thread: Option<JoinHandle<()>>,
    fork_check: ForkCheck,
}

struct State {
    context: Arc<CudaContext>,
    timeout: Duration,
    /// Until it fails.
    comm: Mutex<Option<Comm>>,
    failed: OnceLock<Error>,
    /// Since when nobody calls any more.
    closed: OnceLock<Instant>,
}

impl Watched {
    pub fn new(context: &Arc<CudaContext>, comm: Comm, timeout: Duration) -> Result<Self> {
        let state = Arc::new(State {
            context: Arc::clone(context),
            timeout,
            comm: Mutex::new(Some(comm)),
            failed: OnceLock::new(),
            closed: OnceLock::new(),
        });
        let (sender, receiver) = mpsc::channel();
        let watched = Arc::clone(&state);
        let thread = thread::spawn("nccl-watch".into(), DEEP_STACK, move || watched.watch(&receiver))
            .map_err(|error| {
                state.give_up(Error::Aborted);
                Error::io("spawn of a thread")(error)
            })?;
        Ok(Self { state, calls: Some(sender), thread: Some(thread), fork_check: ForkCheck::new() })
    }

    pub fn check(&self) -> Result<()> {
        self.state.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Puts a call on a stream of the context. `start` gets the limit of its own waits.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of the context, and is not captured.
    pub unsafe fn call(
        &self,
        stream: CUstream,
        start: impl FnOnce(&Comm, Duration) -> Result<()>,
    ) -> Result<()> {
        self.check()?;
        let state = &*self.state;
        state.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let (begin, end) = (Event::new(&state.context)?, Event::new(&state.context)?);
        // In the order of the streams, should several threads call.
        let mut comm = state.comm.lock().unwrap_or_else(PoisonError::into_inner);
        let started = match &*comm {
            // SAFETY: the stream is the caller's word.
            Some(comm) => unsafe { begin.record(stream) }
                .and_then(|()| start(comm, state.timeout))
                // SAFETY: as before.
                .and_then(|()| unsafe { end.record(stream) }),
            None => return self.check(),
        };
        if let Err(error) = started {
            // The other nodes are at another call now, or will be.
            return Err(state.fail(&mut comm, error));
        }
        if let Some(calls) = &self.calls {
            // The thread has ended only where it has failed: the next check says so.
            let _ = calls.send(Call { begin, end, since: None });
        }
        Ok(())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.fork_check.in_fork() {
            // A fork has no such thread, and maybe a lock that it held.
            return std::mem::forget((self.calls.take(), self.thread.take()));
        }
        self.state.closed.get_or_init(Instant::now);
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            // It panics nowhere, and what it could say nobody hears any more.
            let _ = thread.join();
        }
    }
}

impl State {
    fn watch(&self, calls: &Receiver<Call>) {
        if let Err(error) = self.enter() {
            return self.give_up(error);
        }
        let mut under_way = VecDeque::new();
        while let Ok(call) = calls.recv() {
            under_way.push_back(call);
            while !under_way.is_empty() {
                thread::pause(PAUSE);
                under_way.extend(calls.try_iter());
                if let Err(error) = self.advance(&mut under_way) {
                    return self.give_up(error);
                }
            }
        }
        let comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(comm) = comm {
            comm.finish(self.timeout);
        }
    }

    fn enter(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        // Asking for an event is forbidden to all threads while one of them captures, but to those that say so.
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        // SAFETY: sets this thread's mode, and writes the one before.
        unsafe { api::cuThreadExchangeStreamCaptureMode(&mut mode) }
            .map_err(driver("cuThreadExchangeStreamCaptureMode"))
    }

    /// Takes out the calls that are done.
    fn advance(&self, calls: &mut VecDeque<Call>) -> Result<()> {
        while let Some(call) = calls.front_mut() {
            if is_reached(&call.end)? {
                calls.pop_front();
                continue;
            }
            if call.since.is_none() && is_reached(&call.begin)? {
                call.since = Some(Instant::now());
            }
            // At the end, what the stream has not come to is not waited for any longer either.
            let waited =
                call.since.or(self.closed.get().copied()).map_or(Duration::ZERO, |since| since.elapsed());
            let comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
            return match &*comm {
                Some(comm) if waited >= self.timeout => {
                    Err(comm.late("ncclAllReduce, which does not say who is missing,", waited))
                }
                Some(comm) => comm.is_settled().map(drop),
                // A call has failed: the thread is done.
                None => Err(Error::Aborted),
            };
        }
        Ok(())
    }

    fn give_up(&self, error: Error) {
        let mut comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        self.fail(&mut comm, error);
    }

    /// The first error stands; it is known before the kernels end.
    fn fail(&self, comm: &mut Option<Comm>, error: Error) -> Error {
        let error = self.failed.get_or_init(|| error).clone();
        if let Some(comm) = comm.take() {
            comm.abort();
        }
        error
    }
}

/// A call that a stream has not come past, as far as is known.
struct Call {
    begin: Event,
    end: Event,
    /// When the stream was seen to have come to it.
    since: Option<Instant>,
}

/// Whether a stream has come to where the event was recorded.
fn is_reached(event: &Event) -> Result<bool> {
    match event.query() {
        Ok(()) => Ok(true),
        Err(Code::NOT_READY) => Ok(false),
        Err(code) => Err(driver("cuEventQuery of a call of NCCL")(code)),
    }
}
