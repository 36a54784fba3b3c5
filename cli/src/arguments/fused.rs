//! The cases of `--collective all_reduce_fused`: every combination of type, length of a row and number of rows.

use std::fmt;

use fast_allreduce::{Algorithm, CallKind, DType};

use super::Form;
use super::{Bench, DeviceName};
use crate::failure::Failure;

/// Default lengths of rows: hidden sizes of models in use.
const HIDDEN: [usize; 6] = [2048, 4096, 5120, 7168, 8192, 16384];

/// Default numbers of rows: from one token to a batch.
const ROWS: [usize; 4] = [1, 8, 64, 512];

/// The longest row of the call.
const MOST_HIDDEN: usize = 65_536;

/// Types that have the call.
const DTYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

/// One of the combinations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedCase {
    pub dtype: DType,
    /// Elements of a row.
    pub hidden: usize,
    pub rows: usize,
}

impl FusedCase {
    /// Returns the elements of the message.
    pub fn count(&self) -> usize {
        self.hidden * self.rows
    }
}

impl fmt::Display for FusedCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, hidden, rows } = self;
        write!(f, "all_reduce_fused of {rows} x {hidden} {dtype}")
    }
}

impl Bench {
    /// Returns whether `all_reduce_fused` is measured.
    pub fn is_fused(&self) -> bool {
        self.collectives.0 == [CallKind::AllReduceFused]
    }

    /// Returns the cases in the order of the results.
    pub fn fused_cases(&self) -> impl Iterator<Item = FusedCase> + '_ {
        let hidden = if self.hidden.is_empty() { &HIDDEN[..] } else { &self.hidden };
        let rows = if self.rows.is_empty() { &ROWS[..] } else { &self.rows };
        let dtypes = self.dtypes().into_iter().filter(|dtype| DTYPES.contains(dtype));
        dtypes.flat_map(move |dtype| {
            hidden
                .iter()
                .flat_map(move |&hidden| rows.iter().map(move |&rows| FusedCase { dtype, hidden, rows }))
        })
    }

    /// Returns the algorithms to force, of those that have the call; `None` is the plan's choice.
    pub fn fused_algorithms(&self) -> Vec<Option<Algorithm>> {
        let given = self.algorithms().unwrap_or(&[None]).iter().copied();
        given.filter(|algorithm| algorithm.is_none_or(Algorithm::is_direct)).collect()
    }

    /// Returns the forms to measure in place of `all_reduce_fused` with an RMSNorm.
    pub fn forms(&self) -> Vec<&'static Form> {
        self.forms.iter().flat_map(|choice| &choice.0).copied().collect()
    }

    /// Refuses forms of rows that do not have them.
    pub fn check_forms(&self, world_size: usize) -> Result<(), Failure> {
        let cases = || self.fused_cases().map(|case| case.hidden);
        let refused =
            self.forms().iter().find_map(|form| cases().find_map(|hidden| form.refusal(hidden, world_size)));
        refused.map_or(Ok(()), |reason| Err(Failure::Usage(reason)))
    }

    /// Refuses options that do not fit `all_reduce_fused`, and its options if another collective is measured.
    pub(super) fn validate_fused(&self) -> Result<(), Failure> {
        let refuse = |reason: String| Err(Failure::Usage(reason));
        if !self.is_fused() {
            return match self.hidden.is_empty() && self.rows.is_empty() && self.forms.is_empty() {
                true => Ok(()),
                false => {
                    refuse("--hidden, --rows and --form are options of --collective all_reduce_fused".into())
                }
            };
        }
        if self.suspend {
            return refuse("--suspend measures no --collective all_reduce_fused".into());
        }
        if !self.forms.is_empty() {
            if self.device == DeviceName::Cuda {
                return refuse("--form is an option of --device host".into());
            }
            if self.algorithms().is_some() || self.registered {
                return refuse("--form has neither --algo nor --registered: the plan chooses".into());
            }
        }
        if self.min_bytes.or(self.max_bytes).or(self.step_factor).or(self.step_bytes).is_some() {
            return refuse("the sizes of all_reduce_fused are given by --hidden and --rows".into());
        }
        if self.fused_cases().next().is_none() {
            let given = self.dtypes()[0];
            return refuse(format!("all_reduce_fused takes f16, bf16 and f32, not {given}"));
        }
        if self.ops.0 != [fast_allreduce::ReduceOp::Sum] {
            return refuse("all_reduce_fused computes sums: it has no other -o".into());
        }
        if let (true, Some([Some(algorithm), ..])) = (self.fused_algorithms().is_empty(), self.algorithms()) {
            return refuse(format!("--algo {algorithm} has no all_reduce_fused: the direct algorithms do"));
        }
        if let Some(hidden) = self.hidden.iter().find(|hidden| !(1..=MOST_HIDDEN).contains(*hidden)) {
            return refuse(format!("--hidden {hidden}: a row has 1 to {MOST_HIDDEN} elements"));
        }
        if self.rows.contains(&0) {
            return refuse("--rows 0: give numbers from 1 on".into());
        }
        let fits = |case: FusedCase| case.hidden.checked_mul(case.rows).is_some_and(|count| count < 1 << 40);
        match self.fused_cases().find(|case| !fits(*case)) {
            Some(FusedCase { hidden, rows, .. }) => refuse(format!("{rows} rows of {hidden} are too many")),
            None => Ok(()),
        }
    }
}
