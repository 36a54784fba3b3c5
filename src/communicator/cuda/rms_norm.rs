//! Sums of the CUDA device that go on: with a residual, and an RMSNorm of its rows, in the order of a stream.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use super::slices::Addresses;
use crate::call::{
    same_length, Call, Collective, Epilogue, Nvfp4Scales, RawQuantizedRows, RawRmsNorm, RmsNorm, Scales,
    Scaling,
};
use crate::communicator::Communicator;
use crate::device::cuda::Cuda;
use crate::element::Element;
use crate::error::{Error, Result};

impl Communicator<Cuda> {
    /// What a transformer's layer does after its allreduce, in one launch: adds the sum of the ranks' `input`s to `residual`, and
    /// has the rows of that, normalised, in `output`. All ranks must have the same residual and weights. The bits are those of the
    /// host's call of that name. Weights are a slice or a view.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// use cudarc::driver::{CudaSlice, CudaStream};
    /// use fast_allreduce::{Communicator, Cuda, Result, RmsNorm};
    ///
    /// # fn layer(
    /// #     communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, input: &CudaSlice<f32>,
    /// #     residual: &mut CudaSlice<f32>, output: &mut CudaSlice<f32>, weight: &CudaSlice<f32>,
    /// # ) -> Result<()> {
    /// communicator.all_reduce_rms_norm(stream, input, residual, output, RmsNorm::new(4096, 1e-5).weight(weight))?;
    /// communicator.all_reduce_rms_norm(stream, input, residual, output, RmsNorm::new(4096, 1e-5))?; // weights of 1
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`]; [`Error::InvalidSetting`] for a type other than f16, bf16
    /// and f32, a message that is not whole rows, rows of 0 or more than 65,536 elements or larger than the region, and an epsilon
    /// that is negative or no number.
    pub fn all_reduce_rms_norm<T: Element, W: DevicePtr<T>>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        residual: &mut impl DevicePtrMut<T>,
        output: &mut impl DevicePtrMut<T>,
        norm: RmsNorm<'_, W>,
    ) -> Result<()> {
        same_length(input.len(), residual.len())?;
        same_length(input.len(), output.len())?;
        norm.check_weight(norm.weight.map(W::len))?;
        self.check_sum::<T>(residual.len(), Some(norm.at(0, 0)))?;
        let count = residual.len();
        self.with_slices(stream, Some(input), Some(residual), |sum| {
            self.with_slices(
                stream,
                norm.weight,
                Some(output),
                |Addresses { input: weight, output, .. }| {
                    // SAFETY: as in `between`: the slices hold a message, and the weights a row.
                    unsafe { self.add::<T>(stream, sum, count, None, Some(norm.at(weight, output))) }
                },
            )
        })
    }

    /// [`Communicator::all_reduce_rms_norm`] that also has the sum of the ranks' inputs alone, in `sum`: the bits of
    /// [`Communicator::all_reduce`]. Each rank adds its own residual to all rows, so that this may differ between ranks.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_rms_norm`].
    pub fn all_reduce_rms_norm_with_sum<T: Element, W: DevicePtr<T>>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        sum: &mut impl DevicePtrMut<T>,
        residual: &mut impl DevicePtrMut<T>,
        output: &mut impl DevicePtrMut<T>,
        norm: RmsNorm<'_, W>,
    ) -> Result<()> {
        same_length(input.len(), sum.len())?;
        same_length(input.len(), residual.len())?;
        same_length(input.len(), output.len())?;
        norm.check_weight(norm.weight.map(W::len))?;
        self.check_sum::<T>(residual.len(), Some(norm.at(0, 0)))?;
        let count = residual.len();
        self.with_slices(stream, Some(input), Some(sum), |sum| {
            self.with_slices(stream, None::<&CudaSlice<T>>, Some(residual), |residual| {
                self.with_slices(stream, norm.weight, Some(output), |rows| {
                    let raw = norm.at(rows.input, rows.output);
                    // SAFETY: as in `all_reduce_rms_norm`.
                    unsafe { self.add::<T>(stream, sum, count, Some(residual.output), Some(raw)) }
                })
            })
        })
    }

    /// [`Communicator::all_reduce_rms_norm`] with the normalised rows in place of the input.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_rms_norm`].
    pub fn all_reduce_rms_norm_in_place<T: Element, W: DevicePtr<T>>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        residual: &mut impl DevicePtrMut<T>,
        norm: RmsNorm<'_, W>,
    ) -> Result<()> {
        same_length(data.len(), residual.len())?;
        norm.check_weight(norm.weight.map(W::len))?;
        self.check_sum::<T>(residual.len(), Some(norm.at(0, 0)))?;
        let count = residual.len();
        self.with_slices(
            stream,
            norm.weight,
            Some(residual),
            |Addresses { input: weight, output, captured }| {
                self.with_slices(stream, None::<&CudaSlice<T>>, Some(data), |data| {
                    let sum = Addresses { input: data.output, output, captured };
                    // SAFETY: as in `all_reduce_rms_norm`; normalised rows may be where the input was.
                    unsafe { self.add::<T>(stream, sum, count, None, Some(norm.at(weight, data.output))) }
                })
            },
        )
    }

    /// [`Communicator::all_reduce_rms_norm`] with the normalised rows as 8-bit numbers, as the host's call of that name. A scale
    /// that is given is read when the launch runs.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_rms_norm`]; [`Error::InvalidSetting`] for a `Q` other than `i8`
    /// and 8-bit floats, and another number of scales than [`Scaling::count`].
    pub fn all_reduce_rms_norm_quantized<T: Element, Q: Element, W: DevicePtr<T>, S>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        residual: &mut impl DevicePtrMut<T>,
        output: &mut impl DevicePtrMut<Q>,
        scales: Scales<'_, S>,
        norm: RmsNorm<'_, W>,
    ) -> Result<()>
    where
        S: DevicePtr<f32> + DevicePtrMut<f32>,
    {
        same_length(input.len(), residual.len())?;
        same_length(input.len(), output.len())?;
        let (scaling, len) = match &scales {
            Scales::Given(scales) => (Scaling::Given, scales.len()),
            Scales::PerRow(scales) => (Scaling::PerRow, scales.len()),
            Scales::PerGroup(scales) => (Scaling::PerGroup, scales.len()),
        };
        let rows = |scales| RawQuantizedRows::Bytes { dtype: Q::DTYPE, scaling, scales };
        self.check_quantized::<T, _>(&norm, rows(0), (len, input.len()))?;
        let (given, written) = match scales {
            Scales::Given(scales) => (Some(scales), None),
            Scales::PerRow(scales) | Scales::PerGroup(scales) => (None, Some(scales)),
        };
        self.with_slices(stream, given, written, |scales| {
            let rows = rows(scales.input | scales.output);
            // SAFETY: as many scales as there are to be.
            unsafe { self.quantize(stream, input, residual, output, rows, norm) }
        })
    }

    /// [`Communicator::all_reduce_rms_norm`] with the normalised rows as NVFP4, as the host's call of that name. The global scale
    /// is read when the launch runs.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_rms_norm`]; [`Error::InvalidSetting`] for rows that are no multiple of 16, another number of
    /// scales than [`ScaleLayout::count`](crate::ScaleLayout::count), and not one global scale;
    /// [`Error::LengthMismatch`] where `output` has not half as many bytes as there are elements.
    pub fn all_reduce_rms_norm_nvfp4<T: Element, W: DevicePtr<T>>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        residual: &mut impl DevicePtrMut<T>,
        output: &mut impl DevicePtrMut<u8>,
        scales: Nvfp4Scales<'_, impl DevicePtrMut<u8>, impl DevicePtr<f32>>,
        norm: RmsNorm<'_, W>,
    ) -> Result<()> {
        same_length(input.len(), residual.len())?;
        same_length(input.len(), 2 * output.len())?;
        let Nvfp4Scales { blocks, layout, global } = scales;
        let rows = |scales, global| RawQuantizedRows::Nvfp4 { scales, layout, global };
        self.check_quantized::<T, _>(&norm, rows(0, 0), (blocks.len(), input.len()))?;
        if global.len() != 1 {
            let (name, value) = ("global scale", format!("{} elements", global.len()));
            return Err(Error::InvalidSetting { name, value, expected: "one" });
        }
        self.with_slices(stream, None::<&CudaSlice<u8>>, Some(blocks), |blocks| {
            self.with_slices(stream, Some(global), None::<&mut CudaSlice<f32>>, |global| {
                let rows = rows(blocks.output, global.input);
                // SAFETY: as many scales as there are to be, and one for all.
                unsafe { self.quantize(stream, input, residual, output, rows, norm) }
            })
        })
    }

    fn check_quantized<T: Element, W: DevicePtr<T>>(
        &self,
        norm: &RmsNorm<'_, W>,
        rows: RawQuantizedRows,
        (scales, count): (usize, usize),
    ) -> Result<()> {
        norm.check_weight(norm.weight.map(W::len))?;
        rows.check_scales(scales, count, norm.hidden)?;
        self.check_sum::<T>(count, Some(RawRmsNorm { quantized: Some(rows), ..norm.at(0, 0) }))
    }

    /// # Safety
    ///
    /// What `rows` has the addresses of is as [`RawQuantizedRows`] tells, for the length of this call; all has been checked, and
    /// `output` has the bytes that rows become.
    unsafe fn quantize<T: Element, Q: Element, W: DevicePtr<T>>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        residual: &mut impl DevicePtrMut<T>,
        output: &mut impl DevicePtrMut<Q>,
        rows: RawQuantizedRows,
        norm: RmsNorm<'_, W>,
    ) -> Result<()> {
        let count = residual.len();
        self.with_slices(stream, Some(input), Some(residual), |sum| {
            self.with_slices(stream, norm.weight, None::<&mut CudaSlice<T>>, |weight| {
                self.with_slices(stream, None::<&CudaSlice<Q>>, Some(output), |normed| {
                    let raw = norm.at(weight.input, normed.output);
                    let raw = RawRmsNorm { quantized: Some(rows), ..raw };
                    // SAFETY: as in `all_reduce_rms_norm`, and the caller's.
                    unsafe { self.add::<T>(stream, sum, count, None, Some(raw)) }
                })
            })
        })
    }

    /// Adds the sum of the ranks' `input`s to `residual`, which must be the same on all ranks.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`]; [`Error::InvalidSetting`] for a type other than f16, bf16
    /// and f32.
    pub fn all_reduce_add<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        residual: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        same_length(input.len(), residual.len())?;
        self.check_sum::<T>(residual.len(), None)?;
        let count = residual.len();
        self.with_slices(stream, Some(input), Some(residual), |sum| {
            // SAFETY: as in `all_reduce_rms_norm`.
            unsafe { self.add::<T>(stream, sum, count, None, None) }
        })
    }

    /// Refuses what no launch could do, before slices are asked for their addresses.
    fn check_sum<T: Element>(&self, count: usize, norm: Option<RawRmsNorm>) -> Result<()> {
        let epilogue = Epilogue { residual: 0, residual_out: 0, norm };
        let collective = Collective::AllReduceEpilogue(&epilogue);
        let call = Call { collective, input: 0, output: 0, count, dtype: T::DTYPE };
        call.check_arguments(self.rank(), self.world_size())?;
        self.check_row(&call)
    }

    /// # Safety
    ///
    /// As [`Communicator::run`], of an input and a residual of `count` elements, and of the operands of the norm. The residual is
    /// at the output, or where that is the plain sum's at `residual_out`.
    unsafe fn add<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        Addresses { input, output, captured }: Addresses,
        count: usize,
        residual_out: Option<u64>,
        norm: Option<RawRmsNorm>,
    ) -> Result<()> {
        let epilogue = Epilogue {
            residual: residual_out.unwrap_or(output),
            residual_out: residual_out.unwrap_or(0),
            norm,
        };
        let collective = Collective::AllReduceEpilogue(&epilogue);
        let call = Call { collective, input, output, count, dtype: T::DTYPE };
        // SAFETY: the caller's; the stream is kept alive.
        unsafe { self.run(call, stream.cu_stream(), Some(stream), captured) }
    }
}
