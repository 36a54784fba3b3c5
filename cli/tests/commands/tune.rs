//! `tune` writes a file that `bench` and `plan` use; a malformed file, or one of another machine, is refused.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::program::temporary::Folder;
use crate::program::{program, results, run, text};
use fast_allreduce::bootstrap::UniqueId;
use fast_allreduce::plan::{Choice, CpuMake, DeviceKind, Machine, PlannedCall, Step, Table, Tuning};
use fast_allreduce::Algorithm;

/// Returns a tuning file of this machine with one algorithm for all sizes.
fn one_for_all(algorithm: Algorithm) -> String {
    let choice = Choice::host(algorithm, 1, 4096, 65536);
    let table = Table::uniform(DeviceKind::Host, choice).unwrap();
    Tuning::new(Machine::host(), table).unwrap().to_string()
}

fn tuned(arguments: &str, file: &Path) -> Command {
    let mut command = program(arguments);
    command.env("FAST_ALLREDUCE_TUNING", file).env_remove("FAST_ALLREDUCE_ALGO");
    command
}

fn refused(output: &Output, facts: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    for fact in facts {
        assert!(error.contains(fact), "{fact}: {error}");
    }
}

#[test]
fn a_written_file_is_used() {
    let folder = Folder::new();
    let path = folder.path().join("plan.toml");
    let printed = results(&format!(
        "tune --ranks 2 --calls all_reduce --budget 0.2 -b 1K -e 4K --output {}",
        path.display()
    ));
    for size in ["1024 ", "2048 ", "4096 "] {
        let row = printed.lines().find(|line| line.trim_start().starts_with(size)).unwrap();
        let built_in: f64 = row.split_whitespace().nth(1).unwrap().parse().unwrap();
        let ratio: f64 = row.split_whitespace().nth(6).unwrap().parse().unwrap();
        assert!(built_in > 0.0 && ratio > 0.0, "{row}");
    }
    assert!(printed.contains("geometric mean") && printed.contains("FAST_ALLREDUCE_TUNING="), "{printed}");
    assert_eq!(folder.names(), ["plan.toml"], "nothing else is left");
    let tuning = Tuning::load(&path).unwrap();
    assert_eq!(tuning.check(&Machine::host()), Ok(()));

    let output = tuned("bench --ranks 2 -b 1K -e 4K -f 2 -n 2 --format json", &path).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = tuned("plan --ranks 2", &path).output().unwrap();
    let words = text(&output.stdout);
    let steps = tuning.table().describe(2, fast_allreduce::topology::LinkClass::SameDevice);
    assert!(words.starts_with("# device host plan tuning file "), "{words}");
    assert!(steps.lines().all(|line| words.contains(line)), "{words}");
}

#[test]
fn a_file_decides_unless_an_algorithm_is_forced() {
    let folder = Folder::new();
    let file = folder.write("push.toml", one_for_all(Algorithm::TwoShotPush));
    let algorithm = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(document["wrong"], 0);
        document["results"][0]["algo"].as_str().unwrap().to_owned()
    };
    let bench = "bench --ranks 3 -b 4K -e 4K -n 2 --format json";
    assert_eq!(algorithm(&mut tuned(bench, &file)), "two-shot-push");
    assert_eq!(algorithm(tuned(bench, &file).env("FAST_ALLREDUCE_ALGO", "one-shot-push")), "one-shot-push");
    assert_eq!(algorithm(&mut tuned(&format!("{bench} --algo two-shot-pull"), &file)), "two-shot-pull");
    assert_eq!(algorithm(&mut tuned(bench, Path::new(""))), "one-shot-pull");
}

#[test]
fn a_file_that_cannot_be_used_is_refused() {
    let folder = Folder::new();
    let good = one_for_all(Algorithm::OneShotPull);
    let [(_, cpu), (_, cores), _] = &Machine::host().facts()[..] else { panic!("three facts") };
    let cases: [(&str, String, &[&str]); 6] = [
        ("text", "no TOML at all".into(), &["line 1"]),
        ("cut", good[..good.len() - 1].rsplit_once('=').unwrap().0.to_owned(), &["line "]),
        (
            "blocks",
            good.replace("blocks = 1", "blocks = 1000"),
            &["row 1 (line ", "blocks = 1000", "1 to 64"],
        ),
        ("format", good.replace("format = 1", "format = 7"), &["format = 7", "fast-allreduce tune"]),
        ("version", good.replace("version = \"", "version = \"9."), &["version \"9.", "fast-allreduce tune"]),
        (
            "cores",
            good.replace(&format!("cores = {cores}"), "cores = 9999"),
            &["another machine", "cores", "9999"],
        ),
    ];
    for (name, content, facts) in &cases {
        let file = folder.write(name, content);
        let path = file.to_str().unwrap();
        let facts = [&[path], *facts].concat();
        refused(&tuned("bench --ranks 2 -b 8 -e 8 -n 2", &file).output().unwrap(), &facts);
        refused(&run(&format!("plan --tuning {path}")), &facts);
    }
    assert!(good.contains(cpu.as_str()));
    refused(
        &tuned("bench --ranks 2", Path::new("/nonexistent")).output().unwrap(),
        &["/nonexistent", "No such"],
    );
}

/// Runs two ranks, each with its own file or without one.
fn two_ranks(files: [Option<&Path>; 2]) -> [Output; 2] {
    let id = UniqueId::new().unwrap();
    let start = |rank: usize| {
        let arguments = "bench -b 64 -e 64 -n 2 --format json";
        let mut command = match files[rank] {
            Some(file) => tuned(arguments, file),
            None => program(arguments),
        };
        command.env("FAST_ALLREDUCE_UNIQUE_ID", id.to_string());
        command.env("FAST_ALLREDUCE_RANK", rank.to_string()).env("FAST_ALLREDUCE_WORLD_SIZE", "2");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    [start(0), start(1)].map(|rank| rank.wait_with_output().unwrap())
}

fn document(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn ranks_with_different_files_use_the_lowest_ranks() {
    let folder = Folder::new();
    let pull = folder.write("a.toml", one_for_all(Algorithm::OneShotPull));
    let push = folder.write("b.toml", one_for_all(Algorithm::TwoShotPush));
    for (files, algorithm, said) in [
        ([Some(&pull), Some(&push)], "one-shot-pull", "a.toml (FAST_ALLREDUCE_TUNING), from rank 0; rank 1"),
        ([Some(&push), None], "two-shot-push", "b.toml (FAST_ALLREDUCE_TUNING), from rank 0; rank 1"),
        ([None, Some(&push)], "two-shot-push", "b.toml (FAST_ALLREDUCE_TUNING), from rank 1; rank 0"),
    ] {
        let ranks = two_ranks(files.map(|file| file.map(PathBuf::as_path)));
        let document = document(&ranks[0]);
        assert_eq!(document["results"][0]["algo"], algorithm);
        assert!(document["config"]["plan"].as_str().unwrap().contains(said), "{document}");
        assert!(ranks[1].status.success());
    }
    // A named file that cannot be used is an error on all ranks.
    let bad = folder.write("c.toml", "format = 1");
    let ranks = two_ranks([Some(&pull), Some(&bad)]);
    refused(&ranks[0], &["ranks disagree on the plan", "c.toml is refused"]);
    assert_eq!(ranks[1].status.code(), Some(2));
}

/// The error comes before the measurement, which would not end here.
#[test]
fn unwritable_files_are_refused_first() {
    let folder = Folder::new();
    let file = folder.write("file", "");
    let arguments = "tune --ranks 2 --budget 1e9";
    let output = program(arguments).env("XDG_CACHE_HOME", &file).output().unwrap();
    refused(&output, &["tuning file", file.to_str().unwrap()]);
    let output = program(arguments).env_remove("XDG_CACHE_HOME").env_remove("HOME").output().unwrap();
    refused(&output, &["XDG_CACHE_HOME"]);
    refused(&run(&format!("{arguments} --output {}/below", file.display())), &["below"]);
    assert_eq!(folder.names(), ["file"]);
}

#[test]
fn an_installed_file_is_used_by_default() {
    let cache = Folder::new();
    let run = |arguments: &str| {
        let output = program(arguments).env("XDG_CACHE_HOME", cache.path()).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let bench = "bench --ranks 2 -b 64 -e 64 -n 2 --format json";
    let plan_of = |output: &str| {
        let document: serde_json::Value = serde_json::from_str(output).unwrap();
        document["config"]["plan"].as_str().unwrap().to_owned()
    };
    let before = plan_of(&run(bench));
    assert!(before.starts_with("built-in for ") && before.contains("no tuning file in"), "{before}");
    assert!(run("plan").lines().next().unwrap().contains("no tuning file in"));

    let printed = run("tune --ranks 2 --calls all_reduce --budget 0.2 -b 1K -e 2K");
    let (_, path) = printed.split_once("# installed ").unwrap();
    let path = PathBuf::from(path.split_once(':').unwrap().0);
    assert_eq!(path.parent().unwrap(), cache.path().join("fast-allreduce"));
    assert_eq!(Tuning::load(&path).unwrap().check(&Machine::host()), Ok(()));
    let said = format!("tuning file {} (installed for this machine)", path.display());
    assert_eq!(plan_of(&run(bench)), said);
    assert_eq!(run("plan").lines().next().unwrap(), format!("# device host plan {said}"));

    // Worlds that are not measured again keep their plan.
    let choice = Choice::host(Algorithm::TwoShotPush, 1, 4096, 65536);
    let table = Table::uniform(DeviceKind::Host, choice).unwrap();
    std::fs::write(&path, Tuning::new(Machine::host(), table).unwrap().to_string()).unwrap();
    run("tune --ranks 2 --calls all_reduce --budget 0.2 -b 1K -e 1K");
    let link = fast_allreduce::topology::LinkClass::SameDevice;
    let tuned = Tuning::load(&path).unwrap();
    assert_eq!(tuned.table().steps(3, link)[0].choice, choice);
    assert_ne!(tuned.table().steps(2, link)[0].choice, choice);

    // A malformed file is skipped and reported.
    std::fs::write(&path, "format = 1").unwrap();
    let after = plan_of(&run(bench));
    assert!(after.starts_with("built-in for ") && after.contains("is ignored: it has no version"), "{after}");
    let asked =
        program(bench).env("XDG_CACHE_HOME", cache.path()).env("FAST_ALLREDUCE_TUNING", "built-in").output();
    let asked = plan_of(&text(&asked.unwrap().stdout));
    assert!(asked.ends_with("(by the CPU's name; FAST_ALLREDUCE_TUNING asks for it)"), "{asked}");
}

/// A CPU of a known make is not measured, whatever else the machine does.
#[test]
fn the_cpus_name_decides() {
    let plan = |calibrate: &str| {
        let mut command = program("bench --ranks 2 -b 64 -e 64 -n 2 --format json");
        let document = document(&command.env("FAST_ALLREDUCE_CALIBRATE", calibrate).output().unwrap());
        document["config"]["plan"].as_str().unwrap().to_owned()
    };
    let (unmeasured, asked) = (plan("0"), plan("1"));
    match CpuMake::of(&Machine::host()) {
        Some(make) => {
            let said = format!("built-in for {make} (by the CPU's name; no tuning file in");
            assert!(unmeasured.starts_with(&said) && asked == unmeasured, "{asked}");
        }
        None => {
            let said = "the CPU is of a make without a table; no tuning file in";
            assert!(unmeasured.contains(said) && unmeasured.contains(", by default ("), "{unmeasured}");
            assert!(asked.contains(said), "{asked}");
        }
    }
    let refused_value = program("bench --ranks 2").env("FAST_ALLREDUCE_CALIBRATE", "yes").output().unwrap();
    refused(&refused_value, &["FAST_ALLREDUCE_CALIBRATE = yes", "0 or 1"]);
}

#[test]
fn impossible_options_are_refused_before_measuring() {
    refused(&run("tune --ranks 17"), &["17", "2 to 16"]);
    refused(&run("tune --ranks 2 -b 4K -e 1K"), &["4096", "1024"]);
    refused(&run("tune --ranks 2 --budget 0"), &["--budget", "positive"]);
    refused(&run("tune --ranks 2 --calls messages"), &["--calls messages", "--set workers=2"]);
    refused(&run("tune --ranks 2 --calls gossip"), &["gossip", "all_gather", "messages"]);
    refused(&run("tune --set workers=65"), &["--set", "workers = 65", "1 to 64"]);
    refused(&run("tune --ranks 2 --output /nonexistent/plan.toml"), &["/nonexistent/plan.toml", "No such"]);
    refused(&run("tune --ranks 2 --output /tmp"), &["/tmp", "no regular file"]);
    let forced = program("tune --ranks 2").env("FAST_ALLREDUCE_ALGO", "one-shot-pull").output().unwrap();
    refused(&forced, &["FAST_ALLREDUCE_ALGO", "unset"]);
}

#[test]
fn every_call_is_tuned() {
    let folder = Folder::new();
    let path = folder.path().join("plan.toml");
    let arguments = "tune --ranks 2 --set workers=2 --budget 0.5 -b 64K -e 512K --output";
    let printed = results(&format!("{arguments} {}", path.display()));
    for calls in PlannedCall::ALL {
        let part =
            printed.split_once(&format!("# {calls}\n")).unwrap_or_else(|| panic!("{calls}: {printed}")).1;
        let rows =
            part.lines().skip_while(|line| line.starts_with('#')).take_while(|line| !line.starts_with('#'));
        assert_eq!(
            rows.filter(|row| row.contains("65536 ") || row.contains("524288 ")).count(),
            2,
            "{calls}: {part}"
        );
    }
    let tuning = Tuning::load(&path).unwrap();
    // The file is used, and results are right.
    let output = tuned(
        "bench --ranks 2 --set workers=2 --collective all -b 64K -e 512K -f 8 -n 2 --format json",
        &path,
    )
    .output();
    let output = output.unwrap();
    assert_eq!(document(&output)["wrong"], 0);
    // A plan in words names the calls that have separate rows.
    let choice = Choice::host(Algorithm::OneShotPull, 1, 4096, 1 << 19);
    let step = Step { max_bytes: u64::MAX, choice };
    let link = fast_allreduce::topology::LinkClass::SameDevice;
    let table = tuning.table().with_steps_of(PlannedCall::Reduce, 2, link, &[step]).unwrap();
    let file = folder.write("reduce.toml", Tuning::new(Machine::host(), table).unwrap().to_string());
    let words = results(&format!("plan --ranks 2 --tuning {}", file.display()));
    assert!(words.contains("\n  reduce, any size: 1 block, in pieces of 512 KiB a block\n"), "{words}");
}

#[test]
fn the_plan_is_printed_in_words_and_as_a_file() {
    let words = results("plan");
    assert!(words.contains("\n4 ranks:\n  up to 2 KiB: one-shot-pull"), "{words}");
    let words = results("plan --device cuda --ranks 8");
    assert!(words.contains("\n8 ranks (nvswitch):\n  up to 32 KiB: one-shot-push"), "{words}");
    let folder = Folder::new();
    let file = folder.write("plan.toml", results("plan --toml"));
    assert_eq!(Tuning::load(file).unwrap().table(), &Table::built_in_for(&Machine::host()));
}
