//! A model of the Llama architecture (Touvron et al. 2023). Each rank has a part of the heads, of the channels and of
//! the vocabulary.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{ops, rotary_emb, RmsNorm};
use fast_allreduce_candle::{
    invariant, share, AllReduce, ColumnParallelLinear, Comm, HeadShare, RowParallelLinear, Shards,
    VocabParallelEmbedding,
};

use crate::arguments::{Arithmetic, Products};
use crate::config::{unit, Config};

pub struct Model {
    config: Config,
    embedding: VocabParallelEmbedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    logits: Column,
    /// Cosines and sines by position.
    rotation: (Tensor, Tensor),
    heads: HeadShare,
    /// The group of each head, as an index tensor.
    group_of: Tensor,
    /// The first token of this rank's part of the vocabulary.
    first_token: usize,
}

struct Layer {
    attention_norm: RmsNorm,
    /// Queries of the heads, then keys and values of the groups.
    attention: Column,
    attention_output: Row,
    feed_forward_norm: RmsNorm,
    /// Gates, then the channels that they gate.
    gate_up: Column,
    down: Row,
    /// Keys and values of each head: (heads, positions, head_dim).
    cache: Option<(Tensor, Tensor)>,
}

/// A linear layer to units of outputs: (rows, inputs) to (units, rows, unit).
enum Column {
    Invariant(invariant::ColumnLinear),
    Plain(ColumnParallelLinear<InType>, usize),
}

/// A linear layer from units of inputs to all outputs: (units, rows, unit) to (rows, outputs).
enum Row {
    Invariant(invariant::RowLinear),
    Plain(RowParallelLinear<InType>),
}

/// candle's product in the weight's type, which may differ from that of the input and output.
struct InType(candle_nn::Linear);

impl Module for InType {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.0.forward(&xs.to_dtype(self.0.weight().dtype())?)?.to_dtype(xs.dtype())
    }
}

impl Column {
    fn new(products: Products, weight: &Tensor, unit: usize) -> Result<Self> {
        let weight = weight.to_dtype(products.dtype)?;
        Ok(match products.arithmetic {
            Arithmetic::Invariant => Self::Invariant(invariant::ColumnLinear::new(&weight, unit)?),
            Arithmetic::Plain => {
                let product = InType(candle_nn::Linear::new(weight, None));
                Self::Plain(ColumnParallelLinear::new(product), unit)
            }
        })
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Invariant(linear) => linear.forward(xs),
            Self::Plain(linear, unit) => {
                let outputs = linear.forward(xs)?;
                let (rows, channels) = outputs.dims2()?;
                outputs.reshape((rows, channels / unit, *unit))?.transpose(0, 1)
            }
        }
    }
}

impl Row {
    fn new(products: Products, weight: &Tensor, unit: usize, all_reduce: &AllReduce) -> Result<Self> {
        let weight = weight.to_dtype(products.dtype)?;
        Ok(match products.arithmetic {
            Arithmetic::Invariant => {
                Self::Invariant(invariant::RowLinear::new(&weight, unit, all_reduce.clone())?)
            }
            Arithmetic::Plain => {
                let product = InType(candle_nn::Linear::new(weight, None));
                Self::Plain(RowParallelLinear::of(product, None, all_reduce.clone()))
            }
        })
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Invariant(linear) => linear.forward(xs),
            Self::Plain(linear) => {
                let (units, rows, unit) = xs.dims3()?;
                linear.forward(&xs.transpose(0, 1)?.reshape((rows, units * unit))?)
            }
        }
    }
}

impl Model {
    /// Reads this rank's part of the weights.
    pub fn load(config: Config, shards: &dyn Shards, comm: &Comm, products: Products) -> Result<Self> {
        let (device, shape) = (Device::Cpu, config.shape);
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let heads = HeadShare::new(shape.heads, shape.groups, rank, ranks)?;
        // Shares are whole units, so results do not depend on the number of ranks.
        let channels = |all: usize, what: &str| {
            let unit = unit(all);
            if all / unit < ranks {
                candle_core::bail!(
                    "{ranks} ranks are more than the {} units of {unit} of the {all} {what}",
                    all / unit
                )
            }
            let units = share(all / unit, rank, ranks);
            Ok((units.start * unit..units.end * unit, unit))
        };
        let all_reduce = AllReduce::sum(comm);
        let (vocabulary, vocabulary_unit) = channels(shape.vocabulary, "tokens of the vocabulary")?;
        let (feed_forward, feed_forward_unit) =
            channels(shape.feed_forward, "channels of the feed-forward network")?;
        let norm = |name: &str| {
            Ok::<_, candle_core::Error>(RmsNorm::new(shards.whole(name, &device)?, config.epsilon))
        };
        let of_heads = heads.heads.start * shape.head_dim..heads.heads.end * shape.head_dim;
        let of_groups = heads.groups.start * shape.head_dim..heads.groups.end * shape.head_dim;
        let layer = |index: usize| -> Result<Layer> {
            let name = |name: &str| format!("blk.{index}.{name}.weight");
            let rows =
                |of: &str, range: &std::ops::Range<usize>| shards.shard(&name(of), 0, range.clone(), &device);
            let columns =
                |of: &str, range: &std::ops::Range<usize>| shards.shard(&name(of), 1, range.clone(), &device);
            let attention =
                [rows("attn_q", &of_heads)?, rows("attn_k", &of_groups)?, rows("attn_v", &of_groups)?];
            let gate_up = [rows("ffn_gate", &feed_forward)?, rows("ffn_up", &feed_forward)?];
            Ok(Layer {
                attention_norm: norm(&name("attn_norm"))?,
                attention: Column::new(products, &Tensor::cat(&attention, 0)?, shape.head_dim)?,
                attention_output: Row::new(
                    products,
                    &columns("attn_output", &of_heads)?,
                    shape.head_dim,
                    &all_reduce,
                )?,
                feed_forward_norm: norm(&name("ffn_norm"))?,
                gate_up: Column::new(products, &Tensor::cat(&gate_up, 0)?, feed_forward_unit)?,
                down: Row::new(
                    products,
                    &columns("ffn_down", &feed_forward)?,
                    feed_forward_unit,
                    &all_reduce,
                )?,
                cache: None,
            })
        };
        let embedding = VocabParallelEmbedding::load(
            shards,
            "token_embd.weight",
            vocabulary.clone(),
            &device,
            all_reduce.clone(),
        )?;
        let logits = match shards.contains("output.weight") {
            true => Column::new(
                products,
                &shards.shard("output.weight", 0, vocabulary.clone(), &device)?,
                vocabulary_unit,
            )?,
            false => Column::new(products, embedding.table(), vocabulary_unit)?,
        };
        let group_of: Vec<u32> = heads.group_of.iter().map(|&group| group as u32).collect();
        Ok(Self {
            config,
            embedding,
            layers: (0..shape.layers).map(layer).collect::<Result<_>>()?,
            norm: norm("output_norm.weight")?,
            logits,
            rotation: (
                Tensor::zeros((0, 1), DType::F32, &device)?,
                Tensor::zeros((0, 1), DType::F32, &device)?,
            ),
            group_of: Tensor::new(group_of, &device)?,
            heads,
            first_token: vocabulary.start,
        })
    }

    /// Clears the cache, and allocates it for `positions` tokens.
    pub fn clear(&mut self, positions: usize) -> Result<()> {
        let dim = self.config.shape.head_dim;
        let shape = (self.heads.heads.len(), positions, dim);
        for layer in &mut self.layers {
            let zeros = || Tensor::zeros(shape, DType::F32, &Device::Cpu);
            layer.cache = Some((zeros()?, zeros()?));
        }
        let angles: Vec<f32> = (0..positions)
            .flat_map(|position| (0..dim / 2).map(move |index| (position, index as f32 * 2.0 / dim as f32)))
            .map(|(position, power)| position as f32 / self.config.rope_base.powf(power))
            .collect();
        let angles = Tensor::from_vec(angles, (positions, dim / 2), &Device::Cpu)?;
        self.rotation = (angles.cos()?, angles.sin()?);
        Ok(())
    }

    /// Returns the first token of this rank's logits.
    pub fn first_token(&self) -> usize {
        self.first_token
    }

    /// Reads tokens from position `position` on, and returns this rank's logits of the token after the last.
    pub fn forward(&mut self, tokens: &[u32], position: usize) -> Result<Vec<f32>> {
        let count = tokens.len();
        let mut stream = self.embedding.forward(&Tensor::new(tokens, &Device::Cpu)?)?;
        let rotation =
            (self.rotation.0.narrow(0, position, count)?, self.rotation.1.narrow(0, position, count)?);
        let mask = (count > 1).then(|| causal_mask(count, position)).transpose()?;
        for layer in &self.layers {
            let attended = self.attend(
                layer,
                &layer.attention_norm.forward(&stream)?,
                position,
                &rotation,
                mask.as_ref(),
            )?;
            stream = (stream + layer.attention_output.forward(&attended)?)?;
            let gate_up = layer.gate_up.forward(&layer.feed_forward_norm.forward(&stream)?)?;
            let units = gate_up.dim(0)? / 2;
            let gate = gate_up.narrow(0, 0, units)?.silu()?;
            stream = (stream + layer.down.forward(&(gate * gate_up.narrow(0, units, units)?)?)?)?;
        }
        let last = self.norm.forward(&stream.narrow(0, count - 1, 1)?.contiguous()?)?;
        self.logits.forward(&last)?.flatten_all()?.to_vec1()
    }

    /// Computes the attention of this rank's heads: (heads, tokens, head_dim).
    fn attend(
        &self,
        layer: &Layer,
        xs: &Tensor,
        position: usize,
        (cosines, sines): &(Tensor, Tensor),
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let projected = layer.attention.forward(xs)?;
        let (heads, groups, count) = (self.heads.heads.len(), self.heads.groups.len(), xs.dim(0)?);
        let rotate =
            |xs: Tensor| rotary_emb::rope_i(&xs.contiguous()?.unsqueeze(0)?, cosines, sines)?.squeeze(0);
        let queries = rotate(projected.narrow(0, 0, heads)?)?;
        let keys = rotate(projected.narrow(0, heads, groups)?)?;
        let values = projected.narrow(0, heads + groups, groups)?.contiguous()?;
        let Some((key_cache, value_cache)) = &layer.cache else {
            candle_core::bail!("the cache has not been allocated")
        };
        // Each head has its own copy of keys and values, so its result does not depend on which other heads the rank
        // has.
        key_cache.slice_set(&keys.index_select(&self.group_of, 0)?, 1, position)?;
        value_cache.slice_set(&values.index_select(&self.group_of, 0)?, 1, position)?;
        let keys = key_cache.narrow(1, 0, position + count)?;
        let values = value_cache.narrow(1, 0, position + count)?;
        let scale = 1.0 / (self.config.shape.head_dim as f64).sqrt();
        let mut scores = (queries.matmul(&keys.t()?)? * scale)?;
        if let Some(mask) = mask {
            scores = scores.broadcast_add(mask)?;
        }
        ops::softmax_last_dim(&scores)?.matmul(&values)
    }
}

/// Returns a mask (tokens, positions) that is minus infinity for positions after the token.
fn causal_mask(count: usize, position: usize) -> Result<Tensor> {
    let row = |token: usize| {
        (0..position + count).map(move |seen| if seen > position + token { f32::NEG_INFINITY } else { 0.0 })
    };
    Tensor::from_vec((0..count).flat_map(row).collect::<Vec<_>>(), (count, position + count), &Device::Cpu)
}
