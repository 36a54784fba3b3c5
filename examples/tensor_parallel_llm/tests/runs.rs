//! Runs of the program: the same tokens for every number of ranks, ranks that are killed, and input that it must
//! refuse.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};

/// A small, uneven model: 9 heads in 3 groups, 9 units of channels, 10 of tokens.
const SHAPE: &str =
    "--random --layers 2 --heads 9 --groups 3 --head-dim 16 --feed-forward 576 --vocabulary 640 --context 256";

/// More tokens than a test waits for.
const ENDLESS: &str =
    "--random --layers 2 --heads 9 --groups 3 --head-dim 16 --feed-forward 576 --vocabulary 640 \
     --context 20001 --tokens 19990";

fn program(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensor-parallel-llm"));
    // Looking up the names in a backtrace takes longer than what is timed here.
    command.args(arguments.split_whitespace()).env_remove("RUST_BACKTRACE");
    command
}

fn run(mut command: Command) -> Output {
    // A test ends even if the program hangs.
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (id, (done, is_done)) = (child.id(), mpsc::channel::<()>());
    let watch = std::thread::spawn(move || {
        if is_done.recv_timeout(Duration::from_secs(120)) == Err(mpsc::RecvTimeoutError::Timeout) {
            let _ = Command::new("kill").args(["-9", &id.to_string()]).status();
        }
    });
    let output = child.wait_with_output().unwrap();
    drop(done);
    watch.join().unwrap();
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs the program, which must succeed. Returns the text and the line of digests.
fn output_of(arguments: &str) -> (String, String) {
    let output = run(program(arguments));
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{arguments}: {}\n{out}\n{error}", output.status);
    let digest = out.lines().last().unwrap();
    assert!(digest.starts_with("# tokens "), "{out}");
    (out.lines().next().unwrap().to_owned(), digest.to_owned())
}

#[test]
fn no_number_of_ranks_changes_a_bit() {
    let one = output_of(&format!("--ranks 1 --tokens 24 {SHAPE} text"));
    assert_eq!(one.0.split_whitespace().count(), 1 + 24, "{}", one.0);
    for ranks in 2..=9 {
        assert_eq!(output_of(&format!("--ranks {ranks} --tokens 24 {SHAPE} text")), one, "{ranks} ranks");
    }
    assert_ne!(output_of(&format!("--ranks 2 --tokens 24 {SHAPE} --seed 2 text")), one);
}

#[test]
fn no_algorithm_changes_a_bit() {
    let best = output_of(&format!("--ranks 3 --tokens 8 {SHAPE} text"));
    for algorithm in ["one-shot-pull", "two-shot-pull", "one-shot-push", "two-shot-push"] {
        assert_eq!(
            output_of(&format!("--ranks 3 --tokens 8 --algorithm {algorithm} {SHAPE} text")),
            best,
            "{algorithm}"
        );
    }
}

/// Products in f16 are rounded more coarsely, and equally for every number of ranks.
#[test]
fn no_number_of_ranks_changes_a_bit_of_f16() {
    let one = output_of(&format!("--ranks 1 --tokens 16 --dtype f16 {SHAPE} text"));
    for ranks in [2, 3, 9] {
        assert_eq!(
            output_of(&format!("--ranks {ranks} --tokens 16 --dtype f16 {SHAPE} text")),
            one,
            "{ranks} ranks"
        );
    }
    assert_ne!(one.1, output_of(&format!("--ranks 1 --tokens 16 {SHAPE} text")).1);
    let plain = |ranks| {
        output_of(&format!("--ranks {ranks} --tokens 16 --dtype f16 --arithmetic plain {SHAPE} text"))
    };
    assert_eq!(plain(2), plain(2));
}

/// candle's products may give other bits than one rank's, but the same ones in each run, and the same words.
#[test]
fn plain_arithmetic_is_the_same_in_two_runs() {
    let plain = |ranks| output_of(&format!("--ranks {ranks} --tokens 16 --arithmetic plain {SHAPE} text"));
    assert_eq!(plain(3), plain(3));
    assert_eq!(plain(3).0, plain(1).0);
}

/// Reads a prompt of several chunks, and one of a single token.
#[test]
fn prompts_of_any_length_are_read() {
    for prompt in ["a".repeat(700), "a".to_owned()] {
        let shape = SHAPE.replace("--context 256", "--context 1024");
        let of = |ranks: usize| output_of(&format!("--ranks {ranks} --tokens 4 {shape} {prompt}"));
        assert_eq!(of(1), of(4));
    }
}

/// Returns the children of a process.
fn children(process: u32) -> Vec<u32> {
    let list =
        std::fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|id| id.parse().ok()).collect()
}

fn rank_of(process: u32) -> Option<usize> {
    let environment = std::fs::read(format!("/proc/{process}/environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0);
    let rank = variables.find_map(|variable| variable.strip_prefix(b"FAST_ALLREDUCE_RANK="))?;
    text(rank).parse().ok()
}

/// Kills rank 1 of 3. Returns the error lines of the other ranks and the launcher, with the time since the kill.
fn told_after_a_kill() -> Vec<(Duration, String)> {
    let mut launcher = program(&format!("--ranks 3 {ENDLESS} text"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Wait for some text.
    launcher.stdout.as_mut().unwrap().read_exact(&mut [0; 64]).unwrap();
    let mut output = launcher.stdout.take().unwrap();
    std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    let (lines, told) = mpsc::channel();
    let errors = launcher.stderr.take().unwrap();
    std::thread::spawn(move || {
        for line in BufReader::new(errors).lines().map_while(Result::ok) {
            let _ = lines.send((Instant::now(), line));
        }
    });
    let victim = children(launcher.id()).into_iter().find(|&child| rank_of(child) == Some(1)).unwrap();
    let killed = Instant::now();
    assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
    let told: Vec<_> = told.iter().map(|(when, line)| (when.duration_since(killed), line)).collect();
    assert_eq!(launcher.wait().unwrap().code(), Some(1), "{told:?}");
    told
}

/// The best of several attempts counts, because ranks report late if the cores are busy.
#[test]
fn a_rank_that_is_killed_is_named_within_100_ms() {
    let mut least = Duration::MAX;
    for _ in 0..10 {
        let told = told_after_a_kill();
        let by = |rank: usize| told.iter().find(|(_, line)| line.contains(&format!("rank {rank}:")));
        let survivors = [0, 2].map(|rank| by(rank).unwrap_or_else(|| panic!("{told:?}")));
        assert!(survivors.iter().all(|(_, line)| line.contains("rank 1 is gone")), "{told:?}");
        assert!(told.last().unwrap().1.contains("rank 1 ended: signal: 9"), "{told:?}");
        least = least.min(survivors[0].0.max(survivors[1].0));
        if least < Duration::from_millis(100) {
            return;
        }
    }
    panic!("the other ranks took {least:?}");
}

/// Ranks end with their launcher.
#[test]
fn ranks_end_with_the_launcher() {
    let mut launcher = program(
        &format!("--ranks 2 --tokens 100000 {SHAPE} text").replace("--context 256", "--context 200000"),
    )
    .stdout(Stdio::piped())
    .stderr(Stdio::null())
    .spawn()
    .unwrap();
    launcher.stdout.as_mut().unwrap().read_exact(&mut [0; 16]).unwrap();
    let ranks = children(launcher.id());
    assert_eq!(ranks.len(), 2);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    while ranks.iter().any(|rank| rank_of(*rank).is_some()) {
        assert!(Instant::now() < end, "a rank still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Asserts the status of a run, and a word that the error of each rank (or of the launcher) contains.
fn refused(command: Command, status: i32, word: &str, ranks: usize) {
    let what = format!("{command:?}");
    let output = run(command);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{what}: {error}");
    assert!(error.contains(word), "{what}: {error}");
    for rank in 0..ranks {
        assert!(error.contains(&format!("error: rank {rank}: ")), "{what}: {error}");
    }
}

#[test]
fn what_cannot_be_is_refused_on_every_rank() {
    let small = SHAPE.replace("--heads 9 --groups 3", "--heads 3 --groups 3");
    refused(
        program(&format!("--ranks 4 {small} text")),
        1,
        "4 ranks are more than the model's 3 attention heads",
        4,
    );
    refused(
        program(&format!("--ranks 2 {} text", SHAPE.replace("--groups 3", "--groups 2"))),
        1,
        "do not divide",
        2,
    );
    refused(program(&format!("--ranks 2 --tokens 250 {SHAPE} a-long-prompt")), 1, "context is 256", 2);
    refused(program("--ranks 0"), 2, "0 is not in 1..=16", 0);
    refused(program("--timeout 0"), 2, "seconds", 0);
    let mut empty = program(&format!("--ranks 2 {SHAPE}"));
    empty.arg("");
    refused(empty, 1, "prompt is empty", 2);
    let mut none = program("text");
    none.env("XDG_CACHE_HOME", "/nonexistent");
    refused(none, 1, "--random needs none", 0);
    #[cfg(not(feature = "mpi"))]
    refused(program(&format!("--ranks 2 --backend mpi {SHAPE} text")), 1, "--features mpi", 0);
}

/// A directory that is removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tensor-parallel-llm-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// A model whose only weight is the table of tokens.
    fn write(&self, name: &str, architecture: &str, value: f32, merges: &[&str]) -> String {
        let strings =
            |all: &[&str]| Value::Array(all.iter().map(|text| Value::String((*text).into())).collect());
        let others: Vec<_> = (3..128).map(|number| format!("token {number}")).collect();
        let tokens: Vec<_> = ["a", "b", "ab"].into_iter().chain(others.iter().map(String::as_str)).collect();
        let number = Value::U32;
        let metadata = [
            ("general.architecture", Value::String(architecture.into())),
            ("llama.block_count", number(1)),
            ("llama.context_length", number(64)),
            ("llama.embedding_length", number(32)),
            ("llama.feed_forward_length", number(128)),
            ("llama.attention.head_count", number(2)),
            ("tokenizer.ggml.model", Value::String("gpt2".into())),
            ("tokenizer.ggml.tokens", strings(&tokens)),
            ("tokenizer.ggml.merges", strings(merges)),
        ];
        let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
        let table = Tensor::full(value, (128, 32), &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
        let table = QTensor::quantize(&table, GgmlDType::F32).unwrap();
        let path = self.0.join(name);
        let mut file = std::fs::File::create(&path).unwrap();
        gguf_file::write(&mut file, &metadata, &[("token_embd.weight", &table)]).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn damaged_and_different_files_are_refused_on_every_rank() {
    let scratch = Scratch::new("files");
    let of = |model: &str| program(&format!("--ranks 2 --tokens 4 --model {model} a"));
    refused(of(&scratch.write("gpt.gguf", "gpt2", 1.0, &["a b"])), 1, "architecture is gpt2", 2);
    refused(of(&scratch.write("merges.gguf", "llama", 1.0, &["b c"])), 1, "merges \"b c\"", 2);
    let whole = scratch.write("whole.gguf", "llama", 1.0, &["a b"]);
    refused(of(&whole), 1, "no tensor blk.0.attn_q.weight", 2);
    let bytes = std::fs::read(&whole).unwrap();
    std::fs::write(&whole, &bytes[..bytes.len() - 200]).unwrap();
    refused(of(&whole), 1, "truncated", 2);
    std::fs::write(&whole, &bytes[..100]).unwrap();
    refused(of(&whole), 1, "whole.gguf", 2);
    scratch.write("part-0.gguf", "llama", 1.0, &["a b"]);
    let second = scratch.write("part-1.gguf", "llama", 2.0, &["a b"]);
    refused(of(&second.replace("part-1", "part-{rank}")), 1, "different weights: rank", 2);
    refused(of(&scratch.0.join("missing.gguf").to_string_lossy()), 1, "no weights at", 0);
}
