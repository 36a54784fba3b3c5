//! Collectives and messages of the CUDA device, in stream order. `typed.rs` and `messages.rs` take cudarc's slices,
//! `raw.rs` takes raw pointers. This file has the code that all calls share.

mod fused;
mod gathered;
mod messages;
mod raw;
mod register;
mod sharded;
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
    /// Waits for the work on a stream, and returns `Ok` if no call has failed.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn example(communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, mut data: CudaSlice<f32>)
    /// #     -> Result<()> {
    /// communicator.all_reduce_in_place(stream, &mut data, ReduceOp::Sum)?; // Launched.
    /// communicator.synchronize(stream)?; // Done, or an error that names a missing rank.
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] for a stream that is being captured; the capture goes on.
    /// [Errors of every call](Communicator#errors-of-every-call).
    pub fn synchronize(&self, stream: &CudaStream) -> Result<()> {
        self.not_forked()?;
        self.or_poison(bind(stream.context()))?;
        // SAFETY: the stream is live, and its context current.
        unsafe { self.wait_for_stream(stream.cu_stream()) }
    }

    /// Waits for the work on a stream that is not being captured, and checks for failures.
    ///
    /// # Safety
    ///
    /// The stream is live, and of the current context.
    unsafe fn wait_for_stream(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the caller's obligation.
        if self.or_poison(unsafe { is_captured(stream) })? {
            return Err(Error::Unavailable {
                what: "a wait for a stream".into(),
                reason: "it is being captured: end the capture first".into(),
            });
        }
        let runs = self.device().calls.runs_on(stream)?;
        // SAFETY: the caller's obligation.
        self.or_poison(unsafe { wait_for(stream) })?;
        if let Some(runs) = runs {
            self.device().calls.progress.set_ended(runs);
        }
        self.healthy()
    }

    /// Waits until every rank has called it. It uses the bootstrap, and does not wait for work on streams.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn example(communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>) -> Result<()> {
    /// communicator.barrier()?; // All ranks have come here.
    /// communicator.barrier_on(stream)?; // Later work on the stream waits for all ranks' streams.
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [Errors of every step](Communicator#errors-of-every-step).
    pub fn barrier(&self) -> Result<()> {
        // `all_succeeded` rather than a bare barrier, so that a rank that closes its communicator instead is noticed.
        self.unless_failed(self.step(|| self.endpoint.membership()?.connection.all_succeeded(Ok(()))))
    }

    /// Makes later work on `stream` wait until the streams of all ranks have come to this call.
    ///
    /// [`Communicator::barrier`] has an example.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidStream`] for a stream of another context; [`Error::Unavailable`] for an order that a capture
    /// does not permit; [errors of every call](Communicator#errors-of-every-call).
    pub fn barrier_on(&self, stream: &Arc<CudaStream>) -> Result<()> {
        self.healthy()?;
        self.check_stream(stream)?;
        let captured = self.is_captured(stream)?;
        let (collective, dtype) = (Collective::Barrier, DType::U8);
        let call = Call { collective, input: 0, output: 0, count: 0, dtype };
        // SAFETY: a barrier accesses no memory of the caller. The stream is of this context and kept alive.
        unsafe { self.run(call, stream.cu_stream(), Some(stream), captured) }
    }

    /// Starts a collective on a stream after the communicator's last call.
    ///
    /// # Safety
    ///
    /// As [`Communicator::start`] and [`Communicator::in_order`]. The device's context is current, and `captured` says
    /// whether the stream is being captured.
    unsafe fn run(
        &self,
        call: Call<'_>,
        stream: CUstream,
        owner: Option<&Arc<CudaStream>>,
        captured: bool,
    ) -> Result<()> {
        // SAFETY: the caller's obligation.
        unsafe {
            self.in_order(stream, owner, captured, || {
                self.start(call, stream, || match captured {
                    true => self.device().capture_input(stream, call.input),
                    false => Ok(0),
                })
            })
        }
    }

    /// Starts messages on a stream after the communicator's last call.
    ///
    /// # Safety
    ///
    /// As [`Communicator::start_transfers`] and [`Communicator::in_order`]. The device's context is current, and
    /// `captured` says whether the stream is being captured.
    unsafe fn run_transfers(
        &self,
        kind: CallKind,
        transfers: &[Transfer],
        stream: CUstream,
        owner: Option<&Arc<CudaStream>>,
        captured: bool,
    ) -> Result<()> {
        // SAFETY: the caller's obligation.
        unsafe {
            self.in_order(stream, owner, captured, || {
                self.start_transfers(transfers_id(kind, transfers), transfers, stream)
            })
        }
    }

    /// Orders a call after the communicator's last one, starts it, and marks its end for the next one.
    ///
    /// # Safety
    ///
    /// As `order` of the device's `calls`.
    unsafe fn in_order(
        &self,
        stream: CUstream,
        owner: Option<&Arc<CudaStream>>,
        captured: bool,
        start: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.can_lock()?;
        // The call of another thread must not come between the ordering and the launch.
        let _calls = self.device().calls.enter()?;
        // SAFETY: the caller's obligation.
        match unsafe { self.device().calls.order(stream, owner) } {
            // An order that a capture does not permit is refused like a wrong argument: it does not poison.
            Err(refused @ Error::Unavailable { .. }) => return Err(refused),
            ordered => self.or_poison(ordered)?,
        }
        let launches = self.device().calls.progress.launched();
        let started = start();
        match captured {
            true => {
                // SAFETY: the caller's obligation.
                unsafe { self.device().calls.count_captured(stream) };
                if started.is_ok() {
                    self.endpoint.with_membership(|membership| membership.liveness.capture())?;
                }
            }
            false => self.device().calls.progress.count_runs(launches),
        }
        // Even after a failure: pieces may have been launched before it.
        // SAFETY: the caller's obligation.
        let marked = self.or_poison(unsafe { self.device().calls.mark(stream) });
        started.and(marked)
    }
}
