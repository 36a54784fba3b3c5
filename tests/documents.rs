//! What the documents say that can be checked: links lead somewhere, and the example for GPUs is the one that is compiled.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn documents() -> Vec<PathBuf> {
    let mut documents: Vec<PathBuf> = [root().to_path_buf(), root().join("docs")]
        .iter()
        .flat_map(|folder| fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    documents.sort();
    documents
}

/// The text outside of fenced blocks.
fn prose(text: &str) -> String {
    text.split("\n```").step_by(2).collect::<Vec<_>>().join("\n")
}

/// What inline links, reference definitions and images of HTML point at.
fn targets(text: &str) -> Vec<&str> {
    let inline = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    let references =
        text.lines().filter(|line| line.starts_with('[')).filter_map(|line| line.split_once("]: "));
    let images = ["src=\"", "srcset=\""].into_iter().flat_map(|attribute| text.split(attribute).skip(1));
    let images = images.filter_map(|rest| rest.split_once('"')).map(|(target, _)| target);
    inline.chain(references.map(|(_, target)| target)).chain(images).collect()
}

/// The anchors of a document's headings, as GitHub makes them.
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
