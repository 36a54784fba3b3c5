//! `bench --collective`: correctness of every collective, its sizes and bandwidths, and missing placements.

use crate::program::results;
use serde_json::Value;

const ALL: [&str; 12] = [
    "all_reduce",
    "all_gather",
    "all_gather_v",
    "reduce_scatter",
    "reduce_scatter_v",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_v",
    "send_recv",
];

fn json(arguments: &str) -> Value {
    serde_json::from_str(&results(&format!("bench {arguments} --format json"))).unwrap()
}

fn rows(document: &Value) -> &Vec<Value> {
    document["results"].as_array().unwrap()
}

#[test]
fn every_collective_is_right() {
    for (ranks, setting) in [
        (1, ""),
        (2, "-d u8"),
        (3, "--registered -r 2"),
        (4, "-d bf16 -o max --set workers=2 -r 1"),
        (16, ""),
    ] {
        // One launch; less than an element for each rank; several launches, which take long where many ranks share
        // a core.
        for sizes in ["-b 3000 -e 3000", "-b 8 -e 8", "-b 40000 -e 40000 --set max_bytes=4K"] {
            if ranks == 16 && sizes.contains("40000") {
                continue;
            }
            let document =
                json(&format!("--collective all --ranks {ranks} {sizes} -n 2 -w 0 -c 2 {setting}"));
            assert_eq!(document["wrong"], 0, "{ranks} {setting} {sizes}");
            let rows = rows(&document);
            let names: Vec<_> = rows.iter().map(|row| row["collective"].as_str().unwrap()).collect();
            assert_eq!(names, ALL);
            for row in rows {
                let name = row["collective"].as_str().unwrap();
                assert_eq!(row["out_of_place"]["wrong"], 0, "{row}");
                let has_no_form = matches!(name, "all_to_all" | "all_to_all_v" | "send_recv");
                assert_eq!(row["in_place"].is_null(), has_no_form, "{row}");
                assert!(has_no_form || row["in_place"]["wrong"] == 0, "{row}");
            }
        }
    }
}

#[test]
fn collectives_that_reduce_have_every_type_and_operation() {
    for (name, rows) in [("reduce_scatter_v", 60), ("reduce", 60), ("all_to_all_v", 12)] {
        let csv = results(&format!(
            "bench --collective {name} --ranks 3 -b 1000 -e 1000 -d all -o all -n 1 -w 0 --format csv"
        ));
        let lines: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(lines.len(), 1 + rows, "{csv}");
        assert_eq!(lines[0][..7], ["collective", "size", "count", "type", "redop", "root", "algo"]);
        for line in &lines[1..] {
            assert_eq!(line.len(), lines[0].len(), "{line:?}");
            assert_eq!((line[0], line[4] == "none", line[12]), (name, rows == 12, "0"), "{line:?}");
            assert_eq!(line[18], if rows == 12 { "" } else { "0" }, "{line:?}");
        }
    }
}

/// Messages of 1000 bytes between 3 ranks: a share is 83 f32 where there are shares, and they are 82, 83 and 84 where
/// they differ.
#[test]
fn sizes_roots_and_bandwidths_are_those_of_nccl_tests() {
    let document = json("--collective all --ranks 3 -b 1000 -e 1000 -n 2 -r 2");
    assert_eq!(document["config"]["collective"], "all");
    for row in rows(&document) {
        let name = row["collective"].as_str().unwrap();
        let (size, count, factor) = match name {
            "all_reduce" => (1000, 250, 4.0 / 3.0),
            "broadcast" | "reduce" | "send_recv" => (1000, 250, 1.0),
            _ => (996, 83, 2.0 / 3.0),
        };
        assert_eq!((&row["size"], &row["count"]), (&size.into(), &count.into()), "{row}");
        let root = match name {
            "broadcast" | "reduce" | "gather" | "scatter" => 2.into(),
            _ => Value::Null,
        };
        assert_eq!(row["root"], root, "{row}");
        let redop = match name {
            "all_reduce" | "reduce" | "reduce_scatter" | "reduce_scatter_v" => "sum",
            _ => "none",
        };
        assert_eq!(row["redop"], redop, "{row}");
        assert_eq!(row["algo"].is_null(), name != "all_reduce", "{row}");
        for timing in [&row["out_of_place"], &row["in_place"]].into_iter().filter(|timing| timing.is_object())
        {
            let number = |name: &str| timing[name].as_f64().unwrap();
            let algbw = f64::from(size) / number("time_us") * 1e-3;
            assert!((number("algbw_gbs") / algbw - 1.0).abs() < 1e-6, "{row}");
            assert!((number("busbw_gbs") / algbw - factor).abs() < 1e-6, "{row}");
            assert!(number("p99_us") >= number("p50_us") && number("p50_us") > 0.0, "{row}");
        }
    }
}

#[test]
fn a_table_names_the_collective_and_prints_missing_values_as_nccl_tests() {
    let table = results("bench --collective all_to_all --ranks 2 -b 1K -e 1K -n 2");
    assert!(table.contains("# collective all_to_all ranks 2 "), "{table}");
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows.len(), 1, "{table}");
    assert_eq!(rows[0][..6], ["1024", "128", "f32", "none", "-1", "-"]);
    assert_eq!((rows[0].len(), rows[0][11]), (20, "0"));
    assert!(rows[0][12..18].iter().all(|word| *word == "N/A"), "{table}");
    let table = results("bench --collective all --ranks 2 -b 1K -e 1K -n 2");
    for name in ALL {
        assert_eq!(table.matches(&format!("# collective {name}\n")).count(), 1, "{table}");
    }
}

#[test]
fn the_algorithms_that_round_at_each_step_are_right_in_all_types_and_operations() {
    for algorithm in ["ring", "halving-doubling"] {
        // Calls of 16 ranks on few cores take long.
        for (ranks, operations, expected) in [(2, "all", 60), (5, "all", 60), (16, "sum", 12)] {
            let document = json(&format!(
                "--algo {algorithm} --ranks {ranks} -b 1000 -e 1000 -d all -o {operations} -n 1 -w 0"
            ));
            let found = (&document["wrong"], rows(&document).len());
            assert_eq!(found, (&0.into(), expected), "{algorithm} {ranks}");
            for row in rows(&document) {
                let error = row["out_of_place"]["max_error"].as_f64().unwrap();
                let is_exact = matches!(row["redop"].as_str(), Some("min" | "max"))
                    || !matches!(
                        row["type"].as_str(),
                        Some("f16" | "bf16" | "f32" | "f64" | "f8e4m3" | "f8e5m2")
                    );
                assert!(error == 0.0 || !is_exact, "{row}");
            }
        }
    }
}
