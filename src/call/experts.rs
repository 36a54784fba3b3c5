//! Inputs that are computed from experts' rows, by address.

use serde::{Deserialize, Serialize};

use crate::abi::{FaExperts, FA_MOST_EXPERTS};
use crate::catalogue::DType;
use crate::error::{Error, Result};

/// The end of a mixture of experts, by address: the input of a fused call is computed from rows of experts.
///
/// The address of the input is that of the experts' rows, `rows` times [`RawFused::hidden`](super::RawFused::hidden)
/// elements, and the number of elements of the call is that of the residual. `docs/fused.md` defines the arithmetic, to
/// the bit. Each rank has its own experts: only whether there are any must be equal on all ranks.
///
/// ```
/// use fast_allreduce::{DType, RawExperts, RawFused};
///
/// // Row 0 is the sum of two experts' rows, and row 1 has no expert on this rank.
/// let table = [2_i32, 0, -1, -1];
/// let experts = RawExperts { table: table.as_ptr() as u64, top_k: 2, rows: 3, ..RawExperts::default() };
/// let fused = RawFused { experts: Some(experts), hidden: 64, ..RawFused::default() };
/// # assert_eq!(fused.experts.unwrap().routed_scale, 1.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RawExperts {
    /// Address of the table: `top_k` numbers of type `i32` for each row of the message, each the number of an experts'
    /// row, or negative for none.
    pub table: u64,
    /// Number of experts of a row: 1 to 64.
    pub top_k: usize,
    /// Number of experts' rows.
    pub rows: usize,
    /// Address of the weights, one for each entry of the table; 0 for weights of 1.
    pub weights: u64,
    /// Type of the weights: `F32`, or the type of the call.
    pub weights_dtype: DType,
    /// Address of the rows of a shared expert, as many elements as the message has; 0 for none.
    pub shared: u64,
    /// Factor of the sum of the weighted rows, before the shared expert's row is added. Finite.
    pub routed_scale: f32,
}

// The only float is `routed_scale`, and calls with a NaN are refused.
impl Eq for RawExperts {}

impl Default for RawExperts {
    fn default() -> Self {
        Self {
            table: 0,
            top_k: 1,
            rows: 0,
            weights: 0,
            weights_dtype: DType::F32,
            shared: 0,
            routed_scale: 1.0,
        }
    }
}

/// Operands without experts.
pub(super) const NO_EXPERTS: FaExperts = FaExperts {
    table: 0,
    weights: 0,
    shared: 0,
    first_entry: 0,
    top_k: 0,
    rows: 0,
    weights_dtype: 0,
    routed_scale: 0.0,
};

impl RawExperts {
    /// Returns the operands of a launch that begins at row `first` of the message. `row_bytes` is the size of a row.
    pub(super) fn piece(&self, first: usize, row_bytes: usize) -> FaExperts {
        let &Self { table, top_k, rows, weights, weights_dtype, shared, routed_scale } = self;
        let entries = first * top_k;
        let at = |address: u64, bytes: usize| if address == 0 { 0 } else { address + bytes as u64 };
        FaExperts {
            table: at(table, entries * DType::I32.size()),
            weights: at(weights, entries * weights_dtype.size()),
            shared: at(shared, first * row_bytes),
            first_entry: entries as u64,
            top_k: top_k as u32,
            rows: rows as u32,
            weights_dtype: weights_dtype as u32,
            routed_scale,
        }
    }

    /// Returns the number of entries of the table for `rows` rows of the message.
    pub(super) fn entries(&self, rows: usize) -> usize {
        rows.saturating_mul(self.top_k)
    }

    /// Checks the values for `rows` rows of the message.
    pub(super) fn check(&self, rows: usize, dtype: DType) -> Result<()> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        if !(1..=FA_MOST_EXPERTS as usize).contains(&self.top_k) {
            return refuse("top_k", self.top_k.to_string(), "1 to 64 experts of a row");
        }
        if i32::try_from(self.rows).is_err() || i32::try_from(self.entries(rows)).is_err() {
            let value = format!("{} rows, and {} entries of the table", self.rows, self.entries(rows));
            return refuse("experts", value, "less than 2^31 of both");
        }
        if self.weights != 0 && self.weights_dtype != DType::F32 && self.weights_dtype != dtype {
            let value = self.weights_dtype.to_string();
            return refuse("type of experts' weights", value, "f32 or the type of the call");
        }
        match self.routed_scale.is_finite() {
            true => Ok(()),
            false => refuse("routed_scale", self.routed_scale.to_string(), "a finite number"),
        }
    }

    /// Refuses a table that names rows that do not exist. On GPUs the kernels do that: tables are in device memory.
    ///
    /// # Safety
    ///
    /// `Call::check` has passed. The table is valid for reads of its entries for `rows` rows of the message.
    pub(super) unsafe fn check_table(&self, rows: usize) -> Result<()> {
        let entries = self.entries(rows);
        if entries == 0 {
            return Ok(());
        }
        // SAFETY: the caller's obligation; `Operand::new` has refused null and misaligned addresses.
        let table = unsafe { std::slice::from_raw_parts(self.table as *const i32, entries) };
        let is_missing = |&entry: &i32| entry >= self.rows as i32;
        // All entries, not until the first one that is missing: such a loop is vectorised.
        if table.iter().fold(false, |any, entry| any | is_missing(entry)) {
            let found = table.iter().zip(0..).find(|(entry, _)| is_missing(entry));
            let (entry, number) = found.map_or((0, 0), |(&entry, number)| (entry, number));
            return Err(no_expert(number, &format!(" is {entry}, of {} rows", self.rows)));
        }
        Ok(())
    }
}

/// Returns the error for an entry of the table of experts that is no row.
pub(crate) fn no_expert(entry: u32, facts: &str) -> Error {
    Error::InvalidSetting {
        name: "expert_table",
        value: format!("entry {entry}{facts}"),
        expected: "numbers of experts' rows, or negative numbers",
    }
}
