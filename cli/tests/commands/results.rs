//! The output of `bench` in each format, and the correctness of what it measures.

use crate::program::{results, run, text};
use serde_json::Value;

/// Returns the rows of a table, split into words.
fn rows(table: &str) -> Vec<Vec<&str>> {
    let lines = table.lines().filter(|line| !line.starts_with('#'));
    // Without remarks.
    lines.map(|line| line.split('#').next().unwrap_or(line).split_whitespace().collect()).collect()
}

fn json(arguments: &str) -> Value {
    serde_json::from_str(&results(arguments)).unwrap()
}

#[test]
fn every_type_and_operation_is_right() {
    for ranks in [2, 3, 4] {
        let table = results(&format!("bench --ranks {ranks} -b 1000 -e 1000 -n 2 -w 0 -d all -o all"));
        let rows = rows(&table);
        assert_eq!(rows.len(), 60, "{table}");
        for row in rows {
            assert_eq!(row.len(), 20, "{row:?}");
            let count = 1000 / fast_allreduce::DType::ALL.iter().find(|t| t.name() == row[2]).unwrap().size();
            assert_eq!(row[1], count.to_string(), "{row:?}");
            assert_eq!((row[4], row[11], row[17]), ("-1", "0", "0"), "{row:?}");
            let numbers = row[6..].iter().all(|word| word.parse::<f64>().is_ok_and(|number| number >= 0.0));
            assert!(numbers, "{row:?}");
        }
        assert!(table.contains("# Out of bounds values : 0 OK"), "{table}");
        assert!(table.contains("# Avg bus bandwidth "), "{table}");
        let explained =
            "\n# time: mean of calls back to back; p50, p99: of single calls, each after a barrier; ";
        assert!(table.contains(explained), "{table}");
        for fact in [format!("ranks {ranks}"), "device host".into(), "wait auto (".into(), "workers 1".into()]
        {
            assert!(table.contains(&fact), "{fact}: {table}");
        }
    }
}

#[test]
fn a_suspension_is_measured() {
    let arguments = "bench --ranks 2 -b 1K -e 4K --set max_bytes=64K --suspend";
    let suspension = &json(&format!("{arguments} --format json"))["suspension"];
    let number = |name: &str| suspension[name].as_f64().unwrap();
    assert!(number("bytes") > 256e3 && number("bytes") == number("bytes").trunc(), "{suspension}");
    assert!(number("suspend_ms") > 0.0 && number("resume_ms") > 0.0, "{suspension}");
    let shown = results(arguments);
    assert!(
        shown.contains(&format!("# suspend gave back {} B of each rank in ", number("bytes"))),
        "{shown}"
    );
    let csv = run(&format!("{arguments} --format csv"));
    let sentence = "suspend gave back ";
    assert!(text(&csv.stderr).contains(sentence) && !text(&csv.stdout).contains(sentence), "{csv:?}");
    for refused in ["compare --suspend", "bench --suspend --collective all_reduce_fused"] {
        let output = run(refused);
        assert_eq!(output.status.code(), Some(2), "{refused}: {}", text(&output.stderr));
    }
}

#[test]
fn every_algorithm_is_right_in_every_size_and_setting() {
    for setting in
        ["", "--registered", "--set workers=2 --set wait=yield --set max_bytes=8K", "--isa baseline -c 3"]
    {
        let csv = results(&format!(
            "bench --ranks 3 --algo all -d bf16 -b 2 -e 40K -f 17 -n 2 --format csv {setting}"
        ));
        let mut lines = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let header = lines.next().unwrap();
        assert_eq!((header[0], header[6], header[19]), ("collective", "algo", "memcpy_us"));
        let rows: Vec<_> = lines.collect();
        let names = fast_allreduce::Algorithm::ALL.map(fast_allreduce::Algorithm::name);
        assert_eq!(rows.len(), 4 * names.len(), "{csv}");
        for (row, name) in rows.iter().zip(names.iter().cycle()) {
            assert_eq!(row.len(), header.len(), "{row:?}");
            assert_eq!((row[6], row[12], row[18]), (*name, "0", "0"), "{setting}: {row:?}");
        }
    }
}

#[test]
fn json_is_one_object_with_all_facts() {
    let document =
        json("bench --ranks 2 -b 512 -e 2K -f 2 -d half -o max --seed 7 --registered --format json");
    let config = &document["config"];
    assert_eq!(config["ranks"], 2);
    assert_eq!(config["seed"], 7);
    assert_eq!(config["registered"], true);
    assert_eq!(config["device"], "host");
    assert_eq!(config["version"], env!("CARGO_PKG_VERSION"));
    for name in
        ["instruction_set", "cores", "wait", "wait_mode", "workers", "warmup_iters", "check", "region_bytes"]
    {
        assert!(!config[name].is_null(), "{name}");
    }
    assert!(config["iters"].is_null());
    assert_eq!(document["wrong"], 0);
    let results = document["results"].as_array().unwrap();
    let sizes: Vec<_> = results.iter().map(|row| row["size"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [512, 1024, 2048]);
    for row in results {
        assert_eq!(row["count"].as_u64().unwrap() * 2, row["size"].as_u64().unwrap());
        assert_eq!((&row["type"], &row["redop"]), (&"f16".into(), &"max".into()));
        assert_eq!(row["algo"], "one-shot-pull");
        assert_eq!((&row["collective"], &row["root"]), (&"all_reduce".into(), &Value::Null));
        assert!(row["memcpy_us"].as_f64().unwrap() > 0.0);
        for placement in ["out_of_place", "in_place"] {
            let timing = &row[placement];
            assert_eq!(timing["wrong"], 0);
            let number = |name: &str| timing[name].as_f64().unwrap();
            assert!(number("time_us") > 0.0 && number("p50_us") > 0.0);
            assert!(number("p99_us") >= number("p50_us"));
            let algbw = row["size"].as_f64().unwrap() / number("time_us") * 1e-3;
            assert!((number("algbw_gbs") / algbw - 1.0).abs() < 1e-6);
            // 2 (n - 1) / n is 1 for two ranks.
            assert!((number("busbw_gbs") / algbw - 1.0).abs() < 1e-6);
        }
    }
}

#[test]
fn the_order_of_additions_is_reported() {
    let line = |arguments: &str| {
        let table = results(arguments);
        table.lines().find(|line| line.starts_with("# order ")).expect(&table).to_owned()
    };
    for command in ["bench", "compare --vs memcpy"] {
        let of = |order: &str| line(&format!("{command} --ranks 3 -b 4K -e 4K -n 20 {order}"));
        assert!(of("").starts_with("# order fixed: that of the ranks"), "{}", of(""));
        let any = of("--set order=any");
        assert!(any.starts_with("# order any, to no effect: ") && any.contains("NVLS"), "{any}");
    }
    // Enough ranks for in-switch reductions.
    let of = |order: &str| json(&format!("bench --ranks 5 -b 4K -e 4K -n 20 --format json {order}"));
    let (fixed, any) = (of("--set order=fixed"), of("--set order=any"));
    assert_eq!(
        (&fixed["config"]["order"], &fixed["config"]["nvls_refused"]),
        (&"fixed".into(), &Value::Null)
    );
    assert_eq!(any["config"]["order"], "any");
    assert!(any["config"]["nvls_refused"].as_str().unwrap().contains("CPUs"), "{any}");
    let norm =
        line("bench --collective all_reduce_fused --ranks 3 --hidden 64 --rows 2 -n 20 --set order=any");
    assert!(norm.contains("to no effect"), "{norm}");
}

#[test]
fn steps_are_added_and_sizes_are_whole_elements() {
    let document = json("bench --ranks 2 -b 0 -e 20 -i 10 -d int64 -n 1 -w 0 --format json");
    let sizes: Vec<_> =
        document["results"].as_array().unwrap().iter().map(|row| row["size"].clone()).collect();
    assert_eq!(sizes, [0, 8, 16]);
    assert_eq!(document["config"]["iters"], 1);
}

#[test]
fn nothing_is_wrong_where_nothing_is_checked() {
    let table = results("bench --ranks 2 -b 8 -e 8 -c 0 -n 1");
    assert_eq!(rows(&table)[0][11], "N/A");
    assert!(table.contains("# Out of bounds values : N/A"), "{table}");
    let document = json("bench --ranks 2 -b 8 -e 8 -c 0 -n 1 --format json");
    assert!(document["results"][0]["in_place"]["wrong"].is_null());
}

#[test]
fn worlds_of_one_and_sixteen_ranks() {
    for ranks in [1, fast_allreduce::MAX_RANKS] {
        let document = json(&format!("bench --ranks {ranks} -b 4K -e 4K -n 2 -d bfloat16 --format json"));
        assert_eq!((&document["wrong"], &document["config"]["ranks"]), (&0.into(), &ranks.into()));
    }
}

#[test]
fn version_and_help_are_complete() {
    assert_eq!(results("--version"), concat!("fast-allreduce ", env!("CARGO_PKG_VERSION"), "\n"));
    let facts = results("--version --verbose");
    for fact in ["host kernels: baseline", "CUDA kernels: ", "instruction sets: baseline", "cores: "] {
        assert!(facts.contains(fact), "{fact}: {facts}");
    }
    let help = results("bench --help");
    for flag in ["--minbytes", "--registered", "at least 20 and at most 10000", "exit status"] {
        assert!(help.contains(flag), "{flag}");
    }
    let output = run("");
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    assert!(text(&output.stderr).contains("Usage:"));
}
