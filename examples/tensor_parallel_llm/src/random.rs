//! Random weights: each element is a function of the seed, the tensor's name and the index, so that every rank can
//! compute its part alone.

use std::ops::Range;

use candle_core::{Device, Result, Tensor};
use fast_allreduce_candle::Shards;

use crate::config::Shape;

pub struct Random {
    shape: Shape,
    seed: u64,
}

impl Random {
    pub fn new(shape: Shape, seed: u64) -> Self {
        Self { shape, seed }
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Shards for Random {
    /// Has every tensor: inputs and outputs have separate tables.
    fn contains(&self, _: &str) -> bool {
        true
    }

    fn dims(&self, name: &str) -> Result<Vec<usize>> {
        let Shape { heads, groups, head_dim, feed_forward, vocabulary, .. } = self.shape;
        let width = heads * head_dim;
        let kind = name.strip_suffix(".weight").and_then(|name| name.rsplit('.').next()).unwrap_or(name);
        Ok(match kind {
            "token_embd" | "output" => vec![vocabulary, width],
            "attn_q" | "attn_output" => vec![width, width],
            "attn_k" | "attn_v" => vec![groups * head_dim, width],
            "ffn_gate" | "ffn_up" => vec![feed_forward, width],
            "ffn_down" => vec![width, feed_forward],
            "attn_norm" | "ffn_norm" | "output_norm" => vec![width],
            _ => candle_core::bail!("there is no tensor {name}"),
        })
    }

    fn shard(&self, name: &str, dim: usize, range: Range<usize>, device: &Device) -> Result<Tensor> {
        let dims = self.dims(name)?;
        if dim >= dims.len() || range.start > range.end || range.end > dims[dim] {
            candle_core::bail!("{name} is {dims:?}: it has no {range:?} of dimension {dim}")
        }
        let [rows, columns] = [0, 1].map(|other| match dims.get(other) {
            Some(_) if other == dim => range.clone(),
            Some(&all) => 0..all,
            None => 0..1,
        });
        let stride = dims.get(1).copied().unwrap_or(1) as u64;
        let seed = name.bytes().fold(mix(self.seed), |hash, byte| mix(hash ^ u64::from(byte)));
        // This scale keeps the magnitude of activations from layer to layer. Weights of norms are 1.
        let (middle, scale) = if dims.len() == 1 { (1.0, 0.0) } else { (0.0, (3.0 / dims[1] as f32).sqrt()) };
        let element = |row: usize, column: usize| {
            let bits = mix(seed ^ (row as u64 * stride + column as u64)) >> 40;
            middle + scale * (bits as f32 / (1u64 << 23) as f32 - 1.0)
        };
        let values: Vec<f32> = rows
            .clone()
            .flat_map(|row| columns.clone().map(move |column| (row, column)))
            .map(|(row, column)| element(row, column))
            .collect();
        let mut part = dims.clone();
        part[dim] = range.len();
        Tensor::from_vec(values, part, device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_that_of_the_whole() {
        let shape = Shape {
            layers: 1,
            heads: 3,
            groups: 1,
            head_dim: 4,
            feed_forward: 10,
            vocabulary: 20,
            context: 8,
        };
        let random = Random::new(shape, 7);
        let device = Device::Cpu;
        for name in ["blk.0.ffn_down.weight", "blk.1.attn_q.weight", "token_embd.weight"] {
            let whole = random.whole(name, &device).unwrap();
            assert_eq!(whole.dims(), random.dims(name).unwrap());
            for dim in 0..2 {
                let part = random.shard(name, dim, 3..8, &device).unwrap();
                let expected = whole.narrow(dim, 3, 5).unwrap();
                assert_eq!(part.to_vec2::<f32>().unwrap(), expected.to_vec2::<f32>().unwrap());
            }
            let mean = whole.mean_all().unwrap().to_scalar::<f32>().unwrap();
            assert!(mean.abs() < 0.2, "{mean}");
        }
        let others = Random::new(shape, 8).whole("output.weight", &device).unwrap();
        assert_ne!(
            others.to_vec2::<f32>().unwrap(),
            random.whole("output.weight", &device).unwrap().to_vec2::<f32>().unwrap()
        );
    }
}
