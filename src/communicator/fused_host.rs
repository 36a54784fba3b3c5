//! Fused allreduces and reduce-scatters of the host.

use super::fused::{Addresses, Form, Fused, Scales};
use super::Communicator;
use crate::call::{Call, Collective, RawFused};
use crate::catalogue::DType;
use crate::device::Host;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

impl Communicator<Host> {
    /// Sums the ranks' `input`s, adds the sum to a residual, and normalises and quantises rows as `fused` says.
    ///
    /// This is what a transformer's layer does after its allreduce, in one call. All ranks must have the same weights
    /// and bias, and, unless [`Fused::sum`] is used, the same residual: one rank may complete a row for all.
    ///
    /// The bits are those of [`Communicator::all_reduce`], then of an addition in f32 rounded to `T`, then of the norm
    /// in f32 rounded to `T`. They are the same on every rank, with any algorithm. Quantisation takes the rows rounded
    /// to `T`. `docs/fused.md` has the formulas and the order of additions.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let (input, weight) = (vec![1.0_f32; 3 * 4], [0.5, 1.0, 2.0, 4.0]);
    /// let (mut residual, mut output) = (vec![2.0; 3 * 4], vec![0.0; 3 * 4]);
    /// let norm = Norm::Rms { epsilon: 0.0, unit_offset: false };
    /// let fused = Fused::on_host(&mut residual).norm(norm, 4).weight(&weight).rows(&mut output);
    /// communicator.all_reduce_fused(&input, fused)?;
    /// assert_eq!(residual, [4.0; 3 * 4]);
    /// assert_eq!(output, [0.5, 1.0, 2.0, 4.0].repeat(3));
    ///
    /// // Rows of 8-bit integers, with a scale for each row.
    /// let (mut residual, mut numbers, mut scales) = ([0.0; 4], [0_i8; 4], [0.0; 2]);
    /// let fused = Fused::on_host(&mut residual).norm(norm, 2);
    /// let fused = fused.quantized(Scaling::PerRow, &mut numbers, &mut scales);
    /// communicator.all_reduce_fused(&[1.0_f32, -1.0, 0.0, 2.0], fused)?;
    /// assert_eq!(numbers, [127, -127, 0, 127]);
    /// assert_eq!(scales, [1.0 / 127.0, 2.0_f32.sqrt() / 127.0]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// * [`Error::LengthMismatch`], if the residual, the plain sum, the rows or the numbers do not have the input's
    ///   elements.
    /// * [`Error::InvalidSetting`] for a table of experts with an entry that is no row of the input, or of a length
    ///   that does not fit the rows; for a type other than f16, bf16 and f32; a message that is not whole rows; rows
    ///   of 0 or more than 65,536 elements, or larger than the region; an epsilon that is negative, infinite or NaN;
    ///   weights or a bias without an element for each element of a row; and a type, number of scales or length of
    ///   rows that the format of quantised rows does not have.
    /// * [`Error::Disagreement`] also where ranks ask for different norms, rows or formats.
    /// * [Errors of every call](Communicator#errors-of-every-call).
    pub fn all_reduce_fused<T: Element, Q: Element>(
        &self,
        input: &[T],
        mut fused: Fused<'_, Host, T, Q>,
    ) -> Result<()> {
        fused.check_lengths(input.len(), false)?;
        let rows = fused.rows.as_mut().map_or(0, |rows| rows.as_mut_ptr() as u64);
        // SAFETY: `check_lengths` passed, and the slices are borrowed for the length of the call. An exclusive borrow
        // overlaps with no other.
        unsafe { self.fused(Form::AllReduce, input.as_ptr() as u64, input.len(), rows, fused) }
    }

    /// Sums the ranks' `input`s, and applies `fused` to share r of the sum on rank r.
    ///
    /// This is [`Communicator::all_reduce_fused`] for models with sequence parallelism: each rank keeps its own rows,
    /// with the bits of the allreduce. The residual and all memory of `fused` are those of the rank's own share, so no
    /// rank needs the residual of another. All shares have the length of the residual, and `input` has that length
    /// times the number of ranks. Scales of quantised rows are placed as in a message that has only the own rows.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let rank = communicator.rank();
    /// let (input, mut residual, mut rows) = ([1.0_f32, -1.0, 2.0, 2.0], [0.0; 2], [0.0; 2]);
    /// let norm = Norm::Rms { epsilon: 0.0, unit_offset: false };
    /// let fused = Fused::on_host(&mut residual).norm(norm, 2).rows(&mut rows);
    /// communicator.reduce_scatter_fused(&input, fused)?;
    /// assert_eq!(residual, [[2.0, -2.0], [4.0, 4.0]][rank]);
    /// assert_eq!(rows, [[1.0, -1.0], [1.0, 1.0]][rank]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce_fused`], where the residual's elements are those of the own share;
    /// [`Error::InvalidSetting`] also for a plain sum, for experts, and if the region has no room for a row of each
    /// rank.
    pub fn reduce_scatter_fused<T: Element, Q: Element>(
        &self,
        input: &[T],
        fused: Fused<'_, Host, T, Q>,
    ) -> Result<()> {
        self.scatter_fused(Form::ReduceScatter, input, fused)
    }

    /// Reduces as [`Communicator::reduce_scatter_fused`] does, with `counts[r]` elements in the share of rank r.
    ///
    /// `counts` is the same on all ranks. Each is a number of whole rows, and may be 0. `input` has the sum of all
    /// counts.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let counts = [2, 4];
    /// let own = counts[communicator.rank()];
    /// let (mut residual, mut rows) = (vec![0.0_f32; own], vec![0.0; own]);
    /// let norm = Norm::Rms { epsilon: 0.0, unit_offset: false };
    /// let fused = Fused::on_host(&mut residual).norm(norm, 2).rows(&mut rows);
    /// communicator.reduce_scatter_fused_v(&[1.5; 6], fused, &counts)?;
    /// assert_eq!((residual, rows), (vec![3.0; own], vec![1.0; own]));
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::reduce_scatter_fused`]; [`Error::InvalidSetting`] also unless there is a count for each
    /// rank; [`Error::Disagreement`] also where counts differ.
    pub fn reduce_scatter_fused_v<T: Element, Q: Element>(
        &self,
        input: &[T],
        fused: Fused<'_, Host, T, Q>,
        counts: &[usize],
    ) -> Result<()> {
        self.scatter_fused(Form::ReduceScatterV(counts), input, fused)
    }

    fn scatter_fused<T: Element, Q: Element>(
        &self,
        form: Form<'_>,
        input: &[T],
        mut fused: Fused<'_, Host, T, Q>,
    ) -> Result<()> {
        let share = fused.residual.len();
        self.check_shares(form, input.len(), share)?;
        fused.check_lengths(share, false)?;
        let rows = fused.rows.as_mut().map_or(0, |rows| rows.as_mut_ptr() as u64);
        // SAFETY: as in `all_reduce_fused`; `check_shares` passed.
        unsafe { self.fused(form, input.as_ptr() as u64, share, rows, fused) }
    }

    /// Reduces as [`Communicator::all_reduce_fused`] does, and stores the normalised rows in `data`, the input.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let (mut data, mut residual) = ([1.0_f32, 1.0], [2.0, -6.0]);
    /// let norm = Norm::Rms { epsilon: 0.0, unit_offset: false };
    /// let fused = Fused::on_host(&mut residual).norm(norm, 2);
    /// communicator.all_reduce_fused_in_place(&mut data, fused)?;
    /// assert_eq!((residual, data), ([4.0, -4.0], [1.0, -1.0]));
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce_fused`]; [`Error::InvalidSetting`] also where `fused` has separate memory
    /// for rows.
    pub fn all_reduce_fused_in_place<T: Element>(
        &self,
        data: &mut [T],
        fused: Fused<'_, Host, T>,
    ) -> Result<()> {
        fused.check_lengths(data.len(), true)?;
        let address = data.as_mut_ptr() as u64;
        // SAFETY: as in `all_reduce_fused`; rows may overwrite the input.
        unsafe { self.fused(Form::AllReduce, address, data.len(), address, fused) }
    }

    /// Carries out a fused call from `input`. Rows go to `rows` if it is not 0.
    ///
    /// # Safety
    ///
    /// During the call, `input` is valid for reads of what the collective reads for `elements` elements, and `rows`, if
    /// it is not 0, for writes. The memory in `fused` has the lengths of the call.
    unsafe fn fused<T: Element, Q: Element>(
        &self,
        form: Form<'_>,
        input: u64,
        elements: usize,
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
                Scales::Bytes(_, scales, global) => {
                    (scales.as_mut_ptr() as u64, global.map_or(0, |global| global.as_ptr() as u64))
                }
            };
        }
        if let Some(experts) = &fused.experts {
            at.table = experts.table.as_ptr() as u64;
            at.expert_weights = experts.weights.map_or(0, |weights| weights.as_ptr() as u64);
            at.shared = address(experts.shared);
        }
        let raw = fused.at(&at, elements);
        let call = Call::fused(form.of(&raw), input, fused.count(elements), T::DTYPE);
        call.check_arguments(self.rank(), self.world_size())?;
        self.check_row(&call)?;
        // SAFETY: the caller's obligation.
        unsafe { self.run(call) }
    }

    /// Reduces as [`Communicator::all_reduce_fused`] does, with memory by address.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let (input, mut residual) = ([1.0_f32; 8], [0.5_f32; 8]);
    /// let address = residual.as_mut_ptr() as u64;
    /// let fused = RawFused { residual: address, residual_out: address, ..RawFused::default() };
    /// // SAFETY: both arrays have 8 elements, and only this thread has them.
    /// unsafe { communicator.all_reduce_fused_raw(input.as_ptr().cast(), 8, DType::F32, &fused)? };
    /// assert_eq!(residual, [2.5; 8]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce_fused`]; [`Error::InvalidPointer`] for null and misaligned pointers, and for
    /// memory that overlaps where [`RawFused`] does not permit it.
    ///
    /// # Safety
    ///
    /// During the call, `input` is valid for reads of `count` elements of `dtype`, and the memory whose addresses are
    /// in `fused` for the reads and writes that [`RawFused`] describes. No other thread writes what is read or accesses
    /// what is written.
    pub unsafe fn all_reduce_fused_raw(
        &self,
        input: *const std::ffi::c_void,
        count: usize,
        dtype: DType,
        fused: &RawFused,
    ) -> Result<()> {
        let output = fused.output() as *mut _;
        // SAFETY: the caller's obligation.
        unsafe { self.collective_raw(Collective::AllReduceFused(fused), input, output, count, dtype) }
    }
}
