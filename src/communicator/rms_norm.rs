//! Sums of the host device that go on: with a residual, and an RMSNorm of its rows.

use super::Communicator;
use crate::call::{
    same_length, Call, Collective, Epilogue, Nvfp4Scales, RawQuantizedRows, RawRmsNorm, RmsNorm, Scales,
    Scaling,
};
use crate::device::{Device, Host};
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

impl<D: Device> Communicator<D> {
    /// Refuses rows that the region has no room for.
    pub(super) fn check_row(&self, call: &Call<'_>) -> Result<()> {
        match call.collective.epilogue().and_then(Epilogue::row) {
            Some(row) => self.planner.check_row(row, call.dtype),
            None => Ok(()),
        }
    }
}

impl Communicator<Host> {
    /// What a transformer's layer does after its allreduce, in one: adds the sum of the ranks' `input`s to `residual`, and has the
    /// rows of that, normalised, in `output`. All ranks must have the same residual and weights: each row's residual is that of
    /// one of them.
    ///
    /// The bits are those of [`Communicator::all_reduce`], an addition in f32 that is rounded to `T`, and the norm in f32 that is
    /// rounded to `T`; `docs/fused.md` has the formula and the order of its sums. They are the same on every rank, whatever the
    /// algorithm. A row with a NaN or an infinity is NaN, but for finite elements beside an infinity, which are 0.
    ///
    /// ```
    /// use fast_allreduce::{bootstrap::Threads, Communicator, Host, RmsNorm};
    ///
    /// # fn main() -> fast_allreduce::Result<()> {
    /// let ranks = Threads::world(2)?.into_iter().map(|bootstrap| {
    ///     std::thread::spawn(move || -> fast_allreduce::Result<Vec<f32>> {
    ///         let communicator = Communicator::builder().build(Host::new(), bootstrap)?;
    ///         let (input, weight) = (vec![1.0; 3 * 4], [0.5, 1.0, 2.0, 4.0]);
    ///         let (mut residual, mut output) = (vec![2.0; 3 * 4], vec![0.0; 3 * 4]);
    ///         let norm = RmsNorm::new(4, 0.0).weight(&weight[..]);
    ///         communicator.all_reduce_rms_norm(&input, &mut residual, &mut output, norm)?;
    ///         assert_eq!(residual, [4.0; 3 * 4]);
    ///         Ok(output)
    ///     })
    /// });
    /// for rank in ranks.collect::<Vec<_>>() {
    ///     assert_eq!(rank.join().unwrap()?, [0.5, 1.0, 2.0, 4.0].repeat(3));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`]; [`Error::InvalidSetting`] for a type other than f16, bf16 and f32, a message that is not
    /// whole rows, rows of 0 or more than 65,536 elements or larger than the region, and an epsilon that is negative or no number;
    /// [`Error::Disagreement`] where ranks do not agree on the norm.
    pub fn all_reduce_rms_norm<T: Element>(
        &self,
        input: &[T],
        residual: &mut [T],
        output: &mut [T],
        norm: RmsNorm<'_, impl AsRef<[T]> + ?Sized>,
    ) -> Result<()> {
        same_length(input.len(), residual.len())?;
        same_length(input.len(), output.len())?;
        let raw = Self::raw_norm::<T>(&norm, output.as_mut_ptr() as u64)?;
        // SAFETY: the slices hold a message and a row of weights for the length of the call; an exclusive borrow overlaps with no
        // other.
        unsafe { self.add(input.as_ptr() as u64, residual, None, Some(raw)) }
    }

    /// [`Communicator::all_reduce_rms_norm`] that also has the sum of the ranks' inputs alone, in `sum`: the bits of
    /// [`Communicator::all_reduce`]. Each rank adds its own residual to all rows, so that this may differ between ranks.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_rms_norm`].
    pub fn all_reduce_rms_norm_with_sum<T: Element>(
        &self,
        input: &[T],
        sum: &mut [T],
        residual: &mut [T],
        output: &mut [T],
        norm: RmsNorm<'_, impl AsRef<[T]> + ?Sized>,
    ) -> Result<()> {
        same_length(input.len(), sum.len())?;
        same_length(input.len(), residual.len())?;
        same_length(input.len(), output.len())?;
        let raw = Self::raw_norm::<T>(&norm, output.as_mut_ptr() as u64)?;
        // SAFETY: as in `all_reduce_rms_norm`.
        unsafe { self.add(input.as_ptr() as u64, residual, Some(sum), Some(raw)) }
    }

    /// [`Communicator::all_reduce_rms_norm`] with the normalised rows in place of the input.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_rms_norm`].
    pub fn all_reduce_rms_norm_in_place<T: Element>(
        &self,
        data: &mut [T],
        residual: &mut [T],
        norm: RmsNorm<'_, impl AsRef<[T]> + ?Sized>,
    ) -> Result<()> {
        same_length(data.len(), residual.len())?;
        let address = data.as_mut_ptr() as u64;
        let raw = Self::raw_norm::<T>(&norm, address)?;
        // SAFETY: as in `all_reduce_rms_norm`; normalised rows may be where the input was.
        unsafe { self.add(address, residual, None, Some(raw)) }
    }

    /// [`Communicator::all_reduce_rms_norm`] with the normalised rows as 8-bit numbers, for the next matrix product: `Q` is `i8`,
    /// or with the feature `float8` an 8-bit float. What is quantised is what that call gives, rounded to `T`.
    ///
    /// ```
    /// use fast_allreduce::{bootstrap::Threads, Communicator, Host, RmsNorm, Scales};
    ///
    /// # fn main() -> fast_allreduce::Result<()> {
    /// # let Some(bootstrap) = Threads::world(1)?.into_iter().next() else { return Ok(()) };
    /// let communicator = Communicator::builder().build(Host::new(), bootstrap)?;
    /// let (mut residual, mut output, mut scales) = ([0.0; 4], [0_i8; 4], [0.0; 2]);
    /// let norm = RmsNorm::new(2, 0.0);
    /// let input = [1.0_f32, -1.0, 0.0, 2.0];
    /// communicator.all_reduce_rms_norm_quantized(&input, &mut residual, &mut output, Scales::PerRow(&mut scales), norm)?;
    /// assert_eq!(output, [127, -127, 0, 127]);
    /// assert_eq!(scales, [1.0 / 127.0, 2.0_f32.sqrt() / 127.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_rms_norm`]; [`Error::InvalidSetting`] for another `Q`, and another number of scales than
    /// [`Scaling::count`].
    pub fn all_reduce_rms_norm_quantized<T: Element, Q: Element>(
        &self,
        input: &[T],
        residual: &mut [T],
        output: &mut [Q],
        scales: Scales<'_, [f32]>,
        norm: RmsNorm<'_, impl AsRef<[T]> + ?Sized>,
    ) -> Result<()> {
        same_length(input.len(), residual.len())?;
        same_length(input.len(), output.len())?;
        let (scaling, len, scales) = match scales {
            Scales::Given(scales) => (Scaling::Given, scales.len(), scales.as_ptr() as u64),
            Scales::PerRow(scales) => (Scaling::PerRow, scales.len(), scales.as_mut_ptr() as u64),
            Scales::PerGroup(scales) => (Scaling::PerGroup, scales.len(), scales.as_mut_ptr() as u64),
        };
        let quantized = RawQuantizedRows::Bytes { dtype: Q::DTYPE, scaling, scales };
        quantized.check_scales(len, input.len(), norm.hidden)?;
        let raw = Self::raw_norm::<T>(&norm, output.as_mut_ptr() as u64)?;
        let raw = RawRmsNorm { quantized: Some(quantized), ..raw };
        // SAFETY: as in `all_reduce_rms_norm`, and there are as many scales as the call has.
        unsafe { self.add(input.as_ptr() as u64, residual, None, Some(raw)) }
    }

    /// [`Communicator::all_reduce_rms_norm`] with the normalised rows as NVFP4, two elements in a byte of `output`: what is
    /// quantised is what that call gives, rounded to `T`.
    ///
    /// ```
    /// use fast_allreduce::{bootstrap::Threads, Communicator, Host, Nvfp4Scales, RmsNorm, ScaleLayout};
    ///
    /// # fn main() -> fast_allreduce::Result<()> {
    /// # let Some(bootstrap) = Threads::world(1)?.into_iter().next() else { return Ok(()) };
    /// let communicator = Communicator::builder().build(Host::new(), bootstrap)?;
    /// let (mut residual, mut output, mut scales) = ([0.0; 32], [0_u8; 16], [0_u8; 2]);
    /// let scales_of = Nvfp4Scales { blocks: &mut scales[..], layout: ScaleLayout::RowMajor, global: &6.0 };
    /// let input: Vec<f32> = [1.0, -1.0].repeat(16);
    /// communicator.all_reduce_rms_norm_nvfp4(&input, &mut residual, &mut output, scales_of, RmsNorm::new(32, 0.0))?;
    /// assert_eq!(output, [0xF7; 16]); // 6 and -6, and
    /// assert_eq!(scales, [0x38; 2]); // 1, of which a sixth is in all
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_rms_norm`]; [`Error::InvalidSetting`] for rows that are no multiple of 16, and another number
    /// of scales than [`ScaleLayout::count`](crate::ScaleLayout::count); [`Error::LengthMismatch`] where `output` has not half as
    /// many bytes as there are elements.
    pub fn all_reduce_rms_norm_nvfp4<T: Element>(
        &self,
        input: &[T],
        residual: &mut [T],
        output: &mut [u8],
        scales: Nvfp4Scales<'_, [u8], f32>,
        norm: RmsNorm<'_, impl AsRef<[T]> + ?Sized>,
    ) -> Result<()> {
        same_length(input.len(), residual.len())?;
        same_length(input.len(), 2 * output.len())?;
        let Nvfp4Scales { blocks, layout, global } = scales;
        let (scales, global) = (blocks.as_mut_ptr() as u64, std::ptr::from_ref(global) as u64);
        let quantized = RawQuantizedRows::Nvfp4 { scales, layout, global };
        quantized.check_scales(blocks.len(), input.len(), norm.hidden)?;
        let raw = Self::raw_norm::<T>(&norm, output.as_mut_ptr() as u64)?;
        let raw = RawRmsNorm { quantized: Some(quantized), ..raw };
        // SAFETY: as in `all_reduce_rms_norm`, and there are as many scales as the call has.
        unsafe { self.add(input.as_ptr() as u64, residual, None, Some(raw)) }
    }

    /// Adds the sum of the ranks' `input`s to `residual`, which must be the same on all ranks.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`]; [`Error::InvalidSetting`] for a type other than f16, bf16 and f32.
    pub fn all_reduce_add<T: Element>(&self, input: &[T], residual: &mut [T]) -> Result<()> {
        same_length(input.len(), residual.len())?;
        // SAFETY: as in `all_reduce_rms_norm`.
        unsafe { self.add(input.as_ptr() as u64, residual, None, None) }
    }

    fn raw_norm<T: Element>(norm: &RmsNorm<'_, impl AsRef<[T]> + ?Sized>, output: u64) -> Result<RawRmsNorm> {
        let weight: Option<&[T]> = norm.weight.map(AsRef::as_ref);
        norm.check_weight(weight.map(<[T]>::len))?;
        Ok(norm.at(weight.map_or(0, |weight| weight.as_ptr() as u64), output))
    }

    /// # Safety
    ///
    /// `input` is valid for reads of as many elements as `residual` has, the output of `norm` for writes, and its weight for reads
    /// of a row. They overlap as [`Epilogue`] permits.
    unsafe fn add<T: Element>(
        &self,
        input: u64,
        residual: &mut [T],
        sum: Option<&mut [T]>,
        norm: Option<RawRmsNorm>,
    ) -> Result<()> {
        let (count, residual) = (residual.len(), residual.as_mut_ptr() as u64);
        let (output, residual_out) = match sum {
            Some(sum) => (sum.as_mut_ptr() as u64, residual),
            None => (residual, 0),
        };
        let epilogue = Epilogue { residual, residual_out, norm };
        let collective = Collective::AllReduceEpilogue(&epilogue);
        let call = Call { collective, input, output, count, dtype: T::DTYPE };
        call.check_arguments(self.rank(), self.world_size())?;
        self.check_row(&call)?;
        // SAFETY: the caller's.
        unsafe { self.run(call) }
    }
}
