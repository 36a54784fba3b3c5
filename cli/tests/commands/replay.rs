//! `replay`: recorded calls are made again, and recordings compared.

use std::fs;
use std::path::Path;
use std::process::Output;

use crate::program::temporary::Folder;
use crate::program::{program, text};

/// Returns the files of the world with the longest recordings, in the order of the ranks.
fn longest(folder: &Path) -> Vec<String> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let sizes = files.map(|entry| (entry.metadata().unwrap().len(), entry.path().display().to_string()));
    let (_, largest) = sizes.max().unwrap();
    let (world, _) = largest.rsplit_once('-').unwrap();
    [0, 1].map(|rank| format!("{world}-{rank}.record")).to_vec()
}

/// Replays files, and records that below `folder`.
fn replay(files: &[String], folder: &Path, bytes: &str) -> (i32, String) {
    fs::create_dir_all(folder).unwrap();
    let mut command = program("replay");
    command.env("FAST_ALLREDUCE_RECORD_DIR", folder).env("FAST_ALLREDUCE_RECORD_BYTES", bytes);
    let Output { status, stdout, stderr } = command.args(files).output().unwrap();
    (status.code().unwrap(), text(&stdout) + &text(&stderr))
}

#[test]
fn recorded_calls_are_repeated_and_compared() {
    let folder = Folder::new();
    let of = |name: &str| folder.path().join(name);
    fs::create_dir(of("soak")).unwrap();
    let mut soak = program("soak --ranks 2 --calls 60 --seed 5 --faults none -e 16K");
    let output = soak.env("FAST_ALLREDUCE_RECORD_DIR", of("soak")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let files = longest(&of("soak"));
    for (name, bytes) in [("first", "1000000000"), ("second", "hashes")] {
        let (code, shown) = replay(&files, &of(name), bytes);
        assert!(code == 0 && shown.contains(" calls of 2 ranks"), "{code}: {shown}");
    }
    let (first, second) = (longest(&of("first")), longest(&of("second")));
    let both = |one: &[String], other: &[String]| [one, other].concat();
    let (code, shown) = replay(&both(&first, &second), &of("third"), "");
    assert!(code == 0 && shown.contains("rank 1: ") && shown.contains(" equal calls"), "{code}: {shown}");
    let (code, shown) = replay(&both(&files, &first), &of("third"), "");
    assert!(code == 1 && shown.contains("rank 0: 0 equal calls: call 1, "), "{code}: {shown}");

    let cut = of("cut").display().to_string();
    let whole = fs::read(&files[1]).unwrap();
    fs::write(&cut, &whole[..whole.len() - 1]).unwrap();
    let other = of("other").display().to_string();
    fs::write(&other, [b"fast-allreduce 2", &whole[16..]].concat()).unwrap();
    let refused = [
        (vec![files[0].clone(), cut], "the file ends inside it, at byte"),
        (vec![files[0].clone(), other], "does not begin as recordings of this format do"),
        (files[..1].to_vec(), "lack: [1]"),
        (vec![files[0].clone(), files[0].clone()], "rank 0 of its world has another file"),
        (second, "hashes alone"),
        (vec!["/nonexistent".to_owned()], "/nonexistent"),
    ];
    for (files, reason) in refused {
        let (code, shown) = replay(&files, &of("third"), "");
        assert!(code == 2 && shown.contains(reason), "{code}: {shown}");
    }
    // Nothing is recorded where nothing can be.
    let mut command = program("replay");
    command.args(&files).env("FAST_ALLREDUCE_RECORD_DIR", "/nonexistent");
    let output = command.output().unwrap();
    assert!(output.status.code() == Some(2) && text(&output.stderr).contains("FAST_ALLREDUCE_RECORD_DIR"));
}
