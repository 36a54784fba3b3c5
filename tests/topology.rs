//! Topology matrices as users send them: parsing, printing, and errors.

use fast_allreduce::topology::{Link, LinkClass, PcieDistance, Topology};
use fast_allreduce::Error;
use proptest::prelude::*;

const RECORDED: [(&str, usize, LinkClass); 6] = [
    (include_str!("../src/topology/recorded/h100-8-nvswitch.txt"), 8, LinkClass::NvSwitch),
    (include_str!("../src/topology/recorded/a100-4-bridged.txt"), 4, LinkClass::Pcie),
    (include_str!("../src/topology/recorded/a100-4-mesh.txt"), 4, LinkClass::NvLinkMesh),
    (include_str!("../src/topology/recorded/pcie-4.txt"), 4, LinkClass::Pcie),
    (include_str!("../src/topology/recorded/pcie-2-sockets.txt"), 2, LinkClass::Pcie),
    (include_str!("../src/topology/recorded/mixed-5.txt"), 5, LinkClass::Pcie),
];

fn pcie(distance: PcieDistance) -> Option<Link> {
    Some(Link::Pcie { distance })
}

#[test]
fn recorded_matrices_are_read_and_printed_alike() {
    for (text, count, class) in RECORDED {
        let topology = Topology::parse(text).unwrap();
        assert_eq!(topology.gpus().len(), count);
        let all = (0..count).collect::<Vec<_>>();
        assert_eq!(topology.class(&all).unwrap(), class, "{text}");
        let printed = topology.to_string();
        assert_eq!(Topology::parse(&printed).unwrap(), topology, "{printed}");
        // The same links, without network cards and affinities.
        for (theirs, ours) in text.lines().zip(printed.lines()).take(count + 1) {
            let (theirs, ours) = (theirs.split('\t'), ours.split('\t'));
            assert_eq!(theirs.take(count + 1).collect::<Vec<_>>(), ours.collect::<Vec<_>>());
        }
    }
}

#[test]
fn links_are_told_apart() {
    let read = |index: usize| Topology::parse(RECORDED[index].0).unwrap();
    assert_eq!(read(0).link(0, 7), Some(Link::NvSwitch { lanes: 18 }));
    assert_eq!(read(1).link(2, 3), Some(Link::NvLink { lanes: 12 }));
    assert_eq!(read(1).link(1, 2), pcie(PcieDistance::System));
    assert_eq!(read(2).link(3, 0), Some(Link::NvLink { lanes: 4 }));
    assert_eq!(read(3).link(0, 1), pcie(PcieDistance::SingleSwitch));
    assert_eq!(read(3).link(1, 2), pcie(PcieDistance::HostBridge));
    assert_eq!(read(5).link(0, 2), pcie(PcieDistance::Node));
    assert_eq!(read(5).link(4, 4), Some(Link::SameDevice));
    assert_eq!(read(5).link(0, 5), None);
}

#[test]
fn the_class_is_that_of_the_worst_pair() {
    let mixed = Topology::parse(RECORDED[5].0).unwrap();
    assert_eq!(mixed.class(&[]).unwrap(), LinkClass::SameDevice);
    assert_eq!(mixed.class(&[4]).unwrap(), LinkClass::SameDevice);
    assert_eq!(mixed.class(&[4, 4]).unwrap(), LinkClass::SameDevice);
    assert_eq!(mixed.class(&[0, 1]).unwrap(), LinkClass::NvLinkMesh);
    assert_eq!(mixed.class(&[0, 1, 1, 0]).unwrap(), LinkClass::NvLinkMesh);
    assert_eq!(mixed.class(&[0, 1, 2]).unwrap(), LinkClass::Pcie);
    let error = mixed.class(&[0, 5]).unwrap_err();
    assert!(error.to_string().contains("5 (of 5 GPUs)"), "{error}");
}

#[test]
fn a_link_without_access_is_unreachable() {
    let topology = Topology::parse(RECORDED[0].0).unwrap();
    let topology = topology.with_peer_access(|a, b| Ok((a, b) != (2, 1))).unwrap();
    assert!(topology.reachable(1, 2) && !topology.reachable(2, 1) && topology.reachable(2, 2));
    assert!(!topology.reachable(0, 8));
    assert_eq!(topology.class(&[1, 2]).unwrap(), LinkClass::Unreachable);
    assert_eq!(topology.class(&[0, 1, 3]).unwrap(), LinkClass::NvSwitch);
    let refused = Error::Unavailable { what: "peer access".into(), reason: "no context".into() };
    assert_eq!(topology.with_peer_access(|_, _| Err(refused.clone())), Err(refused));
}

#[test]
fn text_around_and_other_spellings_are_passed_over() {
    let text = "$ nvidia-smi topo -m\r\n\x1b[4m\tGPU0\tGPU3\tmlx5_0\tCPU Affinity\x1b[0m\r\n\
                GPU0\t X \tSOC\tPIX\t0-5\r\nGPU3\tSOC\t X \tPHB\t6-11\r\nmlx5_0\tPIX\tPHB\t X \r\n";
    let topology = Topology::parse(text).unwrap();
    assert_eq!(topology.gpus().iter().map(|gpu| gpu.number).collect::<Vec<_>>(), [0, 3]);
    assert_eq!(topology.link(0, 1), pcie(PcieDistance::System));

    let one = Topology::parse("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-31\t0\n").unwrap();
    assert_eq!(one.gpus().len(), 1);
    assert_eq!(Topology::parse(&one.to_string()).unwrap(), one);
}

#[test]
fn bad_matrices_are_refused_with_line_and_fact() {
    let wide = (0..65).map(|gpu| format!("GPU{gpu} ")).collect::<String>();
    let cases = [
        ("", "line 1: no line of GPU columns in the text"),
        ("GPU0 X NV4\nGPU1 NV4 X", "line 1: no line of GPU columns in the text"),
        ("GPU0 GPU1\nGPU0 X NV4", "line 1: no row GPU1 after it"),
        ("\nGPU0 GPU1\nGPU0 X", "line 3: 1 cells in row GPU0"),
        ("GPU0 GPU1\nGPU0 X NVX\nGPU1 NV4 X", "line 2: \"NVX\" between GPU0 and GPU1"),
        ("GPU0 GPU1\nGPU0 X NV0\nGPU1 NV0 X", "line 2: \"NV0\" between GPU0 and GPU1"),
        ("GPU0 GPU1\nGPU0 X NV256\nGPU1 NV4 X", "line 2: \"NV256\" between GPU0 and GPU1"),
        ("GPU0 GPU1\nGPU0 X X\nGPU1 X X", "line 2: \"X\" between GPU0 and GPU1"),
        ("GPU0 GPU1\nGPU0 PIX PIX\nGPU1 PIX X", "line 2: \"PIX\" between GPU0 and GPU0"),
        ("GPU0 GPU1\nGPU0 X NV4\nGPU1 PIX X", "line 3: PIX from GPU1 to GPU0 but NV4 in line 2"),
        ("GPU0 GPU1\nGPU0 X NV4\nGPU0 X NV4", "line 3: a second row GPU0"),
        ("GPU0 GPU0\nGPU0 X NV4", "line 1: a second column GPU0"),
        ("GPU0 GPU1\nGPU0 X NV4\nGPU2 NV4 X", "line 3: a row GPU2"),
        (&wide, "line 1: 65 GPUs"),
        (
            "GPU0 GPU1\nGPU0 X a\u{1b}long-and-strange-cell-of-a-matrix",
            "line 2: \"a\\u{1b}long-and-strange-cell-\"... between GPU0 and GPU1",
        ),
    ];
    for (text, fact) in cases {
        let Err(Error::InvalidSetting { name: "topology", value, .. }) = Topology::parse(text) else {
            panic!("{fact}: {:?}", Topology::parse(text));
        };
        assert_eq!(value, fact);
    }
    let error = Topology::parse(&" ".repeat(1 << 20)).unwrap_err();
    assert!(error.to_string().contains("a text of 1048576 bytes"), "{error}");
}

/// Generates the number of GPUs and the cells of a symmetric matrix.
fn matrices() -> impl Strategy<Value = (usize, Vec<String>)> {
    let cell = prop_oneof![
        (1..=255_u32).prop_map(|lanes| format!("NV{lanes}")),
        prop::sample::select(vec!["PSB", "PIX", "PXB", "PHB", "NODE", "SYS", "N/A"]).prop_map(str::to_owned),
    ];
    (1..=16_usize)
        .prop_flat_map(move |count| (Just(count), prop::collection::vec(cell.clone(), count * count)))
}

fn words() -> impl Strategy<Value = &'static str> {
    let words = ["GPU0", "GPU1", "GPU9999", "X", "NV18", "NV", "SYS", "\n", "\t", "\x1b[", "\x1b[4m"];
    prop::sample::select(words.to_vec())
}

proptest! {
    #[test]
    fn any_matrix_survives_printing((count, cells) in matrices()) {
        let mut text = (0..count).map(|gpu| format!("\tGPU{gpu}")).collect::<String>();
        for a in 0..count {
            text += &format!("\nGPU{a}");
            for b in 0..count {
                text += "\t";
                text += if a == b { "X" } else { &cells[a.min(b) * count + a.max(b)] };
            }
        }
        let topology = Topology::parse(&text).unwrap();
        prop_assert_eq!(Topology::parse(&topology.to_string()).unwrap(), topology);
    }

    #[test]
    fn reading_never_panics(text in ".{0,300}", bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Topology::parse(&text);
        let _ = Topology::parse(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn reading_words_of_the_format_never_panics(words in prop::collection::vec(words(), 0..60)) {
        let _ = Topology::parse(&words.join(" "));
        let _ = Topology::parse(&words.concat());
    }

    #[test]
    fn damaged_matrices_never_panic(
        which in 0..RECORDED.len(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut text = RECORDED[which].0.as_bytes().to_vec();
        let at = at.index(text.len());
        let _ = Topology::parse(&String::from_utf8_lossy(&text[..at]));
        text[at] = byte;
        if let Ok(topology) = Topology::parse(&String::from_utf8_lossy(&text)) {
            prop_assert!(!topology.gpus().is_empty());
        }
    }
}
