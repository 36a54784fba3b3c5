//! `replay`: recorded calls are made again, and recordings compared.

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};

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
    assert!(code == 0 && shown.contains("rank 1: ") && shown.contains(" equal calls\n"), "{code}: {shown}");
    // A run that was stopped earlier is no difference, but said.
    fs::create_dir(of("shorter")).unwrap();
    let mut soak = program("soak --ranks 2 --calls 30 --seed 5 --faults none -e 16K");
    let output = soak.env("FAST_ALLREDUCE_RECORD_DIR", of("shorter")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let (code, shown) = replay(&both(&files, &longest(&of("shorter"))), &of("third"), "");
    assert!(code == 0 && shown.contains(" equal calls; one recording ends there\n"), "{code}: {shown}");
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

/// Another launcher may have only some of the exit statuses.
#[test]
fn every_rank_fails_if_one_has_other_results() {
    let folder = Folder::new();
    let mut soak = program("soak --ranks 2 --calls 20 --seed 5 --faults none -e 16K");
    let output = soak.env("FAST_ALLREDUCE_RECORD_DIR", folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let files = longest(folder.path());
    type Change = fn(&mut Vec<u8>);
    let changes: [(Change, i32, &str); 3] = [
        (|_| (), 0, "calls of 2 ranks"),
        (|file| _ = file.pop(), 2, "the file ends inside it"),
        (|file| change_last_bit(file), 1, "rank 1, call "),
    ];
    for (change, status, shown) in changes {
        let changed = folder.path().join("changed").display().to_string();
        let mut bytes = fs::read(&files[1]).unwrap();
        change(&mut bytes);
        fs::write(&changed, bytes).unwrap();
        let meeting = Folder::new();
        let start = |rank: &str| {
            let mut rank_of = program("replay");
            rank_of.args([&files[0], &changed]).env("FAST_ALLREDUCE_SOCKET_DIR", meeting.path());
            rank_of.env("FAST_ALLREDUCE_RANK", rank).env("FAST_ALLREDUCE_WORLD_SIZE", "2");
            rank_of.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ranks = ["0", "1"].map(start).map(|rank| rank.wait_with_output().unwrap());
        let said: String = ranks.iter().map(|rank| text(&rank.stdout) + &text(&rank.stderr)).collect();
        assert!(ranks.iter().all(|rank| rank.status.code() == Some(status)), "{ranks:?}");
        assert_eq!(said.matches(shown).count(), 1, "{said}");
    }
}

/// Changes the last bit of the last call's results, with the checksum that a recorder would have written.
fn change_last_bit(file: &mut [u8]) {
    const MAGIC: usize = 16;
    let word = |file: &[u8], at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap()) as usize;
    let mut frame = MAGIC;
    loop {
        let end = frame + 24 + word(file, frame) + word(file, frame + 8);
        if end == file.len() {
            break;
        }
        frame = end;
    }
    *file.last_mut().unwrap() ^= 0x80;
    let checked = &file[frame + 24..];
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let words = checked.chunks_exact(8);
    let rest = words.remainder();
    let hash = words.fold(checked.len() as u64, |hash, bytes| mix(hash, word(bytes, 0) as u64));
    let hash = rest.iter().fold(hash, |hash, &byte| mix(hash, byte.into()));
    file[frame + 16..frame + 24].copy_from_slice(&hash.to_le_bytes());
}
