//! `--collective all_reduce_fused` of bench and compare: correctness, what is printed, and what is refused.

use crate::program::temporary::Folder;
use crate::program::{results, run, text};
use serde_json::Value;

const SMALL: &str = "--collective all_reduce_fused --hidden 700,64 --rows 1,5";

fn json(arguments: &str) -> Value {
    serde_json::from_str(&results(&format!("{arguments} --format json"))).unwrap()
}

#[test]
fn every_type_and_algorithm_is_right() {
    for ranks in [1, 2, 3] {
        for setting in
            ["--algo all", "--registered -c 2", "--set max_bytes=4K --set workers=2", "--isa baseline"]
        {
            let document = json(&format!("bench {SMALL} -d all -n 2 -w 0 --ranks {ranks} {setting}"));
            assert_eq!(document["wrong"], 0, "{ranks} {setting}");
            let rows = document["results"].as_array().unwrap();
            let algorithms = if setting == "--algo all" { 4 } else { 1 };
            // Also: the sequence that the call replaces, the allreduce alone, the naive allreduce, and a copy.
            assert_eq!(rows.len(), 3 * 2 * 2 * (algorithms + 4), "{ranks} {setting}");
            for row in rows {
                let is_checked = !["all_reduce", "memcpy"].contains(&row["by"].as_str().unwrap());
                assert_eq!(row["out_of_place"]["wrong"] == 0, is_checked, "{row}");
            }
        }
    }
}

#[test]
fn rows_and_ratios() {
    let document = json(&format!("bench {SMALL} -n 20 --ranks 2"));
    assert!(document["config"]["norm"].as_str().unwrap().contains("vectorised Rust"));
    let rows = document["results"].as_array().unwrap();
    let fused = rows.iter().filter(|row| row["by"] == "fast-allreduce");
    let shapes: Vec<_> = fused.map(|row| [&row["hidden"], &row["count"], &row["size"]]).collect();
    assert_eq!(shapes, [[700, 700, 1400], [700, 3500, 7000], [64, 64, 128], [64, 320, 640]]);
    for shape in rows.chunks(5) {
        let time = |row: &Value| row["out_of_place"]["time_us"].as_f64().unwrap();
        for row in shape {
            assert_eq!(row["type"], "bf16", "{row}");
            let ratio = row["ratio"]["out_of_place"].as_f64().unwrap();
            assert!((ratio - time(row) / time(&shape[0])).abs() < 1e-9, "{row}");
        }
    }
}

#[test]
fn every_form_is_right() {
    for (ranks, dtype) in [(1, "f16"), (2, "bf16"), (3, "f32")] {
        // Whole groups of every format, and a share for each rank.
        let all = "bench --collective all_reduce_fused --form all --hidden 768 --rows 1,5";
        let document = json(&format!("{all} -d {dtype} -n 2 -w 0 --ranks {ranks}"));
        assert_eq!(document["wrong"], 0, "{ranks}");
        let rows = document["results"].as_array().unwrap();
        let by = |by: &'static str| rows.iter().filter(move |row| row["by"] == by);
        // Two norms with and without an offset, 14 formats, experts, a reduce-scatter plain and in 14 formats, gathers
        // in the 13 formats that have scales, and columns.
        assert_eq!(by("fast-allreduce").count(), 2 * (4 + 14 + 1 + 15 + 13 + 1));
        assert!(by("fast-allreduce").all(|row| row["out_of_place"]["wrong"] == 0));
        assert!(by("unfused").all(|row| row["ratio"]["out_of_place"].as_f64().unwrap() > 0.0));
        assert_eq!(by("plain").count(), rows.len() / 3);
    }
    let table = results(
        "bench --collective all_reduce_fused --form layer,scatter_mxfp8 --hidden 64 --rows 2 -n 2 --ranks 2",
    );
    assert!(
        table.contains("# layer, rows of 64 elements") && table.contains("# scatter_mxfp8, rows"),
        "{table}"
    );
}

#[test]
fn tables_csv_and_pages_have_all_columns() {
    let table = results(&format!("bench {SMALL} -n 20 --ranks 2"));
    assert!(
        table.contains("# unfused: all_reduce of fast-allreduce, then an addition and a norm"),
        "{table}"
    );
    assert!(table.contains("# fast-allreduce : out of bounds values 0 OK"), "{table}");
    let rows: Vec<_> = table.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(rows.len(), 4 * 5, "{table}");
    assert!(rows.iter().all(|row| row.split_whitespace().count() == 18), "{table}");
    let csv = results(&format!("bench {SMALL} -n 20 --ranks 2 --format csv"));
    let lines: Vec<_> = csv.lines().collect();
    assert_eq!(lines.len(), 1 + 4 * 5, "{csv}");
    let columns = |line: &str| line.split(',').count();
    assert!(lines.iter().all(|line| columns(line) == columns(lines[0])), "{csv}");
    let folder = Folder::new();
    let page = folder.path().join("page.html");
    results(&format!("bench {SMALL} -n 20 --ranks 2 --report {}", page.display()));
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("all_reduce_fused of bf16, rows of 700") && html.contains("unfused"));
}

#[test]
fn a_comparison_has_the_call_and_the_sequences_that_it_replaces() {
    let document = json(&format!("compare {SMALL} -n 20 --ranks 2 -d f32 --rounds 2"));
    assert_eq!(document["wrong"], 0);
    let rows = document["results"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["by"].as_str().unwrap()).collect();
    assert_eq!(names, ["fast-allreduce", "unfused", "all_reduce", "naive", "memcpy"].repeat(4));
    for row in rows {
        assert!(row["hidden"].is_u64() && row["in_place"].is_null(), "{row}");
        let is_unchecked = row["by"] == "memcpy" || row["by"] == "all_reduce";
        assert_eq!(row["out_of_place"]["wrong"].is_null(), is_unchecked, "{row}");
    }
    let table = results(&format!("compare {SMALL} -n 20 --ranks 2 --vs naive"));
    assert_eq!(table.matches("# rows of ").count(), 2, "{table}");
}

#[test]
fn impossible_options_are_refused() {
    let refused = |arguments: &str, fact: &str| {
        let output = run(arguments);
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), error.lines().count()), (Some(2), 1), "{arguments}: {error}");
        assert!(error.contains(fact), "{arguments}: {error}");
    };
    refused("bench --hidden 64", "all_reduce_fused");
    refused("bench --collective broadcast --rows 4", "all_reduce_fused");
    for (option, fact) in [
        ("-b 4K", "--hidden and --rows"),
        ("-d f64", "f16, bf16 and f32"),
        ("-o max", "sums"),
        ("--algo ring", "direct"),
        ("--hidden 0", "65536"),
        ("--hidden 65537", "65536"),
        ("--rows 0", "1"),
        ("--hidden 64,x", "x"),
        ("--rows 99999999999999999", "too many"),
        ("--rows 1000000000 --hidden 512", "memory"),
        ("--hidden 16384 --rows 1 --set max_bytes=4K", "hidden"),
        ("--form rms2", "rms_offset"),
        ("--form rms --algo all", "--algo"),
        ("--form mxfp8 --hidden 48", "multiples of 32"),
        ("--form sharded --hidden 65", "divided"),
    ] {
        refused(&format!("bench --collective all_reduce_fused --ranks 2 {option}"), fact);
    }
}

#[test]
fn rows_before_one_that_fails_are_written() {
    let output = run(
        "bench --collective all_reduce_fused --hidden 512,65536 --rows 1 -d f32 -n 5 --set max_bytes=64K --format json",
    );
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("hidden"), "{}", text(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = document["results"].as_array().unwrap();
    assert_eq!((rows.len(), &rows[0]["hidden"]), (5, &512.into()));
}
