//! Tests of built-in tables, of tables made from steps, and of tuning files: written, read and damaged.

use proptest::prelude::*;

use super::choice::{format_size, MAX};
use super::table::{Row, Steps};
use super::*;
use crate::abi::FA_MAX_BLOCKS;
use crate::error::Error;
use crate::topology::LinkClass;
use crate::MAX_RANKS;
use Algorithm::{OneShotPull, OneShotPush, Ring, TwoShotPull, TwoShotPush};

const KIB: u64 = 1 << 10;

fn machine(device: DeviceKind) -> Machine {
    match device {
        DeviceKind::Host => {
            Machine::Host { cpu: "A \"CPU\"".into(), cores: 2, instruction_set: "avx2".into() }
        }
        DeviceKind::Cuda => Machine::Cuda {
            gpu: "NVIDIA H100".into(),
            gpus: 8,
            link: LinkClass::NvSwitch,
            driver: "12.8".into(),
        },
    }
}

fn tuning(table: Table) -> Tuning {
    Tuning::new(machine(table.device()), table).unwrap()
}

/// Parses a file's text.
fn read(text: &str) -> Result<(Machine, Table), String> {
    tuning::text::parse(text)
}

fn host() -> Table {
    Table::built_in(DeviceKind::Host)
}

fn cuda() -> Table {
    Table::built_in(DeviceKind::Cuda)
}

#[test]
fn the_built_in_tables_keep_the_invariants_of_files() {
    let others = [GpuGeneration::Ampere, GpuGeneration::Blackwell].map(Table::for_gpu);
    let hosts = CpuMake::ALL.map(Table::for_cpu);
    for table in DeviceKind::ALL.map(Table::built_in).into_iter().chain(others).chain(hosts) {
        assert_eq!(Table::new(table.device(), table.rows.to_vec()), Ok(table));
    }
}

/// The host uses one-shots up to a size that depends on the number of ranks and on the make.
#[test]
fn the_host_plans_by_its_rules() {
    for (make, world_size) in
        CpuMake::ALL.into_iter().flat_map(|make| (1..=MAX_RANKS).map(move |n| (make, n)))
    {
        let is_intel = make == CpuMake::Intel;
        let most = match world_size {
            1 => usize::MAX,
            2 if is_intel => 32 << 10,
            2 => 8 << 10,
            3 if is_intel => 8 << 10,
            3 => 4 << 10,
            4 => 2 << 10,
            5..=7 => 1 << 10,
            _ => 512,
        };
        // Two ranks stage half of a piece.
        let expected = |algorithm, bytes: usize| {
            let is_large = (world_size, algorithm) == (2, TwoShotPull) && (!is_intel || bytes <= 1 << 20);
            let piece_bytes = if is_large { 1 << 20 } else { 256 << 10 };
            Choice::host(algorithm, FA_MAX_BLOCKS, 64 << 10, piece_bytes)
        };
        let table = Table::for_cpu(make);
        let steps = Steps::new(&table, PlannedCall::AllReduce, world_size, LinkClass::SameDevice, Order::Any);
        let edges = (9..=20).map(|bits| 1 << bits).chain([1 << 30]);
        let sizes = edges.flat_map(|edge| [edge - 1, edge, edge + 1]).chain([0, 1, usize::MAX]);
        for bytes in sizes {
            let algorithm = if bytes <= most { OneShotPull } else { TwoShotPull };
            assert_eq!(steps.choice(bytes, None), expected(algorithm, bytes), "{make} {world_size} {bytes}");
        }
        // A forced algorithm keeps the grid of the table.
        for forced in Algorithm::ALL {
            assert_eq!(steps.choice(1 << 20, Some(forced)), expected(forced, 1 << 20), "{make} {world_size}");
        }
    }
}

/// A single row is the slice of one rank, so that nothing is shared in a two-shot.
#[test]
fn a_single_row_on_the_host_is_reduced_in_one_shot() {
    let packing = Packing { pack_bytes: 64, slot_bytes: 128, sentinel_bytes: 0 };
    let limits = |staging_bytes| Limits {
        device: DeviceKind::Host,
        packing,
        world_size: 8,
        mailbox_bytes: staging_bytes,
        staging_bytes,
        levels: crate::plan::Levels::default(),
        stream_from: usize::MAX,
    };
    let algorithm = |forced, rows: usize| {
        let planner = Planner::new(&host(), LinkClass::SameDevice, Order::Fixed, forced, 1, limits(1 << 20));
        planner.rows(rows * 4096, DType::Bf16, Some(4096)).algorithm
    };
    assert_eq!([1, 2, 8].map(|rows| algorithm(None, rows)), [OneShotPull, TwoShotPull, TwoShotPull]);
    assert_eq!(algorithm(Some(TwoShotPull), 1), TwoShotPull);
    assert_eq!(algorithm(Some(OneShotPull), 8), OneShotPull);
}

#[test]
fn tables_are_described() {
    assert_eq!(
        cuda().describe(8, LinkClass::NvSwitch),
        "up to 32 KiB: one-shot-push, up to 64 blocks of 512 threads\n\
         up to 8 MiB: two-shot-push, up to 64 blocks of 512 threads\n\
         any larger size: two-shot-pull, up to 36 blocks of 512 threads\n"
    );
    assert_eq!(
        cuda().describe(4, LinkClass::Pcie),
        "up to 16 KiB: one-shot-push, up to 16 blocks of 512 threads\n\
         up to 1 MiB: two-shot-push, up to 16 blocks of 512 threads\n\
         any larger size: ring, up to 16 blocks of 512 threads, with order any\n"
    );
    assert_eq!(
        host().describe(3, LinkClass::SameDevice),
        "up to 4 KiB: one-shot-pull, a block for 64 KiB, up to 64, in pieces of 256 KiB a block\n\
         any larger size: two-shot-pull, a block for 64 KiB, up to 64, in pieces of 256 KiB a block\n"
    );
    let one = Choice::host(TwoShotPush, 1, 64, 512 << 10);
    assert_eq!(one.to_string(), "two-shot-push, 1 block, in pieces of 512 KiB a block");
    assert_eq!(
        (format_size(0), format_size(100), format_size(MAX)),
        ("0".into(), "100 bytes".into(), "any size".into())
    );
}

#[test]
fn steps_of_one_world_leave_the_others() {
    let steps = [
        Step { max_bytes: 4 * KIB, choice: Choice::cuda(TwoShotPush, 4, 64) },
        Step { max_bytes: MAX, choice: Choice::cuda(OneShotPull, 8, 128) },
    ];
    let table = cuda().with_steps(7, LinkClass::NvSwitch, &steps).unwrap();
    for world_size in 1..=MAX_RANKS {
        for link in LinkClass::ALL {
            let is_new = (world_size, link) == (7, LinkClass::NvSwitch);
            let expected = if is_new { steps.to_vec() } else { cuda().steps(world_size, link) };
            assert_eq!(table.steps(world_size, link), expected, "{world_size} {link}");
        }
    }
    // Setting equal steps again changes nothing.
    assert_eq!(table.with_steps(7, LinkClass::NvSwitch, &steps), Ok(table.clone()));
    let one = [Step { max_bytes: MAX, choice: Choice::host(OneShotPush, 2, 4096, 65536) }];
    let table = host().with_steps(5, LinkClass::NvSwitch, &one).unwrap();
    for world_size in 1..=MAX_RANKS {
        for link in LinkClass::ALL {
            let expected = if world_size == 5 { one.to_vec() } else { host().steps(world_size, link) };
            assert_eq!(table.steps(world_size, link), expected);
        }
    }
}

#[test]
fn other_calls_have_their_own_rows_or_those_of_allreduces() {
    let choice = |piece| Choice::host(OneShotPull, 1, 4096, piece);
    let steps =
        [Step { max_bytes: KIB, choice: choice(4096) }, Step { max_bytes: MAX, choice: choice(8192) }];
    let link = LinkClass::SameDevice;
    let table = host().with_steps_of(PlannedCall::AllGather, 2, link, &steps).unwrap();
    assert_eq!(table.steps(2, link), host().steps(2, link));
    assert_eq!(table.steps_of(PlannedCall::AllGather, 2, link), steps);
    assert_eq!(table.steps_of(PlannedCall::AllGather, 3, link), []);
    let described = table.describe(2, link);
    assert!(
        described.ends_with(
            "all_gather, up to 1 KiB: 1 block, in pieces of 4 KiB a block\n\
         all_gather, any larger size: 1 block, in pieces of 8 KiB a block\n"
        ),
        "{described}"
    );
    // A planner uses these steps for all-gathers only.
    let packing = Packing { pack_bytes: 64, slot_bytes: 128, sentinel_bytes: 0 };
    let staging_bytes = 1 << 20;
    let limits = Limits {
        device: DeviceKind::Host,
        packing,
        world_size: 2,
        mailbox_bytes: staging_bytes,
        staging_bytes,
        levels: crate::plan::Levels::default(),
        stream_from: usize::MAX,
    };
    let piece = |table: &Table, calls, bytes| {
        Planner::new(table, link, Order::Fixed, None, 1, limits).shares(calls, bytes, 1).piece_bytes
    };
    assert_eq!(piece(&table, PlannedCall::AllGather, 1000), 4096);
    assert_eq!(piece(&table, PlannedCall::AllGather, 1 << 20), 8192);
    assert_eq!(piece(&table, PlannedCall::Broadcast, 1 << 20), 256 << 10);
    // An empty list removes them.
    assert_eq!(table.with_steps_of(PlannedCall::AllGather, 2, link, &[]), Ok(host()));
    let error = host().with_steps_of(
        PlannedCall::Reduce,
        2,
        link,
        &[Step { max_bytes: MAX, choice: Choice::host(TwoShotPull, 1, 64, 64) }],
    );
    assert!(error.unwrap_err().to_string().contains("reduce has no choice of algorithms"));
}

/// Normalised rows on GPUs are pushed. All available blocks share the rows, at most one block for each chunk of a row.
/// One-shots and two-shots are chosen by the same sizes as for a plain sum.
#[test]
fn rows_on_gpus_are_pushed_by_teams() {
    let packing = Packing { pack_bytes: 16, slot_bytes: 32, sentinel_bytes: 16 };
    let limits = Limits {
        device: DeviceKind::Cuda,
        packing,
        world_size: 8,
        mailbox_bytes: 8 << 20,
        staging_bytes: 8 << 20,
        levels: crate::plan::Levels::default(),
        stream_from: usize::MAX,
    };
    let plan = |forced, rows: usize| {
        let planner = Planner::new(&cuda(), LinkClass::NvSwitch, Order::Fixed, forced, 64, limits);
        planner.rows(rows * 5120, DType::Bf16, Some(5120))
    };
    let in_teams = [
        (1, (OneShotPush, 10, 64)),
        (3, (OneShotPush, 30, 64)),
        (6, (TwoShotPush, 60, 64)),
        (8, (TwoShotPush, 40, 128)),
        (32, (TwoShotPush, 64, 320)),
        (51, (TwoShotPush, 51, 512)),
        (128, (TwoShotPush, 64, 512)),
    ];
    for (rows, in_teams) in in_teams {
        let Plan { algorithm, blocks, threads, piece_bytes } = plan(None, rows);
        assert_eq!((algorithm, blocks, threads), in_teams, "{rows} rows");
        assert!(piece_bytes >= rows * 10_240, "{rows} rows are one launch");
    }
    assert_eq!(plan(Some(OneShotPush), 32).algorithm, OneShotPush);
    assert_eq!(plan(Some(TwoShotPull), 8).algorithm, TwoShotPull);
    // Algorithms without fused kernels are replaced.
    assert_eq!(plan(Some(Ring), 1).algorithm, TwoShotPull);
}

#[test]
fn invalid_steps_are_refused() {
    let choice = Choice::host(OneShotPull, 1, 4096, 4096);
    let step = |max_bytes, choice| Step { max_bytes, choice };
    let refused = |steps: &[Step], fact: &str| {
        let error = host().with_steps(2, LinkClass::SameDevice, steps).unwrap_err().to_string();
        assert!(error.contains(fact), "{error}");
    };
    refused(&[], "world size 2 has no row");
    refused(&[step(KIB, choice)], "nothing above 1 KiB");
    refused(&[step(KIB, choice), step(KIB, choice), step(MAX, choice)], "1 KiB after 1 KiB");
    refused(&[step(1 << 63, choice), step(MAX, choice)], "9223372036854775808");
    refused(&[step(MAX, Choice::cuda(OneShotPull, 1, 32))], "threads = 32");
    refused(&[step(MAX, Choice::host(OneShotPull, 65, 4096, 4096))], "blocks = 65");
    refused(&[step(MAX, Choice::host(OneShotPull, 1, 0, 4096))], "block_bytes = 0");
    let error = host().with_steps(17, LinkClass::SameDevice, &[step(MAX, choice)]).unwrap_err();
    assert_eq!(error, Error::WorldSize { world_size: 17 });
    assert!(Table::uniform(DeviceKind::Cuda, choice).is_err());
    assert!(Tuning::new(machine(DeviceKind::Cuda), host()).is_err());
}

#[test]
fn written_files_are_read_back() {
    for table in [host(), cuda()] {
        let text = tuning(table.clone()).to_string();
        assert_eq!(read(&text), Ok((machine(table.device()), table)), "{text}");
    }
}

#[test]
fn a_file_of_another_machine_is_refused() {
    let tuning = tuning(host());
    assert_eq!(tuning.check(&machine(DeviceKind::Host)), Ok(()));
    let other = Machine::Host { cpu: "A \"CPU\"".into(), cores: 4, instruction_set: "avx2".into() };
    let error = tuning.check(&other).unwrap_err().to_string();
    assert!(
        error.contains("another machine") && error.contains("cores") && error.contains("tune"),
        "{error}"
    );
    let error = tuning.check(&machine(DeviceKind::Cuda)).unwrap_err().to_string();
    assert!(error.contains("host, not cuda"), "{error}");
}

/// A file of the host with one row for all worlds. The tests damage it.
const FILE: &str = "\
format = 1
version = \"VERSION\"
device = \"host\"
[machine]
cpu = \"A\"
cores = 2
instruction_set = \"avx2\"
[[row]]
ranks = [1, 16]
algorithm = \"one-shot-pull\"
blocks = 4
block_bytes = 65536
piece_bytes = 262144
";

const CUDA_ROW: &str = "\
ranks = [1, 16]
links = [\"same-device\", \"nvswitch\", \"nvlink-mesh\", \"pcie\", \"unreachable\"]
algorithm = \"one-shot-pull\"
blocks = 4
threads = 64
";

#[test]
fn a_bad_file_is_refused_with_line_and_reason() {
    let file = FILE.replace("VERSION", env!("CARGO_PKG_VERSION"));
    let with = |from: &str, to: &str| {
        assert!(file.contains(from), "{from}");
        file.replacen(from, to, 1)
    };
    let row = &file[file.find("[[row]]").unwrap()..];
    let cuda = file.replace("\"host\"", "\"cuda\"").replace("cpu = \"A\"", "gpu = \"A\"");
    let cuda =
        cuda.replace("cores = 2\ninstruction_set = \"avx2\"", "gpus = 1\nlink = \"pcie\"\ndriver = \"1\"");
    let cuda = cuda.replace(&row[8..], CUDA_ROW);
    assert!(read(&file).is_ok() && read(&cuda).is_ok(), "{:?} {:?}", read(&file), read(&cuda));
    let cases = [
        (String::new(), "no tuning file"),
        ("x".repeat(1000), "line 1: "),
        (with("format = 1", "format = 2"), "format = 2, this library reads 1"),
        (with("format = 1", "format = \"1\""), "line 1: invalid type: string"),
        (file.replace(env!("CARGO_PKG_VERSION"), "0.0.1"), "version \"0.0.1\", this is"),
        (with("version", "# version"), "it has no version"),
        (with("\"host\"", "\"tpu\""), "device = \"tpu\""),
        (with("cpu", "gpu"), "[machine] of the host has cpu"),
        (with("cores = 2", "cores = -2"), "line 6: invalid value: integer `-2`"),
        (with("cores", "kernels"), "line 6: unknown field `kernels`"),
        (with("[machine]", "[machines]"), "line 4: unknown field `machines`"),
        (with("blocks = 4", "blocks = 4\nblocks = 4"), "line 12: duplicate key"),
        (with("blocks = 4", "blocks = 65"), "row 1 (line 8): blocks = 65 is not within 1 to 64"),
        (with("blocks = 4", "blocks = 0"), "row 1 (line 8): blocks = 0"),
        (with("blocks = 4", "blocks = 4.0"), "line 11: invalid type: floating point"),
        (with("blocks = 4", "blocks ="), "line 11: "),
        (with("blocks = 4", ""), "line 8: missing field `blocks`"),
        (with("blocks = 4", "blocks = 4\nthreads = 4"), "row 1 (line 8): a row of the host has block_bytes"),
        (with("blocks = 4", "blocks = 4\nworkers = 4"), "line 12: unknown field `workers`"),
        (with("65536", "63"), "row 1 (line 8): block_bytes = 63"),
        (with("262144", "99999999999999999999"), "line 13: "),
        (
            with("ranks", "calls = \"alltoall\"\nranks"),
            "row 1 (line 8): calls = \"alltoall\" is none of all_reduce",
        ),
        (with("ranks", "calls = \"reduce\"\nranks"), "row 1 (line 8): reduce has no choice of algorithms"),
        (
            with("ranks", "calls = \"reduce\"\nranks").replace("algorithm = \"one-shot-pull\"\n", ""),
            "world size 1 has no row",
        ),
        (with("algorithm = \"one-shot-pull\"\n", ""), "row 1 (line 8): missing field `algorithm`"),
        (
            format!(
                "{file}{}",
                row.replace("algorithm = \"one-shot-pull\"", "calls = \"messages\"\nup_to = 9")
            ),
            "row 2 (line 14): messages of world size 1 has nothing above 9 bytes",
        ),
        (with("262144", "9223372036854775807"), "piece_bytes = 9223372036854775807"),
        (with("one-shot-pull", "tree"), "row 1 (line 8): algorithm = \"tree\" is none of one-shot-pull"),
        (with("[1, 16]", "[0, 16]"), "row 1 (line 8): ranks = [0, 16]"),
        (with("[1, 16]", "[1, 17]"), "row 1 (line 8): ranks = [1, 17]"),
        (with("[1, 16]", "[3, 2]"), "row 1 (line 8): ranks = [3, 2]"),
        (with("[1, 16]", "[1, 16, 16]"), "row 1 (line 8): ranks has 3 numbers"),
        (with("[1, 16]", "[1, 15]"), "world size 16 has no row"),
        (with("ranks", "up_to = 1000\nranks"), "row 1 (line 8): world size 1 has nothing above 1000 bytes"),
        (format!("{file}{row}"), "row 2 (line 14): world size 1 has any size after any size"),
        (file.replace(row, ""), "world size 1 has no row"),
        (cuda.replacen("\"pcie\"", "\"wire\"", 1), "link \"wire\" is none of"),
        (cuda.replacen("\"pcie\", ", "", 1), "world size 1 on pcie has no row"),
        (cuda.replace("\"nvswitch\"", "\"pcie\""), "row 1 (line 9): link \"pcie\" is there twice"),
        (cuda.replace("threads = 64", "threads = 48"), "threads = 48 is not a multiple of 32"),
        (cuda.replace("threads = 64", "threads = 544"), "threads = 544"),
        (cuda.replace("threads = 64", ""), "a row of cuda has links and threads"),
        (with("\"A\"", &format!("\"{}\"\ncpu = 1", "A".repeat(5000))), "line 6: duplicate key"),
        ("[".repeat(60_000), "line 1: unquoted keys"),
        (format!("x = {}", "[".repeat(60_000)), "recurs"),
        (format!("a{} = 1", ".a".repeat(20_000)), ""),
    ];
    for (text, fact) in cases {
        let reason = read(&text).expect_err(fact);
        assert!(reason.contains(fact), "{fact}: {reason}");
        assert!(reason.len() < 400 && !reason.contains('\n'), "{reason}");
    }
}

#[test]
fn paths_that_are_no_tuning_files_are_refused() {
    let refused = |path: &std::path::Path, fact: &str| {
        let Err(Error::Tuning { file, reason }) = Tuning::load(path) else { panic!("{path:?}") };
        assert!(reason.contains(fact), "{reason}");
        assert_eq!(file, path.display().to_string());
    };
    refused("/nonexistent/file".as_ref(), "No such file");
    refused("/dev/zero".as_ref(), "no regular file");
    refused("/tmp".as_ref(), "no regular file");
    let folder = crate::testing::temporary::Folder::new();
    refused(&folder.write("long", "# \n".repeat(30_000)), "64 KiB");
    refused(&folder.write("bytes", b"\xff\xfe"), "UTF-8");
    let loaded = Tuning::load(folder.write("right", tuning(host()).to_string())).unwrap();
    assert_eq!((loaded.table(), loaded.machine()), (&host(), &machine(DeviceKind::Host)));
}

fn any_choice(device: DeviceKind) -> impl Strategy<Value = Choice> {
    let algorithm = prop::sample::select(Algorithm::ALL.to_vec());
    (algorithm, 1..=FA_MAX_BLOCKS, 1..=16u32, 64..1u64 << 40, 64..1u64 << 40).prop_map(
        move |(algorithm, blocks, warps, block_bytes, piece_bytes)| match device {
            DeviceKind::Host => Choice::host(algorithm, blocks, block_bytes, piece_bytes),
            DeviceKind::Cuda => Choice::cuda(algorithm, blocks, warps * 32),
        },
    )
}

/// Returns the table with steps for calls other than allreduces in a world; `sizes` may be empty.
fn with_others(
    table: &Table,
    calls: PlannedCall,
    world_size: usize,
    link: LinkClass,
    sizes: &[u64],
) -> Table {
    let choice = |size: u64| match table.device() {
        DeviceKind::Host => {
            Choice::host(OneShotPull, 1 + size as u32 % FA_MAX_BLOCKS, 4096, 64 + size % 4096)
        }
        DeviceKind::Cuda => Choice::cuda(OneShotPull, 1 + size as u32 % FA_MAX_BLOCKS, 32),
    };
    let steps = sizes.iter().map(|&size| Step { max_bytes: size, choice: choice(size) });
    let last = (!sizes.is_empty()).then(|| Step { max_bytes: MAX, choice: choice(7) });
    let steps: Vec<_> = steps.chain(last).collect();
    let made = table.with_steps_of(calls, world_size, link, &steps).unwrap();
    assert_eq!(made.steps_of(calls, world_size, link), steps);
    made
}

fn any_table() -> impl Strategy<Value = Table> {
    let link = prop::sample::select(LinkClass::ALL.to_vec());
    prop::sample::select(DeviceKind::ALL.to_vec()).prop_flat_map(move |device| {
        // A file's integers are signed.
        let sizes = prop::collection::btree_set(0..=i64::MAX as u64, 0..6);
        let steps = (sizes, prop::collection::vec(any_choice(device), 7));
        let worlds = prop::collection::vec((1..=MAX_RANKS, link.clone(), steps), 0..5);
        let others = prop::sample::select(PlannedCall::ALL[1..].to_vec());
        let sizes = prop::collection::btree_set(0..=i64::MAX as u64, 0..3);
        let others = prop::collection::vec((others, 1..=MAX_RANKS, link.clone(), sizes), 0..4);
        (worlds, others).prop_map(move |(worlds, others)| {
            let table = others.into_iter().fold(
                Table::built_in(device),
                |table, (calls, world_size, link, sizes)| {
                    let sizes: Vec<_> = sizes.into_iter().collect();
                    with_others(&table, calls, world_size, link, &sizes)
                },
            );
            worlds.into_iter().fold(table, |table, (world_size, link, (sizes, choices))| {
                let sizes = sizes.into_iter().chain([MAX]);
                let steps = sizes.zip(choices).map(|(max_bytes, choice)| Step { max_bytes, choice });
                table.with_steps(world_size, link, &steps.collect::<Vec<_>>()).unwrap()
            })
        })
    })
}

/// Returns whether every call has a plan that the device can use.
fn is_complete(table: &Table) -> bool {
    let fits = |row: &Row| row.choice.check(table.device()).is_ok();
    let covers = |world_size| {
        LinkClass::ALL.iter().all(|&link| {
            let steps = table.steps(world_size, link);
            steps.last().is_some_and(|step| step.max_bytes == MAX)
                && steps.windows(2).all(|pair| pair[0].max_bytes < pair[1].max_bytes)
        })
    };
    table.rows.iter().all(fits) && (1..=MAX_RANKS).all(covers)
}

proptest! {
    #[test]
    fn any_table_is_written_and_read_back(table in any_table(), cpu in ".{0,40}") {
        prop_assert!(is_complete(&table));
        let mut machine = machine(table.device());
        let (Machine::Host { cpu: name, .. } | Machine::Cuda { gpu: name, .. }) = &mut machine;
        *name = cpu;
        let text = Tuning::new(machine.clone(), table.clone()).unwrap().to_string();
        prop_assert_eq!(read(&text), Ok((machine, table)), "{}", text);
    }

    #[test]
    fn reading_never_panics(text in ".{0,400}", bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = read(&text);
        let _ = read(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn a_damaged_file_is_refused_or_complete(
        table in any_table(),
        cut in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut text = tuning(table).to_string().into_bytes();
        let cut = cut.index(text.len());
        let _ = read(&String::from_utf8_lossy(&text[..cut]));
        for (at, byte) in changes {
            let at = at.index(text.len());
            text[at] = byte;
        }
        if let Ok((_, table)) = read(&String::from_utf8_lossy(&text)) {
            prop_assert!(is_complete(&table));
        }
    }
}

#[test]
fn a_fixed_order_has_only_direct_algorithms() {
    use crate::plan::GpuGeneration;
    let generations = [GpuGeneration::Ampere, GpuGeneration::Hopper, GpuGeneration::Blackwell];
    let ring = Choice::cuda(Ring, 16, 512);
    let uniform = Table::uniform(DeviceKind::Cuda, ring).unwrap();
    let tables = generations.map(Table::for_gpu).into_iter().chain([uniform]);
    let mut others = 0;
    for (table, world_size) in
        tables.flat_map(|table| (1..=16).map(move |world_size| (table.clone(), world_size)))
    {
        for link in LinkClass::ALL {
            let steps = |order| Steps::new(&table, PlannedCall::AllReduce, world_size, link, order);
            let (fixed, any) = (steps(Order::Fixed), steps(Order::Any));
            for bytes in (0..40).map(|shift| 1_usize << shift).chain([0, usize::MAX]) {
                let (fixed, any) = (fixed.choice(bytes, None), any.choice(bytes, None));
                assert!(fixed.algorithm.is_direct(), "{world_size} ranks, {link:?}, {bytes} bytes: {fixed}");
                match any.algorithm.is_direct() {
                    true => assert_eq!(fixed, any),
                    false => others += 1,
                }
            }
            // An algorithm that is set by name is used.
            assert_eq!(fixed.choice(8 << 20, Some(Ring)).algorithm, Ring);
        }
    }
    assert!(others > 0);
}

/// `docs/tuning.md` shows the built-in tables. With `FAST_ALLREDUCE_PLANS=write` this test writes them.
#[test]
fn the_documentation_shows_the_built_in_tables() {
    let cpus = CpuMake::ALL.map(|make| (format!("CPUs of {make}"), Table::for_cpu(make)));
    let gpus =
        GpuGeneration::ALL.map(|generation| (format!("{generation} GPUs"), Table::for_gpu(generation)));
    let mut shown = String::new();
    for (of, table) in cpus.into_iter().chain(gpus) {
        shown += &format!("\n{of}:\n\n| ranks | links | up to | what |\n|---|---|---|---|\n");
        for Row { ranks: (first, last), links, max_bytes, choice, .. } in table.rows.iter() {
            let links: Vec<_> = links.iter().map(LinkClass::name).collect();
            let links = if links.len() == LinkClass::ALL.len() { "any".into() } else { links.join(", ") };
            let ranks = if first == last { first.to_string() } else { format!("{first} to {last}") };
            shown += &format!("| {ranks} | {links} | {} | {choice} |\n", format_size(*max_bytes));
        }
    }
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/tuning.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once("<!-- plan: built-in -->\n").unwrap();
    let (_, after) = rest.split_once("<!-- plan: end -->").unwrap();
    let now = format!("{before}<!-- plan: built-in -->\n{shown}\n<!-- plan: end -->{after}");
    if std::env::var_os("FAST_ALLREDUCE_PLANS").is_some_and(|value| value == "write") {
        std::fs::write(&path, &now).unwrap();
    }
    assert!(
        now == std::fs::read_to_string(&path).unwrap(),
        "run with FAST_ALLREDUCE_PLANS=write to update {path:?}"
    );
}
