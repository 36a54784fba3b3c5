//! Which GPU architectures the build script compiles the kernels for.

#[path = "../build/architectures.rs"]
mod architectures;

use architectures::{parse_capabilities, ptx_alone, select, targets, Capability, ALL, USUAL};

/// The architectures that CUDA 13.0's nvcc lists, in its order.
const KNOWN: [&str; 12] = [
    "sm_75", "sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90", "sm_100", "sm_110", "sm_103", "sm_120",
    "sm_121",
];

fn selected(asked: Option<&str>, gpus: &[Capability]) -> Result<Vec<String>, String> {
    select(asked, gpus, &KNOWN.map(String::from))
}

#[test]
fn the_gpus_of_this_machine_decide() {
    let cases: [(&[Capability], &[&str]); 9] = [
        (&[(9, 0)], &["sm_90"]),
        (&[(9, 0); 8], &["sm_90"]),
        (&[(10, 0), (8, 0), (10, 0)], &["sm_80", "sm_100"]),
        (&[(12, 0), (9, 0)], &["sm_90", "sm_120"]),
        // Code for an earlier minor version runs as well.
        (&[(8, 8), (9, 9)], &["sm_88", "sm_90"]),
        (&[(10, 2)], &["sm_100"]),
        // Newer than the toolkit: the driver compiles the PTX of the newest architecture.
        (&[(13, 0)], &["sm_121"]),
        // Too old for the toolkit.
        (&[(7, 0), (9, 0)], &["sm_90"]),
        (&[(7, 0)], &USUAL),
    ];
    for (gpus, expected) in cases {
        assert_eq!(selected(None, gpus).unwrap(), expected, "{gpus:?}");
    }
}

#[test]
fn without_gpus_it_is_those_of_servers() {
    assert_eq!(selected(None, &[]).unwrap(), USUAL);
    let old = ["sm_70", "sm_75"].map(String::from);
    assert_eq!(select(None, &[], &old).unwrap(), old);
    assert!(select(None, &[], &["sm_35".into()]).unwrap_err().contains("sm_120"));
}

#[test]
fn what_is_asked_for_is_compiled() {
    let gpu = [(9, 0)];
    assert_eq!(selected(Some("all"), &gpu).unwrap(), &ALL[1..]);
    assert_eq!(selected(Some(" sm_100,sm_87 ,,sm_100"), &gpu).unwrap(), ["sm_87", "sm_100"]);
    for (asked, named) in
        [("sm_90,sm_70", "\"sm_70\""), ("90", "\"90\""), ("sm_90,all", "\"all\""), (",", "\",\"")]
    {
        let error = selected(Some(asked), &gpu).unwrap_err();
        assert!(error.contains(named), "{asked}: {error}");
    }
}

#[test]
fn capabilities_are_read_line_by_line() {
    assert_eq!(parse_capabilities("9.0\n 8.6 \r\n10.3\n"), [(9, 0), (8, 6), (10, 3)]);
    let others = ["", "N/A", "[Not Supported]", "compute_cap", "9", "9.x", "-9.0", "99999999999.0", "9.0.1"];
    for text in others {
        assert_eq!(parse_capabilities(text), [], "{text}");
    }
}

#[test]
fn architectures_share_ptx() {
    let of = |archs: &str| {
        let archs: Vec<_> = archs.split(' ').map(String::from).collect();
        targets(&archs)
            .into_iter()
            .map(|(ptx, codes)| format!("{ptx}: {}", codes.join(" ")))
            .collect::<Vec<_>>()
    };
    assert_eq!(of("sm_90"), ["compute_90: sm_90 compute_90"]);
    assert_eq!(of("sm_80 sm_90 sm_100"), ["compute_80: sm_80", "compute_90: sm_90 sm_100 compute_90"]);
    assert_eq!(
        of("sm_70 sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120"),
        [
            "compute_70: sm_70",
            "compute_75: sm_75",
            "compute_80: sm_80 sm_86 sm_89",
            "compute_90: sm_90 sm_100 sm_120 compute_90",
        ]
    );
    // Code that uses the features of one architecture only.
    assert_eq!(of("sm_90 sm_90a"), ["compute_90: sm_90", "compute_90a: sm_90a compute_90a"]);
}

#[test]
fn ptx_of_the_oldest_runs_on_all() {
    assert_eq!(ptx_alone(&USUAL.map(String::from)), [("compute_80".into(), vec!["compute_80".into()])]);
    assert_eq!(ptx_alone(&["sm_89".into()]), [("compute_80".into(), vec!["compute_80".into()])]);
}
