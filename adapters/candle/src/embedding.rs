//! An embedding whose vocabulary is divided among the ranks.

use std::ops::Range;

use candle_core::{DType, Device, Module, Result, Tensor};

use crate::{AllReduce, Shards};

/// An embedding of which each rank has the rows of a part of the vocabulary. A rank that does not have a token's row gives zeros, so
/// that the sum over the ranks is the row, exactly.
#[derive(Debug, Clone)]
pub struct VocabParallelEmbedding {
    table: Tensor,
    own: Range<usize>,
    all_reduce: AllReduce,
}

impl VocabParallelEmbedding {
    /// Of this rank's rows, which are those of the tokens `own`.
    ///
    /// # Errors
    ///
    /// If the table does not have as many rows, or none.
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
    /// As [`Shards::shard`].
    pub fn load(
        shards: &dyn Shards,
        name: &str,
        own: Range<usize>,
        device: &Device,
        all_reduce: AllReduce,
    ) -> Result<Self> {
        Self::new(shards.shard(name, 0, own.clone(), device)?, own, all_reduce)
    }

    /// This rank's rows: where inputs and outputs share a table, the weight of its part of the logits.
    pub fn table(&self) -> &Tensor {
        &self.table
    }
}

impl Module for VocabParallelEmbedding {
    /// From tokens of any shape to that shape and a dimension more.
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
