//! Coverage: notes of each process about executed instructions, and their summary.
//!
//! A note is a file with one byte for each coverage place of a kernel; 1 means that it was reached. Its
//! name has the kernel and the process.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::Mutex;

use crate::driver::environment::environment;
use crate::errors::LoadResult;
use crate::lower::Covered;
use crate::program::Program;

/// Name for the functions that kernels call; they are counted together.
const FUNCTIONS: &str = "functions";

fn bytes_of(covered: &[AtomicU8]) -> Vec<u8> {
    covered.iter().map(|byte| u8::from(byte.load(Ordering::Relaxed) != 0)).collect()
}

/// Returns the folder for notes: `PTX_MACHINE_COVERAGE`.
pub fn folder() -> Option<&'static Path> {
    environment().coverage.as_deref()
}

/// Writes a note after a launch, if there is a folder for notes and a place was reached for the first time.
pub fn note(program: &Program, kernel: &str) {
    static NOTED: Mutex<BTreeMap<(String, bool), usize>> = Mutex::new(BTreeMap::new());
    let (Some(folder), Ok(compiled)) = (folder(), program.kernel(kernel)) else { return };
    let Ok(mut noted) = NOTED.lock() else { return };
    for (name, bytes) in
        [(kernel, bytes_of(&compiled.covered)), (FUNCTIONS, bytes_of(&program.function_covered))]
    {
        let count = bytes.iter().filter(|&&byte| byte != 0).count();
        // A process may load the same kernels twice, with and without observation.
        let key = (name.to_owned(), program.is_observed());
        if noted.get(&key).is_some_and(|&before| before == count) {
            continue;
        }
        noted.insert(key, count);
        let own = format!("{}-{}", std::process::id(), u8::from(program.is_observed()));
        let path = folder.join(format!("{name}.{own}"));
        if let Err(error) = std::fs::write(&path, bytes) {
            eprintln!("PTX machine: {}: {error}", path.display());
        }
    }
}

/// Coverage of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    /// The kernel, or `functions`.
    pub kernel: String,
    /// Number of reachable instructions.
    pub all: usize,
    /// Number of reachable instructions that were executed.
    pub executed: usize,
    /// Number of unreachable instructions, which are not part of `all`.
    pub dead: usize,
    /// Reachable instructions that were not executed: their number for each source line.
    pub missed: BTreeMap<String, usize>,
}

/// Summarises the notes of a folder.
///
/// # Errors
///
/// A note cannot be read.
pub fn read(program: &Program, folder: &Path) -> io::Result<Vec<Coverage>> {
    let mut notes: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let bytes = std::fs::read(&path)?;
        let all = notes.entry(name).or_insert_with(|| vec![0; bytes.len()]);
        all.resize(all.len().max(bytes.len()), 0);
        all.iter_mut().zip(bytes).for_each(|(all, byte)| *all |= byte);
    }
    let mut coverage = Vec::new();
    let kernels: Vec<&str> = program.kernels().chain([FUNCTIONS]).collect();
    for kernel in kernels {
        let places = places(program, kernel).map_err(|error| io::Error::other(error.to_string()))?;
        let note = notes.get(kernel).cloned().unwrap_or_default();
        let reached = places.iter().enumerate().filter(|(i, _)| note.get(*i).is_some_and(|&byte| byte != 0));
        let instructions =
            |&covered: &Covered| (covered.first..covered.last).map(move |at| (covered.function, at));
        let mut all: BTreeSet<(u32, u32)> = places.iter().flat_map(instructions).collect();
        // A guarded instruction belongs to its block too, but reaching the block does not mean that it is
        // executed.
        let guarded: BTreeSet<(u32, u32)> =
            places.iter().filter(|c| c.last == c.first + 1).flat_map(instructions).collect();
        let single = |covered: &Covered| covered.last == covered.first + 1;
        let mut executed = BTreeSet::new();
        for (_, covered) in reached {
            let is_single = single(covered);
            executed.extend(instructions(covered).filter(|at| is_single || !guarded.contains(at)));
        }
        let whole = all.len();
        let dead = program.dead(kernel).map_err(|error| io::Error::other(error.to_string()))?;
        all.retain(|at| executed.contains(at) || !dead.contains(at));
        let mut missed = BTreeMap::new();
        for &(function, at) in all.difference(&executed) {
            let place = program.source_of(function as usize, at as usize);
            *missed.entry(place).or_insert(0) += 1;
        }
        coverage.push(Coverage {
            kernel: kernel.to_owned(),
            dead: whole - all.len(),
            all: all.len(),
            executed: executed.len(),
            missed,
        });
    }
    Ok(coverage)
}

fn places(program: &Program, kernel: &str) -> LoadResult<Vec<Covered>> {
    Ok(match kernel {
        FUNCTIONS => program.function_facts.covers.clone(),
        _ => program.kernel(kernel)?.facts.covers.clone(),
    })
}
