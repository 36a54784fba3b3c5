//! Sparse allreduce: the exchanges that gradient compression needs, built on this crate's collectives, each checked
//! against the dense allreduce of what the ranks kept.
//!
//! ```sh
//! cargo run --release --example sparse_allreduce -- --ranks 4 --density 0.01
//! ```
//!
//! Each rank is a thread with a vector like a gradient. It keeps some elements (`selection.rs`, `gaussian_k.rs`), and
//! the ranks add what they kept by one of the paths (`path.rs`, a file for each). It prints the bytes that each path
//! sends, the time it takes, and its error, and ends with status 1 if any output is not, to the bit, what the path
//! promises.

mod arguments;
mod dense;
mod gaussian_k;
mod gaussian_k_concat;
mod gtop_k;
mod inputs;
mod judge;
mod normal;
mod ok_top_k;
mod path;
mod ranks;
mod regions;
mod report;
mod selection;
mod sparse;
mod top_k;
mod top_k_a_opt;
mod top_k_sa;
mod traffic;

use std::process::ExitCode;

use arguments::Options;
use ranks::Ranks;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{}", arguments::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Whether every path kept its promise.
fn run(options: &Options) -> Result<bool, String> {
    report::print_head(options);
    let ranks = Ranks::new(options)?;
    let mut is_right = true;
    for path in options.paths() {
        let outcomes = ranks.run(path, options)?;
        let verdict = judge::judge(path.promise, &outcomes, options.kept());
        report::print_row(path, &outcomes, &verdict);
        is_right &= verdict.is_right();
    }
    Ok(is_right)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worlds that are a power of two and that are not; regions without entries; everything kept.
    #[test]
    fn every_path_keeps_its_promise() {
        for ranks in [1, 2, 3, 4, 5, 8] {
            for shape in ["--count 20000", "--count 3 --density 1", "--count 999 --density 0.3 --seed 7"] {
                let line = format!("--ranks {ranks} --iterations 1 {shape}");
                let options = Options::parse(line.split(' ').map(str::to_owned)).unwrap().unwrap();
                assert_eq!(run(&options), Ok(true), "{line}");
            }
        }
    }
}
