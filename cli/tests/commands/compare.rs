//! The output of `compare`, contenders that are left out, and the pages of `--report`.

use std::fs;

use crate::program::temporary::Folder;
use crate::program::{program, results, run, text};
use serde_json::Value;

const SMALL: &str = "--ranks 2 -b 1K -e 4K -n 20 --rounds 2";

fn json(arguments: &str) -> Value {
    serde_json::from_str(&results(&format!("{arguments} --format json"))).unwrap()
}

#[test]
fn every_contender_has_a_line_for_each_size() {
    let table = results(&format!("compare {SMALL}"));
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows.len(), 6, "{table}");
    for (row, (size, by, wrong)) in rows.iter().zip([
        ("1024", "fast-allreduce", "0"),
        ("1024", "naive", "0"),
        ("1024", "memcpy", "N/A"),
        ("4096", "fast-allreduce", "0"),
        ("4096", "naive", "0"),
        ("4096", "memcpy", "N/A"),
    ]) {
        assert_eq!(row.len(), 18, "{row:?}");
        assert_eq!((row[0], row[5], row[10], row[15]), (size, by, wrong, wrong), "{row:?}");
        assert_eq!(row[11] == "1.00" && row[16] == "1.00", by == "fast-allreduce", "{row:?}");
    }
    assert!(table.contains("# fast-allreduce : out of bounds values 0 OK"), "{table}");
    assert!(table.contains("# against memcpy") && table.contains("# against naive: "), "{table}");
    assert!(table.contains("\n# time: median over the rounds "), "{table}");
}

/// For a message of two pieces, of which the last has one element, and for one element.
#[test]
fn the_naive_allreduce_is_right() {
    for arguments in
        ["--ranks 3 -b 4194312 -e 4194312 -d f64 -n 1 -c 1", "--ranks 4 -b 4 -e 4 -d all -o all -n 2 -c 2"]
    {
        let document = json(&format!("compare {arguments} --rounds 1 --vs naive"));
        let rows = document["results"].as_array().unwrap();
        let naive: Vec<_> = rows.iter().filter(|row| row["by"] == "naive").collect();
        // All operations except averages.
        let expected = if arguments.contains("all") { 12 * 4 } else { 1 };
        assert_eq!(naive.len(), expected, "{arguments}");
        for row in naive {
            for placement in ["out_of_place", "in_place"] {
                assert_eq!(row[placement]["wrong"], 0, "{row}");
            }
        }
    }
}

#[test]
fn ratios_are_of_the_times_and_errors_of_the_results() {
    let document = json(&format!("compare {SMALL} -d f16 --algo all --vs memcpy"));
    let lines = document["results"].as_array().unwrap();
    let algorithms = fast_allreduce::Algorithm::ALL;
    assert_eq!(lines.len(), 2 * (algorithms.len() + 1));
    for size in lines.chunks(algorithms.len() + 1) {
        let (ours, memcpy) = size.split_at(algorithms.len());
        for placement in ["out_of_place", "in_place"] {
            let time = |line: &Value| line[placement]["time_us"].as_f64().unwrap();
            let fastest = ours.iter().map(time).fold(f64::INFINITY, f64::min);
            for line in size {
                let ratio = line["ratio"][placement].as_f64().unwrap();
                assert!((ratio * fastest / time(line) - 1.0).abs() < 1e-6, "{line}");
            }
            for (line, algorithm) in ours.iter().zip(algorithms) {
                assert_eq!((&line["algo"], &line[placement]["wrong"]), (&algorithm.name().into(), &0.into()));
                let error = line[placement]["max_error"].as_f64().unwrap();
                assert!(error > 0.0 && error < 0.01, "{line}");
            }
            assert!(memcpy[0][placement]["wrong"].is_null() && memcpy[0]["algo"].is_null(), "{memcpy:?}");
        }
    }
    assert_eq!((&document["wrong"], &document["config"]["rounds"]), (&0.into(), &2.into()));
    assert_eq!(document["summary"][1]["by"], "memcpy");
    let mean = document["summary"][1]["ratio"]["mean"].as_f64().unwrap();
    assert!(mean > 0.0, "{document}");
}

#[test]
fn unavailable_contenders_are_left_out_with_the_reason() {
    let document = json(&format!("compare {SMALL} --vs nccl --vs memcpy --vs nccl"));
    let left_out = document["left_out"].as_array().unwrap();
    assert_eq!(left_out.len(), 1, "{left_out:?}");
    assert_eq!(left_out[0]["name"], "nccl");
    assert!(left_out[0]["reason"].as_str().unwrap().contains("--device cuda"), "{left_out:?}");
    assert_eq!(document["results"].as_array().unwrap().len(), 4);
    let table = results(&format!("compare {SMALL} --vs nccl --vs memcpy"));
    assert!(table.contains("# nccl left out: it reduces memory of GPUs"), "{table}");
}

#[test]
fn gloo_needs_the_torch_of_python3() {
    let folder = Folder::new();
    let without = |rival: &str| {
        let mut command = program(&format!("compare {SMALL} --vs gloo {rival}"));
        command.env("PATH", folder.path()).output().unwrap()
    };
    let output = without("");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).starts_with("error: --vs gloo: python3, with whose torch it runs: "));
    let interpreter = folder.path().join("python3");
    fs::write(&interpreter, "#!/bin/sh\necho 'error python3 cannot import torch: none'\n").unwrap();
    fs::set_permissions(&interpreter, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = without("--vs memcpy");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("# gloo left out: python3 cannot import torch: none\n"), "{table}");
}

#[test]
fn csv_has_as_many_cells_in_every_line() {
    let csv = results(&format!("compare {SMALL} -d i32 --format csv"));
    let lines: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(lines.len(), 7, "{csv}");
    assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{csv}");
    assert_eq!((lines[0][14], lines[1][14]), ("out_of_place_max_error", "0e0"), "{csv}");
    let csv = results(&format!("compare {SMALL} --collective send_recv --vs memcpy --format csv"));
    let lines: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{csv}");
}

#[test]
fn every_collective_has_its_lines() {
    let document = json(&format!("compare {SMALL} --collective all"));
    let lines = document["results"].as_array().unwrap();
    // The naive contender only has an allreduce.
    assert_eq!(lines.len(), (12 * 2 + 1) * 2);
    assert_eq!(document["left_out"].as_array().unwrap().len(), 11);
    for line in lines {
        let has_in_place =
            !["all_to_all", "all_to_all_v", "send_recv"].contains(&line["collective"].as_str().unwrap());
        assert_eq!(line["in_place"].is_object(), has_in_place, "{line}");
        assert_eq!(line["ratio"]["in_place"].is_number(), has_in_place, "{line}");
        assert_eq!(line["out_of_place"]["wrong"].is_number(), line["by"] != "memcpy", "{line}");
    }
    assert_eq!((&document["wrong"], &document["config"]["collective"]), (&0.into(), &"all".into()));
}

fn refused(arguments: &str, facts: &[&str]) {
    let output = run(arguments);
    let error = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""), "{arguments}: {error}");
    assert_eq!(error.lines().count(), 1, "{arguments}: {error}");
    for fact in facts {
        assert!(error.contains(fact), "{arguments}: {error}");
    }
}

#[test]
fn without_any_rival_there_is_nothing_to_compare() {
    refused("compare --vs nccl -e 1K", &["--vs nccl", "--device cuda"]);
    refused("compare --vs mpi --vs nccl -e 1K", &["--vs mpi", "mpi`", "; --vs nccl"]);
    refused("compare --vs smoke", &["smoke", "memcpy"]);
    refused("compare --rounds 0", &["--rounds", "from 1"]);
    refused("compare --registered --algo all", &["--registered", "one algorithm"]);
}

#[test]
fn pages_are_whole_and_hold_everything() {
    let folder = Folder::new();
    let page = folder.path().join("<i>&'.html");
    fs::write(&page, "old").unwrap();
    results(&format!("bench --ranks 3 -b 1K -e 16K -f 4 -n 5 -d all -o max --report {}", page.display()));
    let html = fs::read_to_string(&page).unwrap();
    assert_eq!(folder.names().len(), 1, "{:?}", folder.names());
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"), "{html}");
    // Twelve types with four algorithms each; memcpy only has a latency.
    assert_eq!(html.matches("<svg").count(), 24);
    assert_eq!(html.matches("class=\"line\"").count(), 12 * (5 + 4));
    assert_eq!(html.matches("class=\"first\"").count(), 12 * 3);
    assert!(html.contains("&lt;i&gt;&amp;&#39;") && !html.contains("<i>"), "{html}");
    assert!(html.contains("<pre><code>fast-allreduce bench --ranks 3"), "{html}");
    for fact in ["<dt>CPU</dt>", "<dt>Kernel</dt>", "Every checked element is right.", " UTC</p>"] {
        assert!(html.contains(fact), "{fact}");
    }
    assert!(html.contains("all_reduce: max of bf16"), "{html}");
    results(&format!("bench --ranks 2 -b 1K -e 4K -n 5 --collective all_gather --report {}", page.display()));
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.contains("all_gather of f32") && html.contains("all_gather, 2 ranks"), "{html}");
    results(&format!("compare {SMALL} --report {}", page.display()));
    let html = fs::read_to_string(&page).unwrap();
    assert!(
        html.contains("fast-allreduce against naive, memcpy") && html.contains(" times as long"),
        "{html}"
    );
    // Messages of 0 bytes cannot be drawn, and a world of one has no bus bandwidth.
    results(&format!("bench --ranks 1 -b 0 -e 0 -n 1 --report {}", page.display()));
    assert!(!fs::read_to_string(&page).unwrap().contains("<svg"));
}

#[test]
fn a_page_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let folder = Folder::new();
    let missing = folder.path().join("none/page.html");
    refused(
        &format!("bench --report {}", missing.display()),
        &["cannot write", "none/page.html", "No such file"],
    );
    refused(&format!("compare --report {}", folder.path().display()), &["cannot write", "no regular file"]);
    assert_eq!(folder.names(), Vec::<String>::new());
    refused("bench --report /proc/page.html", &["/proc/page.html"]);
}
