//! Linear layers divided among the ranks.

use std::ops::Range;

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::Linear;

use crate::{AllGather, AllReduce, Shards};

/// A linear layer whose outputs are divided among the ranks: each has its rows of the weight.
///
/// Its result is the rank's part, which a [`RowParallelLinear`] takes without communication.
/// [`ColumnParallelLinear::gathered`] concatenates the parts. `M` computes the product: candle's [`Linear`], or a
/// `QMatMul` of a tensor that [`Gguf::quantized`](crate::Gguf::quantized) reads.
#[derive(Debug, Clone)]
pub struct ColumnParallelLinear<M = Linear> {
    product: M,
    gather: Option<AllGather>,
}

impl ColumnParallelLinear {
    /// Reads this rank's rows of a weight, and of a bias if its name is given.
    ///
    /// # Errors
    ///
    /// Those of [`Shards::shard`].
    pub fn load(
        shards: &dyn Shards,
        weight: &str,
        bias: Option<&str>,
        outputs: Range<usize>,
        device: &Device,
    ) -> Result<Self> {
        let bias = bias.map(|bias| shards.shard(bias, 0, outputs.clone(), device)).transpose()?;
        Ok(Self::new(Linear::new(shards.shard(weight, 0, outputs, device)?, bias)))
    }
}

impl<M: Module> ColumnParallelLinear<M> {
    /// Creates the layer from a product with this rank's rows.
    pub fn new(product: M) -> Self {
        Self { product, gather: None }
    }

    /// Gathers the outputs of all ranks on every rank.
    #[must_use]
    pub fn gathered(mut self, gather: AllGather) -> Self {
        self.gather = Some(gather);
        self
    }
}

impl<M: Module> Module for ColumnParallelLinear<M> {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let own = self.product.forward(xs)?;
        match &self.gather {
            None => Ok(own),
            Some(gather) => gather.forward(&own),
        }
    }
}

/// A linear layer whose inputs are divided among the ranks: each has its columns of the weight, and an allreduce sums
/// the products. The bias is added once, after the sum.
///
/// `M` is as in [`ColumnParallelLinear`].
#[derive(Debug, Clone)]
pub struct RowParallelLinear<M = Linear> {
    product: M,
    bias: Option<Tensor>,
    all_reduce: AllReduce,
}

impl RowParallelLinear {
    /// Creates the layer from this rank's columns of the weight, and the whole bias.
    pub fn new(weight: Tensor, bias: Option<Tensor>, all_reduce: AllReduce) -> Self {
        Self::of(Linear::new(weight, None), bias, all_reduce)
    }

    /// Reads this rank's columns of a weight, and the whole bias if its name is given.
    ///
    /// # Errors
    ///
    /// Those of [`Shards::shard`].
    pub fn load(
        shards: &dyn Shards,
        weight: &str,
        bias: Option<&str>,
        inputs: Range<usize>,
        device: &Device,
        all_reduce: AllReduce,
    ) -> Result<Self> {
        let bias = bias.map(|bias| shards.whole(bias, device)).transpose()?;
        Ok(Self::new(shards.shard(weight, 1, inputs, device)?, bias, all_reduce))
    }
}

impl<M: Module> RowParallelLinear<M> {
    /// Creates the layer from any product with this rank's columns, which adds no bias itself.
    pub fn of(product: M, bias: Option<Tensor>, all_reduce: AllReduce) -> Self {
        Self { product, bias, all_reduce }
    }
}

impl<M: Module> Module for RowParallelLinear<M> {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let sum = self.product.forward(xs)?;
        // The product is a new tensor that shares no storage.
        self.all_reduce.forward_in_place(&sum)?;
        match &self.bias {
            None => Ok(sum),
            Some(bias) => sum.broadcast_add(bias),
        }
    }
}
