//! Sums that go on, as typed values: with a residual, a norm of rows, and quantised rows.

use super::Communicator;
use crate::call::{same_length, Call, Collective, RawFused, RawQuantizedRows};
use crate::catalogue::{DType, Norm, Scaling};
use crate::device::{Device, Host};
use crate::element::Element;
use crate::error::{Error, Result};

/// What typed calls of a device take as memory: slices on the host, anything that has a pointer for cudarc on a GPU.
pub trait Slices: Device {
    /// Memory that is read.
    type Read<'a, T: 'a>: Copy;
    /// Memory that is written.
    type Write<'a, T: 'a>;

    /// Its elements.
    #[doc(hidden)]
    fn len<T>(slice: Self::Read<'_, T>) -> usize;
    /// Its elements.
    #[doc(hidden)]
    fn len_mut<T>(slice: &Self::Write<'_, T>) -> usize;
}

impl Slices for Host {
    type Read<'a, T: 'a> = &'a [T];
    type Write<'a, T: 'a> = &'a mut [T];

    fn len<T>(slice: &[T]) -> usize {
        slice.len()
    }
    fn len_mut<T>(slice: &&mut [T]) -> usize {
        slice.len()
    }
}

/// Scales of quantised rows: one that is read; floats that are written; bytes that are written, with a global one that is read.
pub(super) enum Scales<'a, D: Slices> {
    Given(D::Read<'a, f32>),
    Written(Scaling, D::Write<'a, f32>),
    Blocks(Scaling, D::Write<'a, u8>, D::Read<'a, f32>),
}

impl<D: Slices> Scales<'_, D> {
    pub(super) fn scaling(&self) -> Scaling {
        match self {
            Self::Given(_) => Scaling::Given,
            Self::Written(scaling, _) | Self::Blocks(scaling, ..) => *scaling,
        }
    }
}

/// What an allreduce does with its sum, for `all_reduce_fused` of a communicator: adds it to a residual, and as it is asked for
/// keeps the plain sum and normalises the rows. `T` is the type of the call, `Q` that of quantised rows.
///
/// ```
/// use fast_allreduce::{Fused, Norm};
///
/// let (mut residual, mut rows, weight) = ([0.0_f32; 8192], [0.0; 8192], [1.0; 4096]);
/// let norm = Norm::Rms { epsilon: 1e-5, unit_offset: false }; // Gemma has a unit offset
/// let fused = Fused::on_host(&mut residual).norm(norm, 4096).weight(&weight).rows(&mut rows);
/// # let _ = fused;
/// ```
#[must_use]
pub struct Fused<'a, D: Slices, T: 'a, Q: 'a = T> {
    pub(super) residual: D::Write<'a, T>,
    pub(super) sum: Option<D::Write<'a, T>>,
    pub(super) norm: Norm,
    pub(super) hidden: usize,
    pub(super) weight: Option<D::Read<'a, T>>,
    pub(super) bias: Option<D::Read<'a, T>>,
    pub(super) rows: Option<D::Write<'a, T>>,
    pub(super) quantized: Option<(D::Write<'a, Q>, Scales<'a, D>)>,
}

impl<'a, T: Element> Fused<'a, Host, T> {
    /// Adds the sum to the residual, in place. All ranks have the same there, unless the plain sum is asked for.
    pub fn on_host(residual: &'a mut [T]) -> Self {
        Self::new(residual)
    }
}

impl<'a, D: Slices, T: Element> Fused<'a, D, T> {
    pub(super) fn new(residual: D::Write<'a, T>) -> Self {
        Self {
            residual,
            sum: None,
            norm: Norm::None,
            hidden: 0,
            weight: None,
            bias: None,
            rows: None,
            quantized: None,
        }
    }
}

impl<'a, D: Slices, T: Element, Q: Element> Fused<'a, D, T, Q> {
    /// Keeps the sum of the ranks' inputs alone as well: the bits of [`Communicator::all_reduce`]. Each rank then adds its own
    /// residual to all rows, so that this may differ between ranks.
    pub fn sum(self, sum: D::Write<'a, T>) -> Self {
        Self { sum: Some(sum), ..self }
    }

    /// Normalises the residual's sum in rows of `hidden` elements, which go where [`Fused::rows`] or [`Fused::quantized`] says.
    pub fn norm(self, norm: Norm, hidden: usize) -> Self {
        Self { norm, hidden, ..self }
    }

    /// Multiplies element i of each normalised row by `weight[i]`.
    pub fn weight(self, weight: D::Read<'a, T>) -> Self {
        Self { weight: Some(weight), ..self }
    }

    /// Adds `bias[i]` to element i of each normalised row, if the norm takes a bias.
    pub fn bias(self, bias: D::Read<'a, T>) -> Self {
        Self { bias: Some(bias), ..self }
    }

    /// Where normalised rows go.
    pub fn rows(self, rows: D::Write<'a, T>) -> Self {
        Self { rows: Some(rows), ..self }
    }

    /// Quantises the normalised rows, as [`Fused::rows`] would have them, to `i8` or, with the feature `float8`, 8-bit floats. There
    /// are as many scales as [`Scaling::scales`] tells, which the call writes.
    pub fn quantized<N: Element>(
        self,
        scaling: Scaling,
        numbers: D::Write<'a, N>,
        scales: D::Write<'a, f32>,
    ) -> Fused<'a, D, T, N> {
        self.with(numbers, Scales::Written(scaling, scales))
    }

    /// [`Fused::quantized`] with one scale that is given, the same on all ranks ([`Scaling::Given`]).
    pub fn quantized_by<N: Element>(
        self,
        numbers: D::Write<'a, N>,
        scale: D::Read<'a, f32>,
    ) -> Fused<'a, D, T, N> {
        self.with(numbers, Scales::Given(scale))
    }

    /// [`Fused::quantized`] to 4-bit numbers, two in a byte, whose scales are bytes. The global scale is read: a positive number, the
    /// same on all ranks. `448 * 6 / greatest` suits numbers of at most the greatest magnitude.
    pub fn quantized_blocks(
        self,
        scaling: Scaling,
        numbers: D::Write<'a, u8>,
        scales: D::Write<'a, u8>,
        global: D::Read<'a, f32>,
    ) -> Fused<'a, D, T, u8> {
        self.with(numbers, Scales::Blocks(scaling, scales, global))
    }

    fn with<N>(self, numbers: D::Write<'a, N>, how: Scales<'a, D>) -> Fused<'a, D, T, N> {
        let Self { residual, sum, norm, hidden, weight, bias, rows, .. } = self;
        Fused { residual, sum, norm, hidden, weight, bias, rows, quantized: Some((numbers, how)) }
    }

    /// What the call does, with memory at these addresses.
    pub(super) fn at(&self, at: &Addresses) -> RawFused {
        let quantized = self.quantized.as_ref().map(|(_, how)| (how.scaling(), Q::DTYPE));
        at.raw(self.norm, self.hidden, quantized)
    }

    /// Addresses that stand for memory that there is.
    #[cfg(feature = "cuda")]
    pub(super) fn placeholders(&self, in_place: bool) -> Addresses {
        Addresses {
            residual: 1,
            sum: self.sum.is_some().into(),
            weight: self.weight.is_some().into(),
            bias: self.bias.is_some().into(),
            rows: (in_place || self.rows.is_some()).into(),
            numbers: 1,
            scales: 1,
            global: 1,
        }
    }

    /// Refuses memory of another length than the call has there, and a second place for rows of a call in place.
    pub(super) fn check_lengths(&self, count: usize, in_place: bool) -> Result<()> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        let messages = [Some(&self.residual), self.sum.as_ref(), self.rows.as_ref()];
        for message in messages.into_iter().flatten() {
            same_length(count, D::len_mut(message))?;
        }
        for (name, one) in [("weight", self.weight), ("bias", self.bias)] {
            let hidden = self.hidden;
            if let Some(len) = one.map(D::len).filter(|&len| len != hidden) {
                let value = format!("{len} elements for rows of {hidden}");
                return refuse(name, value, "one for each element of a row");
            }
        }
        if in_place && self.rows.is_some() {
            return refuse("rows", "a place".to_owned(), "none, where rows go where the input is");
        }
        let Some((numbers, how)) = &self.quantized else { return Ok(()) };
        let (scaling, hidden) = (how.scaling(), self.hidden);
        let (len, global, is_such) = match how {
            Scales::Given(scale) => (D::len(*scale), 1, true),
            Scales::Written(_, scales) => {
                (D::len_mut(scales), 1, !scaling.is_given() && !scaling.has_global())
            }
            Scales::Blocks(_, scales, global) => (D::len_mut(scales), D::len(*global), scaling.has_global()),
        };
        if !is_such {
            let expected =
                "a format whose scales are those: floats that are written, or bytes with a global one";
            return refuse("scaling", scaling.to_string(), expected);
        }
        same_length(count, D::len_mut(numbers) * (8 / scaling.bits()))?;
        if len != scaling.scales(count / hidden.max(1), hidden) {
            let value = format!("{len} for {count} elements in rows of {hidden}");
            return refuse("scales", value, "as many as Scaling::scales tells");
        }
        match global {
            1 => Ok(()),
            _ => refuse("global scale", format!("{global} elements"), "one"),
        }
    }
}

/// Where a call's memory is; 0 where there is none.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Addresses {
    pub residual: u64,
    pub sum: u64,
    pub weight: u64,
    pub bias: u64,
    pub rows: u64,
    pub numbers: u64,
    pub scales: u64,
    pub global: u64,
}

impl Addresses {
    pub fn raw(&self, norm: Norm, hidden: usize, quantized: Option<(Scaling, DType)>) -> RawFused {
        let &Self { residual, sum, weight, bias, rows, numbers, scales, global } = self;
        let rows_of = |(scaling, dtype)| RawQuantizedRows { scaling, dtype, numbers, scales, global };
        let quantized = quantized.map(rows_of);
        RawFused { residual, residual_out: residual, sum, norm, hidden, weight, bias, rows, quantized }
    }
}

impl<D: Device> Communicator<D> {
    /// Refuses rows that the region has no room for.
    pub(super) fn check_row(&self, call: &Call<'_>) -> Result<()> {
        match call.collective.fused().and_then(RawFused::row) {
            Some(row) => self.planner.check_row(row, call.dtype),
            None => Ok(()),
        }
    }
}

impl Communicator<Host> {
    /// What a transformer's layer does after its allreduce, in one: adds the sum of the ranks' `input`s to a residual, and does what
    /// else `fused` asks for. All ranks must have the same residual, weights and bias: each row's residual is that of one of them.
    ///
    /// The bits are those of [`Communicator::all_reduce`], an addition in f32 that is rounded to `T`, and the norm in f32 that is
    /// rounded to `T`; `docs/fused.md` has the formulas and the order of their sums. They are the same on every rank, whatever the
    /// algorithm. What is quantised are the rows, rounded to `T`.
    ///
    /// ```
    /// use fast_allreduce::{bootstrap::Threads, Communicator, Fused, Host, Norm, Scaling};
    ///
    /// # fn main() -> fast_allreduce::Result<()> {
    /// let norm = Norm::Rms { epsilon: 0.0, unit_offset: false };
    /// let ranks = Threads::world(2)?.into_iter().map(|bootstrap| {
    ///     std::thread::spawn(move || -> fast_allreduce::Result<Vec<f32>> {
    ///         let communicator = Communicator::builder().build(Host::new(), bootstrap)?;
    ///         let (input, weight) = (vec![1.0; 3 * 4], [0.5, 1.0, 2.0, 4.0]);
    ///         let (mut residual, mut output) = (vec![2.0; 3 * 4], vec![0.0; 3 * 4]);
    ///         let fused = Fused::on_host(&mut residual).norm(norm, 4).weight(&weight).rows(&mut output);
    ///         communicator.all_reduce_fused(&input, fused)?;
    ///         assert_eq!(residual, [4.0; 3 * 4]);
    ///         Ok(output)
    ///     })
    /// });
    /// for rank in ranks.collect::<Vec<_>>() {
    ///     assert_eq!(rank.join().unwrap()?, [0.5, 1.0, 2.0, 4.0].repeat(3));
    /// }
    ///
    /// // To 8-bit integers with a scale for each row, and to NVFP4.
    /// # let Some(bootstrap) = Threads::world(1)?.into_iter().next() else { return Ok(()) };
    /// let communicator = Communicator::builder().build(Host::new(), bootstrap)?;
    /// let (mut residual, mut numbers, mut scales) = ([0.0; 4], [0_i8; 4], [0.0; 2]);
    /// let fused = Fused::on_host(&mut residual).norm(norm, 2);
    /// let fused = fused.quantized(Scaling::PerRow, &mut numbers, &mut scales);
    /// communicator.all_reduce_fused(&[1.0_f32, -1.0, 0.0, 2.0], fused)?;
    /// assert_eq!(numbers, [127, -127, 0, 127]);
    /// assert_eq!(scales, [1.0 / 127.0, 2.0_f32.sqrt() / 127.0]);
    ///
    /// let (mut residual, mut numbers, mut scales) = ([0.0; 32], [0_u8; 16], [0_u8; 2]);
    /// let fused = Fused::on_host(&mut residual).norm(norm, 32);
    /// let fused = fused.quantized_blocks(Scaling::Nvfp4, &mut numbers, &mut scales, &[6.0]);
    /// communicator.all_reduce_fused(&[1.0_f32, -1.0].repeat(16), fused)?;
    /// assert_eq!(numbers, [0xF7; 16]); // 6 and -6, and
    /// assert_eq!(scales, [0x38; 2]); // 1, of which a sixth is in all
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`]; [`Error::LengthMismatch`] where memory has not the elements of the input, or numbers not
    /// the bytes that they become; [`Error::InvalidSetting`] for a type other than f16, bf16 and f32, a message that is not whole
    /// rows, rows of 0 or more than 65,536 elements or larger than the region, an epsilon that is negative or no number, another
    /// `Q` or number of scales than the format has, and rows that are no multiple of 16 for NVFP4; [`Error::Disagreement`] where
    /// ranks do not agree on the call.
    pub fn all_reduce_fused<T: Element, Q: Element>(
        &self,
        input: &[T],
        mut fused: Fused<'_, Host, T, Q>,
    ) -> Result<()> {
        fused.check_lengths(input.len(), false)?;
        let rows = fused.rows.as_mut().map_or(0, |rows| rows.as_mut_ptr() as u64);
        // SAFETY: the slices hold a message each, weights and biases a row, and as many scales as there are, for the length of the
        // call; an exclusive borrow overlaps with no other.
        unsafe { self.fused(input.as_ptr() as u64, input.len(), rows, fused) }
    }

    /// [`Communicator::all_reduce_fused`] with the normalised rows where the input is.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_fused`]; [`Error::InvalidSetting`] where `fused` has another place for them.
    pub fn all_reduce_fused_in_place<T: Element>(
        &self,
        data: &mut [T],
        fused: Fused<'_, Host, T>,
    ) -> Result<()> {
        fused.check_lengths(data.len(), true)?;
        let address = data.as_mut_ptr() as u64;
        // SAFETY: as in `all_reduce_fused`; rows may be where the input was.
        unsafe { self.fused(address, data.len(), address, fused) }
    }

    /// # Safety
    ///
    /// `input` is valid for reads of `count` elements, and `rows` for writes if it is not 0. Memory has the lengths of the call.
    unsafe fn fused<T: Element, Q: Element>(
        &self,
        input: u64,
        count: usize,
        rows: u64,
        mut fused: Fused<'_, Host, T, Q>,
    ) -> Result<()> {
        let address = |slice: Option<&[T]>| slice.map_or(0, |slice| slice.as_ptr() as u64);
        let mut at = Addresses {
            residual: fused.residual.as_mut_ptr() as u64,
            sum: fused.sum.as_mut().map_or(0, |sum| sum.as_mut_ptr() as u64),
            weight: address(fused.weight),
            bias: address(fused.bias),
            rows,
            ..Addresses::default()
        };
        if let Some((numbers, how)) = &mut fused.quantized {
            at.numbers = numbers.as_mut_ptr() as u64;
            (at.scales, at.global) = match how {
                Scales::Given(scale) => (scale.as_ptr() as u64, 0),
                Scales::Written(_, scales) => (scales.as_mut_ptr() as u64, 0),
                Scales::Blocks(_, scales, global) => (scales.as_mut_ptr() as u64, global.as_ptr() as u64),
            };
        }
        let raw = fused.at(&at);
        let call = Call::fused(&raw, input, count, T::DTYPE);
        call.check_arguments(self.rank(), self.world_size())?;
        self.check_row(&call)?;
        // SAFETY: the caller's.
        unsafe { self.run(call) }
    }

    /// [`Communicator::all_reduce_fused`] by address.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_fused`]; [`Error::InvalidPointer`] for null and misaligned pointers, and for memory that
    /// overlaps where [`RawFused`] does not permit it.
    ///
    /// # Safety
    ///
    /// `input` is valid for reads of `count` elements of `dtype`, and what `fused` has the addresses of for reads or writes as it
    /// tells, and no other thread writes the one or accesses the other during the call.
    pub unsafe fn all_reduce_fused_raw(
        &self,
        input: *const std::ffi::c_void,
        count: usize,
        dtype: DType,
        fused: &RawFused,
    ) -> Result<()> {
        let output = fused.output() as *mut _;
        // SAFETY: the caller's.
        unsafe { self.collective_raw(Collective::AllReduceFused(fused), input, output, count, dtype) }
    }
}
