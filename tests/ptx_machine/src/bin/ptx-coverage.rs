//! Sums up which instructions of each kernel were executed, and checks that they are enough.
//!
//!     ptx-coverage PTX FOLDER LIST
//!
//! FOLDER has the notes of `PTX_MACHINE_COVERAGE`. LIST names the places in the source whose instructions need not be executed, a
//! line each, with the reason; after an `@` come the kernels that this holds for, by the beginnings of their names. Of each kernel
//! 90 % of the rest must be. What a kernel of the hot set misses elsewhere is an error, and so is a place that no kernel misses.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use fast_allreduce_ptx_machine::coverage::{self, Coverage};
use fast_allreduce_ptx_machine::Program;

/// Of the instructions of each kernel, in per cent.
const LEAST: f64 = 90.0;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [ptx, folder, list] = &arguments[..] else {
        eprintln!("usage: ptx-coverage PTX FOLDER LIST");
        return ExitCode::from(2);
    };
    match report(ptx, folder, list) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("ptx-coverage: {error}");
            ExitCode::from(2)
        }
    }
}

/// A line of the list.
struct Excused<'a> {
    place: &'a str,
    /// None: all.
    kernels: Option<Vec<&'a str>>,
}

impl<'a> Excused<'a> {
    fn of_line(line: &'a str) -> Option<Self> {
        let word = line.split_whitespace().next().filter(|word| !word.starts_with('#'))?;
        Some(match word.split_once('@') {
            Some((place, kernels)) => Self { place, kernels: Some(kernels.split(',').collect()) },
            None => Self { place: word, kernels: None },
        })
    }

    fn excuses(&self, kernel: &str, place: &str) -> bool {
        let kernels = self.kernels.as_ref();
        self.place == place && kernels.is_none_or(|names| names.iter().any(|name| kernel.starts_with(name)))
    }
}

fn percent(coverage: &Coverage, excused: usize) -> f64 {
    100.0 * coverage.executed as f64 / (coverage.all - excused).max(1) as f64
}

fn report(ptx: &str, folder: &str, list: &str) -> Result<bool, String> {
    let text = std::fs::read_to_string(ptx).map_err(|error| format!("{ptx}: {error}"))?;
    let program = Program::load(&text, false).map_err(|error| error.to_string())?;
    let all = coverage::read(&program, Path::new(folder)).map_err(|error| format!("{folder}: {error}"))?;
    let text = std::fs::read_to_string(list).map_err(|error| format!("{list}: {error}"))?;
    let list: Vec<Excused> = text.lines().filter_map(Excused::of_line).collect();
    let mut sound = true;
    let mut used = BTreeSet::new();
    for kernel in &all {
        let hot = kernel.kernel.contains("_sum_w");
        let Coverage { kernel: name, executed, all, dead, missed } = kernel;
        let mut excused = 0;
        let mut rest = Vec::new();
        for (place, count) in missed {
            match list.iter().position(|one| one.excuses(name, place)) {
                Some(line) => {
                    used.insert(line);
                    excused += count;
                }
                None => rest.push((place, count)),
            }
        }
        let percent = percent(kernel, excused);
        println!(
            "{name:<40} {executed:>6} of {all:>6}, {excused} excused: {percent:5.1} %; {dead} that no thread can reach"
        );
        if kernel.executed == 0 {
            println!("  no instruction was executed");
            sound = false;
        }
        if percent < LEAST {
            println!("  less than {LEAST} %");
            sound = false;
        }
        for (place, count) in rest {
            println!("  {place}: {count} instructions were not executed");
            sound &= !hot;
        }
    }
    for (_, one) in list.iter().enumerate().filter(|(line, _)| !used.contains(line)) {
        println!("{} is listed, and every kernel that it is listed for executes it", one.place);
        sound = false;
    }
    Ok(sound)
}
