//! Targets without the built-in runner must not contain `#[test]`, which would silently never run.

use std::path::{Path, PathBuf};

use crate::runner::always;

tests! {
    always => targets_without_the_built_in_runner_have_no_tests;
}

fn targets_without_the_built_in_runner_have_no_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let of_package = |folder: &Path| {
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let manifest: toml::Table = manifest.parse().unwrap();
        let targets = manifest["test"].as_array().unwrap().iter();
        let own =
            targets.filter(|target| target.get("harness").and_then(toml::Value::as_bool) == Some(false));
        own.map(|target| folder.join("tests").join(target["name"].as_str().unwrap())).collect::<Vec<_>>()
    };
    let targets = [of_package(root), of_package(&root.join("cli"))].concat();
    assert_eq!(targets.len(), 6, "{targets:?}");
    for file in targets.iter().flat_map(|target| files(target)) {
        let text = std::fs::read_to_string(&file).unwrap();
        let is_left_out =
            |line: &str| ["#[test]", "proptest!"].iter().any(|start| line.trim().starts_with(start));
        assert!(!text.lines().any(is_left_out), "{}", file.display());
    }
}

/// Source files of a target: those of a folder and its subfolders, or one file.
fn files(target: &Path) -> Vec<PathBuf> {
    let Ok(entries) = target.read_dir() else { return vec![target.with_extension("rs")] };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}
