//! An embedding whose vocabulary is divided among the ranks.

use std::ops::Range;

use candle_core::{DType, Device, Module, Result, Tensor};

use crate::{AllReduce, Shards};

/// An embedding of which each rank has the rows of a part of the vocabulary.
///
/// A rank without a token's row contributes zeros, so the sum over the ranks is exactly the row.
#[derive(Debug, Clone)]
pub struct VocabParallelEmbedding {
    table: Tensor,
    own: Range<usize>,
    all_reduce: AllReduce,
}

impl VocabParallelEmbedding {
    /// Creates the layer from this rank's rows, which are those of the tokens `own`.
    ///
    /// # Errors
    ///
    /// An error if the table is empty, or its number of rows is not that of `own`.
    pub fn new(table: Tensor, own: Range<usize>, all_reduce: AllReduce) -> Result<Self> {
        let (rows, _) = table.dims2()?;
        if rows != own.len() || rows == 0 {
            candle_core::bail!("a table of {rows} rows is not that of the {} tokens {own:?}", own.len())
        }
        Ok(Self { table, own, all_reduce })
    }

    /// Reads this rank's rows of a table.
    ///
    /// # Errors
    ///
    /// Those of [`Shards::shard`].
    pub fn load(
        shards: &dyn Shards,
        name: &str,
        own: Range<usize>,
        device: &Device,
        all_reduce: AllReduce,
    ) -> Result<Self> {
        Self::new(shards.shard(name, 0, own.clone(), device)?, own, all_reduce)
    }

    /// Returns this rank's rows. If inputs and outputs share a table, they are the weight of this rank's logits.
    pub fn table(&self) -> &Tensor {
        &self.table
    }
}

impl Module for VocabParallelEmbedding {
    /// Maps tokens of any shape to that shape with a last dimension of the embedding's width.
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let (rows, width) = self.table.dims2()?;
        let flat = tokens.flatten_all()?.to_dtype(DType::I64)?;
        let (start, end) = (self.own.start as i64, self.own.end as i64);
        let is_own = flat.ge(start)?.mul(&flat.lt(end)?)?;
        let local =
            flat.broadcast_sub(&Tensor::new(start, tokens.device())?)?.clamp(0i64, rows as i64 - 1)?;
        let found = self.table.index_select(&local, 0)?;
        let is_own = is_own.unsqueeze(1)?.broadcast_as((flat.elem_count(), width))?;
        let parts = is_own.where_cond(&found, &found.zeros_like()?)?;
        self.all_reduce.forward_in_place(&parts)?;
        let mut dims = tokens.dims().to_vec();
        dims.push(width);
        parts.reshape(dims)
    }
}
