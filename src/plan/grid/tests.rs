//! Tests of the built-in table on recorded machines, and of its grids.

use proptest::prelude::*;

use super::super::Algorithm::{HalvingDoubling, OneShotPull, OneShotPush, Ring, TwoShotPull, TwoShotPush};
use super::*;
use crate::abi::FA_MAX_BLOCKS;
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::plan::limits::{Limits, Packing};
use crate::plan::planner::Planner;
use crate::plan::table::Steps;
use crate::plan::{Algorithm, Choice, DeviceKind, GpuGeneration, Order, Plan, PlannedCall, Table};
use crate::topology::{recorded, LinkClass};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Number of multiprocessors of an H100.
const MULTIPROCESSORS: usize = 132;

/// Facts that all ranks share.
#[derive(Debug, Clone, Copy)]
struct Facts {
    world_size: usize,
    bytes: usize,
    link: LinkClass,
    forced: Option<Algorithm>,
    multiprocessors: usize,
}

fn facts(world_size: usize, bytes: u64, link: LinkClass) -> Facts {
    let ranks_per_device = if link == LinkClass::SameDevice { world_size } else { 1 };
    let multiprocessors = MULTIPROCESSORS / ranks_per_device;
    Facts { world_size, bytes: bytes as usize, link, forced: None, multiprocessors }
}

fn plan_by(table: &Table, facts: &Facts) -> Plan {
    let Facts { world_size, bytes, link, forced, multiprocessors } = *facts;
    let choice =
        Steps::new(table, PlannedCall::AllReduce, world_size, link, Order::Any).choice(bytes, forced);
    let (blocks, threads) = cuda(&choice, bytes, world_size, multiprocessors);
    Plan { algorithm: choice.algorithm, blocks, threads, piece_bytes: usize::MAX }
}

fn plan(facts: &Facts) -> Plan {
    plan_by(&Table::built_in(DeviceKind::Cuda), facts)
}

/// Plans for the first `world_size` GPUs of a recorded machine.
fn on(matrix: &str, world_size: usize, bytes: u64) -> Plan {
    let ranks = (0..world_size).collect::<Vec<_>>();
    plan(&facts(world_size, bytes, recorded::read(matrix).class(&ranks).unwrap()))
}

fn choice(algorithm: Algorithm, blocks: usize, threads: usize) -> Plan {
    Plan { algorithm, blocks, threads, piece_bytes: usize::MAX }
}

#[test]
fn plans_on_eight_h100() {
    let on = |world_size, bytes| on(recorded::H100_NVSWITCH, world_size, bytes);
    for world_size in 2..=8 {
        assert_eq!(on(world_size, KIB), choice(OneShotPush, 2, 32));
        assert_eq!(on(world_size, 8 * KIB), choice(OneShotPush, 16, 32));
        assert_eq!(on(world_size, 32 * KIB), choice(OneShotPush, 64, 32));
    }
    assert_eq!(on(2, 256 * KIB), choice(OneShotPush, 64, 256));
    assert_eq!(on(2, 8 * MIB), choice(OneShotPush, 64, 512));
    assert_eq!(on(2, 8 * MIB + 2), choice(OneShotPull, 64, 512));
    for world_size in 3..=4 {
        assert_eq!(on(world_size, 128 * KIB), choice(OneShotPush, 64, 128));
    }
    assert_eq!(on(4, 256 * KIB), choice(TwoShotPush, 64, 64));
    assert_eq!(on(4, MIB), choice(TwoShotPush, 64, 256));
    for world_size in 3..=5 {
        assert_eq!(on(world_size, 64 * KIB), choice(OneShotPush, 64, 64));
    }
    assert_eq!(on(8, 64 * KIB), choice(TwoShotPush, 16, 32));
    assert_eq!(on(8, 256 * KIB), choice(TwoShotPush, 64, 32));
    assert_eq!(on(8, MIB), choice(TwoShotPush, 64, 128));
    for world_size in 3..=8 {
        assert_eq!(on(world_size, 8 * MIB), choice(TwoShotPush, 64, 512));
        assert_eq!(on(world_size, 64 * MIB), choice(TwoShotPull, 36, 512));
    }
}

#[test]
fn plans_of_other_generations() {
    let algorithm = |generation, world_size, bytes| {
        plan_by(&Table::for_gpu(generation), &facts(world_size, bytes, LinkClass::NvSwitch)).algorithm
    };
    // The largest sizes of one-shot pushes and of two-shot pushes.
    for (generation, world_size, one_shot, two_shot) in [
        (GpuGeneration::Ampere, 3, 128 * KIB, 8 * MIB),
        (GpuGeneration::Ampere, 4, 96 * KIB, 8 * MIB),
        (GpuGeneration::Ampere, 8, 32 * KIB, 8 * MIB),
        (GpuGeneration::Hopper, 3, 128 * KIB, 8 * MIB),
        (GpuGeneration::Hopper, 5, 96 * KIB, 8 * MIB),
        (GpuGeneration::Hopper, 7, 32 * KIB, 8 * MIB),
        (GpuGeneration::Hopper, 8, 32 * KIB, 8 * MIB),
        (GpuGeneration::Hopper, 16, 256 * KIB, 4 * MIB),
        (GpuGeneration::Blackwell, 3, 512 * KIB, 8 * MIB),
        (GpuGeneration::Blackwell, 4, 256 * KIB, 8 * MIB),
        (GpuGeneration::Blackwell, 8, 192 * KIB, 8 * MIB),
    ] {
        assert_eq!(algorithm(generation, world_size, one_shot), OneShotPush);
        assert_eq!(algorithm(generation, world_size, one_shot + 2), TwoShotPush);
        assert_eq!(algorithm(generation, world_size, two_shot), TwoShotPush);
        assert_eq!(algorithm(generation, world_size, two_shot + 2), TwoShotPull);
    }
    for generation in [GpuGeneration::Ampere, GpuGeneration::Blackwell] {
        assert_eq!(algorithm(generation, 2, 8 * MIB), OneShotPush);
        assert_eq!(algorithm(generation, 2, 8 * MIB + 2), OneShotPull);
    }
}

/// Packets of calls outside of the hot set have tags. Two ranks pull such calls from smaller sizes on, if the table
/// pulls.
#[test]
fn calls_whose_packets_have_tags() {
    let packing = Packing { pack_bytes: 16, slot_bytes: 32, sentinel_bytes: 16 };
    let (mailbox_bytes, staging_bytes) = (64 << 20, 64 << 20);
    let table = Table::built_in(DeviceKind::Cuda);
    let algorithm = |world_size, link, forced, kib: usize, dtype: DType, op| {
        let limits = Limits {
            device: DeviceKind::Cuda,
            packing,
            world_size,
            mailbox_bytes,
            staging_bytes,
            levels: crate::plan::Levels::default(),
            stream_from: usize::MAX,
        };
        let planner = Planner::new(&table, link, Order::Any, forced, MULTIPROCESSORS, limits);
        planner.reduction((kib << 10) / dtype.size(), dtype, op).algorithm
    };
    let nvlink = LinkClass::NvSwitch;
    for (dtype, op) in
        [(DType::Bf16, ReduceOp::Avg), (DType::F64, ReduceOp::Sum), (DType::I32, ReduceOp::Max)]
    {
        assert_eq!(algorithm(2, nvlink, None, 1024, dtype, op), OneShotPush);
        assert_eq!(algorithm(2, nvlink, None, 2048, dtype, op), OneShotPull);
        assert_eq!(algorithm(2, LinkClass::Pcie, None, 2048, dtype, op), OneShotPush);
        assert_eq!(algorithm(2, nvlink, Some(OneShotPush), 2048, dtype, op), OneShotPush);
        for world_size in [3, 8] {
            assert_eq!(algorithm(world_size, nvlink, None, 4096, dtype, op), TwoShotPush);
        }
    }
    for dtype in [DType::F16, DType::Bf16, DType::F32] {
        assert_eq!(algorithm(2, nvlink, None, 2048, dtype, ReduceOp::Sum), OneShotPush);
    }
}

#[test]
fn plans_on_bridged_pairs_and_on_a_mesh() {
    assert_eq!(on(recorded::A100_BRIDGED, 2, 64 * KIB), choice(OneShotPush, 64, 64));
    // Ranks 1 and 2 have no bridge.
    assert_eq!(on(recorded::A100_BRIDGED, 3, 64 * KIB), choice(TwoShotPush, 16, 96));
    assert_eq!(on(recorded::A100_BRIDGED, 4, MIB), choice(TwoShotPush, 16, 512));
    assert_eq!(on(recorded::A100_MESH, 4, MIB), choice(TwoShotPush, 64, 256));
}

#[test]
fn plans_on_pcie() {
    for bytes in [KIB, 64 * KIB, MIB, 64 * MIB] {
        assert_eq!(on(recorded::SOCKETS, 2, bytes).algorithm, OneShotPush);
        assert_eq!(on(recorded::PCIE, 2, bytes).algorithm, OneShotPush);
        let by_size = match bytes {
            KIB => OneShotPush,
            ..=MIB => TwoShotPush,
            _ => Ring,
        };
        assert_eq!(on(recorded::MIXED, 5, bytes).algorithm, by_size);
        for world_size in 3..=4 {
            assert_eq!(on(recorded::PCIE, world_size, bytes).algorithm, by_size);
        }
    }
    assert_eq!(on(recorded::MIXED, 2, 64 * MIB).algorithm, OneShotPull);
}

#[test]
fn plans_through_host_memory() {
    for world_size in 2..=16 {
        for (bytes, algorithm) in [(KIB, TwoShotPush), (64 * KIB, TwoShotPush), (MIB, TwoShotPull)] {
            assert_eq!(plan(&facts(world_size, bytes, LinkClass::Unreachable)).algorithm, algorithm);
        }
    }
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
            let by_size = match (bytes, world_size) {
                (..=65_536, _) => OneShotPush,
                (MIB, 2) => TwoShotPush,
                (_, 2) => OneShotPull,
                _ => TwoShotPull,
            };
            assert_eq!(plan.algorithm, by_size, "{world_size} {bytes}");
        }
    }
}

#[test]
fn a_forced_algorithm_keeps_the_grid_of_its_rows() {
    let forced =
        |algorithm, bytes| plan(&Facts { forced: Some(algorithm), ..facts(8, bytes, LinkClass::NvSwitch) });
    assert_eq!(forced(OneShotPush, MIB), choice(OneShotPush, 64, 512));
    assert_eq!(forced(TwoShotPull, KIB), choice(TwoShotPull, 1, 32));
    assert_eq!(forced(TwoShotPush, 64 * MIB), choice(TwoShotPush, 64, 512));
}

#[test]
fn a_table_can_be_replaced() {
    let table = Table::uniform(DeviceKind::Cuda, Choice::cuda(OneShotPush, 8, 256)).unwrap();
    assert_eq!(plan_by(&table, &facts(8, 64 * MIB, LinkClass::Pcie)), choice(OneShotPush, 8, 256));
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
        // There are enough packs for all blocks except one, with one warp of each block idle.
        let packs = facts.bytes.div_ceil(16);
        prop_assert!((plan.blocks - 1) * (plan.threads - 32) <= packs, "{:?}", plan);
        match facts.forced {
            Some(forced) => prop_assert_eq!(plan.algorithm, forced),
            None if facts.link == LinkClass::Pcie && facts.world_size > 2 && facts.bytes > 32 << 10 => {
                // No pulls, and no algorithm in which a rank writes to all others at once.
                prop_assert!(matches!(plan.algorithm, TwoShotPush | Ring | HalvingDoubling));
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
}
