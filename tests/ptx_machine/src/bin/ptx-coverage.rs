//! Sums up which instructions of each kernel were executed, and checks that of the hot set they are enough.
//!
//!     ptx-coverage PTX FOLDER LIST
//!
//! FOLDER has the notes of `PTX_MACHINE_COVERAGE`. LIST names the places in the source whose instructions a hot kernel need not
//! execute, a line each, with the reason: what is missed elsewhere is an error, and so is a place that no kernel misses any more.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use fast_allreduce_ptx_machine::coverage::{self, Coverage};
use fast_allreduce_ptx_machine::Program;

/// Of the instructions of each hot kernel, in per cent.
const LEAST: f64 = 95.0;

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

fn percent(coverage: &Coverage) -> f64 {
    100.0 * coverage.executed as f64 / coverage.all.max(1) as f64
}

fn report(ptx: &str, folder: &str, list: &str) -> Result<bool, String> {
    let text = std::fs::read_to_string(ptx).map_err(|error| format!("{ptx}: {error}"))?;
    let program = Program::load(&text, false).map_err(|error| error.to_string())?;
    let all = coverage::read(&program, Path::new(folder)).map_err(|error| format!("{folder}: {error}"))?;
    let text = std::fs::read_to_string(list).map_err(|error| format!("{list}: {error}"))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    let listed: BTreeSet<&str> = lines.filter_map(|line| line.split_whitespace().next()).collect();
    let mut sound = true;
    let mut missed = BTreeSet::new();
    for kernel in &all {
        let percent = percent(kernel);
        let hot = kernel.kernel.contains("_sum_w");
        let Coverage { kernel: name, executed, all, dead, .. } = kernel;
        println!(
            "{name:<40} {executed:>6} of {all:>6}  {percent:5.1} %, and {dead} that no thread can reach"
        );
        if kernel.executed == 0 {
            println!("  no instruction was executed");
            sound = false;
        }
        if !hot {
            continue;
        }
        if percent < LEAST {
            println!("  less than {LEAST} %");
            sound = false;
        }
        for (place, count) in &kernel.missed {
            missed.insert(place.clone());
            if !listed.contains(place.as_str()) {
                println!("  {place}: {count} instructions were not executed");
                sound = false;
            }
        }
    }
    for place in listed.iter().filter(|&&place| !missed.contains(place)) {
        println!("{place} is listed, and every hot kernel executes it");
        sound = false;
    }
    Ok(sound)
}
