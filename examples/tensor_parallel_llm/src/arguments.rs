//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use candle_core::DType;
use clap::{Parser, ValueEnum};
use fast_allreduce::Algorithm;

use crate::config::{count, Shape};

/// Continues a text with a language model in tensor parallelism between processes on CPUs.
#[derive(Debug, Clone, Parser)]
#[command(name = "tensor_parallel_llm")]
pub struct Arguments {
    /// The text to continue
    #[arg(default_value = "Once upon a time")]
    pub prompt: String,
    /// Rank processes
    #[arg(long, value_name = "N", default_value = "2", value_parser = count(1..=16))]
    pub ranks: usize,
    /// Threads of candle in each rank [default: cores / ranks, at least 1]
    #[arg(long, value_name = "N", value_parser = count(1..=256))]
    pub threads: Option<usize>,
    /// Tokens to generate at most
    #[arg(long, value_name = "N", default_value = "64", value_parser = count(1..=1 << 20))]
    pub tokens: usize,
    /// A GGUF file [default: the one of fetch-weights.sh]; {rank} in its path is replaced by the rank
    #[arg(long, value_name = "FILE", conflicts_with = "random")]
    model: Option<PathBuf>,
    /// Random weights instead of a file; tokens are numbers
    #[arg(long)]
    random: bool,
    /// Seed of the random weights
    #[arg(long, requires = "random", default_value = "1")]
    seed: u64,
    /// invariant: the same bits for every number of ranks; plain: candle's products, summed in f32
    #[arg(long, default_value = "invariant")]
    arithmetic: Arithmetic,
    /// Type in which weights are stored and multiplied; f16 reads half the bytes for each token
    #[arg(long, default_value = "f32", value_parser = ["f32", "f16"])]
    dtype: String,
    /// Library that ranks reduce with; mpi and both start them with mpirun (or the command in MPIRUN)
    #[arg(long, default_value = "fast-allreduce")]
    pub backend: Backend,
    /// Algorithm of fast-allreduce for all sizes [default: the best for each size]
    #[arg(long, value_parser = |name: &str| name.parse::<Algorithm>().map_err(|error| error.to_string()))]
    pub algorithm: Option<Algorithm>,
    /// The longest wait for another rank in a call
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
    /// Number of continuations, of which the first is printed; times are medians
    #[arg(long, value_name = "N", default_value = "1", value_parser = count(1..=1 << 20))]
    pub rounds: usize,
    /// Continue after the model's end of text
    #[arg(long)]
    pub ignore_end: bool,
    #[command(flatten)]
    shape: Shape,
}

#[derive(Debug, Clone)]
pub enum Weights {
    /// A file, with `{rank}` in its path replaced by the rank.
    File(PathBuf),
    Random {
        shape: Shape,
        seed: u64,
    },
}

/// How linear layers are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Products {
    pub arithmetic: Arithmetic,
    /// Type in which weights are stored and multiplied.
    pub dtype: DType,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Arithmetic {
    // Unit by unit: the same bits for every number of ranks.
    Invariant,
    // candle's products, and sums in f32.
    Plain,
}

/// The library that ranks reduce with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    FastAllreduce,
    Mpi,
    // Alternating.
    Both,
}

impl Backend {
    pub fn needs_mpi(self) -> bool {
        self != Self::FastAllreduce
    }
}

impl Arguments {
    pub fn weights(&self) -> Weights {
        match self.random {
            true => Weights::Random { shape: self.shape, seed: self.seed },
            false => Weights::File(self.model.clone().unwrap_or_else(default_model)),
        }
    }

    pub fn products(&self) -> Products {
        let dtype = if self.dtype == "f16" { DType::F16 } else { DType::F32 };
        Products { arithmetic: self.arithmetic, dtype }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.filter(|limit| !limit.is_zero()).ok_or_else(|| "seconds, such as 2.5, are expected".into())
}

/// Returns the path to which fetch-weights.sh writes the model.
fn default_model() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    cache.unwrap_or_else(home).join("fast-allreduce/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn arguments_are_parsed() {
        let parse = |arguments: &[&str]| Arguments::try_parse_from([&["llm"], arguments].concat());
        let arguments = parse(&["--ranks", "3", "--algorithm", "one-shot-push", "A text"]).unwrap();
        assert_eq!((arguments.ranks, arguments.prompt.as_str()), (3, "A text"));
        assert_eq!(arguments.algorithm, Some(Algorithm::OneShotPush));
        assert!(matches!(arguments.weights(), Weights::File(_)));
        let arguments = parse(&["--random", "--heads", "14", "--groups", "2"]).unwrap();
        let Weights::Random { shape, seed: 1 } = arguments.weights() else { panic!("{arguments:?}") };
        assert_eq!((shape.heads, shape.groups), (14, 2));
        for wrong in [
            &["--ranks", "0"][..],
            &["--ranks", "17"],
            &["--heads", "3"],
            &["--algorithm", "tree"],
            &["--model", "a", "--random"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
