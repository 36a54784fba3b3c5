//! Sums of the CUDA device that go on, in the order of a stream.

use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::call::{Call, Collective, RawFused};
use crate::catalogue::DType;
use crate::communicator::fused::{Addresses, Fused, Scales, Slices};
use crate::communicator::Communicator;
use crate::device::cuda::Cuda;
use crate::element::Element;
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
    /// Adds the sum to the residual, in place. All ranks have the same there, unless the plain sum is asked for.
    pub fn on_cuda(residual: &'a mut dyn DevicePtrMut<T>) -> Self {
        Self::new(residual)
    }
}

/// No memory of a kind.
fn none<'a, T>() -> Option<&'a dyn DevicePtr<T>> {
    None
}

impl Communicator<Cuda> {
    /// What a transformer's layer does after its allreduce, in one launch: adds the sum of the ranks' `input`s to a residual, and
    /// does what else `fused` asks for. All ranks must have the same residual, weights and bias. The bits are those of the host's
    /// call of that name. Scales that are given are read when the launch runs.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// use cudarc::driver::{CudaSlice, CudaStream};
    /// use fast_allreduce::{Communicator, Cuda, Fused, Norm, Result};
    ///
    /// # fn layer(
    /// #     communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, input: &CudaSlice<f32>,
    /// #     residual: &mut CudaSlice<f32>, output: &mut CudaSlice<f32>, weight: &CudaSlice<f32>,
    /// # ) -> Result<()> {
    /// let norm = Norm::Rms { epsilon: 1e-5, unit_offset: false };
    /// let fused = Fused::on_cuda(residual).norm(norm, 4096).weight(weight).rows(output);
    /// communicator.all_reduce_fused(stream, input, fused)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`], and as the host's call of that name.
    pub fn all_reduce_fused<T: Element, Q: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        fused: Fused<'_, Cuda, T, Q>,
    ) -> Result<()> {
        self.check_fused(&fused, input.len(), false)?;
        let count = input.len();
        self.with_slices::<T, _, dyn DevicePtrMut<T>>(stream, Some(input), None, |own| {
            self.fused(stream, (own.input, count, 0, own.captured), fused)
        })
    }

    /// [`Communicator::all_reduce_fused`] with the normalised rows where the input is.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_fused`]; [`Error::InvalidSetting`](crate::Error::InvalidSetting) where `fused` has another place
    /// for them.
    pub fn all_reduce_fused_in_place<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        fused: Fused<'_, Cuda, T>,
    ) -> Result<()> {
        self.check_fused(&fused, data.len(), true)?;
        let count = data.len();
        self.with_slices(stream, none::<T>(), Some(data), |own| {
            self.fused(stream, (own.output, count, own.output, own.captured), fused)
        })
    }

    /// Refuses what no launch could do, before slices are asked for their addresses.
    fn check_fused<T: Element, Q: Element>(
        &self,
        fused: &Fused<'_, Cuda, T, Q>,
        count: usize,
        in_place: bool,
    ) -> Result<()> {
        fused.check_lengths(count, in_place)?;
        let raw = fused.at(&fused.placeholders(in_place));
        let call = Call::fused(&raw, 0, count, T::DTYPE);
        call.check_arguments(self.rank(), self.world_size())?;
        self.check_row(&call)
    }

    /// The call of an input at an address, whose rows go to another one, if that is not 0, or where `fused` says.
    fn fused<T: Element, Q: Element>(
        &self,
        stream: &Arc<CudaStream>,
        (input, count, rows, captured): (CUdeviceptr, usize, CUdeviceptr, bool),
        fused: Fused<'_, Cuda, T, Q>,
    ) -> Result<()> {
        let Fused { residual, sum, norm, hidden, weight, bias, rows: own_rows, quantized } = fused;
        let format = quantized.as_ref().map(|(_, how)| (how.scaling(), Q::DTYPE));
        let (numbers, how) = quantized.map_or((None, None), |(numbers, how)| (Some(numbers), Some(how)));
        let (given, floats, blocks) = match how {
            None => (None, None, None),
            Some(Scales::Given(scale)) => (Some(scale), None, None),
            Some(Scales::Written(_, scales)) => (None, Some(scales), None),
            Some(Scales::Blocks(_, scales, global)) => (Some(global), None, Some(scales)),
        };
        let mut at = Addresses { rows, ..Addresses::default() };
        self.with_slices(stream, weight, Some(residual), |own| {
            (at.weight, at.residual) = (own.input, own.output);
            self.with_slices(stream, bias, sum, |own| {
                (at.bias, at.sum) = (own.input, own.output);
                self.with_slices(stream, none::<T>(), own_rows, |own| {
                    at.rows |= own.output;
                    self.with_slices(stream, none::<Q>(), numbers, |own| {
                        at.numbers = own.output;
                        self.with_slices(stream, given, floats, |own| {
                            let has_global = blocks.is_some();
                            at.global = if has_global { own.input } else { 0 };
                            at.scales = if has_global { 0 } else { own.input | own.output };
                            self.with_slices(stream, none::<u8>(), blocks, |own| {
                                at.scales |= own.output;
                                let raw = at.raw(norm, hidden, format);
                                let call = Call::fused(&raw, input, count, T::DTYPE);
                                // SAFETY: as in `between`: the slices hold messages, rows of weights and as many scales as
                                // there are; what is written is borrowed exclusively. The stream is kept alive.
                                unsafe { self.run(call, stream.cu_stream(), Some(stream), captured) }
                            })
                        })
                    })
                })
            })
        })
    }

    /// [`Communicator::all_reduce_fused`] on raw pointers and a raw stream.
    ///
    /// # Errors
    ///
    /// As [`Communicator::collective_raw`], and [`Communicator::all_reduce_fused`].
    ///
    /// # Safety
    ///
    /// As [`Communicator::collective_raw`], also of what `fused` has the addresses of.
    pub unsafe fn all_reduce_fused_raw(
        &self,
        stream: CUstream,
        input: CUdeviceptr,
        count: usize,
        dtype: DType,
        fused: &RawFused,
    ) -> Result<()> {
        let collective = Collective::AllReduceFused(fused);
        // SAFETY: the caller's.
        unsafe { self.collective_raw(stream, collective, input, fused.output(), count, dtype) }
    }
}
