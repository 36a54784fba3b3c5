//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use candle_core::DType;
use clap::builder::RangedU64ValueParser;
use clap::{Arg, ArgAction, ArgMatches, Command};
use fast_allreduce::Algorithm;

use crate::config::Shape;

/// The parsed command line.
#[derive(Debug, Clone)]
pub struct Arguments {
    pub prompt: String,
    pub ranks: usize,
    /// Number of candle's threads in each rank.
    pub threads: Option<usize>,
    pub tokens: usize,
    /// A file, with `{rank}` in its path replaced by the rank, or random weights.
    pub weights: Weights,
    pub products: Products,
    pub backend: Backend,
    pub algorithm: Option<Algorithm>,
    /// The longest wait for another rank in a call.
    pub timeout: Duration,
    /// Number of times that the prompt is continued. Only the first continuation is printed.
    pub rounds: usize,
    pub ignore_end: bool,
}

#[derive(Debug, Clone)]
pub enum Weights {
    File(PathBuf),
    Random { shape: Shape, seed: u64 },
}

/// How linear layers are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Products {
    pub arithmetic: Arithmetic,
    /// Type in which weights are stored and multiplied.
    pub dtype: DType,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Unit by unit: the same bits for every number of ranks.
    Invariant,
    /// candle's products, and sums in f32.
    Plain,
}

/// The library that ranks reduce with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    FastAllreduce,
    Mpi,
    /// Alternating.
    Both,
}

impl Backend {
    pub fn needs_mpi(self) -> bool {
        self != Self::FastAllreduce
    }
}

pub fn parse() -> Result<Arguments, clap::Error> {
    of(std::env::args_os())
}

fn of(
    arguments: impl IntoIterator<Item = impl Into<std::ffi::OsString> + Clone>,
) -> Result<Arguments, clap::Error> {
    let matches = command().try_get_matches_from(arguments)?;
    let weights = match matches.get_flag("random") {
        true => Weights::Random { shape: shape(&matches), seed: *matches.get_one("seed").unwrap_or(&1) },
        false => Weights::File(matches.get_one("model").cloned().unwrap_or_else(default_model)),
    };
    let text = |name| matches.get_one::<String>(name).map_or("", String::as_str);
    Ok(Arguments {
        prompt: text("prompt").to_owned(),
        ranks: number(&matches, "ranks"),
        threads: matches.contains_id("threads").then(|| number(&matches, "threads")),
        tokens: number(&matches, "tokens"),
        weights,
        products: Products {
            arithmetic: if text("arithmetic") == "plain" { Arithmetic::Plain } else { Arithmetic::Invariant },
            dtype: if text("dtype") == "f16" { DType::F16 } else { DType::F32 },
        },
        backend: match text("backend") {
            "mpi" => Backend::Mpi,
            "both" => Backend::Both,
            _ => Backend::FastAllreduce,
        },
        algorithm: matches.get_one("algorithm").copied(),
        timeout: *matches.get_one("timeout").unwrap_or(&Duration::from_secs(30)),
        rounds: number(&matches, "rounds"),
        ignore_end: matches.get_flag("ignore-end"),
    })
}

fn number(matches: &ArgMatches, name: &str) -> usize {
    matches.get_one::<u64>(name).map_or(1, |&number| number as usize)
}

fn shape(matches: &ArgMatches) -> Shape {
    Shape {
        layers: number(matches, "layers"),
        heads: number(matches, "heads"),
        groups: number(matches, "groups"),
        head_dim: number(matches, "head-dim"),
        feed_forward: number(matches, "feed-forward"),
        vocabulary: number(matches, "vocabulary"),
        context: number(matches, "context"),
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

fn command() -> Command {
    let count = |name: &'static str, least: u64, most: u64, default: &'static str, help: &'static str| {
        let parser = RangedU64ValueParser::<u64>::new().range(least..=most);
        Arg::new(name).long(name).value_name("N").value_parser(parser).default_value(default).help(help)
    };
    let of_shape = |arg: Arg| arg.requires("random").help_heading("Shape of random weights");
    Command::new("tensor_parallel_llm")
        .about("Continues a text with a language model in tensor parallelism between processes on CPUs")
        .arg(Arg::new("prompt").default_value("Once upon a time").help("The text to continue"))
        .arg(count("ranks", 1, 16, "2", "Rank processes"))
        .arg(
            Arg::new("threads")
                .long("threads")
                .value_name("N")
                .value_parser(RangedU64ValueParser::<u64>::new().range(1..=256))
                .help("Threads of candle in each rank [default: cores / ranks, at least 1]"),
        )
        .arg(count("tokens", 1, 1 << 20, "64", "Tokens to generate at most"))
        .arg(
            Arg::new("model")
                .long("model")
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .conflicts_with("random")
                .help("A GGUF file [default: the one of fetch-weights.sh]; {rank} in its path is replaced by the rank"),
        )
        .arg(
            Arg::new("random")
                .long("random")
                .action(ArgAction::SetTrue)
                .help("Random weights instead of a file; tokens are numbers"),
        )
        .arg(
            Arg::new("seed")
                .long("seed")
                .requires("random")
                .value_parser(clap::value_parser!(u64))
                .help("Seed of the random weights"),
        )
        .arg(
            Arg::new("arithmetic")
                .long("arithmetic")
                .value_parser(["invariant", "plain"])
                .default_value("invariant")
                .help("invariant: the same bits for every number of ranks; plain: candle's products, summed in f32"),
        )
        .arg(
            Arg::new("dtype")
                .long("dtype")
                .value_parser(["f32", "f16"])
                .default_value("f32")
                .help("Type in which weights are stored and multiplied; f16 reads half the bytes for each token"),
        )
        .arg(
            Arg::new("backend")
                .long("backend")
                .value_parser(["fast-allreduce", "mpi", "both"])
                .default_value("fast-allreduce")
                .help("Library that ranks reduce with; mpi and both start them with mpirun (or the command in MPIRUN)"),
        )
        .arg(
            Arg::new("algorithm")
                .long("algorithm")
                .value_parser(|name: &str| name.parse::<Algorithm>().map_err(|error| error.to_string()))
                .help("Algorithm of fast-allreduce for all sizes [default: the best for each size]"),
        )
        .arg(
            Arg::new("timeout")
                .long("timeout")
                .value_name("SECONDS")
                .value_parser(seconds)
                .help("The longest wait for another rank in a call [default: 30]"),
        )
        .arg(count("rounds", 1, 1 << 20, "1", "Number of continuations; times are medians"))
        .arg(
            Arg::new("ignore-end")
                .long("ignore-end")
                .action(ArgAction::SetTrue)
                .help("Continue after the model's end of text"),
        )
        .arg(of_shape(count("layers", 1, 1000, "4", "Layers")))
        .arg(of_shape(count("heads", 1, 1000, "9", "Attention heads")))
        .arg(of_shape(count("groups", 1, 1000, "3", "Groups of keys and values")))
        .arg(of_shape(count("head-dim", 2, 1024, "64", "Width of a head")))
        .arg(of_shape(count("feed-forward", 1, 1 << 20, "1536", "Width of the feed-forward network")))
        .arg(of_shape(count("vocabulary", 2, 1 << 24, "4096", "Tokens of the vocabulary")))
        .arg(of_shape(count("context", 1, 1 << 20, "1024", "Tokens of the context")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn arguments_are_told_apart() {
        let arguments = of(["llm", "--ranks", "3", "--algorithm", "one-shot-push", "A text"]).unwrap();
        assert_eq!((arguments.ranks, arguments.prompt.as_str()), (3, "A text"));
        assert_eq!(arguments.algorithm, Some(Algorithm::OneShotPush));
        assert!(matches!(arguments.weights, Weights::File(_)));
        let arguments = of(["llm", "--random", "--heads", "14", "--groups", "2"]).unwrap();
        let Weights::Random { shape, seed: 1 } = arguments.weights else { panic!("{arguments:?}") };
        assert_eq!((shape.heads, shape.groups), (14, 2));
        for wrong in [
            &["--ranks", "0"][..],
            &["--ranks", "17"],
            &["--heads", "3"],
            &["--algorithm", "tree"],
            &["--model", "a", "--random"],
        ] {
            assert!(of([&["llm"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }
}
