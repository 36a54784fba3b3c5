//! Tests RMSNorm of rows whose elements are divided among the ranks on the host: every shape, each instruction set, and
//! the refused arguments.

use std::time::Duration;

use fast_allreduce::device::host::Isa;
use fast_allreduce::{Communicator, DType, Error, Host, RawShardedRows, Result, ShardedColumns};

use crate::fused::HostCaller;
use crate::host::Build;
use crate::suite::launch::{threads, InThreads, Launch, LocalProcesses, Rank};
use crate::suite::random::Random;
use crate::suite::scenario::Setup;
use crate::suite::sharded::ShardedRows;

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

/// Numbers of rows and of elements that a rank has of a row. The most rows are several launches.
const SHAPES: [(usize, usize); 9] =
    [(5, 1), (3, 7), (400, 16), (4, 33), (1, 513), (7, 512), (2, 768), (9, 1536), (0, 64)];

pub fn every_shape(launch: &dyn Launch, name: &str, sizes: &[usize], isas: &[Isa], rounds: usize) {
    for size in launch.sizes(sizes) {
        let random = Random::new(&format!("{name} in a world of {size}"));
        let shapes = SHAPES.iter().flat_map(|&shape| TYPES.map(|dtype| (shape, dtype)));
        let rows = shapes.enumerate().map(|(number, (shape, dtype))| {
            let mut random = random.fork(number);
            (ShardedRows::new(&mut random, dtype, shape, size), random)
        });
        let rows: Vec<_> = rows.collect();
        launch.run(size, &|rank: &Rank| {
            for workers in [1, 3] {
                let setup = Setup { workers, max_bytes: 16 << 10, ..Setup::default() };
                let isa = isas[rank.rank() % isas.len()];
                let mut caller = HostCaller::new(setup.build_with(isa, rank).unwrap(), 256 << 10);
                for (rows, random) in &rows {
                    let mut random = random.fork(16 * workers + rank.rank());
                    for _ in 0..rounds {
                        rows.check(&mut caller, &mut random);
                    }
                }
                caller.communicator.barrier().unwrap();
            }
        });
    }
}

#[test]
fn every_shape_on_threads() {
    every_shape(&InThreads, "sharded on threads", &[2, 3, 1, 5, 8, 16], &[Isa::best()], 2);
}

#[test]
fn every_shape_on_processes() {
    let processes = LocalProcesses::new("sharded::every_shape_on_processes");
    every_shape(&processes, "sharded on processes", &[2, 3], &[Isa::best()], 1);
}

/// Tests worlds with one instruction set, and worlds in which each rank uses another.
#[test]
fn every_shape_on_every_instruction_set() {
    let supported = Vec::from_iter(Isa::supported());
    for isas in supported.iter().map(|&isa| vec![isa]).chain([supported.clone()]) {
        every_shape(&InThreads, "sharded on instruction sets", &[3], &isas, 1);
    }
}

/// Tests that calls with packets for rows, and other pushes, may follow one another.
#[test]
fn among_other_calls() {
    threads(3, |rank| {
        let communicator = Setup { max_bytes: 16 << 10, ..Setup::default() }.build(&rank);
        for turn in 0..300 {
            // A power of two, whose scale is exact.
            let mut data = vec![(1 << (turn % 9)) as f32; 2 * (1 + turn % 40)];
            let columns = ShardedColumns::on_host(0..2, 6).epsilon(0.0);
            communicator.sharded_rms_norm_in_place(&mut data, 2, &[columns]).unwrap();
            assert!(data.iter().all(|&x| x == 1.0), "{turn}: {data:?}");
            communicator.all_reduce_in_place(&mut data, fast_allreduce::ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|&x| x == 3.0), "{turn}: {data:?}");
        }
    });
}

/// Tests that the typed calls return the results of the raw call. The other tests check those.
#[test]
fn typed_calls() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        // Rows of two columns on rank 0, and of one on rank 1: (2, 4, 4) and (0, 0, 3).
        let (input, weight) = match rank.rank() {
            0 => (vec![2.0_f32, 4.0, 9.0, 0.0, 0.0, 9.0], vec![1.0, 0.5]),
            _ => (vec![4.0_f32, 9.0, 9.0, 3.0, 9.0, 9.0], vec![2.0]),
        };
        let columns = || ShardedColumns::on_host(0..2 - rank.rank(), 3).weight(&weight).epsilon(0.0);
        let mut output = [f32::NAN; 6];
        communicator.sharded_rms_norm(&input, &mut output, 3, &[columns()]).unwrap();
        let (first, second) = (1.0 / 12.0_f32.sqrt(), 1.0 / 3.0_f32.sqrt());
        match rank.rank() {
            0 => assert_eq!(output[..2], [2.0 * first, 4.0 * first * 0.5]),
            _ => assert_eq!((output[0], output[3]), (4.0 * first * 2.0, 3.0 * second * 2.0)),
        }
        // Other columns stay as they are.
        assert!(output[2].is_nan() && output[5].is_nan());
        let mut data = input.clone();
        communicator.sharded_rms_norm_in_place(&mut data, 3, &[columns().unit_offset()]).unwrap();
        let factors = if rank.rank() == 0 { [2.0 * 2.0, 4.0 * 1.5] } else { [4.0 * 3.0, 9.0 / first] };
        let same = |(is, expected): (&f32, f32)| (is - expected * first).abs() <= is.abs() * 1e-6;
        assert!(data.iter().zip(factors).all(same), "{data:?}");
        communicator.sharded_rms_norm_in_place(&mut [] as &mut [f32], 3, &[columns()]).unwrap();
    });
}

/// Tests zeros, an infinity and a NaN, which reach all ranks.
#[test]
fn special_values() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let is_first = rank.rank() == 0;
        let mut data = [0.0_f32, 1.0, 1.0, -1.0];
        if is_first {
            (data[1], data[2]) = (f32::INFINITY, f32::NAN);
        }
        let columns = ShardedColumns::on_host(0..1, 2).epsilon(0.0);
        communicator.sharded_rms_norm_in_place(&mut data, 1, &[columns]).unwrap();
        // 0 times an infinity, and an infinity times 0.
        assert!(data[0].is_nan() && data[2].is_nan() && data[1].is_nan() == is_first, "{data:?}");
        assert!(is_first || data[1] == 0.0, "{data:?}");
    });
}

fn setting(result: Result<()>) -> (&'static str, String) {
    match result {
        Err(Error::InvalidSetting { name, value, .. }) => (name, value),
        other => panic!("{other:?}"),
    }
}

#[test]
fn refused_arguments() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let (mut data, weight) = ([1.0_f32; 12], [1.0_f32; 3]);
        let mut call = |width, columns, total, epsilon| {
            let columns = ShardedColumns::on_host(columns, total).epsilon(epsilon);
            setting(communicator.sharded_rms_norm_in_place(&mut data, width, &[columns]))
        };
        assert_eq!(call(5, 0..4, 8, 0.0), ("width", "5 in 12 elements".into()));
        assert_eq!(call(0, 0..0, 8, 0.0).0, "width");
        assert_eq!(call(4, 2..5, 8, 0.0), ("columns", "2..5 of 4".into()));
        assert_eq!(call(4, 0..4, 3, 0.0), ("total", "3, where this rank has 4".into()));
        assert_eq!(call(4, 0..0, 0, 0.0).0, "total");
        assert_eq!(call(4, 0..4, (1 << 20) + 1, 0.0).0, "total");
        for epsilon in [-1e-5, f32::NAN, f32::INFINITY] {
            assert_eq!(call(4, 0..4, 8, epsilon).0, "epsilon");
        }
        let one = |columns| ShardedColumns::on_host(columns, 8);
        let mut call = |parts: &[_]| communicator.sharded_rms_norm_in_place(&mut data, 4, parts);
        assert_eq!(setting(call(&[one(0..4).weight(&weight)])).0, "weight");
        assert_eq!(setting(call(&[])).0, "parts");
        assert_eq!(setting(call(&[one(0..1), one(1..2), one(2..3)])), ("parts", "3".into()));
        let shared = call(&[one(0..3), one(2..4)]);
        assert!(matches!(shared, Err(Error::InvalidPointer { which: "second input", .. })), "{shared:?}");
        let columns = [ShardedColumns::on_host(0..1, 2)];
        let integers = communicator.sharded_rms_norm_in_place(&mut [1_i32], 1, &columns_of(0..1));
        assert_eq!(setting(integers).0, "element type");
        let lengths = communicator.sharded_rms_norm(&[1.0_f32; 2], &mut [0.0; 3], 1, &columns);
        assert_eq!(lengths, Err(Error::LengthMismatch { input: 2, output: 3 }));
        memory_that_overlaps(&communicator);
        assert_eq!(data, [1.0; 12]);
        communicator.sharded_rms_norm_in_place(&mut data, 4, &[one(0..1), one(1..4)]).unwrap();
    });
}

fn columns_of(columns: std::ops::Range<usize>) -> [ShardedColumns<'static, Host, i32>; 1] {
    [ShardedColumns::on_host(columns, 2)]
}

fn memory_that_overlaps(communicator: &Communicator<Host>) {
    let mut memory = [1.0_f32; 64];
    let base = memory.as_mut_ptr() as u64;
    let at = |element: u64| base + 4 * element;
    let part = |input, output, stride| RawShardedRows {
        output: at(output),
        columns: 3,
        total: 8,
        ..RawShardedRows::in_place(at(input), stride)
    };
    let weighted = |element| RawShardedRows { weight: at(element), ..part(0, 32, 8) };
    let wide = RawShardedRows { output_stride: 7, ..part(0, 17, 8) };
    // SAFETY: an accepted call uses only addresses within `memory`.
    let call = |parts: &[RawShardedRows]| unsafe { communicator.sharded_rms_norm_raw(parts, 3, DType::F32) };
    let problems = [
        (call(&[part(0, 2, 8)]), "output"),
        (call(&[part(0, 6, 8)]), "output"),
        (call(&[wide]), "output"),
        (call(&[weighted(34)]), "weight"),
        (call(&[weighted(30)]), "weight"),
        (call(&[part(0, 0, 8), part(2, 2, 8)]), "second input"),
        (call(&[part(0, 32, 8), part(3, 34, 8)]), "second output"),
        (call(&[part(0, 32, 8), part(8, 2, 8)]), "second output"),
        (call(&[RawShardedRows { input: 0, ..part(0, 32, 8) }]), "input"),
        (call(&[RawShardedRows { output: at(32) + 2, ..part(0, 32, 8) }]), "output"),
        (call(&[RawShardedRows { weight: at(60) + 1, ..part(0, 32, 8) }]), "weight"),
    ];
    for (number, (result, name)) in problems.into_iter().enumerate() {
        assert!(
            matches!(result, Err(Error::InvalidPointer { which, .. }) if which == name),
            "{number}: {result:?}: {name}"
        );
    }
    assert_eq!(setting(call(&[part(0, 32, 2)])), ("row stride", "2 for 3 columns".into()));
    assert_eq!(memory, [1.0; 64]);
    call(&[part(0, 3, 8), part(32, 32, 8)]).unwrap();
    memory.fill(0.0);
}

/// Tests ranks whose calls differ in one argument: all ranks get an error that has both calls.
#[test]
fn ranks_that_differ() {
    // Rows, parts, total, epsilon and offset, which rank 1 changes.
    type Call = (usize, usize, usize, f32, bool);
    let same: Call = (2, 2, 8, 1e-6, false);
    let others: [(Call, &str); 5] = [
        ((1, 2, 8, 1e-6, false), "sharded_rms_norm of 1 rows of f32"),
        ((2, 1, 8, 1e-6, false), "rows of 8, "),
        ((2, 2, 9, 1e-6, false), "rows of 9 and 9"),
        ((2, 2, 8, 1e-5, false), "rows of 8 and 8"),
        ((2, 2, 8, 1e-6, true), "rows of 8 and 8"),
    ];
    for (other, fact) in others {
        for check in [true, false] {
            threads(2, |rank| {
                let builder = Communicator::builder().check(check).timeout(Duration::from_secs(20));
                let communicator = builder.build(Host::new(), rank.clone()).unwrap();
                let (rows, parts, total, epsilon, offset) = if rank.rank() == 1 { other } else { same };
                let mut data = [3.0_f32; 8];
                let part = |number: usize| {
                    let columns = ShardedColumns::on_host(2 * number..2 * number + 2, total).epsilon(epsilon);
                    if offset {
                        columns.unit_offset()
                    } else {
                        columns
                    }
                };
                let error = communicator
                    .sharded_rms_norm_in_place(&mut data[..4 * rows], 4, &[part(0), part(1)][..parts])
                    .unwrap_err();
                assert!(matches!(error, Error::Disagreement { .. }), "{error:?}");
                let text = error.to_string();
                assert!(text.contains(fact) && text.contains("of 2 rows of f32"), "{text}");
                assert_eq!(data, [3.0; 8]);
            });
        }
    }
}

/// Tests that a rank that does not call is named, and that the communicator is poisoned, as in other collectives.
#[test]
fn a_rank_that_does_not_come() {
    threads(3, |rank| {
        let timeout = Duration::from_millis(300);
        let communicator = Setup { timeout, ..Setup::default() }.build(&rank);
        let call = || {
            let mut data = [1.0_f32; 64];
            let columns = ShardedColumns::on_host(0..8, 24).epsilon(0.0);
            communicator.sharded_rms_norm_in_place(&mut data, 8, &[columns]).map(|()| data)
        };
        assert_eq!(call(), Ok([1.0; 64]));
        if rank.rank() == 1 {
            // The rank is not gone, but later than the others' timeout. The sums that it needs may already be there.
            std::thread::sleep(3 * timeout);
            assert!(call().is_ok_and(|data| data == [1.0; 64]) || call().is_err());
            return;
        }
        let error = call().unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
        assert_eq!(call().unwrap_err(), error);
    });
}
