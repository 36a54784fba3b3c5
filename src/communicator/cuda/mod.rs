//! The collectives of the CUDA device, in stream order: on cudarc's slices in `typed.rs` and `messages.rs`, on raw pointers in
//! `raw.rs`. Here is what all of them go through.

mod fused;
mod messages;
mod raw;
mod register;
mod slices;
mod typed;

use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use cudarc::driver::CudaStream;

pub use self::register::{Registered, RegisteredMemory};
use super::Communicator;
use crate::call::{transfers_id, Call, CallKind, Collective, Transfer};
use crate::catalogue::DType;
use crate::device::cuda::driver::capture::is_captured;
use crate::device::cuda::driver::{bind, wait_for};
use crate::device::cuda::Cuda;
use crate::error::{Error, Result};

impl Communicator<Cuda> {
    /// Waits for the work on a stream, and says whether the calls on it succeeded.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](crate::Error::Driver); [`Error::Timeout`](crate::Error::Timeout) naming the ranks that did not come;
    /// [`Error::Unavailable`](crate::Error::Unavailable) for a stream that is captured, which then goes on.
    pub fn synchronize(&self, stream: &CudaStream) -> Result<()> {
        self.not_forked()?;
        self.or_poison(bind(stream.context()))?;
        // SAFETY: the stream is live, and its context current.
        unsafe { self.wait_for_stream(stream.cu_stream()) }
    }

    /// # Safety
    ///
    /// The stream is live, and of the current context.
    unsafe fn wait_for_stream(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the caller's.
        if self.or_poison(unsafe { is_captured(stream) })? {
            return Err(Error::Unavailable {
                what: "a wait for a stream".into(),
                reason: "it is being captured: end the capture first".into(),
            });
        }
        let runs = self.device().calls.runs_on(stream)?;
        // SAFETY: the caller's.
        self.or_poison(unsafe { wait_for(stream) })?;
        if let Some(runs) = runs {
            self.device().calls.progress.set_ended(runs);
        }
        self.healthy()
    }

    /// Returns when every rank has called it, through the bootstrap: what is on the streams is not waited for.
    ///
    /// # Errors
    ///
    /// Those of the bootstrap; and the error that poisoned the communicator.
    pub fn barrier(&self) -> Result<()> {
        // With a word for it, so that a rank which closes its communicator instead is noticed.
        self.unless_failed(self.step(|| self.connection.all_succeeded(Ok(()))))
    }

    /// Makes the work that is on `stream` after this wait until every rank has called it and its stream has come so far.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidStream`](crate::Error::InvalidStream), [`Error::Driver`](crate::Error::Driver); see
    /// [`Communicator::all_reduce`] on ranks that do not come.
    pub fn barrier_on(&self, stream: &Arc<CudaStream>) -> Result<()> {
        self.healthy()?;
        self.check_stream(stream)?;
        let captured = self.is_captured(stream)?;
        let (collective, dtype) = (Collective::Barrier, DType::U8);
        let call = Call { collective, input: 0, output: 0, count: 0, dtype };
        // SAFETY: it accesses no memory of a caller's; the stream is of this context and kept alive.
        unsafe { self.run(call, stream.cu_stream(), Some(stream), captured) }
    }

    /// # Safety
    ///
    /// As [`Communicator::start`] and [`Cuda::order`]; the device's context is current, and `captured` says whether the stream is.
    unsafe fn run(
        &self,
        call: Call<'_>,
        stream: CUstream,
        owner: Option<&Arc<CudaStream>>,
        captured: bool,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe {
            self.in_order(stream, owner, captured, || {
                self.start(call, stream, || match captured {
                    true => self.device().capture_input(stream, call.input),
                    false => Ok(0),
                })
            })
        }
    }

    /// # Safety
    ///
    /// As [`Communicator::start_transfers`] and [`Cuda::order`]; the device's context is current, and `captured` says whether the stream
    /// is.
    unsafe fn run_transfers(
        &self,
        kind: CallKind,
        transfers: &[Transfer],
        stream: CUstream,
        owner: Option<&Arc<CudaStream>>,
        captured: bool,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe {
            self.in_order(stream, owner, captured, || {
                self.start_transfers(transfers_id(kind, transfers), transfers, stream)
            })
        }
    }

    /// Starts a call on a stream after the communicator's last one.
    ///
    /// # Safety
    ///
    /// As [`Cuda::order`].
    unsafe fn in_order(
        &self,
        stream: CUstream,
        owner: Option<&Arc<CudaStream>>,
        captured: bool,
        start: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.can_lock()?;
        // Another thread's call comes before this one's ordering or after its launch, not between the two.
        let _calls = self.device().calls.enter()?;
        // SAFETY: the caller's.
        match unsafe { self.device().calls.order(stream, owner) } {
            // What a capture does not admit is the caller's to put right, like an argument.
            Err(refused @ Error::Unavailable { .. }) => return Err(refused),
            ordered => self.or_poison(ordered)?,
        }
        let launches = self.device().calls.progress.launched();
        let started = start();
        match captured {
            true => {
                // SAFETY: the caller's.
                unsafe { self.device().calls.count_captured(stream) };
                if started.is_ok() {
                    self.liveness.capture();
                }
            }
            false => self.device().calls.progress.count_runs(launches),
        }
        // Pieces may have been launched before one failed.
        // SAFETY: the caller's.
        let marked = self.or_poison(unsafe { self.device().calls.mark(stream) });
        started.and(marked)
    }
}
