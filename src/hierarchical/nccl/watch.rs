//! A thread that limits the waits of NCCL's kernels, which have no time limit.
//!
//! Each call is enqueued between two events on its stream. The limit runs from the time when the stream reaches the
//! first event. If the stream does not reach the second event in time, the thread records the failure and aborts the
//! communicator. That ends the kernel, so that the stream goes on.

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

/// Interval of checking the calls under way.
const PAUSE: Duration = Duration::from_millis(1);

/// A communicator whose calls are watched.
pub(super) struct Watched {
    state: Arc<State>,
    /// Sends calls to the thread; `None` once this is being dropped.
    calls: Option<Sender<Call>>,
    thread: Option<JoinHandle<()>>,
    fork_check: ForkCheck,
}

struct State {
    context: Arc<CudaContext>,
    timeout: Duration,
    /// `None` after a failure.
    comm: Mutex<Option<Comm>>,
    failed: OnceLock<Error>,
    /// When the drop of [`Watched`] began; no call is made after that.
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

    /// Enqueues a call on a stream of the context by `start`, which gets the time limit for its own waits.
    ///
    /// # Safety
    ///
    /// `stream` is a valid stream of the context, and is not being captured.
    pub unsafe fn call(
        &self,
        stream: CUstream,
        start: impl FnOnce(&Comm, Duration) -> Result<()>,
    ) -> Result<()> {
        self.check()?;
        let state = &*self.state;
        state.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let (begin, end) = (Event::new(&state.context)?, Event::new(&state.context)?);
        // The lock keeps the calls of several threads in one order.
        let mut comm = state.comm.lock().unwrap_or_else(PoisonError::into_inner);
        let started = match &*comm {
            // SAFETY: the caller guarantees the stream.
            Some(comm) => unsafe { begin.record(stream) }
                .and_then(|()| start(comm, state.timeout))
                // SAFETY: the caller guarantees the stream.
                .and_then(|()| unsafe { end.record(stream) }),
            None => return self.check(),
        };
        if let Err(error) = started {
            // The other nodes make this call, but this node has not made it: the communicator cannot be used any more.
            return Err(state.fail(&mut comm, error));
        }
        if let Some(calls) = &self.calls {
            // An error means that the thread has ended after a failure, which the next check returns.
            let _ = calls.send(Call { begin, end, since: None });
        }
        Ok(())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.fork_check.in_fork() {
            // In a fork the thread does not run, and it may have held the lock.
            return std::mem::forget((self.calls.take(), self.thread.take()));
        }
        self.state.closed.get_or_init(Instant::now);
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic, and nobody would handle its error.
            let _ = thread.join();
        }
    }
}

impl State {
    fn watch(&self, calls: &Receiver<Call>) {
        if let Err(error) = self.prepare_thread() {
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

    /// Prepares the thread for calls of the driver.
    fn prepare_thread(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        // While another thread captures, querying events is forbidden, except to threads in relaxed mode.
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        // SAFETY: sets this thread's mode, and writes the previous one.
        unsafe { api::cuThreadExchangeStreamCaptureMode(&mut mode) }
            .map_err(driver("cuThreadExchangeStreamCaptureMode"))
    }

    /// Removes the calls that are complete, and checks the limit of the first that is not.
    fn advance(&self, calls: &mut VecDeque<Call>) -> Result<()> {
        while let Some(call) = calls.front_mut() {
            if is_reached(&call.end)? {
                calls.pop_front();
                continue;
            }
            if call.since.is_none() && is_reached(&call.begin)? {
                call.since = Some(Instant::now());
            }
            // After the last call, the limit also runs for calls that the stream has not reached.
            let waited =
                call.since.or(self.closed.get().copied()).map_or(Duration::ZERO, |since| since.elapsed());
            let comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
            return match &*comm {
                Some(comm) if waited >= self.timeout => Err(comm.late("ncclAllReduce", waited)),
                Some(comm) => comm.is_settled().map(drop),
                // A call has failed: the thread ends.
                None => Err(Error::Aborted),
            };
        }
        Ok(())
    }

    fn give_up(&self, error: Error) {
        let mut comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        self.fail(&mut comm, error);
    }

    /// Records an error, if it is the first, and aborts the communicator. The error is recorded before the kernels end.
    fn fail(&self, comm: &mut Option<Comm>, error: Error) -> Error {
        let error = self.failed.get_or_init(|| error).clone();
        if let Some(comm) = comm.take() {
            comm.abort();
        }
        error
    }
}

/// A call that is not known to be complete.
struct Call {
    begin: Event,
    end: Event,
    /// When the stream was first seen to have reached `begin`.
    since: Option<Instant>,
}

/// Returns whether a stream has reached an event.
fn is_reached(event: &Event) -> Result<bool> {
    match event.query() {
        Ok(()) => Ok(true),
        Err(Code::NOT_READY) => Ok(false),
        Err(code) => Err(driver("cuEventQuery of an NCCL call")(code)),
    }
}
