//! Which GPU architectures the build script compiles the kernels for, and which prebuilt kernels it accepts.

#[path = "../build/architectures.rs"]
mod architectures;
#[path = "../build/fingerprint.rs"]
mod fingerprint;
#[path = "../build/prebuilt.rs"]
mod prebuilt;
#[path = "../src/testing/temporary.rs"]
mod temporary;

use std::fs;

use prebuilt::Facts;
use temporary::Folder;

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

/// The fingerprints of the sources and of the flags.
const OF: (u64, u64) = (0x0123_4567_89ab_cdef, 7);
const NAMES: [&str; 2] = ["norms.fatbin", "others.fatbin"];

/// Returns a folder of kernels, and one to copy them to.
fn kernels() -> (Folder, Folder) {
    let folder = Folder::new();
    for name in NAMES {
        fs::write(folder.path().join(name), name).unwrap();
    }
    let fatbins = NAMES.map(|name| (name.to_owned(), fingerprint::of_bytes(name.as_bytes()))).to_vec();
    let archs = vec!["sm_75".into(), "sm_120".into()];
    let facts = Facts { sources: OF.0, flags: OF.1, nvcc: "13.0.88".into(), archs, fatbins };
    fs::write(folder.path().join(prebuilt::FILE), facts.to_string()).unwrap();
    (folder, Folder::new())
}

fn copied(folder: &Folder, to: &Folder, of: (u64, u64)) -> Result<(Facts, u64), String> {
    Facts::copy(folder.path(), of, &NAMES.map(String::from), to.path())
}

#[test]
fn prebuilt_kernels_are_copied() {
    let (folder, to) = kernels();
    let (facts, bytes) = copied(&folder, &to, OF).unwrap();
    assert_eq!(
        (facts.nvcc.as_str(), facts.archs.join(" "), bytes),
        ("13.0.88", "sm_75 sm_120".into(), 12 + 13)
    );
    for name in NAMES {
        assert_eq!(fs::read_to_string(to.path().join(name)).unwrap(), name);
    }
}

#[test]
fn prebuilt_kernels_of_other_sources_are_refused() {
    let (folder, to) = kernels();
    for other in [(OF.0 ^ 1, OF.1), (OF.0, OF.1 ^ 1)] {
        let error = copied(&folder, &to, other).unwrap_err();
        for (part, named) in
            [OF.0, OF.1, other.0, other.1].map(|hash| format!("{hash:016x}")).iter().enumerate()
        {
            assert!(error.contains(named.as_str()), "{part}: {error}");
        }
        assert!(error.contains("FAST_ALLREDUCE_NVCC"), "{error}");
    }
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
}

#[test]
fn damaged_prebuilt_kernels_are_refused() {
    let (folder, to) = kernels();
    let facts = fs::read_to_string(folder.path().join(prebuilt::FILE)).unwrap();
    // A file that is cut, changed, or gone.
    let other = folder.path().join(NAMES[1]);
    for contents in ["others.fatbi", "others.fatbim", ""] {
        fs::write(&other, contents).unwrap();
        let error = copied(&folder, &to, OF).unwrap_err();
        assert!(error.contains("others.fatbin is damaged"), "{error}");
    }
    fs::remove_file(&other).unwrap();
    assert!(copied(&folder, &to, OF).unwrap_err().contains("others.fatbin: No such file"));
    // The facts are cut anywhere, or a byte of them is no longer text.
    for end in 0..facts.len() {
        fs::write(folder.path().join(prebuilt::FILE), &facts[..end]).unwrap();
        let error = copied(&folder, &to, OF).unwrap_err();
        assert!(error.contains("is damaged") || error.contains("others.fatbin"), "{end}: {error}");
    }
    fs::write(folder.path().join(prebuilt::FILE), facts.replace("nvcc", "nvc\u{e9}")).unwrap();
    assert!(copied(&folder, &to, OF).unwrap_err().contains("FACTS is damaged"));
}

#[test]
fn a_fingerprint_depends_on_names_and_contents() {
    let of = |name, contents| {
        let folder = Folder::new();
        folder.write(name, contents);
        fingerprint::of(folder.path()).unwrap()
    };
    assert_eq!(of("a/b.cu", "c"), of("a/b.cu", "c"));
    for (name, contents) in [("a/b.cu", "d"), ("a/c.cu", "c"), ("a/b.cu", "")] {
        assert_ne!(of("a/b.cu", "c"), of(name, contents), "{name} {contents}");
    }
}
