//! `soak`: the summary of a short run, replays, faults, and how runs end.

use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use crate::program::{program, results, run, text, wait_until, Busy};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use serde_json::Value;

fn json(arguments: &str) -> Value {
    serde_json::from_str(&results(arguments)).unwrap()
}

#[test]
fn a_few_seconds_are_right_and_leak_nothing() {
    let text = results("soak --minutes 0.05 --ranks 3 -e 64K --seed 3");
    for line in [
        "# seed 3 maxbytes 65536 faults all",
        "drawn ",
        "by algorithm ",
        "worst call ",
        "wrong          nothing",
    ] {
        assert!(text.lines().any(|found| found.starts_with(line)), "{line}: {text}");
    }
}

#[test]
fn a_seed_gives_the_same_calls() {
    let first = json("soak --calls 160 --ranks 3 -e 16K --seed 7 --format json");
    let total = &first["total"];
    assert_eq!((&total["drawn"], &total["timeouts"]), (&160.into(), &0.into()));
    assert_eq!((&first["leaks_measured"], &first["leaks"]), (&true.into(), &vec![Value::Null; 3].into()));
    assert_eq!(total["by_algorithm"].as_object().unwrap().len(), 6, "{total}");
    assert_eq!(total["by_collective"].as_object().unwrap().len(), 15, "{total}");
    assert_eq!(total["by_type"].as_object().unwrap().len(), 12, "{total}");
    assert!(total["communicators"].as_u64().unwrap() >= 6, "{total}");
    let again = json("soak --calls 160 --ranks 3 -e 16K --seed 7 --format json");
    for name in ["calls", "bytes", "by_collective", "by_algorithm", "by_type", "communicators", "groups"] {
        assert_eq!(total[name], again["total"][name], "{name}");
    }
    assert_eq!(first["digest"], again["digest"]);
    let other = json("soak --calls 16 --ranks 3 -e 16K --seed 8 --format json");
    assert_ne!(first["digest"], other["digest"]);
}

#[test]
fn a_setting_that_is_given_is_not_drawn() {
    let drawn = "soak --calls 64 --ranks 2 -e 16K --seed 7 --format json --faults none";
    let fixed = json(&format!("{drawn} --set algorithm=two-shot-push --set workers=2"));
    let algorithms = fixed["total"]["by_algorithm"].as_object().unwrap();
    assert_eq!(algorithms.keys().collect::<Vec<_>>(), ["two-shot-push"]);
    assert_eq!(fixed["digest"], json(drawn)["digest"]);
}

#[test]
fn faults_are_made_counted_and_survived() {
    let run = |faults: &str| {
        json(&format!("soak --calls 64 --ranks 3 -e 16K --seed 5 --format json --faults {faults}"))
    };
    let (aborts, stops, none) = (run("abort"), run("stop"), run("none"));
    assert!(aborts["total"]["faults"]["abort"].as_u64().unwrap() >= 1, "{aborts}");
    let of_stops = &stops["total"]["faults"];
    let count = |name: &str| of_stops[name].as_u64().unwrap_or(0);
    assert!(count("short stop") + count("long stop") >= 1, "{stops}");
    assert_eq!(none["total"]["faults"], serde_json::json!({}));
    for faulty in [&aborts, &stops] {
        // Each rank's round has ended, and a new communicator was made.
        assert!(faulty["total"]["after_faults"].as_object().unwrap().values().any(|ranks| *ranks != 0));
        assert!(!faulty["total"]["recoveries"].as_object().unwrap().is_empty(), "{faulty}");
        assert_ne!(faulty["digest"], none["digest"]);
        // The other calls are the same.
        assert_eq!(faulty["total"]["by_collective"], none["total"]["by_collective"]);
    }
}

/// Returns the largest writable anonymous mapping of a process: with messages of megabytes, its private buffers.
fn private_memory(pid: Pid) -> Option<(u64, u64)> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let anonymous =
        maps.lines().filter(|line| line.split_whitespace().count() == 5 && line.contains(" rw-p "));
    let ranges = anonymous.filter_map(|line| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        let start = u64::from_str_radix(start, 16).ok()?;
        Some((start, u64::from_str_radix(end, 16).ok()? - start))
    });
    ranges.max_by_key(|(_, length)| *length)
}

#[test]
fn memory_that_another_process_writes_is_found_with_seed_and_call() {
    const START: u64 = 64 << 10;
    const END: u64 = 1 << 20;
    let mut busy = Busy::start(program("soak --minutes 10 --ranks 2 -e 4M --seed 11"), 2);
    let (base, length) = private_memory(busy.ranks[1]).unwrap();
    assert!(length > 4 << 20, "{length}");
    let memory =
        std::fs::OpenOptions::new().write(true).open(format!("/proc/{}/mem", busy.ranks[1])).unwrap();
    let has_ended = wait_until(Duration::from_secs(120), || {
        for offset in (START..END).step_by(4096) {
            // Fails once the rank has ended.
            let _ = memory.write_at(&[0x5b], base + offset);
        }
        busy.launcher.try_wait().unwrap().is_some()
    });
    assert!(has_ended);
    let (output, _) = busy.finish(Duration::from_secs(20));
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: rank ") && error.contains(": seed 11, call "), "{error}");
}

#[test]
fn a_killed_rank_is_an_error_and_ends_the_others() {
    let busy = Busy::start(program("soak --minutes 10 --ranks 3 -e 4K"), 3);
    busy.signal(1, Signal::SIGKILL);
    let (output, _) = busy.finish(Duration::from_secs(20));
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(text(&output.stderr), "error: rank 1 was killed by signal 9 (SIGKILL)\n");
}

#[test]
fn ranks_end_with_their_launcher() {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let busy = Busy::start(program("soak --minutes 10 --ranks 3 -e 4K"), 3);
        // A stopped rank ends as well.
        busy.signal(1, Signal::SIGSTOP);
        kill(Pid::from_raw(busy.launcher.id() as i32), signal).unwrap();
        let (output, _) = busy.finish(Duration::from_secs(20));
        assert_eq!(output.status.signal(), Some(signal as i32));
    }
}

#[test]
fn impossible_options_are_refused() {
    for (arguments, fact) in [
        ("soak --ranks 17", "1 to 16"),
        ("soak --minutes 0", "--minutes"),
        ("soak --minutes 1 --calls 5", "--calls"),
        ("soak --set device=cuda", "CPUs"),
        ("soak --set timeout=1", "--timeout"),
        ("soak --set workers=65", "workers = 65"),
        ("soak --set max_blocks=4", "a setting of GPUs"),
        ("soak -e 2G", "--maxbytes"),
        ("soak --faults some", "--faults"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments}");
        let error = text(&output.stderr);
        assert!(error.lines().count() == 1 && error.contains(fact), "{arguments}: {error}");
    }
}
