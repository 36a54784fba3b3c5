//! All-gathers of quantised rows as typed values.

use super::slices::Slices;
use super::Communicator;
use crate::call::{same_length, Call, Collective, RawGatheredRows};
use crate::catalogue::Scaling;
use crate::device::Host;
use crate::element::Element;
use crate::error::{Error, Result};

/// Quantised rows of this rank, and memory for those of all ranks:
/// [`all_gather_rows`](Communicator#method.all_gather_rows) has an example.
///
/// `N` is the type of the numbers, `S` that of the scales: `f32` or `u8` ([`Scaling`]). A byte of `numbers` holds one
/// number of 8 bits, or two of 4 bits.
#[must_use]
pub struct GatheredRows<'a, D: Slices, N: 'a, S: 'a> {
    pub(super) scaling: Scaling,
    pub(super) hidden: usize,
    pub(super) own: (D::Read<'a, N>, D::Read<'a, S>),
    pub(super) all: (D::Write<'a, N>, D::Write<'a, S>),
}

impl<'a, N: Element, S: Element> GatheredRows<'a, Host, N, S> {
    /// Describes rows of `hidden` elements in a format: `own` has the numbers and the scales of this rank's rows, and
    /// `all` receives those of all ranks. Lengths of scales are those of [`Scaling::scales`].
    pub fn on_host(
        scaling: Scaling,
        hidden: usize,
        own: (&'a [N], &'a [S]),
        all: (&'a mut [N], &'a mut [S]),
    ) -> Self {
        Self { scaling, hidden, own, all }
    }
}

impl<D: Slices, N: Element, S: Element> GatheredRows<'_, D, N, S> {
    /// Returns the rows by address.
    pub(super) fn raw(&self, scales: u64, all_scales: u64) -> RawGatheredRows {
        RawGatheredRows { scaling: self.scaling, hidden: self.hidden, scales, all_scales }
    }

    /// Refuses rows that the format does not have, and slices of the wrong length. `call` has no addresses.
    pub(super) fn check(&self, call: &Call<'_>, rank: usize, world_size: usize) -> Result<()> {
        let &Self { scaling, hidden, ref own, ref all } = self;
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        call.check_arguments(rank, world_size)?;
        if S::DTYPE != scaling.scale_type() {
            return refuse("scales", format!("{} in {scaling}", S::DTYPE), "f32 or u8, as the format has");
        }
        let (reads, writes) = (D::len(own.0), D::len_mut(&all.0));
        same_length(call.collective.input_len(call.count, rank, world_size), reads)?;
        same_length(call.collective.output_len(call.count, rank, world_size), writes)?;
        let row_bytes = scaling.number_bytes(hidden);
        let lengths = [("scales", D::len(own.1), reads), ("all_scales", D::len_mut(&all.1), writes)];
        for (name, len, numbers) in lengths {
            if len != scaling.scales(numbers / row_bytes, hidden) {
                let value = format!("{len} for {} rows of {hidden}", numbers / row_bytes);
                return refuse(name, value, "as many as Scaling::scales returns");
            }
        }
        Ok(())
    }
}

/// Returns the collective, with counts or with equal shares.
pub(super) fn gather_of<'a>(rows: &'a RawGatheredRows, counts: Option<&'a [usize]>) -> Collective<'a> {
    match counts {
        None => Collective::AllGatherRows(rows),
        Some(counts) => Collective::AllGatherRowsV(rows, counts),
    }
}

impl Communicator<Host> {
    /// Gathers the ranks' quantised rows, in rank order: numbers, and scales in the layout of one message.
    ///
    /// With [`Communicator::reduce_scatter_fused`] this is the second half of a layer with sequence parallelism: it
    /// moves rows of 8 or 4 bits. Together they give the quantised rows of [`Communicator::all_reduce_fused`], bit for
    /// bit. All ranks have the same number of rows. Scales of a rank are placed as in a message that has only its rows.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let rank = communicator.rank();
    /// let (numbers, scales) = ([1_i8, 2, 3], [0.5 + rank as f32]); // A row of three elements.
    /// let (mut all, mut all_scales) = ([0; 6], [0.0; 2]);
    /// let rows = GatheredRows::on_host(
    ///     Scaling::PerRow, 3, (&numbers, &scales), (&mut all, &mut all_scales),
    /// );
    /// communicator.all_gather_rows(rows)?;
    /// assert_eq!((all, all_scales), ([1, 2, 3, 1, 2, 3], [0.5, 1.5]));
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] for the numbers; [`Error::InvalidSetting`] for scales of another type or number, for
    /// types and lengths of rows that the format does not have, for a format whose scale is given, for numbers that are
    /// not whole rows, and for rows larger than the region; [`Error::Disagreement`] also where ranks differ in the
    /// format or in the rows; [errors of every call](Communicator#errors-of-every-call).
    pub fn all_gather_rows<N: Element, S: Element>(&self, rows: GatheredRows<'_, Host, N, S>) -> Result<()> {
        self.gather_rows(None, rows)
    }

    /// Gathers as [`Communicator::all_gather_rows`] does, with `counts[r]` elements of `numbers` on rank r.
    ///
    /// `counts` is the same on all ranks. Each is a number of whole rows, and may be 0.
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_gather_rows`]; [`Error::InvalidSetting`] also unless there is a count for each
    /// rank.
    pub fn all_gather_rows_v<N: Element, S: Element>(
        &self,
        rows: GatheredRows<'_, Host, N, S>,
        counts: &[usize],
    ) -> Result<()> {
        self.gather_rows(Some(counts), rows)
    }

    fn gather_rows<N: Element, S: Element>(
        &self,
        counts: Option<&[usize]>,
        rows: GatheredRows<'_, Host, N, S>,
    ) -> Result<()> {
        let all_scales = rows.all.1.as_mut_ptr() as u64;
        let raw = rows.raw(rows.own.1.as_ptr() as u64, all_scales);
        let (collective, count) = (gather_of(&raw, counts), rows.own.0.len());
        let call = Call { collective, input: 0, output: 0, count, dtype: N::DTYPE };
        rows.check(&call, self.rank(), self.world_size())?;
        self.check_row(&call)?;
        self.between(collective, count, rows.own.0, rows.all.0)
    }
}
