//! What is printed: a head, and a line for each path.

use std::time::Duration;

use crate::arguments::Options;
use crate::judge::{Outcome, Verdict};
use crate::path::{Path, Promise};
use crate::traffic::RULE;

pub fn print_head(options: &Options) {
    let Options { ranks, count, density, seed, iterations, .. } = options;
    let k = options.kept();
    println!(
        "# sparse allreduce of {count} f32 between {ranks} ranks, density {density} (k = {k}), seed {seed}"
    );
    println!("# sent: {RULE}");
    println!(
        "# kept: elements that a rank keeps; of dense: what is sent, over what the dense allreduce sends"
    );
    println!("# times: of the slowest rank, medians of {iterations}");
    println!("# wrong: elements of all ranks that differ in any bit from what the path promises, or whose dense allreduce differs");
    println!("# digest: of the output's bits, by which other programs compare theirs: FNV-1a over its 32-bit words");
    println!("# rel. error: of the output against the dense allreduce of what was kept, in the 2-norm");
    println!(
        "{:>18} {:>10} {:>12} {:>12} {:>9} {:>11} {:>11} {:>7} {:>10} {:>16}  promise",
        "path",
        "kept",
        "sent, mean",
        "sent, most",
        "of dense",
        "select (ms)",
        "reduce (ms)",
        "wrong",
        "rel. error",
        "digest"
    );
}

pub fn print_row(path: &Path, outcomes: &[Outcome], verdict: &Verdict) {
    let ranks = outcomes.len();
    let mean = |of: fn(&Outcome) -> usize| outcomes.iter().map(of).sum::<usize>() / ranks;
    let slowest =
        |of: fn(&Outcome) -> Duration| outcomes.iter().map(of).max().unwrap_or_default().as_secs_f64() * 1e3;
    let sent = mean(|outcome| outcome.sent);
    let of_dense = match 2 * (ranks - 1) * outcomes[0].output.len() * size_of::<f32>() / ranks {
        0 => 0.0,
        dense => sent as f64 / dense as f64,
    };
    println!(
        "{:>18} {:>10} {:>12} {:>12} {:>9.4} {:>11.3} {:>11.3} {:>7} {:>10.3e} {:016x}  {}{}",
        path.name,
        mean(|outcome| outcome.kept.len()),
        sent,
        outcomes.iter().map(|outcome| outcome.sent).max().unwrap_or_default(),
        of_dense,
        slowest(|outcome| outcome.selecting),
        slowest(|outcome| outcome.reducing),
        verdict.wrong + verdict.wrong_dense,
        verdict.relative_error,
        digest(&outcomes[0].output),
        match path.promise {
            Promise::Sum => "the sum",
            Promise::TopKOfSum => "the top k of the sum",
            Promise::TopKOfTree => "the top k of a tree",
        },
        if verdict.is_right() { "" } else { ": BROKEN" },
    );
}

/// FNV-1a (Fowler, Noll and Vo), a word at a time.
fn digest(output: &[f32]) -> u64 {
    output.iter().fold(0xCBF2_9CE4_8422_2325, |hash: u64, value| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0000_0100_0000_01B3)
    })
}
