//! Tests sums with quantised transport on the host: every length, type and placement, each instruction set, and the
//! refused arguments.

use fast_allreduce::device::host::Isa;
use fast_allreduce::{Collective, Communicator, DType, Error, Host, QuantizedTransport, Result, Transport};

use crate::fused::HostCaller;
use crate::host::Build;
use crate::suite::launch::{threads, InThreads, Launch, LocalProcesses, Rank};
use crate::suite::quantized::{closest_to_the_bound, Placement, QuantizedSum};
use crate::suite::random::Random;
use crate::suite::scenario::Setup;

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

/// Complete and incomplete groups, fewer groups than ranks and blocks, and messages of several pieces.
const COUNTS: [usize; 13] = [0, 1, 31, 32, 33, 64, 95, 128, 257, 1000, 4097, 9999, 16384];

fn every_length(launch: &dyn Launch, name: &str, sizes: &[usize], isas: &[Isa], rounds: usize) {
    for &size in sizes {
        let random = Random::new(&format!("{name} in a world of {size}"));
        let kinds = TYPES.iter().flat_map(|&dtype| Transport::ALL.map(|transport| (dtype, transport)));
        let cases = kinds.flat_map(|kind| COUNTS.map(|count| (kind, count)));
        let messages = cases.enumerate().map(|(number, ((dtype, transport), count))| {
            let mut random = random.fork(number);
            (QuantizedSum::new(&mut random, dtype, transport, count, size), random)
        });
        let messages: Vec<_> = messages.collect();
        launch.run(size, &|rank: &Rank| {
            let mut made = 0;
            for workers in [1, 3] {
                let setup = Setup { workers, max_bytes: 16 << 10, ..Setup::default() };
                let isa = isas[rank.rank() % isas.len()];
                let mut caller = HostCaller::new(setup.build_with(isa, rank).unwrap(), 256 << 10);
                for (message, random) in &messages {
                    let mut random = random.fork(workers);
                    for _ in 0..rounds {
                        message.check(&mut caller, Placement::random(&mut random));
                        made += 1;
                    }
                }
                caller.communicator.barrier().unwrap();
            }
            assert_eq!(made, 2 * 13 * 2 * 3 * rounds);
        });
    }
}

#[test]
fn every_length_on_threads() {
    every_length(&InThreads, "quantized on threads", &[2, 3, 1, 5, 16], &[Isa::best()], 3);
}

#[test]
fn every_length_on_processes() {
    let processes = LocalProcesses::new("quantized::every_length_on_processes");
    every_length(&processes, "quantized on processes", &[2, 3], &[Isa::best()], 2);
}

/// Tests worlds with one instruction set, and worlds in which each rank uses another.
#[test]
fn every_length_on_every_instruction_set() {
    let supported = Vec::from_iter(Isa::supported());
    for isas in supported.iter().map(|&isa| vec![isa]).chain([supported.clone()]) {
        every_length(&InThreads, "quantized on instruction sets", &[3], &isas, 1);
    }
}

/// Alternates quantised calls, in which peers write to a rank's staging, with other calls, in which the rank itself
/// writes to it. The grids change.
#[test]
fn among_other_calls() {
    let random = Random::new("quantized::among_other_calls");
    threads(3, |rank| {
        let setup = Setup { workers: 3, max_bytes: 64 << 10, every_algorithm: true, ..Setup::default() };
        let mut caller = HostCaller::new(setup.build(&rank), 256 << 10);
        for number in 0..300 {
            let mut random = random.fork(number);
            let most = random.pick(&[40, 2000, 20_000]);
            let count = 1 + random.below(most);
            let (dtype, transport) = (random.pick(&TYPES), random.pick(&Transport::ALL));
            match random.below(3) {
                0 => {
                    let mut data = vec![1.0_f32; count];
                    caller
                        .communicator
                        .all_reduce_in_place(&mut data, fast_allreduce::ReduceOp::Sum)
                        .unwrap();
                    assert_eq!(data, vec![3.0; count]);
                }
                1 => {
                    let mut all = vec![0.0_f32; 3 * count];
                    let own = vec![rank.rank() as f32; count];
                    caller.communicator.all_gather(&own, &mut all).unwrap();
                    assert!((0..3).all(|r| all[r * count..][..count] == vec![r as f32; count]));
                }
                _ => {
                    let message = QuantizedSum::new(&mut random, dtype, transport, count, 3);
                    message.check(&mut caller, Placement::random(&mut random));
                }
            }
        }
    });
}

/// Tests that the typed calls return the results of the raw call. The other tests check those.
#[test]
fn typed_calls() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        // The scale of each rank's input is 1, so integers are exact. The scale of the sum is 2.
        let input: Vec<f32> = (0..128).map(|i| i as f32).collect();
        let mut output = vec![f32::NAN; 128];
        communicator.all_reduce_quantized(&input, &mut output, Transport::Int8, 0.01).unwrap();
        let last: Vec<f32> = (96..128).map(|i| 2.0 * i as f32).collect();
        assert_eq!(output[96..], last);
        let mut data = input.clone();
        communicator.all_reduce_quantized_in_place(&mut data, Transport::Int8, 0.01).unwrap();
        assert_eq!(data, output);
        communicator.all_reduce_quantized_in_place(&mut data, Transport::F8E4M3, 0.1).unwrap();
        assert!(data.iter().zip(&input).all(|(is, x)| (is - 4.0 * x).abs() <= 0.074 * 512.0));
        communicator.all_reduce_quantized::<f32>(&[], &mut [], Transport::Int8, 0.1).unwrap();
    });
}

#[test]
fn the_bound_is_close() {
    for dtype in TYPES {
        for transport in Transport::ALL {
            let part = closest_to_the_bound(transport, dtype);
            println!("{transport} of {dtype}: {part:.3} of what is guaranteed");
            assert!((0.75..=1.0).contains(&part), "{transport} of {dtype}: {part}");
        }
    }
}

/// Tests arguments that are refused before the launch; the communicator still works.
#[test]
fn bad_arguments_are_refused() {
    fn setting(result: Result<()>) -> (&'static str, String) {
        match result {
            Err(Error::InvalidSetting { name, value, .. }) => (name, value),
            other => panic!("{other:?}"),
        }
    }
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let mut output = [0.0_f32; 4];
        let mut call = |transport, tolerance| {
            communicator.all_reduce_quantized(&[1.0; 4], &mut output, transport, tolerance)
        };
        for tolerance in [0.007, 0.0, -0.1, f32::NAN] {
            let (name, value) = setting(call(Transport::Int8, tolerance));
            assert!(name == "tolerance" && value.contains("int8 guarantees 0.0079"), "{name}: {value}");
        }
        assert!(setting(call(Transport::F8E4M3, 0.05)).1.contains("f8e4m3 guarantees 0.073"));
        let wide = communicator.all_reduce_quantized(&[1.0_f64], &mut [0.0], Transport::Int8, 0.1);
        assert_eq!(setting(wide), ("element type", "f64".into()));
        let integers = communicator.all_reduce_quantized_in_place(&mut [1_i8], Transport::Int8, 0.1);
        assert_eq!(setting(integers), ("element type", "i8".into()));
        let short = communicator.all_reduce_quantized(&[1.0_f32; 3], &mut [0.0; 4], Transport::Int8, 0.1);
        assert!(matches!(short, Err(Error::LengthMismatch { input: 3, output: 4 })), "{short:?}");
        let collective =
            Collective::AllReduceQuantized(QuantizedTransport { transport: Transport::Int8, tolerance: 0.1 });
        let mut data = [127.0_f32; 8];
        let (input, output) = (data.as_ptr(), data[1..].as_mut_ptr());
        // SAFETY: the call is refused.
        let overlap =
            unsafe { communicator.collective_raw(collective, input.cast(), output.cast(), 4, DType::F32) };
        assert!(matches!(overlap, Err(Error::Overlap { .. })), "{overlap:?}");
        communicator.all_reduce_quantized_in_place(&mut data, Transport::Int8, 0.1).unwrap();
        assert_eq!(data, [254.0; 8]);
    });
}

/// Tests ranks whose calls differ in one argument: all ranks get an error.
#[test]
fn ranks_that_differ() {
    type Differ = fn(usize) -> (Transport, f32);
    let differences: [Differ; 2] =
        [|rank| (Transport::ALL[rank], 0.1), |rank| (Transport::Int8, [0.1, 0.2][rank])];
    for differ in differences {
        threads(2, |rank| {
            let communicator = Setup::default().build(&rank);
            let (transport, tolerance) = differ(rank.rank());
            let error = communicator
                .all_reduce_quantized_in_place(&mut [1.0_f32; 8], transport, tolerance)
                .unwrap_err();
            assert!(matches!(error, Error::Disagreement { .. }), "{error:?}");
            let text = error.to_string();
            let description = "all_reduce_quantized of 8 f32 (sum, int8 in groups of 32, tolerance 0.1)";
            assert!(text.contains(description), "{text}");
        });
    }
}

/// Tests ranks whose calls differ in two arguments, without checked calls. The arguments are adjacent in the compared
/// hash, and such differences once cancelled out.
#[test]
fn ranks_that_differ_in_two() {
    threads(2, |rank| {
        let builder = Communicator::builder().check(false).timeout(std::time::Duration::from_secs(10));
        let number = rank.rank();
        let communicator = builder.build(Host::new(), rank).unwrap();
        let tolerance = f32::from_bits(0.5_f32.to_bits() ^ number as u32);
        let mut data = [100.0_f32; 32];
        let error = communicator
            .all_reduce_quantized_in_place(&mut data, Transport::ALL[number], tolerance)
            .unwrap_err();
        assert!(matches!(error, Error::Disagreement { .. }), "{error:?}");
    });
}

/// Tests that a rank that does not call is named, and that the communicator is poisoned, as in other collectives.
#[test]
fn a_rank_that_does_not_come() {
    threads(3, |rank| {
        let timeout = std::time::Duration::from_millis(300);
        let communicator = Setup { timeout, ..Setup::default() }.build(&rank);
        let mut data = [1.0_f32; 640];
        let mut call = || communicator.all_reduce_quantized_in_place(&mut data, Transport::Int8, 0.1);
        call().unwrap();
        if rank.rank() == 1 {
            // The rank is not gone, but later than the others' timeout.
            std::thread::sleep(3 * timeout);
            call().unwrap_err();
            return;
        }
        let error = call().unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
        assert_eq!(call().unwrap_err(), error);
    });
}
