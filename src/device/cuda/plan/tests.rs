//! The published table on recorded machines, its invariants, and its text.

use proptest::prelude::*;

use super::*;
use crate::abi::FA_MAX_BLOCKS;
use crate::damaged::damaged;
use crate::error::Error;
use crate::topology::recorded;

/// An H100.
const MULTIPROCESSORS: usize = 132;

fn facts(world_size: usize, bytes: u64, link: LinkClass) -> Facts {
    let ranks_per_device = if link == LinkClass::SameDevice { world_size } else { 1 };
    let multiprocessors = MULTIPROCESSORS / ranks_per_device;
    Facts { world_size, bytes: bytes as usize, link, forced: None, multiprocessors }
}

fn plan(facts: &Facts) -> Plan {
    Table::default().plan(facts)
}

/// The plan of the first `world_size` GPUs of a recorded machine.
fn on(matrix: &str, world_size: usize, bytes: u64) -> Plan {
    let ranks = (0..world_size).collect::<Vec<_>>();
    plan(&facts(world_size, bytes, recorded::read(matrix).class(&ranks).unwrap()))
}

fn choice(algorithm: Algorithm, blocks: usize, threads: usize) -> Plan {
    Plan { algorithm, blocks, threads, piece_bytes: usize::MAX }
}

#[test]
fn the_published_table_holds_what_a_file_must() {
    let text = Table::default().to_string();
    assert_eq!(Table::parse(&text).unwrap(), Table::default(), "{text}");
}

#[test]
fn plans_on_eight_h100() {
    let on = |world_size, bytes| on(recorded::H100_NVSWITCH, world_size, bytes);
    for world_size in 2..=8 {
        assert_eq!(on(world_size, KIB), choice(OneShotPush, 1, 64));
        assert_eq!(on(world_size, 8 * KIB), choice(OneShotPush, 1, 512));
        assert_eq!(on(world_size, 128 * KIB), choice(OneShotPush, 16, 512));
    }
    assert_eq!(on(2, 2 * MIB), choice(OneShotPush, 64, 512));
    assert_eq!(on(2, 2 * MIB + 1), choice(OneShotPull, 36, 512));
    assert_eq!(on(2, 64 * MIB), choice(OneShotPull, 36, 512));
    assert_eq!(on(3, 512 * KIB), choice(OneShotPush, 64, 512));
    assert_eq!(on(3, 512 * KIB + 2), choice(TwoShotPull, 22, 512));
    assert_eq!(on(4, 384 * KIB), choice(OneShotPush, 48, 512));
    assert_eq!(on(4, 512 * KIB), choice(OneShotPull, 36, 512));
    assert_eq!(on(4, 1024 * KIB), choice(TwoShotPull, 32, 512));
    assert_eq!(on(5, 192 * KIB), choice(OneShotPush, 24, 512));
    assert_eq!(on(5, 256 * KIB), choice(OneShotPull, 32, 512));
    for world_size in 6..=8 {
        assert_eq!(on(world_size, 128 * KIB + 1).algorithm, OneShotPull);
        assert_eq!(on(world_size, 256 * KIB + 1).algorithm, TwoShotPull);
        assert_eq!(on(world_size, 64 * MIB), choice(TwoShotPull, 36, 512));
    }
    assert_eq!(on(8, 512 * KIB), choice(TwoShotPull, 8, 512));
}

#[test]
fn plans_on_bridged_pairs_and_on_a_mesh() {
    assert_eq!(on(recorded::A100_BRIDGED, 2, 64 * KIB), choice(OneShotPush, 8, 512));
    // Ranks 1 and 2 have no bridge.
    assert_eq!(on(recorded::A100_BRIDGED, 3, 64 * KIB), choice(TwoShotPush, 3, 480));
    assert_eq!(on(recorded::A100_BRIDGED, 4, MIB), choice(TwoShotPush, 16, 512));
    assert_eq!(on(recorded::A100_MESH, 4, MIB), choice(TwoShotPull, 32, 512));
}

#[test]
fn plans_on_pcie() {
    for bytes in [KIB, 64 * KIB, MIB, 64 * MIB] {
        assert_eq!(on(recorded::SOCKETS, 2, bytes).algorithm, OneShotPush);
        assert_eq!(on(recorded::PCIE, 2, bytes).algorithm, OneShotPush);
        assert_eq!(on(recorded::MIXED, 5, bytes).algorithm, TwoShotPush);
        for world_size in 3..=4 {
            assert_eq!(on(recorded::PCIE, world_size, bytes).algorithm, TwoShotPush);
        }
    }
    assert_eq!(on(recorded::MIXED, 2, 64 * MIB).algorithm, OneShotPull);
}

#[test]
fn all_ranks_of_one_device_are_resident() {
    for world_size in 2..=16 {
        let ranks = vec![0; world_size];
        let class = recorded::read(recorded::H100_NVSWITCH).class(&ranks).unwrap();
        assert_eq!(class, LinkClass::SameDevice);
        for bytes in [KIB, 64 * KIB, MIB, 64 * MIB] {
            let plan = plan(&facts(world_size, bytes, class));
            assert!(plan.blocks * world_size <= MULTIPROCESSORS, "{world_size} {bytes}: {plan:?}");
            let small = bytes <= 64 * KIB;
            assert_eq!(plan.algorithm, if small { OneShotPush } else { TwoShotPull });
        }
    }
}

#[test]
fn a_forced_algorithm_keeps_the_grid_of_its_rows() {
    let forced =
        |algorithm, bytes| plan(&Facts { forced: Some(algorithm), ..facts(8, bytes, LinkClass::NvSwitch) });
    assert_eq!(forced(OneShotPush, MIB), choice(OneShotPush, 64, 512));
    assert_eq!(forced(TwoShotPull, KIB), choice(TwoShotPull, 1, 32));
    assert_eq!(forced(TwoShotPush, 64 * MIB), choice(TwoShotPush, 36, 512));
}

#[test]
fn the_table_in_words() {
    assert_eq!(
        Table::default().describe(8, LinkClass::NvSwitch),
        "up to 128 KiB: one-shot-push, up to 64 blocks of 512\n\
         up to 256 KiB: one-shot-pull, up to 36 blocks of 512\n\
         any larger size: two-shot-pull, up to 36 blocks of 512\n"
    );
    assert_eq!(
        Table::default().describe(4, LinkClass::Pcie),
        "any larger size: two-shot-push, up to 16 blocks of 512\n"
    );
}

/// The least table: one row.
const ONE_ROW: &str = "fast-allreduce plan 1\n\
    1-16 same-device,nvswitch,nvlink-mesh,pcie,unreachable max one-shot-push 8 256\n";

#[test]
fn a_table_can_be_replaced() {
    let table = Table::parse(ONE_ROW).unwrap();
    assert_eq!(table.plan(&facts(8, 64 * MIB, LinkClass::Pcie)), choice(OneShotPush, 8, 256));
    assert_ne!(table.digest(), Table::default().digest());
    assert_eq!(table.digest(), Table::parse(&table.to_string()).unwrap().digest());
}

#[test]
fn a_bad_table_is_refused_with_line_and_fact() {
    let all = "same-device,nvswitch,nvlink-mesh,pcie,unreachable";
    let row = |row: &str| format!("fast-allreduce plan 1\n\n# a comment\n{}\n", row.replace("all", all));
    let cases = [
        (String::new(), "line 1: nothing"),
        ("fast-allreduce plan 2".into(), "line 1: \"fast-allreduce plan 2\""),
        (format!("{ONE_ROW}1 pcie max\n"), "line 3: 3 cells"),
        (row("0-16 all max one-shot-push 8 256"), "line 4: ranks \"0-16\""),
        (row("1-17 all max one-shot-push 8 256"), "line 4: ranks \"1-17\""),
        (row("8-6 all max one-shot-push 8 256"), "line 4: ranks \"8-6\""),
        (row("1-16 pcie,pcie max one-shot-push 8 256"), "line 4: links \"pcie,pcie\""),
        (row("1-16 wire max one-shot-push 8 256"), "line 4: links \"wire\""),
        (row("1-16 all +1 one-shot-push 8 256"), "line 4: size \"+1\""),
        (row("1-16 all KiB one-shot-push 8 256"), "line 4: size \"KiB\""),
        (row("1-16 all 99999999999999999999 one-shot-push 8 256"), "line 4: size \"99999999999999999999\""),
        (
            row("1-16 all 18446744073709551615MiB one-shot-push 8 256"),
            "line 4: size \"18446744073709551615MiB\"",
        ),
        (row("1-16 all max three-shot 8 256"), "line 4: algorithm \"three-shot\""),
        (row("1-16 all max one-shot-push 0 256"), "line 4: blocks \"0\""),
        (row("1-16 all max one-shot-push 65 256"), "line 4: blocks \"65\""),
        (row("1-16 all max one-shot-push 8 0"), "line 4: threads \"0\""),
        (row("1-16 all max one-shot-push 8 48"), "line 4: threads \"48\""),
        (row("1-16 all max one-shot-push 8 544"), "line 4: threads \"544\""),
        (format!("{ONE_ROW}8 pcie 2MiB two-shot-pull 8 256"), "line 3: 2 MiB for 8 ranks, pcie"),
        (row("1-16 all 3KiB one-shot-push 8 256"), "line 4: nothing above 3 KiB for 1 ranks, same-device"),
        (row("1-15 all max one-shot-push 8 256"), "line 4: the end, and no row for 16 ranks, same-device"),
        (" ".repeat(65 << 10), "line 1: a text of 66560 bytes"),
    ];
    for (text, fact) in cases {
        let Err(Error::InvalidSetting { name: "plan table", value, .. }) = Table::parse(&text) else {
            panic!("{fact}: {:?}", Table::parse(&text));
        };
        assert_eq!(value, fact);
    }
}

fn any_link() -> impl Strategy<Value = LinkClass> {
    prop::sample::select(LinkClass::ALL.to_vec())
}

fn any_facts() -> impl Strategy<Value = Facts> {
    let forced = prop::option::of(prop::sample::select(Algorithm::ALL.to_vec()));
    // Sizes of every magnitude.
    let bytes = (any::<usize>(), 0..64_u32).prop_map(|(bits, shift)| bits >> shift);
    (0..20_usize, bytes, any_link(), forced, 0..200_usize).prop_map(
        |(world_size, bytes, link, forced, multiprocessors)| Facts {
            world_size,
            bytes,
            link,
            forced,
            multiprocessors,
        },
    )
}

proptest! {
    #[test]
    fn every_call_has_a_plan_within_limits(facts in any_facts()) {
        let plan = plan(&facts);
        prop_assert!((1..=FA_MAX_BLOCKS as usize).contains(&plan.blocks));
        prop_assert!((32..=512).contains(&plan.threads) && plan.threads % 32 == 0);
        prop_assert!(plan.blocks == 1 || plan.blocks <= facts.multiprocessors);
        // All threads of a block but those of a last warp have work, unless there is nearly none.
        let packs = facts.bytes.div_ceil(16);
        prop_assert!((plan.blocks - 1) * plan.threads <= packs, "{:?}", plan);
        match facts.forced {
            Some(forced) => prop_assert_eq!(plan.algorithm, forced),
            None if facts.link >= LinkClass::Pcie && facts.world_size > 2 => {
                prop_assert_eq!(plan.algorithm, TwoShotPush);
            }
            None => {}
        }
    }

    #[test]
    fn one_algorithm_never_takes_fewer_blocks_for_more(facts in any_facts(), more in any::<usize>()) {
        let larger = Facts { bytes: facts.bytes.saturating_add(more % 1_000_000), ..facts };
        let (small, large) = (plan(&facts), plan(&larger));
        if small.algorithm == large.algorithm {
            prop_assert!(small.blocks <= large.blocks, "{:?} then {:?}", small, large);
        }
    }

    #[test]
    fn reading_a_table_never_panics(text in ".{0,400}", bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Table::parse(&text);
        let _ = Table::parse(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn a_damaged_table_is_refused_or_still_whole(
        text in damaged(vec![Table::default().to_string().into_bytes(), ONE_ROW.into()]),
    ) {
        if let Ok(table) = Table::parse(&String::from_utf8_lossy(&text)) {
            for world_size in 1..=MAX_RANKS {
                for link in LinkClass::ALL {
                    let plan = table.plan(&facts(world_size, u64::MAX, link));
                    prop_assert!((1..=FA_MAX_BLOCKS as usize).contains(&plan.blocks));
                }
            }
        }
    }
}
