//! `inspect`: flight records of ranks that run, are stopped, or were killed.

use std::fs;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{kill, Signal};
use serde_json::Value;

use crate::program::temporary::Folder;
use crate::program::{program, run, text, wait_until, Busy};

/// Returns the ranks of the world with most calls in `inspect --json`; `None` if it fails.
fn ranks(what: &str) -> Option<Vec<Value>> {
    let output = run(&format!("inspect --json {what}"));
    let worlds: Value = serde_json::from_slice(&output.stdout).ok()?;
    assert!(output.status.success());
    let ranks = worlds.as_array()?.iter().filter_map(|world| world["ranks"].as_array());
    ranks.max_by_key(|ranks| ranks.iter().map(|rank| rank["begun"].as_u64()).max()).cloned()
}

#[test]
fn stopped_and_killed_ranks_are_inspected() {
    let folder = Folder::new();
    let directory = folder.path().display().to_string();
    let mut command = program("bench --ranks 3 -b 1K -e 1K -n 1000000000000 --timeout 300");
    command.env("FAST_ALLREDUCE_FLIGHT_DIR", &directory);
    let busy = Busy::start(command, 3);
    let limit = Duration::from_secs(30);
    let of_first = busy.ranks[0].to_string();
    let has_calls = || {
        let begun = |rank: &Value| rank["begun"].as_u64() > Some(3);
        ranks(&of_first).is_some_and(|ranks| ranks.len() == 3 && ranks.iter().all(begun))
    };
    assert!(wait_until(limit, has_calls), "{:?}", ranks(&of_first));

    // While a rank is stopped, the others wait for it.
    let stopped = busy.ranks[1];
    kill(stopped, Signal::SIGSTOP).unwrap();
    let is_named = || {
        let others_wait = |ranks: Vec<Value>| {
            let number = ranks.iter().find(|rank| rank["process"] == stopped.as_raw())?["rank"].clone();
            Some(ranks.iter().any(|rank| rank["waiting_for"] == number))
        };
        ranks(&of_first).and_then(others_wait) == Some(true)
    };
    assert!(wait_until(limit, is_named), "{:?}", ranks(&of_first));
    let report = folder.path().join("report.html");
    let output = run(&format!("inspect {of_first} --calls 3 --report {}", report.display()));
    let shown = text(&output.stdout);
    assert!(shown.contains("waiting for rank") && shown.contains("waiting time"), "{shown}");
    let page = fs::read_to_string(&report).unwrap();
    assert!(page.contains("<svg") && page.contains("waits for rank"), "{page}");

    // Killed ranks leave their files.
    busy.ranks.iter().for_each(|rank| kill(*rank, Signal::SIGKILL).unwrap());
    let have_ended = || {
        let ended = |rank: &Value| rank["state"] == "ended" || rank["state"] == "failed";
        ranks(&directory).is_some_and(|ranks| ranks.len() == 3 && ranks.iter().all(ended))
    };
    busy.finish(limit);
    assert!(have_ended(), "{:?}", ranks(&directory));

    // Damaged files are skipped, or refused with the reason if there is no other.
    let files: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    for (number, file) in files.iter().filter(|file| *file != &report).enumerate() {
        let mut bytes = fs::read(file).unwrap();
        match number % 3 {
            0 => bytes.truncate(100),
            1 => bytes[8] ^= 0xFF,
            _ => bytes.fill(0xA5),
        }
        fs::write(file, bytes).unwrap();
        // Those of the other ranks are read. Of the damaged one the name tells the rank, but in another namespace of
        // processes it has another number.
        if number == 0 {
            let name = file.file_stem().unwrap().to_str().unwrap();
            let (rank, _) = name.rsplit_once('-').unwrap();
            let other =
                Path::new(&directory).join(rank.to_owned() + "-1").with_extension(file.extension().unwrap());
            fs::rename(file, &other).unwrap();
            let shown = text(&run(&format!("inspect {directory}")).stdout);
            assert!(shown.contains(&format!("{}: it has only 100 bytes", other.display())), "{shown}");
        }
    }
    let refused = text(&run(&format!("inspect {directory}")).stderr);
    for reason in ["100 bytes", "version", "no flight record"] {
        assert!(refused.contains(reason), "{refused}");
    }
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let mut command = program("bench --ranks 2 -b 1K -e 1K");
    let output = command.env("FAST_ALLREDUCE_FLIGHT_DIR", "/nonexistent/records").output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("/nonexistent/records") && error.contains("FAST_ALLREDUCE_FLIGHT_DIR"), "{error}");
}

#[test]
fn what_cannot_be_inspected_is_an_error_with_the_reason() {
    let folder = Folder::new();
    let own = std::process::id();
    for (what, reason) in [
        (own.to_string(), "no communicator with a flight record"),
        ("4294967295".to_owned(), "no such process"),
        ("4294967296".to_owned(), "No such file"),
        (folder.path().join("missing").display().to_string(), "No such file"),
        (folder.path().display().to_string(), "no files of ranks"),
    ] {
        let output = run(&format!("inspect {what}"));
        let error = text(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(reason), "{what}: {error}");
    }
}
