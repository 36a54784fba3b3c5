//! Sums up which instructions of each kernel were executed, and checks that coverage is sufficient.
//!
//!     ptx-coverage PTX FOLDER LIST SOURCES
//!
//! FOLDER has the notes of `PTX_MACHINE_COVERAGE`; SOURCES is the folder of the sources. LIST names source
//! lines whose instructions need not be executed: `FILE@KERNELS TEXT`. KERNELS are prefixes of kernel
//! names; TEXT is the whole line without indentation, or `-` for instructions that belong to no line of the
//! file. At least `LEAST` of each kernel's other instructions must be executed. A kernel of the hot set must
//! execute all of them, and every line of LIST must be missed by some kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::ExitCode;

use fast_allreduce_ptx_machine::coverage::{self, Coverage};
use fast_allreduce_ptx_machine::Program;

/// Minimum coverage of each kernel's instructions, in per cent.
const LEAST: f64 = 85.0;
/// Minimum for kernels of rows and for functions, which are theirs. Their norms and formats are drawn at random; the
/// fixed calls alone execute 61 to 77 %. Those without teams of blocks never execute the exchange between the blocks of
/// a team, about a tenth of their instructions.
const LEAST_OF_ROWS: f64 = 60.0;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [ptx, folder, list, sources] = &arguments[..] else {
        eprintln!("usage: ptx-coverage PTX FOLDER LIST SOURCES");
        return ExitCode::from(2);
    };
    match report(ptx, folder, list, Path::new(sources)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("ptx-coverage: {error}");
            ExitCode::from(2)
        }
    }
}

/// Source lines by file name. A place names no folder, so files of the same name are kept together.
struct Sources(BTreeMap<String, Vec<Vec<String>>>);

impl Sources {
    fn read(folder: &Path) -> std::io::Result<Self> {
        let mut sources = Self(BTreeMap::new());
        sources.add(folder)?;
        Ok(sources)
    }

    fn add(&mut self, folder: &Path) -> std::io::Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                self.add(&entry.path())?;
                continue;
            }
            let text = std::fs::read_to_string(entry.path())?;
            let lines = text.lines().map(|line| line.trim().to_owned()).collect();
            self.0.entry(entry.file_name().to_string_lossy().into_owned()).or_default().push(lines);
        }
        Ok(())
    }

    /// Returns the file of a place `FILE:LINE` and the line's text in each file of that name; `-` if there
    /// is no such line.
    fn at<'a>(&'a self, place: &'a str) -> (&'a str, Vec<&'a str>) {
        let (file, line) = place.rsplit_once(':').unwrap_or((place, ""));
        let line = line.parse::<usize>().ok().and_then(|line| line.checked_sub(1));
        let files = self.0.get(file).into_iter().flatten();
        let mut texts: Vec<&str> = files.filter_map(|lines| Some(lines.get(line?)?.as_str())).collect();
        if texts.is_empty() {
            texts.push("-");
        }
        (file, texts)
    }
}

/// A row of the list of exceptions.
struct Excused<'a> {
    file: &'a str,
    kernels: Vec<&'a str>,
    text: &'a str,
}

impl<'a> Excused<'a> {
    fn of_line(line: &'a str) -> Option<Self> {
        let (place, text) = line.split_once(' ').filter(|_| !line.starts_with('#'))?;
        let (file, kernels) = place.split_once('@')?;
        Some(Self { file, kernels: kernels.split(',').collect(), text: text.trim() })
    }

    fn excuses(&self, kernel: &str, (file, texts): &(&str, Vec<&str>)) -> bool {
        *file == self.file
            && texts.contains(&self.text)
            && self.kernels.iter().any(|name| kernel.starts_with(name))
    }
}

fn percent(coverage: &Coverage, excused: usize) -> f64 {
    100.0 * coverage.executed as f64 / (coverage.all - excused).max(1) as f64
}

fn report(ptx: &str, folder: &str, list: &str, sources: &Path) -> Result<bool, String> {
    let text = std::fs::read_to_string(ptx).map_err(|error| format!("{ptx}: {error}"))?;
    let program = Program::load(&text, false).map_err(|error| error.to_string())?;
    let all = coverage::read(&program, Path::new(folder)).map_err(|error| format!("{folder}: {error}"))?;
    let sources = Sources::read(sources).map_err(|error| format!("{}: {error}", sources.display()))?;
    let text = std::fs::read_to_string(list).map_err(|error| format!("{list}: {error}"))?;
    let list: Vec<Excused> = text.lines().filter_map(Excused::of_line).collect();
    let mut errors = Vec::new();
    let mut used = BTreeSet::new();
    for kernel in &all {
        let hot = kernel.kernel.contains("_sum_w");
        let Coverage { kernel: name, executed, all, dead, missed } = kernel;
        let mut excused = 0;
        let mut rest = Vec::new();
        for (place, count) in missed {
            let at = sources.at(place);
            match list.iter().position(|one| one.excuses(name, &at)) {
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
            errors.push(format!("{name}: no instruction was executed"));
        }
        let least = if name.contains("_norm_") || name == "functions" { LEAST_OF_ROWS } else { LEAST };
        if percent < least {
            errors.push(format!("{name}: {percent:.1} %, less than {least} %"));
        }
        for (place, count) in rest {
            println!("  {place}: {count} instructions were not executed");
            if hot {
                errors
                    .push(format!("{name}: {place}: {count} instructions of the hot set were not executed"));
            }
        }
    }
    for (_, one) in list.iter().enumerate().filter(|(line, _)| !used.contains(line)) {
        errors.push(format!(
            "{}: `{}` is listed, and every kernel that it is listed for executes it",
            one.file, one.text
        ));
    }
    // Errors are printed last, as readers of a long log look there first.
    for error in &errors {
        println!("error: {error}");
    }
    Ok(errors.is_empty())
}
