//! Writes everything about a call to a file: kernel, launches, memory, and results. replay.py runs it on a GPU.

use std::fmt::Write as _;
use std::path::Path;

use fast_allreduce_ptx_machine::clock::Timing;
use fast_allreduce_ptx_machine::{Launch, Program, Range};

/// Memory that consists of copies of a value after a call.
pub struct Expected {
    pub range: Range,
    pub value: Vec<u8>,
}

/// A call, as JSON without its end.
pub struct Export(String);

impl Export {
    /// Describes the launches of all ranks and the contents of their memory, before they run.
    ///
    /// # Safety
    ///
    /// All ranges are readable and aligned to 8 bytes, and no kernel runs.
    pub unsafe fn of(ptx: &Path, program: &Program, calls: &[Launch], homes: &[(Range, usize)]) -> Self {
        let Launch { kernel, grid, block, cluster, dynamic_shared: shared, .. } = calls[0];
        let module = ptx.file_stem().unwrap_or_default().to_string_lossy();
        let sizes = program.parameters(kernel).unwrap_or_default().iter();
        let sizes = list(sizes.map(|(offset, bytes)| format!("[{offset},{bytes}]")));
        let params = list(calls.iter().map(|call| hex(call.params)));
        let memory = list(homes.iter().map(|(range, _)| {
            // SAFETY: the caller vouches for the range.
            let words =
                unsafe { std::slice::from_raw_parts(range.low as *const u64, range.bytes as usize / 8) };
            format!("[{},{},{}]", range.low, range.bytes, runs(words))
        }));
        Self(format!(
            "{{\"module\":\"{module}\",\"kernel\":\"{kernel}\",\"grid\":{grid:?},\"block\":{block:?},\
             \"cluster\":{cluster:?},\"shared\":{shared},\n\"parameters\":{sizes},\n\"launches\":{params},\n\
             \"memory\":{memory}"
        ))
    }

    /// Writes the file, with the prediction and what the memory has to be after the call.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(
        &self,
        path: &Path,
        programmatic: bool,
        timing: &Timing,
        expected: &[Expected],
    ) -> Result<(), String> {
        let expected = list(
            expected
                .iter()
                .map(|Expected { range, value }| format!("[{},{},{}]", range.low, range.bytes, hex(value))),
        );
        let us = timing.call_ns / 1e3;
        let end = format!(
            ",\n\"expected\":{expected},\n\"programmatic\":{programmatic},\"predicted_us\":{us:.3}}}\n"
        );
        std::fs::write(path, format!("{}{end}", self.0))
            .map_err(|error| format!("{}: {error}", path.display()))
    }
}

fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(","))
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::from("\"");
    bytes.iter().for_each(|byte| _ = write!(text, "{byte:02x}"));
    text + "\""
}

/// Returns the runs of equal words that are not zero: index of the first word, word, and number of words.
fn runs(words: &[u64]) -> String {
    let mut at = 0;
    let runs = words.chunk_by(|a, b| a == b).filter_map(|run| {
        at += run.len();
        (run[0] != 0).then(|| format!("[{},{},{}]", at - run.len(), run[0], run.len()))
    });
    list(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_written_as_runs_of_equal_words() {
        assert_eq!(runs(&[0, 0, 7, 7, 7, 0, 9]), "[[2,7,3],[6,9,1]]");
        assert_eq!((runs(&[0; 4]), hex(&[0, 255])), ("[]".to_owned(), "\"00ff\"".to_owned()));
    }
}
