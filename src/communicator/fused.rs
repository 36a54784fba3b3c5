//! Fused allreduces and reduce-scatters as typed values: a residual, a norm of rows, and quantised rows.

use super::experts::Experts;
use super::slices::Slices;
use super::Communicator;
use crate::call::{same_length, Call, Collective, RawExperts, RawFused, RawQuantizedRows};
use crate::catalogue::{DType, Norm, Scaling};
use crate::device::{Device, Host};
use crate::element::Element;
use crate::error::{Error, Result};

/// Scales of quantised rows: one scale that is read; floats that are written; or bytes that are written, possibly with
/// a global scale that is read.
pub(super) enum Scales<'a, D: Slices> {
    Given(D::Read<'a, f32>),
    Written(Scaling, D::Write<'a, f32>),
    Bytes(Scaling, D::Write<'a, u8>, Option<D::Read<'a, f32>>),
}

impl<D: Slices> Scales<'_, D> {
    pub(super) fn scaling(&self) -> Scaling {
        match self {
            Self::Given(_) => Scaling::Given,
            Self::Written(scaling, _) | Self::Bytes(scaling, ..) => *scaling,
        }
    }
}

/// Operations that [`all_reduce_fused`](Communicator#method.all_reduce_fused) and
/// [`reduce_scatter_fused`](Communicator#method.reduce_scatter_fused) apply to their sum.
///
/// The sum is added to a residual. On request the plain sum is stored too, and the normalised rows are stored as they
/// are ([`Fused::rows`]), quantised, or both. `T` is the type of the call, `Q` that of quantised rows.
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(2, |communicator| {
/// let (input, weight, bias) = (vec![0.5_f32; 8192], vec![1.0; 4096], vec![0.1; 4096]);
/// let (mut residual, mut sum, mut rows) = (vec![0.0; 8192], vec![0.0; 8192], vec![0.0; 8192]);
/// let rms = Norm::Rms { epsilon: 1e-5, unit_offset: false }; // Gemma has a unit offset.
/// let fused = Fused::on_host(&mut residual).norm(rms, 4096).weight(&weight).rows(&mut rows);
/// communicator.all_reduce_fused(&input, fused)?;
/// assert!((rows[0] - 1.0).abs() < 1e-4);
///
/// // The plain sum as well, and rows of 8-bit integers with a scale that is given.
/// let mut numbers = vec![0_i8; 8192];
/// let layer = Norm::Layer { epsilon: 1e-5, unit_offset: false };
/// let fused = Fused::on_host(&mut residual).sum(&mut sum).norm(layer, 4096);
/// let fused = fused.weight(&weight).bias(&bias).quantized_by(&mut numbers, &[0.1]);
/// communicator.all_reduce_fused(&input, fused)?;
/// assert_eq!((sum[0], residual[0], numbers[0]), (1.0, 2.0, 1));
///
/// // NVFP4: two numbers in a byte, a scale for each 16, and a global scale.
/// let (mut residual, mut numbers, mut scales) = ([0.0; 32], [0_u8; 16], [0_u8; 2]);
/// let rms = Norm::Rms { epsilon: 0.0, unit_offset: false };
/// let fused = Fused::on_host(&mut residual).norm(rms, 32);
/// let fused = fused.quantized_blocks(Scaling::Nvfp4, &mut numbers, &mut scales, &[6.0]);
/// communicator.all_reduce_fused(&[1.0_f32, -1.0].repeat(16), fused)?;
/// assert_eq!(numbers, [0xF7; 16]); // 6 and -6,
/// assert_eq!(scales, [0x38; 2]); // times 1, over the global scale of 6.
/// # Ok(()) });
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
    pub(super) experts: Option<Experts<'a, D, T>>,
}

impl<'a, T: Element> Fused<'a, Host, T> {
    /// Adds the sum to `residual`, in place. In an allreduce all ranks have the same residual, unless [`Fused::sum`] is
    /// used.
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
            experts: None,
        }
    }
}

impl<'a, D: Slices, T: Element, Q: Element> Fused<'a, D, T, Q> {
    /// Stores the sum of the ranks' inputs alone as well, with the bits of [`Communicator::all_reduce`].
    ///
    /// Then each rank adds its own residual to all rows, so the residuals of the ranks may differ. A reduce-scatter
    /// refuses it.
    pub fn sum(self, sum: D::Write<'a, T>) -> Self {
        Self { sum: Some(sum), ..self }
    }

    /// Normalises the new residual in rows of `hidden` elements.
    ///
    /// [`Fused::rows`] and the methods for quantised rows say where the rows are stored.
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

    /// Stores the normalised rows in `rows`, in the type of the call.
    pub fn rows(self, rows: D::Write<'a, T>) -> Self {
        Self { rows: Some(rows), ..self }
    }

    /// Computes the input from experts' rows, which are then the input of the call. A reduce-scatter refuses them.
    pub fn experts(self, experts: Experts<'a, D, T>) -> Self {
        Self { experts: Some(experts), ..self }
    }

    /// Quantises the normalised rows to `i8` or 8-bit floats (feature `float8`), and computes the scales.
    ///
    /// The rows are first rounded to the type of the call, as [`Fused::rows`] has them. `scales` has
    /// [`Scaling::scales`] elements.
    pub fn quantized<N: Element>(
        self,
        scaling: Scaling,
        numbers: D::Write<'a, N>,
        scales: D::Write<'a, f32>,
    ) -> Fused<'a, D, T, N> {
        self.with(numbers, Scales::Written(scaling, scales))
    }

    /// Quantises the normalised rows by one scale that is given, the same on all ranks ([`Scaling::Given`]).
    ///
    /// `scale` has one element. Numbers are as with [`Fused::quantized`].
    pub fn quantized_by<N: Element>(
        self,
        numbers: D::Write<'a, N>,
        scale: D::Read<'a, f32>,
    ) -> Fused<'a, D, T, N> {
        self.with(numbers, Scales::Given(scale))
    }

    /// Quantises the normalised rows to 4-bit numbers, two per byte, with one-byte scales and a global scale.
    ///
    /// `scales` has [`Scaling::scales`] elements. `global` has one, which is read: a positive number, the same on all
    /// ranks. For numbers of magnitudes up to `greatest`, `448 * 6 / greatest` is suitable.
    pub fn quantized_blocks(
        self,
        scaling: Scaling,
        numbers: D::Write<'a, u8>,
        scales: D::Write<'a, u8>,
        global: D::Read<'a, f32>,
    ) -> Fused<'a, D, T, u8> {
        self.with(numbers, Scales::Bytes(scaling, scales, Some(global)))
    }

    /// Quantises the normalised rows to 8-bit floats (feature `float8`), or to 4-bit numbers, two per `u8`, with scales
    /// that are powers of two: E8M0, one byte each.
    ///
    /// `scales` has [`Scaling::scales`] elements.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let (mut residual, mut numbers, mut scales) = ([0.0; 64], [0_u8; 32], [0_u8; 2]);
    /// let fused = Fused::on_host(&mut residual).norm(Norm::Rms { epsilon: 0.0, unit_offset: false }, 64);
    /// let fused = fused.quantized_e8m0(Scaling::Mxfp4, &mut numbers, &mut scales);
    /// communicator.all_reduce_fused(&[1.0_f32, -1.0].repeat(32), fused)?;
    /// assert_eq!(numbers, [0xE6; 32]); // 4 and -4,
    /// assert_eq!(scales, [125; 2]); // times 2^(125 - 127).
    /// # Ok(()) });
    /// ```
    pub fn quantized_e8m0<N: Element>(
        self,
        scaling: Scaling,
        numbers: D::Write<'a, N>,
        scales: D::Write<'a, u8>,
    ) -> Fused<'a, D, T, N> {
        self.with(numbers, Scales::Bytes(scaling, scales, None))
    }

    fn with<N>(self, numbers: D::Write<'a, N>, how: Scales<'a, D>) -> Fused<'a, D, T, N> {
        let Self { residual, sum, norm, hidden, weight, bias, rows, experts, .. } = self;
        Fused { residual, sum, norm, hidden, weight, bias, rows, quantized: Some((numbers, how)), experts }
    }

    /// Returns the number of elements of the call. `input` is that of the input.
    pub(super) fn count(&self, input: usize) -> usize {
        if self.experts.is_some() {
            D::len_mut(&self.residual)
        } else {
            input
        }
    }

    /// Returns the facts of the experts; `input` is the number of elements of their rows.
    pub(super) fn expert_facts(&self, input: usize) -> Option<RawExperts> {
        let &Experts { top_k, routed_scale, .. } = self.experts.as_ref()?;
        let rows = input / self.hidden.max(1);
        Some(RawExperts { top_k, rows, routed_scale, ..RawExperts::default() })
    }

    /// Returns the operands by address. `input` is the number of elements of the input.
    pub(super) fn at(&self, at: &Addresses, input: usize) -> RawFused {
        let quantized = self.quantized.as_ref().map(|(_, how)| (how.scaling(), Q::DTYPE));
        at.raw(self.norm, self.hidden, quantized, self.expert_facts(input))
    }

    /// Returns addresses that are not null where there is memory, for checks before the real addresses are known.
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
            table: 1,
            expert_weights: self.experts.as_ref().map_or(0, |experts| experts.weights.is_some().into()),
            shared: 1,
        }
    }

    /// Refuses memory of the wrong length, and separate memory for the rows of a call in place. `input` is the number
    /// of elements of the input.
    pub(super) fn check_lengths(&self, input: usize, in_place: bool) -> Result<()> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        let count = self.count(input);
        if let Some(experts) = &self.experts {
            let hidden = self.hidden.max(1);
            if in_place || input % hidden != 0 {
                let value = format!("{input} elements, in rows of {hidden}");
                return refuse(
                    "experts' rows",
                    value,
                    "whole rows, which the normalised rows do not replace",
                );
            }
            let entries = (count / hidden).saturating_mul(experts.top_k);
            for len in [Some(D::len(experts.table)), experts.weights.map(D::len)].into_iter().flatten() {
                if len != entries {
                    let value = format!("{len} for {count} elements in rows of {hidden}");
                    return refuse("expert_table", value, "top_k entries for each row, and as many weights");
                }
            }
            same_length(count, experts.shared.map_or(count, D::len))?;
        }
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
            return refuse("rows", "memory".to_owned(), "none: a call in place stores the rows in the input");
        }
        let Some((numbers, how)) = &self.quantized else { return Ok(()) };
        let (scaling, hidden) = (how.scaling(), self.hidden);
        let (len, global, fits) = match how {
            Scales::Given(scale) => (D::len(*scale), 1, true),
            Scales::Written(_, scales) => {
                (D::len_mut(scales), 1, !scaling.is_given() && scaling.scale_type() == DType::F32)
            }
            Scales::Bytes(_, scales, global) => {
                let fits = scaling.scale_type() == DType::U8 && scaling.has_global() == global.is_some();
                (D::len_mut(scales), global.map_or(1, D::len), fits)
            }
        };
        if !fits {
            let expected =
                "a format with such scales: floats that are written, bytes with a global scale, or E8M0";
            return refuse("scaling", scaling.to_string(), expected);
        }
        same_length(count, D::len_mut(numbers) * (8 / scaling.bits()))?;
        if len != scaling.scales(count / hidden.max(1), hidden) {
            let value = format!("{len} for {count} elements in rows of {hidden}");
            return refuse("scales", value, "as many as Scaling::scales returns");
        }
        match global {
            1 => Ok(()),
            _ => refuse("global scale", format!("{global} elements"), "one"),
        }
    }
}

/// Collective that a fused call is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Form<'a> {
    AllReduce,
    ReduceScatter,
    /// With the number of elements of each rank's share.
    ReduceScatterV(&'a [usize]),
}

impl<'a> Form<'a> {
    /// Returns the collective.
    pub fn of(self, fused: &'a RawFused) -> Collective<'a> {
        match self {
            Self::AllReduce => Collective::AllReduceFused(fused),
            Self::ReduceScatter => Collective::ReduceScatterFused(fused),
            Self::ReduceScatterV(counts) => Collective::ReduceScatterFusedV(fused, counts),
        }
    }
}

/// Addresses of a call's memory; 0 where there is none.
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
    pub table: u64,
    pub expert_weights: u64,
    pub shared: u64,
}

impl Addresses {
    pub fn raw(
        &self,
        norm: Norm,
        hidden: usize,
        quantized: Option<(Scaling, DType)>,
        experts: Option<RawExperts>,
    ) -> RawFused {
        let &Self { residual, sum, weight, bias, rows, numbers, scales, global, .. } = self;
        let &Self { table, expert_weights: weights, shared, .. } = self;
        let experts = experts.map(|facts| RawExperts { table, weights, shared, ..facts });
        let rows_of = |(scaling, dtype)| RawQuantizedRows { scaling, dtype, numbers, scales, global };
        let quantized = quantized.map(rows_of);
        RawFused {
            residual,
            residual_out: residual,
            sum,
            norm,
            hidden,
            weight,
            bias,
            rows,
            quantized,
            experts,
        }
    }
}

impl<D: Device> Communicator<D> {
    /// Refuses an input whose length is not that of all shares. `share` is the length of the rank's own share.
    pub(super) fn check_shares(&self, form: Form<'_>, input: usize, share: usize) -> Result<()> {
        let none = RawFused::default();
        let collective = form.of(&none);
        collective.check_counts(self.world_size())?;
        let (rank, world_size) = (self.rank(), self.world_size());
        same_length(collective.input_len(share, rank, world_size), input)?;
        same_length(collective.output_len(share, rank, world_size), share)
    }

    /// Refuses rows that do not fit into the region.
    pub(super) fn check_row(&self, call: &Call<'_>) -> Result<()> {
        match call.collective.fused().and_then(RawFused::row) {
            Some(row) => self.planner.check_row(row, call.dtype, call.division()),
            None => call
                .collective
                .gathered()
                .map_or(Ok(()), |rows| self.planner.check_gathered_row(rows.hidden, rows.staged_row())),
        }
    }
}
