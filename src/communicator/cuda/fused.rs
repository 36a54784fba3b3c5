//! Fused allreduces and reduce-scatters of the CUDA device, in stream order.

use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::call::{Call, Collective, RawFused};
use crate::catalogue::DType;
use crate::communicator::experts::Experts;
use crate::communicator::fused::{Addresses, Form, Fused, Scales};
use crate::communicator::slices::Slices;
use crate::communicator::Communicator;
use crate::device::cuda::Cuda;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

impl Slices for Cuda {
    type Read<'a, T: 'a> = &'a dyn DevicePtr<T>;
    type Write<'a, T: 'a> = &'a mut dyn DevicePtrMut<T>;

    fn len<T>(slice: &dyn DevicePtr<T>) -> usize {
        slice.len()
    }
    fn len_mut<T>(slice: &&mut dyn DevicePtrMut<T>) -> usize {
        slice.len()
    }
}

impl<'a, T: Element> Fused<'a, Cuda, T> {
    /// Adds the sum to `residual`, in place. In an allreduce all ranks have the same residual, unless [`Fused::sum`] is
    /// used.
    pub fn on_cuda(residual: &'a mut dyn DevicePtrMut<T>) -> Self {
        Self::new(residual)
    }
}

impl<'a, T: Element> Experts<'a, Cuda, T> {
    /// Describes experts by a table: `top_k` entries for each row of the message, each an experts' row, or negative.
    ///
    /// The kernel checks the table. If an entry is no row of the input, it sends nothing, and the error is that of the
    /// next call on this rank, or of [`Communicator::synchronize`]; the other ranks wait in vain. Of a message that
    /// takes several launches, the pieces before that entry have been written.
    pub fn on_cuda(table: &'a dyn DevicePtr<i32>, top_k: usize) -> Self {
        Self::new(table, top_k)
    }
}

/// Returns no slice, with a type that `with_slices` accepts.
fn none<'a, T>() -> Option<&'a dyn DevicePtr<T>> {
    None
}

impl Communicator<Cuda> {
    /// Sums the ranks' `input`s, adds the sum to a residual, and normalises and quantises rows as `fused` says.
    ///
    /// This is what a transformer's layer does after its allreduce, in one launch. All ranks must have the same weights
    /// and bias, and, unless [`Fused::sum`] is used, the same residual. The bits are those of the host's method. A
    /// scale that is given is read when the launch runs.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn layer(
    /// #     communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, input: &CudaSlice<f32>,
    /// #     residual: &mut CudaSlice<f32>, output: &mut CudaSlice<f32>, weight: &CudaSlice<f32>,
    /// # ) -> Result<()> {
    /// let norm = Norm::Rms { epsilon: 1e-5, unit_offset: false };
    /// let fused = Fused::on_cuda(residual).norm(norm, 4096).weight(weight).rows(output);
    /// communicator.all_reduce_fused(stream, input, fused)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce`]; [`Error::InvalidSetting`] also for a message, a type, memory or a format
    /// that the host's method refuses.
    pub fn all_reduce_fused<T: Element, Q: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        fused: Fused<'_, Cuda, T, Q>,
    ) -> Result<()> {
        self.fused_from(stream, Form::AllReduce, input, input.len(), fused)
    }

    /// Sums the ranks' `input`s, and applies `fused` to share r of the sum on rank r.
    ///
    /// Lengths and results are those of the host's method. The residual and all memory of `fused` are those of the
    /// rank's own share.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn layer(
    /// #     communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, input: &CudaSlice<f32>,
    /// #     residual: &mut CudaSlice<f32>, output: &mut CudaSlice<f32>, norm: Norm
    /// # ) -> Result<()> {
    /// let fused = Fused::on_cuda(residual).norm(norm, 4096).rows(output);
    /// communicator.reduce_scatter_fused(stream, input, fused)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce_fused`]; [`Error::InvalidSetting`] also for a plain sum, for experts, and if
    /// the region has no room for a row of each rank.
    pub fn reduce_scatter_fused<T: Element, Q: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        fused: Fused<'_, Cuda, T, Q>,
    ) -> Result<()> {
        let share = fused.residual.len();
        self.check_shares(Form::ReduceScatter, input.len(), share)?;
        self.fused_from(stream, Form::ReduceScatter, input, share, fused)
    }

    /// Reduces as [`Communicator::reduce_scatter_fused`] does, with `counts[r]` elements in the share of rank r.
    ///
    /// `counts` is the same on all ranks. Each is a number of whole rows, and may be 0.
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::reduce_scatter_fused`]; [`Error::InvalidSetting`] also unless there is a count for each
    /// rank; [`Error::Disagreement`] also where counts differ, in checked calls.
    pub fn reduce_scatter_fused_v<T: Element, Q: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        fused: Fused<'_, Cuda, T, Q>,
        counts: &[usize],
    ) -> Result<()> {
        let (form, share) = (Form::ReduceScatterV(counts), fused.residual.len());
        self.check_shares(form, input.len(), share)?;
        self.fused_from(stream, form, input, share, fused)
    }

    /// Carries out a fused call on an input. `count` is the number of elements of the message, or of the own share.
    fn fused_from<T: Element, Q: Element>(
        &self,
        stream: &Arc<CudaStream>,
        form: Form<'_>,
        input: &impl DevicePtr<T>,
        count: usize,
        fused: Fused<'_, Cuda, T, Q>,
    ) -> Result<()> {
        self.check_fused(form, &fused, count, false)?;
        self.with_slices::<T, _, dyn DevicePtrMut<T>>(stream, Some(input), None, |own| {
            self.fused(stream, form, (own.input, count, 0, own.captured), fused)
        })
    }

    /// Reduces as [`Communicator::all_reduce_fused`] does, and stores the normalised rows in `data`, the input.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn layer(
    /// #     communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, mut data: CudaSlice<f32>,
    /// #     residual: &mut CudaSlice<f32>, norm: Norm
    /// # ) -> Result<()> {
    /// let fused = Fused::on_cuda(residual).norm(norm, 4096);
    /// communicator.all_reduce_fused_in_place(stream, &mut data, fused)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce_fused`]; [`Error::InvalidSetting`] also where `fused` has separate memory
    /// for rows.
    pub fn all_reduce_fused_in_place<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        fused: Fused<'_, Cuda, T>,
    ) -> Result<()> {
        self.check_fused(Form::AllReduce, &fused, data.len(), true)?;
        let count = data.len();
        self.with_slices(stream, none::<T>(), Some(data), |own| {
            self.fused(stream, Form::AllReduce, (own.output, count, own.output, own.captured), fused)
        })
    }

    /// Refuses arguments that no launch can carry out, before the addresses of slices are taken.
    fn check_fused<T: Element, Q: Element>(
        &self,
        form: Form<'_>,
        fused: &Fused<'_, Cuda, T, Q>,
        input: usize,
        in_place: bool,
    ) -> Result<()> {
        fused.check_lengths(input, in_place)?;
        let raw = fused.at(&fused.placeholders(in_place), input);
        let call = Call::fused(form.of(&raw), 0, fused.count(input), T::DTYPE);
        call.check_arguments(self.rank(), self.world_size())?;
        self.check_row(&call)
    }

    /// Carries out a fused call of an input by address. Rows go to the address `rows` if it is not 0, else where
    /// `fused` says.
    fn fused<T: Element, Q: Element>(
        &self,
        stream: &Arc<CudaStream>,
        form: Form<'_>,
        (input, elements, rows, captured): (CUdeviceptr, usize, CUdeviceptr, bool),
        fused: Fused<'_, Cuda, T, Q>,
    ) -> Result<()> {
        let (count, facts) = (fused.count(elements), fused.expert_facts(elements));
        let Fused { residual, sum, norm, hidden, weight, bias, rows: own_rows, quantized, experts } = fused;
        let (table, expert_weights, shared) =
            experts.map_or((None, None, None), |one| (Some(one.table), one.weights, one.shared));
        let format = quantized.as_ref().map(|(_, how)| (how.scaling(), Q::DTYPE));
        let (numbers, how) = quantized.map_or((None, None), |(numbers, how)| (Some(numbers), Some(how)));
        let (given, floats, bytes) = match how {
            None => (None, None, None),
            Some(Scales::Given(scale)) => (Some(scale), None, None),
            Some(Scales::Written(_, scales)) => (None, Some(scales), None),
            Some(Scales::Bytes(_, scales, global)) => (global, None, Some(scales)),
        };
        let mut at = Addresses { rows, ..Addresses::default() };
        self.with_slices(stream, weight, Some(residual), |own| {
            (at.weight, at.residual) = (own.input, own.output);
            self.with_slices(stream, bias, sum, |own| {
                (at.bias, at.sum) = (own.input, own.output);
                self.with_slices(stream, shared, own_rows, |own| {
                    at.shared = own.input;
                    at.rows |= own.output;
                    self.with_slices(stream, none::<Q>(), numbers, |own| {
                        at.numbers = own.output;
                        self.with_slices(stream, given, floats, |own| {
                            let has_bytes = bytes.is_some();
                            at.global = if has_bytes { own.input } else { 0 };
                            at.scales = if has_bytes { 0 } else { own.input | own.output };
                            self.with_slices(stream, none::<u8>(), bytes, |own| {
                                at.scales |= own.output;
                                self.with_experts(stream, table, expert_weights, |table, weights| {
                                    (at.table, at.expert_weights) = (table, weights);
                                    let raw = at.raw(norm, hidden, format, facts);
                                    let call = Call::fused(form.of(&raw), input, count, T::DTYPE);
                                    // SAFETY: as in `between` of `typed.rs`. `check_lengths` has compared the lengths
                                    // of all slices, and those that are written are borrowed exclusively. The stream
                                    // is kept alive.
                                    unsafe { self.run(call, stream.cu_stream(), Some(stream), captured) }
                                })
                            })
                        })
                    })
                })
            })
        })
    }

    /// Passes the addresses of a table of experts and of their weights to `start`, as `with_slices` does.
    fn with_experts(
        &self,
        stream: &Arc<CudaStream>,
        table: Option<&dyn DevicePtr<i32>>,
        weights: Option<&dyn DevicePtr<f32>>,
        start: impl FnOnce(CUdeviceptr, CUdeviceptr) -> Result<()>,
    ) -> Result<()> {
        self.with_slices::<i32, _, dyn DevicePtrMut<i32>>(stream, table, None, |table| {
            self.with_slices::<f32, _, dyn DevicePtrMut<f32>>(stream, weights, None, |weights| {
                start(table.input, weights.input)
            })
        })
    }

    /// Reduces as [`Communicator::all_reduce_fused`] does, with memory by address and a raw stream.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # unsafe fn layer(communicator: &Communicator<Cuda>, stream: CUstream, input: u64, residual: u64)
    /// #     -> Result<()> {
    /// let fused = RawFused { residual, residual_out: residual, ..RawFused::default() };
    /// communicator.all_reduce_fused_raw(stream, input, 4096, DType::Bf16, &fused)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::collective_raw`] and [`Communicator::all_reduce_fused`].
    ///
    /// # Safety
    ///
    /// As [`Communicator::collective_raw`], also for the memory whose addresses are in `fused`: it is valid for the
    /// reads and writes that [`RawFused`] describes.
    pub unsafe fn all_reduce_fused_raw(
        &self,
        stream: CUstream,
        input: CUdeviceptr,
        count: usize,
        dtype: DType,
        fused: &RawFused,
    ) -> Result<()> {
        let collective = Collective::AllReduceFused(fused);
        // SAFETY: the caller's obligation.
        unsafe { self.collective_raw(stream, collective, input, fused.output(), count, dtype) }
    }
}
