//! Reads `csrc/kernels.def`, the list of what kernels there are, and writes it as Rust.

use std::fmt::Write as _;
use std::path::Path;

/// Writes `out_dir/kernels.rs`: of each list the names of its entries in order, and of `FA_HOT_WORLDS` the numbers.
///
/// # Panics
///
/// When the file cannot be read or written, or a list is not there.
pub fn write(csrc: &Path, out_dir: &Path) {
    let path = csrc.join("kernels.def");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut rust = String::new();
    let of_algorithms = ["HOT", "REDUCING", "MOVING", "OTHER", "NORMING", "NVLS"].map(|list| (list, 2));
    // The column of the name; of the types, that of what their kernels are named after.
    for (list, column) in of_algorithms.into_iter().chain([("TYPES", 6), ("HOT_TYPES", 0)]) {
        let names = column_of(&text, list, column);
        writeln!(rust, "pub const {list}: [&str; {}] = {names:?};", names.len()).expect("a string takes it");
    }
    let worlds = column_of(&text, "HOT_WORLDS", 0).join(", ");
    writeln!(rust, "pub const HOT_WORLDS: &[usize] = &[{worlds}];").expect("a string takes it");
    let to = out_dir.join("kernels.rs");
    std::fs::write(&to, rust).unwrap_or_else(|error| panic!("{}: {error}", to.display()));
}

/// A column of a list, with the entries of the lists that are part of it.
fn column_of<'a>(text: &'a str, list: &str, column: usize) -> Vec<&'a str> {
    let head = format!("#define FA_{list}(X, ...)");
    let (_, body) = text.split_once(&head).unwrap_or_else(|| panic!("kernels.def has no {head}"));
    // The first line is what is left of the head's; a definition ends with the first line that does not go on.
    let mut lines = body.lines().skip(1);
    let mut entries = Vec::new();
    loop {
        let line = lines.next().unwrap_or_default().trim();
        let entry = line.trim_end_matches('\\').trim();
        if let Some(entry) = entry.strip_prefix("X(") {
            entries.push(entry.split(',').nth(column).unwrap_or_default().trim());
        } else if let Some(other) = entry.strip_prefix("FA_").and_then(|entry| entry.split('(').next()) {
            entries.extend(column_of(text, other, column));
        }
        if !line.ends_with('\\') {
            return entries;
        }
    }
}
