//! `bench --device cuda` and `gpu-check`, on the stand-in driver of `lab/stand_in_driver`: that they work, not what
//! a GPU does.
//!
//! `FAST_ALLREDUCE_STAND_IN` names the folder of its `libcuda.so.1`, and the build needs kernels:
//! `FAST_ALLREDUCE_NVCC=lab/stand_in_driver/nvcc`. Without it these tests are ignored, and fail if
//! `FAST_ALLREDUCE_REQUIRE`, a list, contains `stand-in`.

mod program;
#[macro_use]
#[path = "../../tests/runner/mod.rs"]
mod runner;

use std::ffi::OsString;
use std::process::{Command, ExitCode, Output};

use program::temporary::Folder;
use program::{program, run, text};
use runner::{Found, Missing};
use serde_json::Value;

tests! {
    no_driver => without_a_driver_there_is_one_line;
    stand_in =>
        bench_is_right_in_every_algorithm,
        bench_is_right_in_every_collective,
        bench_says_that_ranks_share_a_gpu,
        bench_uses_in_switch_reductions,
        bench_suspends,
        every_step_of_gpu_check_is_reported,
        peers_measure_the_pretended_links,
        broken_links_are_reported,
        one_gpu_skips_what_takes_several,
        measured_constants_are_those_of_the_pretended_gpu,
        a_clock_that_changes_is_refused,
        a_broken_probe_is_reported,
        a_watchdog_is_warned_of,
        a_run_goes_on_with_what_passed,
        a_report_that_cannot_be_written_is_an_error_before_the_steps,
        steps_without_time_are_not_run,
        settings_are_passed_to_the_ranks,
        a_step_that_fails_is_reported_and_the_next_runs,
        a_tuning_file_is_used;
}

fn main() -> ExitCode {
    runner::run(tests())
}

/// The folder of the stand-in driver.
struct StandIn(OsString);

impl StandIn {
    /// Returns a command that runs the program on the stand-in driver.
    fn program(&self, arguments: &str) -> Command {
        let mut command = program(arguments);
        command.env("LD_LIBRARY_PATH", &self.0).env_remove("CUDA_VISIBLE_DEVICES");
        command
    }

    /// Returns the output of a run that must succeed.
    fn results(&self, arguments: &str) -> Output {
        let output = self.program(arguments).output().unwrap();
        let said = || format!("{arguments}: {}{}", text(&output.stderr), text(&output.stdout));
        assert!(output.status.success(), "{}", said());
        output
    }
}

fn stand_in() -> Found<StandIn> {
    let missing = || {
        Missing::new("stand-in", "FAST_ALLREDUCE_STAND_IN does not name the folder of the stand-in driver")
    };
    std::env::var_os("FAST_ALLREDUCE_STAND_IN").map(StandIn).ok_or_else(missing)
}

fn no_driver() -> Found<()> {
    match ["libcuda.so.1", "libcuda.so"].into_iter().any(is_loadable) {
        true => Err(Missing::new("no-driver", "this machine has a CUDA driver")),
        false => Ok(()),
    }
}

fn without_a_driver_there_is_one_line() {
    for arguments in ["bench --device cuda", "gpu-check"] {
        let output = run(arguments);
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.starts_with("error: ") && error.contains("libcuda.so.1"), "{error}");
    }
}

fn is_loadable(name: &str) -> bool {
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: loads a library, whose initialisers are its own.
    unsafe { !nix::libc::dlopen(name.as_ptr(), nix::libc::RTLD_LAZY).is_null() }
}

fn bench_is_right_in_every_algorithm(stand_in: StandIn) {
    for setting in ["", "--eager", "--registered", "--set max_bytes=8K"] {
        let arguments = format!(
            "bench --device cuda --ranks 3 --algo all -d bf16 -b 2 -e 20K -f 101 -n 20 --format json {setting}"
        );
        let output = stand_in.results(&arguments);
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        let config = &document["config"];
        assert_eq!(
            (&config["device"], &config["gpus"], &config["ranks_per_gpu"]),
            (&"cuda".into(), &2.into(), &2.into())
        );
        assert_eq!(
            config["timed"],
            if setting == "--eager" { "calls" } else { "replays of a graph of 20 calls" }
        );
        let results = document["results"].as_array().unwrap();
        assert_eq!(results.len(), 3 * fast_allreduce::Algorithm::ALL.len());
        for row in results {
            for placement in ["out_of_place", "in_place"] {
                assert_eq!(row[placement]["wrong"], 0, "{setting}: {row}");
                assert!(row[placement]["time_us"].as_f64().unwrap() > 0.0, "{setting}: {row}");
            }
        }
    }
}

fn bench_is_right_in_every_collective(stand_in: StandIn) {
    for setting in ["", "--eager -d u8", "--registered -r 2", "--set max_bytes=8K"] {
        let arguments = format!(
            "bench --device cuda --ranks 3 --collective all -b 3000 -e 30000 -f 10 --format json {setting}"
        );
        let output = stand_in.results(&arguments);
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        let results = document["results"].as_array().unwrap();
        assert_eq!(results.len(), 2 * 12);
        for row in results {
            let timings = ["out_of_place", "in_place"].map(|placement| &row[placement]);
            let timings: Vec<_> = timings.into_iter().filter(|timing| !timing.is_null()).collect();
            assert!(!timings.is_empty(), "{setting}: {row}");
            for timing in timings {
                assert_eq!(timing["wrong"], 0, "{setting}: {row}");
                assert!(timing["time_us"].as_f64().unwrap() > 0.0, "{setting}: {row}");
            }
        }
    }
}

fn bench_says_that_ranks_share_a_gpu(stand_in: StandIn) {
    let output = stand_in.results("bench --device cuda --ranks 3 -b 1K -e 1K -n 20");
    let table = text(&output.stdout);
    assert!(table.contains("Up to 2 ranks share a GPU") && table.contains("NVLink"), "{table}");
    let output = stand_in.results("bench --device cuda --ranks 2 -b 1K -e 1K -n 20");
    assert!(!text(&output.stdout).contains("share"), "{}", text(&output.stdout));
}

fn bench_suspends(stand_in: StandIn) {
    let arguments =
        "bench --device cuda --ranks 2 -b 1K -e 1K -n 1 -w 0 --set max_bytes=1M --suspend --format json";
    let document: Value = serde_json::from_slice(&stand_in.results(arguments).stdout).unwrap();
    let suspension = &document["suspension"];
    assert!(suspension["bytes"].as_u64().unwrap() > 1 << 20 && document["wrong"] == 0, "{document}");
    assert!(suspension["resume_ms"].as_f64().unwrap() > 0.0, "{suspension}");
}

fn bench_uses_in_switch_reductions(stand_in: StandIn) {
    let config = |arguments: &str, multicast: bool| {
        let mut program = stand_in.program(arguments);
        if multicast {
            program.envs([("STAND_IN_MULTICAST", "1"), ("STAND_IN_DEVICES", "5")]);
        }
        let output = program.output().unwrap();
        let said = || format!("{arguments}: {}{}", text(&output.stderr), text(&output.stdout));
        assert!(output.status.success(), "{}", said());
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let arguments = "bench --device cuda --ranks 5 -d f32 --eager -n 1 -w 0 --format json";
    for (order, multicast, bytes, algorithm) in
        [("any", true, "9M", Some("two-shot-nvls")), ("any", false, "1K", None), ("fixed", true, "1K", None)]
    {
        let document = config(&format!("{arguments} -b {bytes} -e {bytes} --set order={order}"), multicast);
        assert_eq!((&document["config"]["order"], &document["wrong"]), (&order.into(), &0.into()));
        let refused = document["config"]["nvls_refused"].as_str();
        assert_eq!(refused.is_some(), order == "any" && !multicast, "{document}");
        let algo = document["results"][0]["algo"].as_str();
        assert_eq!(algo == Some("two-shot-nvls"), algorithm.is_some(), "{document}");
    }
    let document = config(&format!("{arguments} -b 1K -e 1K --algo one-shot-nvls"), true);
    assert_eq!((&document["results"][0]["algo"], &document["wrong"]), (&"one-shot-nvls".into(), &0.into()));
}

fn every_step_of_gpu_check_is_reported(stand_in: StandIn) {
    let folder = Folder::new();
    let (json, markdown) = (folder.path().join("report.json"), folder.path().join("report.md"));
    let steps = [
        "facts",
        "ipc-handles",
        "ipc-descriptors",
        "peers",
        "nvls",
        "gpus",
        "cooperative",
        "hot",
        "phases",
        "costs",
        "link",
        "beside-a-kernel",
        "run-ahead",
        "threads",
        "latency",
        "time-slices",
        "world",
        "processes",
        "fixed",
        "bandwidth",
    ];
    // Each step may take its whole limit, however slow the others are.
    let arguments = format!(
        "gpu-check --small --seconds 3000 --json {} --markdown {}",
        json.display(),
        markdown.display()
    );
    let mut program = stand_in.program(&arguments);
    let output = program.envs([("STAND_IN_DEVICES", "8"), ("STAND_IN_MULTICAST", "1")]).output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stderr), text(&output.stdout));
    let (json, markdown) = (std::fs::read(&json).unwrap(), std::fs::read_to_string(&markdown).unwrap());

    let report: Value = serde_json::from_slice(&json).unwrap();
    let done = report["steps"].as_array().unwrap();
    assert_eq!(done.len(), steps.len());
    for (outcome, name) in done.iter().zip(steps) {
        assert_eq!((&outcome["step"], &outcome["error"]), (&name.into(), &Value::Null), "{outcome}");
        assert!(markdown.contains(&format!("| {name} | passed |")), "{markdown}");
        let records = outcome["records"].as_array().unwrap();
        assert!(!records.is_empty(), "{name}");
        for check in records.iter().filter(|record| record["kind"] == "check") {
            assert!(check["error"].is_null() && check["cases"].as_u64().unwrap() > 0, "{check}");
        }
        // Only what this machine lacks is skipped.
        for skipped in records.iter().filter(|record| record["kind"] == "skipped") {
            let name = skipped["name"].as_str().unwrap();
            assert!(name == "links" || name.starts_with("nccl beside"), "{skipped}");
        }
    }
    // Each world size has 36.
    let hot = format!("yes, {} cases", 36 * fast_allreduce::device::cuda::HOT_WORLDS.len());
    // The answers that later steps depend on are at the top.
    for (question, answer) in [
        ("Is nvidia-cuda-mps-control present?", ""),
        ("Do CUDA IPC handles open between two processes on one GPU?", "yes; "),
        ("Do file descriptors of VMM memory open between two processes on one GPU?", "yes; "),
        ("Does the world of one cooperative launch pass for 2 to 16 ranks?", "yes, "),
        (
            "Do the hot kernels pass in one cooperative launch, for each of their world sizes and three types?",
            hot.as_str(),
        ),
        ("What does a barrier cost between two processes that the GPU time-slices?", "mean "),
        ("By which ways do all 8 GPUs share memory?", "pointers, ipc, descriptor**"),
        ("Does in-switch reduction (NVLS) work between all GPUs?", "yes**"),
    ] {
        let summary = markdown.split("| step |").next().unwrap();
        assert!(summary.contains(&format!("* {question} **{answer}")), "{markdown}");
    }
    assert!(markdown.contains(
        "2 ranks in one cooperative launch, registered inputs: microseconds of a call in a graph of 20"
    ));
}

/// The GPUs of each pair, and the constants that their accesses yield.
fn peers_measure_the_pretended_links(stand_in: StandIn) {
    let folder = Folder::new();
    let file = folder.path().join("report.json");
    for devices in 2..=4_u64 {
        let arguments = format!("gpu-check --small --json {} --step peers --step nvls", file.display());
        let mut program = stand_in.program(&arguments);
        program.env("STAND_IN_DEVICES", devices.to_string());
        // The constants do not depend on the clock, which falls after the first access.
        program.env("STAND_IN_THROTTLE", if devices == 3 { "1" } else { "0" });
        let output = program.output().unwrap();
        let markdown = text(&output.stdout);
        assert!(output.status.success(), "{}{markdown}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        for (name, expected) in [
            ("remote_load_ns", 820.0),
            ("remote_store_ns", 400.0),
            ("sm_remote_bytes", 20.0),
            ("link_gbps", 450.0),
            ("link_header_bytes", 16.0),
            ("link_partial_bytes", 16.0),
        ] {
            let measured = report["constants"][name].as_f64().unwrap();
            assert!((measured - expected).abs() <= expected * 0.01, "{name}: {measured}, not {expected}");
        }
        // Both directions of each pair, by three ways: a ring that a kernel and a copy read, and what a kernel and a
        // copy wrote; and a signal of each pair.
        let cases: u64 = 3 * (devices * (devices - 1) * 4 + devices * (devices - 1) / 2);
        assert!(markdown.contains(&format!("| peers | passed | {cases} |")), "{markdown}");
        assert!(
            markdown.contains("| nvls | skipped: NVLS (in-switch reduction) is not available: "),
            "{markdown}"
        );
        for table in ["by a kernel", "by a copy engine", "a load from a peer", "a signal, one way"] {
            for way in ["pointers", "ipc", "descriptor"] {
                let title = format!("{table}; memory shared by {way}:");
                assert!(markdown.contains(&title), "{title}: {markdown}");
            }
        }
    }
}

fn broken_links_are_reported(stand_in: StandIn) {
    let run = |steps: &str, settings: &[(&str, &str)]| {
        let mut program = stand_in.program(&format!("gpu-check --small {steps}"));
        let output = program.env("STAND_IN_DEVICES", "3").envs(settings.iter().copied()).output().unwrap();
        (output.status.code(), text(&output.stdout))
    };
    // Handles open, but map other memory. The pairs are tried one by one.
    let (status, markdown) = run("--step peers", &[("STAND_IN_IPC_BLACK_HOLE", "1")]);
    assert_eq!(status, Some(1), "{markdown}");
    assert!(markdown.contains("| peers | FAILED (4 checks) |"), "{markdown}");
    assert!(markdown.contains("share memory? **pointers, descriptor; NOT by ipc**"), "{markdown}");
    assert!(markdown.contains("**ipc, only GPU 0 and GPU 2: FAILED**"), "{markdown}");
    // Kernels write, and their stores do not arrive.
    let (status, markdown) = run("--step peers", &[("STAND_IN_LOST_STORES", "1")]);
    assert_eq!(status, Some(1), "{markdown}");
    assert!(markdown.contains("NOT by pointers, ipc, descriptor**"), "{markdown}");
    assert!(markdown.contains("a signal by a store did not arrive: peer access is broken"), "{markdown}");
    // A call of GPU 1 fails between its copies to GPU 0, which is not the links' fault. By threads, since each process
    // counts its calls.
    let (status, markdown) = run("--step peers", &[("STAND_IN_FAIL", "cuMemcpyDtoDAsync:80:1")]);
    assert_eq!(status, Some(1), "{markdown}");
    assert!(markdown.contains("GPU 1 to GPU 0: cuMemcpyDtoDAsync failed"), "{markdown}");
    assert!(!markdown.contains("peer access is broken"), "{markdown}");
    // A thread of any rank fails: the process has more streams than those of the ranks that are processes.
    let (status, markdown) = run("--step gpus", &[("STAND_IN_FAIL", "cuStreamCreate:20:2")]);
    assert_eq!(status, Some(1), "{markdown}");
    assert!(markdown.contains("3 GPUs, processes: right, "), "{markdown}");
    assert!(markdown.contains("3 GPUs, threads: FAILED** in 0 cases: rank "), "{markdown}");
    assert!(markdown.contains(": cuStreamCreate failed: CUDA_ERROR_OUT_OF_MEMORY"), "{markdown}");
    // No GPU reaches another.
    let (status, markdown) = run("--step peers --step gpus", &[("STAND_IN_NO_PEER", "1")]);
    assert_eq!(status, Some(1), "{markdown}");
    assert!(markdown.contains("share memory? **none; NOT by pointers, ipc, descriptor**"), "{markdown}");
    // Calls go through host memory.
    assert!(markdown.contains("| gpus | passed |"), "{markdown}");
    // The switch is there, and the driver refuses the group.
    let failure = "cuMulticastCreate:1:401";
    let settings = [("STAND_IN_MULTICAST", "1"), ("STAND_IN_FAIL", failure)];
    let (status, markdown) = run("--step nvls", &settings);
    assert_eq!(status, Some(1), "{markdown}");
    assert!(markdown.contains("| nvls | FAILED (1 checks) |"), "{markdown}");
    assert!(markdown.contains("nvidia-fabricmanager"), "{markdown}");
    // Another call fails.
    let settings = [("STAND_IN_MULTICAST", "1"), ("STAND_IN_FAIL", "cuStreamCreate:1:2")];
    let (status, markdown) = run("--step nvls", &settings);
    assert_eq!(status, Some(1), "{markdown}");
    assert!(markdown.contains("| nvls | FAILED (1 checks) |"), "{markdown}");
    assert!(markdown.contains("cuStreamCreate") && !markdown.contains("fabricmanager"), "{markdown}");
}

fn one_gpu_skips_what_takes_several(stand_in: StandIn) {
    let mut program = stand_in.program("gpu-check --small --step peers --step nvls --step gpus");
    let output = program.env("STAND_IN_DEVICES", "1").output().unwrap();
    let markdown = text(&output.stdout);
    assert!(output.status.success(), "{markdown}");
    for step in ["peers", "nvls", "gpus"] {
        assert!(
            markdown.contains(&format!("| {step} | skipped: this process sees one GPU, and")),
            "{markdown}"
        );
    }
    assert!(markdown.contains("Everything ran on one GPU"), "{markdown}");
}

/// The driver reports the times of a pretended GPU (lab/stand_in_driver/launch/probes.cpp). Its clock is low at first.
fn measured_constants_are_those_of_the_pretended_gpu(stand_in: StandIn) {
    let folder = Folder::new();
    let file = folder.path().join("report.json");
    let steps = "--step costs --step beside-a-kernel --step run-ahead";
    stand_in.results(&format!("gpu-check --small --json {} {steps}", file.display()));
    let report: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for (name, expected) in [
        ("ghz", 1.5),
        ("alu_cycles", 4.0),
        ("shared_cycles", 28.0),
        ("l1_cycles", 36.0),
        ("l2_cycles", 240.0),
        ("dram_cycles", 690.0),
        ("acquire_cycles", 9.0),
        ("fence_block_cycles", 12.0),
        ("fence_gpu_ns", 140.0),
        ("fence_system_ns", 560.0),
        ("fence_sc_system_ns", 640.0),
        ("sync_cycles", 20.0),
        ("sync_warp_cycles", 2.0),
        ("constant_cycles", 100.0),
        ("cold_line_cycles", 42.0),
        ("sm_load_bytes", 60.0),
        ("l2_gbps", 5400.0),
    ] {
        let measured = report["constants"][name].as_f64().unwrap();
        assert!((measured - expected).abs() <= expected * 0.002, "{name}: {measured}, not {expected}");
    }
    let figure = |row: &str| {
        let records = report["steps"][0]["records"].as_array().unwrap();
        records.iter().find(|record| record["row"] == row).unwrap()["value"].as_f64().unwrap()
    };
    for (stores, ns) in [("nothing", 640.0), ("1 local stores", 645.0), ("64 local stores", 960.0)] {
        let measured =
            figure(&format!("sequentially consistent fence of system scope, {stores} outstanding"));
        assert!((measured - ns).abs() < 2.0, "{stores}: {measured}");
    }
    let answers = report["steps"][1]["records"].as_array().unwrap();
    let waiting = answers.iter().find(|record| record["kind"] == "answer").unwrap();
    // Other calls may take as long as the kernel spins, on a loaded machine.
    let waiting: Vec<_> = waiting["answer"].as_str().unwrap().split("; ").collect();
    for call in ["cuMemFree", "cuMemFreeHost", "cuCtxSynchronize"] {
        assert!(waiting.contains(&call), "{waiting:?}");
    }
    assert!(waiting.len() < 10, "{waiting:?}");
    assert!(answers.iter().all(|record| record["kind"] != "skipped"), "{answers:?}");
}

fn a_clock_that_changes_is_refused(stand_in: StandIn) {
    let folder = Folder::new();
    let file = folder.path().join("report.json");
    let arguments = format!("gpu-check --json {} --step costs", file.display());
    let output = stand_in.program(&arguments).env("STAND_IN_THROTTLE", "1").output().unwrap();
    let markdown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{markdown}");
    assert!(markdown.contains("| costs | FAILED (1 checks) |"), "{markdown}");
    assert!(markdown.contains("was 1.500 GHz") && markdown.contains("is 1.350 GHz"), "{markdown}");
    assert!(markdown.contains("--lock-gpu-clocks"), "{markdown}");
    let report: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(report["constants"].as_object().unwrap().len(), 0, "{report}");
}

fn a_broken_probe_is_reported(stand_in: StandIn) {
    let arguments = "gpu-check --small --step costs --step run-ahead --step facts";
    // The module of the probes has no code for the GPU.
    let output = stand_in.program(arguments).env("STAND_IN_FAIL", "cuModuleLoadData:1:209").output().unwrap();
    let markdown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{markdown}");
    for step in ["costs", "run-ahead", "facts"] {
        assert!(markdown.contains(&format!("| {step} | FAILED: ")), "{markdown}");
    }
    assert!(markdown.contains("CUDA_ERROR_NO_BINARY_FOR_GPU"), "{markdown}");
}

fn a_watchdog_is_warned_of(stand_in: StandIn) {
    let facts = |watchdog: &str| {
        let mut program = stand_in.program("gpu-check --small --step facts --step ipc-handles --step hot");
        let output = program.env("STAND_IN_WATCHDOG", watchdog).output().unwrap();
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    };
    assert!(facts("1").contains("(a display)? **YES: kernels of this program wait for at most 1 s"));
    assert!(facts("0").contains("(a display)? **no**"));
}

fn a_run_goes_on_with_what_passed(stand_in: StandIn) {
    let folder = Folder::new();
    let file = folder.path().join("report.json");
    let steps = "--step facts --step ipc-handles --step fixed";
    let run = |more: &str, no_ipc: &str| {
        let arguments = format!("gpu-check --json {} {steps} {more}", file.display());
        let output = stand_in.program(&arguments).env("STAND_IN_NO_IPC", no_ipc).output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    // Without a report of an earlier run all steps run.
    let (status, said) = run("--small --resume", "1");
    assert_eq!((status, said.matches(" ...").count()), (Some(1), 3), "{said}");
    let (status, said) = run("--small --resume", "0");
    assert_eq!((status, said.matches(" ...").count()), (Some(0), 1), "{said}");
    assert!(said.contains("ipc-handles ..."), "{said}");
    let report: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(report["steps"].as_array().unwrap().len(), 3);
    // A report with other settings is refused.
    let (status, said) = run("--resume", "0");
    assert!(status == Some(2) && said.contains("--resume"), "{said}");
    // So is a part of a report.
    std::fs::write(&file, "{").unwrap();
    let (status, said) = run("--small --resume", "0");
    assert!(status == Some(2) && said.contains("cannot read"), "{said}");
}

fn a_report_that_cannot_be_written_is_an_error_before_the_steps(stand_in: StandIn) {
    for option in ["--json", "--markdown"] {
        for (file, fact) in
            [("/nonexistent/report", "/nonexistent/report: No such file"), ("/dev/full", "regular")]
        {
            let output =
                stand_in.program(&format!("gpu-check --step facts {option} {file}")).output().unwrap();
            let said = text(&output.stderr);
            assert!(output.status.code() == Some(2) && said.contains(fact), "{said}");
            assert!(!said.contains("facts ..."), "{said}");
        }
    }
}

fn steps_without_time_are_not_run(stand_in: StandIn) {
    let arguments = "gpu-check --small --seconds 0 --step facts --step hot";
    let output = stand_in.program(arguments).output().unwrap();
    let markdown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{markdown}");
    for step in ["facts", "hot"] {
        assert!(markdown.contains(&format!("| {step} | FAILED: not run")), "{markdown}");
    }
    // Ranks that have little time skip what is left.
    for step in ["peers", "nvls"] {
        let mut program = stand_in.program(&format!("gpu-check --small --alone --step {step} --limit 0"));
        let output = program.env("STAND_IN_MULTICAST", "1").output().unwrap();
        let records = text(&output.stdout);
        assert!(output.status.success(), "{}{records}", text(&output.stderr));
        assert!(records.contains("the step's time was over"), "{records}");
        assert!(!records.contains(r#""kind":"check""#) && records.contains(r#""kind":"done""#), "{records}");
    }
}

fn settings_are_passed_to_the_ranks(stand_in: StandIn) {
    let arguments = "gpu-check --small --step ipc-handles --step fixed --set";
    stand_in.results(&format!("{arguments} max_blocks=3"));
    for (setting, fact) in [
        ("max_blocks=0", "max_blocks = 0"),
        ("workers=2", "a setting of CPUs"),
        ("sharing=ipc", "is chosen by the steps"),
    ] {
        let output = stand_in.program(&format!("{arguments} {setting}")).output().unwrap();
        let error = text(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(fact), "{setting}: {error}");
    }
}

fn a_step_that_fails_is_reported_and_the_next_runs(stand_in: StandIn) {
    let arguments = "gpu-check --small --step ipc-handles --step ipc-descriptors --step facts";
    let output = stand_in.program(arguments).env("STAND_IN_NO_IPC", "1").output().unwrap();
    let markdown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{markdown}");
    assert!(markdown.contains("* descriptor: right, "), "{markdown}");
    assert!(markdown.contains("* **ipc: FAILED**"), "{markdown}");
    assert!(
        markdown.contains("| ipc-handles | FAILED (1 checks) |") && markdown.contains("| facts | passed |"),
        "{markdown}"
    );
}

fn a_tuning_file_is_used(stand_in: StandIn) {
    let folder = Folder::new();
    let path = folder.path().join("tuning.toml");
    let tune = format!("tune --device cuda --ranks 2 --budget 0.1 -b 4K -e 4K --output {}", path.display());
    stand_in.results(&tune);
    let mut bench = stand_in.program("bench --device cuda --ranks 2 -b 4K -e 4K -n 2");
    let output = bench.env("FAST_ALLREDUCE_TUNING", &path).output().unwrap();
    let tuning = std::fs::read_to_string(&path).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(tuning.contains("device = \"cuda\"") && tuning.contains("Stand-in device 0"), "{tuning}");
}
