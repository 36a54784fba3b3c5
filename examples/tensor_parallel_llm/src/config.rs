//! The shape of a model.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use candle_core::quantized::gguf_file::Value;
use clap::builder::RangedU64ValueParser;
use clap::Args;

use crate::Result;

/// The sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Args)]
#[command(next_help_heading = "Shape of random weights")]
pub struct Shape {
    /// Layers
    #[arg(long, value_name = "N", requires = "random", default_value = "4", value_parser = count(1..=1000))]
    pub layers: usize,
    /// Attention heads
    #[arg(long, value_name = "N", requires = "random", default_value = "9", value_parser = count(1..=1000))]
    pub heads: usize,
    /// Groups of keys and values, which divide the heads
    #[arg(long, value_name = "N", requires = "random", default_value = "3", value_parser = count(1..=1000))]
    pub groups: usize,
    /// Width of a head
    #[arg(long, value_name = "N", requires = "random", default_value = "64", value_parser = count(2..=1024))]
    pub head_dim: usize,
    /// Width of the feed-forward network
    #[arg(long, value_name = "N", requires = "random", default_value = "1536", value_parser = count(1..=1 << 20))]
    pub feed_forward: usize,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N", requires = "random", default_value = "4096", value_parser = count(2..=1 << 24))]
    pub vocabulary: usize,
    /// Tokens of the context
    #[arg(long, value_name = "N", requires = "random", default_value = "1024", value_parser = count(1..=1 << 20))]
    pub context: usize,
}

/// A model of the Llama architecture.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    pub shape: Shape,
    pub rope_base: f32,
    pub epsilon: f64,
}

impl Config {
    pub fn random(shape: Shape) -> Self {
        Self { shape, rope_base: 10_000.0, epsilon: 1e-5 }
    }

    /// Reads the configuration from a GGUF file's metadata.
    pub fn of_gguf(metadata: &HashMap<String, Value>) -> Result<Self> {
        let value = |key: &str| metadata.get(key).ok_or_else(|| format!("the file has no {key}"));
        let architecture = value("general.architecture")?.to_string()?;
        if architecture != "llama" {
            return Err(format!("the file's architecture is {architecture}; only llama is supported").into());
        }
        let number =
            |key: &str| -> Result<usize> { Ok(value(&format!("llama.{key}"))?.to_u64()?.try_into()?) };
        let heads = number("attention.head_count")?;
        let width = number("embedding_length")?;
        if heads == 0 || !width.is_multiple_of(heads) {
            return Err(format!("{width} channels do not divide into {heads} heads").into());
        }
        let shape = Shape {
            layers: number("block_count")?,
            heads,
            groups: number("attention.head_count_kv").unwrap_or(heads),
            head_dim: width / heads,
            feed_forward: number("feed_forward_length")?,
            vocabulary: match number("vocab_size") {
                Ok(vocabulary) => vocabulary,
                Err(_) => value("tokenizer.ggml.tokens")?.to_vec()?.len(),
            },
            context: number("context_length")?,
        };
        let rotated = number("rope.dimension_count").unwrap_or(shape.head_dim);
        if rotated != shape.head_dim {
            return Err(format!(
                "rotary embeddings of {rotated} of {} channels are not supported",
                shape.head_dim
            )
            .into());
        }
        let float =
            |key: &str, default: f32| value(&format!("llama.{key}")).map_or(Ok(default), Value::to_f32);
        Ok(Self {
            shape,
            rope_base: float("rope.freq_base", 10_000.0)?,
            epsilon: float("attention.layer_norm_rms_epsilon", 1e-5)?.into(),
        })
    }
}

/// Returns a parser of numbers in a range.
pub fn count(range: RangeInclusive<u64>) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(range)
}

/// Returns the unit in which channels are computed: the largest divisor up to 64. It does not depend on the number of
/// ranks.
pub fn unit(channels: usize) -> usize {
    (1..=64).rev().find(|unit| channels.is_multiple_of(*unit)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_divide() {
        assert_eq!([1536, 49152, 100, 7, 97].map(unit), [64, 64, 50, 7, 1]);
    }

    #[test]
    fn another_architecture_is_named() {
        let metadata = HashMap::from([("general.architecture".to_owned(), Value::String("gpt2".to_owned()))]);
        let error = Config::of_gguf(&metadata).unwrap_err().to_string();
        assert!(error.contains("gpt2") && error.contains("llama"), "{error}");
        assert!(Config::of_gguf(&HashMap::new()).is_err());
    }
}
