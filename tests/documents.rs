//! Claims of the documents that can be checked: link targets and named files exist, and the README's example for GPUs
//! is the one that is compiled.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn documents() -> Vec<PathBuf> {
    let mut documents: Vec<PathBuf> = ["", "docs", "lab", "lab/journal", "lab/reports", "tests"]
        .iter()
        .flat_map(|folder| fs::read_dir(root().join(folder)).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    documents.sort();
    documents
}

/// Returns the text outside of fenced blocks.
fn prose(text: &str) -> String {
    text.split("\n```").step_by(2).collect::<Vec<_>>().join("\n")
}

/// Returns the targets of inline links, of reference definitions and of HTML images.
fn targets(text: &str) -> Vec<&str> {
    let inline = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    let references =
        text.lines().filter(|line| line.starts_with('[')).filter_map(|line| line.split_once("]: "));
    let images = ["src=\"", "srcset=\""].into_iter().flat_map(|attribute| text.split(attribute).skip(1));
    let images = images.filter_map(|rest| rest.split_once('"')).map(|(target, _)| target);
    inline.chain(references.map(|(_, target)| target)).chain(images).collect()
}

/// Returns the anchors of a document's headings, as GitHub creates them.
fn anchors(text: &str) -> HashSet<String> {
    let headings = text
        .lines()
        .filter_map(|line| line.strip_prefix('#'))
        .map(|line| line.trim_start_matches('#').trim());
    headings
        .map(|heading| {
            let kept = heading.to_lowercase();
            kept.chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
                .map(|c| if c == ' ' { '-' } else { c })
                .collect()
        })
        .collect()
}

#[test]
fn links_lead_somewhere() {
    let mut seen = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        for target in targets(&prose(&text)).into_iter().filter(|target| !target.starts_with("https://")) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = if path.is_empty() { document.clone() } else { document.parent().unwrap().join(path) };
            assert!(file.exists(), "{}: {target} is not there", document.display());
            if !anchor.is_empty() {
                let anchors = anchors(&prose(&fs::read_to_string(&file).unwrap()));
                assert!(anchors.contains(anchor), "{}: {target} has no such heading", document.display());
            }
            seen += 1;
        }
    }
    assert!(seen > 20, "only {seen} links were found");
}

/// Files of other projects that our documents name.
const OF_OTHERS: [&str; 2] = ["csrc/cpu/comm/shm.cpp", "csrc/custom_all_reduce.cuh"];

/// Collects the project's text files, relative to its root.
fn texts(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let name = entry.unwrap().file_name();
        let path = folder.join(&name);
        let is_ours = !name.to_string_lossy().starts_with('.') && name != "target";
        if is_ours && root().join(&path).is_dir() {
            texts(&path, found);
        } else if is_ours && ends_as_text(&name.to_string_lossy()) {
            found.push(path);
        }
    }
}

fn ends_as_text(name: &str) -> bool {
    let endings = [".rs", ".cuh", ".cu", ".cpp", ".hpp", ".h", ".sh", ".py", ".pyi", ".md", ".def"];
    endings.iter().any(|ending| name.ends_with(ending))
}

/// Returns the paths in a text: words that contain a slash and end with the extension of a text file.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || "/._-$~{}<>*:\\".contains(c)));
    let words = words.map(|word| word.trim_end_matches(['.', ':']));
    words.filter(|word| {
        word.contains('/') && ends_as_text(word) && word.starts_with(|c: char| c.is_ascii_alphabetic())
    })
}

/// Returns whether the path names a file, relative to the folder of the file that contains it or to one of its parents.
fn exists(path: &str, named_in: &Path) -> bool {
    named_in.ancestors().skip(1).any(|folder| root().join(folder).join(path).exists())
}

#[test]
fn files_that_are_named_exist() {
    // A path that begins with a folder of the root names one of the project's files.
    let folders: HashSet<String> = fs::read_dir(root())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    let mut files = Vec::new();
    texts(Path::new(""), &mut files);
    let (mut seen, mut missing) = (0, Vec::new());
    // Scripts change their folder before they name files.
    for file in files.iter().filter(|file| file.extension().is_none_or(|extension| extension != "sh")) {
        for path in paths(&fs::read_to_string(root().join(file)).unwrap()) {
            let is_ours = path.split('/').next().is_some_and(|first| folders.contains(first));
            if is_ours && !OF_OTHERS.contains(&path) {
                seen += 1;
                if !exists(path, file) {
                    missing.push(format!("{}: {path}", file.display()));
                }
            }
        }
    }
    assert!(seen > 100, "only {seen} paths were found");
    assert!(missing.is_empty(), "files that are not there are named: {missing:#?}");
}

/// A step of .ci/run or of scripts/nightly.sh that is renamed is noticed here, not after an hour.
#[test]
fn scripts_that_scripts_run_exist() {
    let mut files = Vec::new();
    texts(Path::new(""), &mut files);
    files.retain(|file| file.extension().is_some_and(|extension| extension == "sh"));
    files.push(".ci/run".into());
    let (mut seen, mut missing) = (0, Vec::new());
    for file in files {
        for path in paths(&fs::read_to_string(root().join(&file)).unwrap()) {
            if path.starts_with("scripts/") && !path.contains(['$', '*', '{', '<']) {
                seen += 1;
                let script = root().join(path);
                let is_program = fs::read(&script).is_ok_and(|text| text.starts_with(b"#!"));
                let mode = fs::metadata(&script).map_or(0, |facts| facts.permissions().mode());
                if mode == 0 || is_program && mode & 0o100 == 0 {
                    missing.push(format!("{}: {path}", file.display()));
                }
            }
        }
    }
    assert!(seen > 100, "only {seen} paths were found");
    assert!(missing.is_empty(), "scripts that are not there, or cannot be executed, are named: {missing:#?}");
}

#[test]
fn the_readmes_example_for_gpus_is_the_one_that_is_compiled() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let (_, rest) = readme.split_once("```rust,ignore\n").expect("the README has an example for GPUs");
    let (block, _) = rest.split_once("```").unwrap();
    let example = fs::read_to_string(root().join("examples/gpu_all_reduce.rs")).unwrap();
    let lines = |text: &str| {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.map(|line| line.to_owned() + "\n").collect::<String>()
    };
    assert!(lines(&example).contains(&lines(block)), "it is not in examples/gpu_all_reduce.rs:\n{block}");
}
