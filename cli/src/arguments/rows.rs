//! What `bench` and `compare` measure of `all_reduce_fused`: every combination of type, length of a row and number of rows.

use std::fmt;

use fast_allreduce::{Algorithm, CallKind, DType};

use super::Bench;
use crate::failure::Failure;

/// Lengths of rows where nothing is said: hidden sizes of models in use.
const HIDDEN: [usize; 6] = [2048, 4096, 5120, 7168, 8192, 16384];

/// Numbers of rows where nothing is said: of a token to a batch of them.
const ROWS: [usize; 4] = [1, 8, 64, 512];

/// The longest row of the call.
const MOST_HIDDEN: usize = 65_536;

/// Types that have the call.
const DTYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

/// One of the combinations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsCase {
    pub dtype: DType,
    /// Elements of a row.
    pub hidden: usize,
    pub rows: usize,
}

impl RowsCase {
    /// Elements of the message.
    pub fn count(&self) -> usize {
        self.hidden * self.rows
    }
}

impl fmt::Display for RowsCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, hidden, rows } = self;
        write!(f, "all_reduce_fused of {rows} x {hidden} {dtype}")
    }
}

impl Bench {
    /// Whether it is `all_reduce_fused` that is measured.
    pub fn is_rms_norm(&self) -> bool {
        self.collectives.0 == [CallKind::AllReduceFused]
    }

    /// What was asked for, in the order of the rows of results.
    pub fn rows_cases(&self) -> impl Iterator<Item = RowsCase> + '_ {
        let or =
            |given: &[usize], usual: &[usize]| if given.is_empty() { usual.into() } else { given.to_vec() };
        let (hidden, rows) = (or(&self.hidden, &HIDDEN), or(&self.rows, &ROWS));
        let dtypes = self.dtypes().into_iter().filter(|dtype| DTYPES.contains(dtype));
        dtypes.flat_map(move |dtype| {
            let rows = rows.clone();
            let shapes = hidden
                .clone()
                .into_iter()
                .flat_map(move |hidden| rows.clone().into_iter().map(move |rows| (hidden, rows)));
            shapes.map(move |(hidden, rows)| RowsCase { dtype, hidden, rows })
        })
    }

    /// Algorithms to force, of those that have the call; `None` is the plan's choice.
    pub fn rows_algorithms(&self) -> Vec<Option<Algorithm>> {
        let given = self.algorithms().unwrap_or(&[None]).iter().copied();
        given.filter(|algorithm| algorithm.is_none_or(Algorithm::is_direct)).collect()
    }

    /// Refuses what `all_reduce_fused` has not, and its options where another collective is measured.
    pub(super) fn validate_rows(&self) -> Result<(), Failure> {
        let refuse = |reason: String| Err(Failure::Usage(reason));
        if !self.is_rms_norm() {
            return match self.hidden.is_empty() && self.rows.is_empty() {
                true => Ok(()),
                false => refuse("--hidden and --rows are of --collective all_reduce_fused".into()),
            };
        }
        let has_sizes = self.min_bytes.or(self.max_bytes).or(self.step_factor).or(self.step_bytes).is_some();
        if has_sizes {
            return refuse("sizes of all_reduce_fused are given by --hidden and --rows".into());
        }
        if self.rows_cases().next().is_none() {
            let given = self.dtypes()[0];
            return refuse(format!("all_reduce_fused is of f16, bf16 and f32: there is none of {given}"));
        }
        if self.ops.0 != [fast_allreduce::ReduceOp::Sum] {
            return refuse("all_reduce_fused is of sums: it has no other -o".into());
        }
        if let (true, Some([Some(algorithm), ..])) = (self.rows_algorithms().is_empty(), self.algorithms()) {
            return refuse(format!("--algo {algorithm} has no all_reduce_fused: the direct algorithms do"));
        }
        let is_fit = |hidden: &usize| (1..=MOST_HIDDEN).contains(hidden);
        if let Some(hidden) = self.hidden.iter().find(|hidden| !is_fit(hidden)) {
            return refuse(format!("--hidden {hidden}: a row has 1 to {MOST_HIDDEN} elements"));
        }
        if self.rows.contains(&0) {
            return refuse("--rows 0: give numbers from 1 on".into());
        }
        let is_fit = |case: RowsCase| case.hidden.checked_mul(case.rows).is_some_and(|count| count < 1 << 40);
        match self.rows_cases().find(|case| !is_fit(*case)) {
            Some(RowsCase { hidden, rows, .. }) => refuse(format!("{rows} rows of {hidden} are too many")),
            None => Ok(()),
        }
    }
}
