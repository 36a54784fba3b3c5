//! `tune` writes a file that `bench` and `plan` take; a file that is damaged, of another machine, or not that of the other ranks
//! is refused.

mod program;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fast_allreduce::bootstrap::UniqueId;
use fast_allreduce::plan::{Choice, DeviceKind, Machine, Table, Tuning};
use fast_allreduce::Algorithm;
use program::{program, results, run, text};

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("fast-allreduce-tune-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A file of this machine in which one algorithm does everything.
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
fn what_tune_writes_is_used() {
    let folder = Folder::new("written");
    let path = folder.0.join("plan.toml");
    let printed = results(&format!("tune --ranks 2 --budget 0.2 -b 1K -e 4K --output {}", path.display()));
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
    assert!(words.starts_with("# device host plan of a tuning file"), "{words}");
    assert!(steps.lines().all(|line| words.contains(line)), "{words}");
}

#[test]
fn a_file_decides_unless_an_algorithm_is_forced() {
    let folder = Folder::new("decides");
    let file = folder.file("push.toml", &one_for_all(Algorithm::TwoShotPush));
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
    let folder = Folder::new("refused");
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
        let file = folder.file(name, content);
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

#[test]
fn ranks_with_different_files_disagree() {
    let folder = Folder::new("different");
    let files = [
        folder.file("a.toml", &one_for_all(Algorithm::OneShotPull)),
        folder.file("b.toml", &one_for_all(Algorithm::TwoShotPush)),
        folder.file("c.toml", "format = 1"),
    ];
    for (second, facts) in [
        (Some(&files[1]), ["ranks disagree on the plan", "one with digest"]),
        (None, ["ranks disagree on the plan", "the built-in one"]),
        (Some(&files[2]), ["ranks disagree on the plan", "c.toml is refused"]),
    ] {
        let id = UniqueId::new().unwrap();
        let start = |rank: usize| {
            let mut command = match (rank, second) {
                (0, _) => tuned("bench -b 64 -e 64 -n 2", &files[0]),
                (_, Some(file)) => tuned("bench -b 64 -e 64 -n 2", file),
                (_, None) => program("bench -b 64 -e 64 -n 2"),
            };
            command.env("FAST_ALLREDUCE_UNIQUE_ID", id.to_string());
            command.env("FAST_ALLREDUCE_RANK", rank.to_string()).env("FAST_ALLREDUCE_WORLD_SIZE", "2");
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ranks = [start(0), start(1)].map(|rank| rank.wait_with_output().unwrap());
        refused(&ranks[0], &facts);
        assert_eq!(ranks[1].status.code(), Some(2));
    }
}

#[test]
fn what_tune_cannot_do_is_refused_before_it_measures() {
    refused(&run("tune --ranks 17"), &["17", "2 to 16"]);
    refused(&run("tune --ranks 2 -b 4K -e 1K"), &["4096", "1024"]);
    refused(&run("tune --ranks 2 --budget 0"), &["--budget", "positive"]);
    refused(&run("tune --workers 65"), &["--workers", "1 to 64"]);
    refused(&run("tune --ranks 2 --output /nonexistent/plan.toml"), &["/nonexistent/plan.toml", "No such"]);
    refused(&run("tune --ranks 2 --output /tmp"), &["/tmp", "no regular file"]);
    let forced = program("tune --ranks 2").env("FAST_ALLREDUCE_ALGO", "one-shot-pull").output().unwrap();
    refused(&forced, &["FAST_ALLREDUCE_ALGO", "unset"]);
}

#[test]
fn the_plan_is_printed_in_words_and_as_a_file() {
    let words = results("plan");
    assert!(words.contains("\n3 ranks:\n  up to 32 KiB: one-shot-pull"), "{words}");
    let words = results("plan --device cuda --ranks 8");
    assert!(words.contains("\n8 ranks (nvswitch):\n  up to 128 KiB: one-shot-push"), "{words}");
    let folder = Folder::new("toml");
    let file = folder.file("plan.toml", &results("plan --toml"));
    assert_eq!(Tuning::load(file).unwrap().table(), &Table::built_in(DeviceKind::Host));
}
