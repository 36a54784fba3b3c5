//! Writes the generated files into the checkout that contains this crate.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for file in catalogue::faces::all() {
        let written = file.rendered(&root).and_then(|text| std::fs::write(root.join(file.path), text));
        if let Err(error) = written {
            eprintln!("{}: {error}", file.path);
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
