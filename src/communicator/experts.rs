//! Experts of fused calls, as typed values.

use super::slices::Slices;
use crate::device::Host;
use crate::element::Element;

/// Experts from whose rows the input of a fused call is computed: the end of a mixture of experts.
///
/// The input of the call is the experts' rows. For each row of the message, the rows that the table names are
/// multiplied by their weights and added up, and the row of a shared expert is added. Each rank has its own experts,
/// rows and table. `docs/fused.md` has the formula.
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(2, |communicator| {
/// // Three experts' rows of two elements; row 0 takes two of them, row 1 none of this rank's.
/// let experts_rows = [1.0_f32, 2.0, 10.0, 20.0, 100.0, 200.0];
/// let (table, weights, shared) = ([2, 0, -1, -1], [0.5, 3.0, 0.0, 0.0], [0.0_f32, 1.0, 0.0, 1.0]);
/// let (mut residual, mut rows) = ([0.0; 4], [0.0; 4]);
/// let norm = Norm::Rms { epsilon: 0.0, unit_offset: false };
/// let experts = Experts::on_host(&table, 2).weights(&weights).shared(&shared);
/// let fused = Fused::on_host(&mut residual).norm(norm, 2).experts(experts).rows(&mut rows);
/// communicator.all_reduce_fused(&experts_rows, fused)?;
/// // The sum over two ranks, each with half of 100 and thrice 1.
/// assert_eq!(residual, [106.0, 214.0, 0.0, 2.0]);
/// # Ok(()) });
/// ```
#[must_use]
pub struct Experts<'a, D: Slices, T: 'a> {
    pub(super) table: D::Read<'a, i32>,
    pub(super) top_k: usize,
    pub(super) weights: Option<D::Read<'a, f32>>,
    pub(super) shared: Option<D::Read<'a, T>>,
    pub(super) routed_scale: f32,
}

impl<'a, T: Element> Experts<'a, Host, T> {
    /// Describes experts by a table: `top_k` entries for each row of the message, each an experts' row, or negative.
    pub fn on_host(table: &'a [i32], top_k: usize) -> Self {
        Self::new(table, top_k)
    }
}

impl<'a, D: Slices, T: Element> Experts<'a, D, T> {
    pub(super) fn new(table: D::Read<'a, i32>, top_k: usize) -> Self {
        Self { table, top_k, weights: None, shared: None, routed_scale: 1.0 }
    }

    /// Multiplies each experts' row by a weight; `weights` has one for each entry of the table.
    pub fn weights(self, weights: D::Read<'a, f32>) -> Self {
        Self { weights: Some(weights), ..self }
    }

    /// Adds the rows of a shared expert: as many elements as the message has.
    pub fn shared(self, shared: D::Read<'a, T>) -> Self {
        Self { shared: Some(shared), ..self }
    }

    /// Multiplies the sum of the weighted rows by a factor, before the shared expert is added.
    pub fn routed_scale(self, routed_scale: f32) -> Self {
        Self { routed_scale, ..self }
    }
}
