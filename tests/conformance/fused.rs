//! Tests sums with a residual, a norm and quantised rows on the host: every shape and algorithm, each instruction set,
//! and the refused arguments.

use fast_allreduce::device::host::Isa;
use fast_allreduce::{
    Algorithm, Buffer, Collective, Communicator, DType, Element, Error, Fused, Host, Norm, RawFused, Result,
    Scaling,
};

use crate::host::{Build, Private};
use crate::suite::launch::{threads, InThreads, Launch, LocalProcesses, Rank};
use crate::suite::quantized_rows::Becomes;
use crate::suite::random::Random;
use crate::suite::rows::{Caller, Placement, Rows};
use crate::suite::scenario::Setup;

/// A rank with memory for calls.
pub struct HostCaller {
    pub communicator: Communicator<Host>,
    private: Private,
    registered: Buffer<u8>,
}

impl HostCaller {
    pub fn new(communicator: Communicator<Host>, bytes: usize) -> Self {
        let registered = communicator.alloc(bytes).unwrap();
        Self { communicator, private: Private::new(bytes), registered }
    }
}

impl Caller for HostCaller {
    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    fn room(&mut self, registered: bool, bytes: usize) -> u64 {
        assert!(bytes <= self.registered.len(), "{bytes} bytes");
        match registered {
            true => self.registered.as_mut_ptr() as u64,
            false => self.private.base() as u64,
        }
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        // SAFETY: within the memory that the test requested, which nothing else uses.
        unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes.len()) }.copy_from_slice(bytes);
    }

    fn read(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        // SAFETY: as in `write`.
        unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }.to_vec()
    }

    fn call(
        &mut self,
        collective: Collective<'_>,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        let (input, output) = (input as *const _, output as *mut _);
        // SAFETY: as in `write`; the addresses are aligned to the element.
        unsafe { self.communicator.collective_raw(collective, input, output, count, dtype) }
    }
}

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

/// Numbers of rows and of elements in a row: whole packs and others, fewer rows than ranks and blocks, messages of
/// several pieces.
const SHAPES: [(usize, usize); 10] =
    [(5, 1), (3, 7), (140, 32), (4, 33), (1, 513), (7, 512), (2, 1000), (13, 256), (3, 2048), (0, 64)];

pub fn every_shape(launch: &dyn Launch, name: &str, sizes: &[usize], isas: &[Isa], rounds: usize) {
    for size in launch.sizes(sizes) {
        let random = Random::new(&format!("{name} in a world of {size}"));
        let shapes = SHAPES.iter().flat_map(|&shape| TYPES.map(|dtype| (shape, dtype)));
        let rows = shapes.enumerate().map(|(number, (shape, dtype))| {
            let mut random = random.fork(number);
            (Rows::new(&mut random, dtype, shape, size), random)
        });
        let rows: Vec<_> = rows.collect();
        launch.run(size, &|rank: &Rank| {
            let mut made = 0;
            for (number, algorithm) in Algorithm::ALL.map(Some).into_iter().chain([None]).enumerate() {
                for workers in [1, 3] {
                    let setup = Setup { algorithm, workers, max_bytes: 16 << 10, ..Setup::default() };
                    let isa = isas[rank.rank() % isas.len()];
                    let mut caller = HostCaller::new(setup.build_with(isa, rank).unwrap(), 320 << 10);
                    for (rows, random) in &rows {
                        let mut random = random.fork(2 * number + workers);
                        for _ in 0..rounds {
                            let placement = Placement::random(&mut random);
                            rows.check(&mut caller, placement.of_rank(&random, rank.rank()));
                            made += 1;
                        }
                    }
                    caller.communicator.barrier().unwrap();
                }
            }
            assert_eq!(made, 7 * 2 * 10 * 3 * rounds);
        });
    }
}

#[test]
fn every_shape_on_threads() {
    every_shape(&InThreads, "fused on threads", &[2, 3, 1, 5], &[Isa::best()], 3);
}

#[test]
fn every_shape_on_processes() {
    let processes = LocalProcesses::new("fused::every_shape_on_processes");
    every_shape(&processes, "fused on processes", &[2, 3], &[Isa::best()], 1);
}

/// Tests worlds with one instruction set, and worlds in which each rank uses another.
#[test]
fn every_shape_on_every_instruction_set() {
    let supported = Vec::from_iter(Isa::supported());
    for isas in supported.iter().map(|&isa| vec![isa]).chain([supported.clone()]) {
        every_shape(&InThreads, "fused on instruction sets", &[3], &isas, 1);
    }
}

/// Tests rows of the maximum length, and rows as long as the region allows.
#[test]
fn the_longest_rows() {
    let random = Random::new("fused::the_longest_rows");
    let rows = TYPES.map(|dtype| Rows::new(&mut random.fork(dtype as usize), dtype, (2, 65536), 2));
    threads(2, |rank| {
        for algorithm in Algorithm::DIRECT {
            let setup = Setup { algorithm: Some(algorithm), max_bytes: 260 << 10, ..Setup::default() };
            let mut caller = HostCaller::new(setup.build(&rank), 6 << 20);
            let mut random = random.fork(10 + algorithm as usize);
            for rows in &rows {
                rows.check(&mut caller, Placement::random(&mut random));
            }
        }
    });
}

/// Describes an RMSNorm of rows of `hidden` elements.
pub fn rms<'a, T: Element>(residual: &'a mut [T], hidden: usize, epsilon: f32) -> Fused<'a, Host, T> {
    Fused::on_host(residual).norm(Norm::Rms { epsilon, unit_offset: false }, hidden)
}

/// Tests that the typed calls return the results of the raw call. The other tests check those.
#[test]
fn typed_calls() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let input = [1.0_f32, -2.0, 3.0, 0.5];
        let weight = [1.0_f32, 0.0];
        let mut residual = [2.0_f32, 8.0, -6.0, 3.0];
        let mut output = [f32::NAN; 4];
        let norm = Norm::Rms { epsilon: 0.0, unit_offset: true };
        let fused = Fused::on_host(&mut residual).norm(norm, 2).weight(&weight).rows(&mut output);
        communicator.all_reduce_fused(&input, fused).unwrap();
        assert_eq!(residual, [4.0, 4.0, 0.0, 4.0]);
        let scale = 1.0 / 8.0_f32.sqrt();
        assert_eq!(output, [2.0, 1.0, 0.0, 4.0 * scale]);
        let mut data = input;
        communicator.all_reduce_fused_in_place(&mut data, rms(&mut residual, 4, 1.0)).unwrap();
        assert_eq!(residual, [6.0, 0.0, 6.0, 5.0]);
        let scale = 1.0 / (97.0_f32 / 4.0 + 1.0).sqrt();
        assert_eq!(data, residual.map(|x| x * scale));
        communicator.all_reduce_fused(&input, Fused::on_host(&mut residual)).unwrap();
        assert_eq!(residual, [8.0, -4.0, 12.0, 6.0]);
        // With the plain sum, the residual belongs to each rank alone.
        let (mut sum, mut own) = ([f32::NAN; 4], [rank.rank() as f32; 4]);
        let fused = rms(&mut own, 1, 0.0).sum(&mut sum).rows(&mut output);
        communicator.all_reduce_fused(&input, fused).unwrap();
        assert_eq!(sum, input.map(|x| 2.0 * x));
        assert_eq!(own, sum.map(|x| x + rank.rank() as f32));
        assert_eq!(output, own.map(f32::signum));
        communicator.all_reduce_fused::<f32, f32>(&[], rms(&mut [], 7, 0.0).rows(&mut [])).unwrap();
    });
}

/// Tests a weight and a bias, and rows of equal elements, whose variance is zero.
#[test]
fn layer_norms() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let norm = Norm::Layer { epsilon: 0.0, unit_offset: false };
        let layer = Norm::Layer { epsilon: 1e-5, unit_offset: false };
        let (input, weight, bias) = ([0.5_f32, 2.5, -1.0, 1.0], [2.0_f32, 1.0], [0.5_f32, -1.0]);
        let (mut residual, mut rows) = ([0.0_f32; 4], [f32::NAN; 4]);
        let fused = Fused::on_host(&mut residual).norm(norm, 2).weight(&weight).bias(&bias).rows(&mut rows);
        communicator.all_reduce_fused(&input, fused).unwrap();
        assert_eq!((residual, rows), ([1.0, 5.0, -2.0, 2.0], [-1.5, 0.0, -1.5, 0.0]));
        // LayerNorm1P: the factors are 3 and 2.
        let norm = Norm::Layer { epsilon: 0.0, unit_offset: true };
        let mut shifted = [0.0_f32; 4];
        let fused = Fused::on_host(&mut shifted).norm(norm, 2).weight(&weight).bias(&bias).rows(&mut rows);
        communicator.all_reduce_fused(&input, fused).unwrap();
        assert_eq!(rows, [-2.5, 1.0, -2.5, 1.0]);
        let mut data = [1.0_f32, 1.0, 0.0, 0.0];
        let fused = Fused::on_host(&mut residual)
            .norm(Norm::Layer { epsilon: 1.0, unit_offset: false }, 4)
            .bias(&input);
        communicator.all_reduce_fused_in_place(&mut data, fused).unwrap();
        assert_eq!(residual, [3.0, 7.0, -2.0, 2.0]);
        let scale = 1.0 / (41.0_f32 / 4.0 + 1.0).sqrt();
        let scaled = [0.5_f32, 4.5, -4.5, -0.5].map(|difference| difference * scale);
        assert_eq!(data, [0, 1, 2, 3].map(|i| scaled[i] + input[i]));
        let (mut even, mut rows, bias) = ([3.0_f32; 4], [f32::NAN; 4], [1.0_f32, 2.0, 3.0, 4.0]);
        let fused = Fused::on_host(&mut even).norm(layer, 4).bias(&bias);
        communicator.all_reduce_fused(&[0.0; 4], fused.rows(&mut rows)).unwrap();
        assert_eq!(rows, bias);
        // Both the quantised numbers and the rows in the element type are requested.
        let (mut numbers, mut scales, mut even) = ([0_i8; 4], [0.0_f32], [0.0_f32; 4]);
        let bias = [1.0_f32, 0.0, -1.0, 0.0];
        let fused = Fused::on_host(&mut even).norm(layer, 4).bias(&bias);
        let fused = fused.rows(&mut rows).quantized(Scaling::PerRow, &mut numbers, &mut scales);
        communicator.all_reduce_fused(&[0.0; 4], fused).unwrap();
        assert_eq!((rows, numbers, scales), (bias, [127, 0, -127, 0], [1.0 / 127.0]));
    });
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
        let communicator = Setup { max_bytes: 8 << 10, ..Setup::default() }.build(&rank);
        let mut residual = [0.0_f32; 12];
        let mut output = [0.0_f32; 12];
        let mut call = |hidden, epsilon, weight: Option<&[f32]>| {
            let mut fused = rms(&mut residual, hidden, epsilon).rows(&mut output);
            if let Some(weight) = weight {
                fused = fused.weight(weight);
            }
            communicator.all_reduce_fused(&[1.0; 12], fused)
        };
        assert_eq!(setting(call(5, 0.0, None)), ("hidden", "5 in a message of 12".into()));
        assert_eq!(setting(call(0, 0.0, None)).0, "hidden");
        assert_eq!(setting(call(65537, 0.0, None)).0, "hidden");
        for epsilon in [-1e-5, f32::NAN, f32::INFINITY] {
            assert_eq!(setting(call(4, epsilon, None)).0, "epsilon");
        }
        assert_eq!(setting(call(4, 0.0, Some(&[1.0; 3]))).0, "weight");
        let (input, mut four, mut rows) = ([1.0_f32; 4], [0.0; 4], [0.0; 4]);
        let biased = rms(&mut four, 4, 0.0).bias(&input).rows(&mut rows);
        assert_eq!(setting(communicator.all_reduce_fused(&input, biased)).0, "bias");
        assert_eq!(setting(communicator.all_reduce_fused(&input, rms(&mut four, 4, 0.0))).0, "rows");
        let no_norm = Fused::on_host(&mut four).rows(&mut rows);
        assert_eq!(setting(communicator.all_reduce_fused(&input, no_norm)).0, "norm");
        let (residual, weight) = (four.as_mut_ptr() as u64, input.as_ptr() as u64);
        let forgotten = RawFused { residual, residual_out: residual, weight, ..RawFused::default() };
        let pointer = input.as_ptr().cast();
        // SAFETY: a refused call reads and writes nothing.
        let refused = unsafe { communicator.all_reduce_fused_raw(pointer, 4, DType::F32, &forgotten) };
        assert_eq!(setting(refused).0, "norm");
        let elsewhere = rms(&mut four, 4, 0.0).rows(&mut rows);
        let mut data = input;
        assert_eq!(setting(communicator.all_reduce_fused_in_place(&mut data, elsewhere)).0, "rows");
        assert!(matches!(
            communicator.all_reduce_fused(&[1.0_f32; 3], Fused::on_host(&mut [0.0; 4])),
            Err(Error::LengthMismatch { input: 3, output: 4 })
        ));
        let add = |result| setting(result).0;
        assert_eq!(add(communicator.all_reduce_fused(&[1_i32], Fused::on_host(&mut [2]))), "element type");
        assert_eq!(add(communicator.all_reduce_fused(&[1_f64], Fused::on_host(&mut [2.0]))), "element type");
        let long = vec![0.0_f32; 4096];
        let (mut residual, mut output) = (long.clone(), long.clone());
        let too_long = communicator.all_reduce_fused(&long, rms(&mut residual, 4096, 0.0).rows(&mut output));
        let (name, value) = setting(too_long);
        assert!(name == "hidden" && value.ends_with("rows of at most 2032"), "{value}");
        memory_that_overlaps(&communicator);
        let mut residual = [1.0_f32; 4];
        communicator.all_reduce_fused(&[1.0; 4], Fused::on_host(&mut residual)).unwrap();
        assert_eq!(residual, [3.0; 4]);
    });
}

/// Describes an RMSNorm of rows of `hidden` elements, without memory.
fn rows_of(hidden: usize) -> RawFused {
    RawFused { norm: Norm::Rms { epsilon: 0.0, unit_offset: false }, hidden, ..RawFused::default() }
}

fn memory_that_overlaps(communicator: &Communicator<Host>) {
    let mut memory = [0.0_f32; 40];
    let at = |element: usize| memory.as_ptr() as u64 + 4 * element as u64;
    let run = |fused| {
        // SAFETY: an accepted call uses only addresses within `memory`.
        unsafe { communicator.all_reduce_fused_raw(at(0) as *const _, 8, DType::F32, &fused) }
    };
    let call_to = |residual, residual_out, sum, rows, weight| {
        run(RawFused { residual, residual_out, sum, rows, weight, ..rows_of(4) })
    };
    let call = |residual, residual_out, rows, weight| call_to(residual, residual_out, 0, rows, weight);
    let problems = [
        (call(at(17), at(16), at(8), at(24)), "residual_out"),
        (call(at(0), at(16), at(8), at(24)), "residual"),
        (call(at(16), at(16), at(16), at(24)), "rows"),
        (call(at(16), at(16), at(4), at(24)), "rows"),
        (call(at(16), at(16), at(8), at(15)), "weight"),
        (call(at(16), at(16), at(8), at(18)), "weight"),
        (call(at(16), at(16), at(8) + 2, at(24)), "rows"),
        (call_to(at(16), at(16), at(15), at(8), at(28)), "sum"),
        (call_to(at(16), at(16), at(24), at(24), at(36)), "sum"),
        (call_to(at(16), at(20), at(28), at(8), at(36)), "residual_out"),
        (call_to(at(16), at(16), at(24), at(12), at(36)), "rows"),
        (call_to(at(16), at(16), at(24), at(8), at(28)), "weight"),
        (call_to(at(16), at(5), at(24), at(8), at(32)), "residual_out"),
    ];
    for (result, name) in problems {
        assert!(
            matches!(result, Err(Error::InvalidPointer { which, .. }) if which == name),
            "{result:?}: {name}"
        );
    }
    call(at(16), at(16), at(0), at(24)).unwrap();
    call_to(at(16), at(16), at(24), at(8), at(32)).unwrap();
    let quantized = |numbers, scales| {
        let quantized = Becomes(DType::I8, Scaling::PerRow).at(numbers, scales, 0);
        run(RawFused { residual: at(16), residual_out: at(16), quantized: Some(quantized), ..rows_of(4) })
    };
    let problems = [
        (quantized(at(0), at(30)), "numbers"),
        (quantized(at(24), at(25)), "scales"),
        (quantized(at(24), at(23)), "scales"),
        (quantized(at(24), at(7)), "scales"),
        (quantized(at(24), 0), "scales"),
        (quantized(at(24), at(30) + 2), "scales"),
    ];
    for (result, name) in problems {
        assert!(
            matches!(result, Err(Error::InvalidPointer { which, .. }) if which == name),
            "{result:?}: {name}"
        );
    }
    quantized(at(24) + 1, at(30)).unwrap();
    nvfp4_that_overlaps(communicator);
    memory.fill(0.0);
}

fn nvfp4_that_overlaps(communicator: &Communicator<Host>) {
    let mut memory = [1.0_f32; 64];
    let at = |element: usize| memory.as_ptr() as u64 + 4 * element as u64;
    let call = |numbers, scales, global| {
        let quantized = Some(Becomes(DType::U8, Scaling::Nvfp4).at(numbers, scales, global));
        let fused = RawFused { residual: at(16), residual_out: at(16), quantized, ..rows_of(16) };
        // SAFETY: an accepted call uses only addresses within `memory`.
        unsafe { communicator.all_reduce_fused_raw(at(0) as *const _, 16, DType::F32, &fused) }
    };
    let problems = [
        (call(at(15), at(40), at(50)), "numbers"),
        (call(at(32), at(33), at(50)), "scales"),
        (call(at(32), 0, at(50)), "scales"),
        (call(at(32), at(40), 0), "global scale"),
        (call(at(32), at(40), at(50) + 2), "global scale"),
        (call(at(32), at(40), at(40)), "global scale"),
        (call(at(32), at(40), at(20)), "global scale"),
    ];
    for (result, name) in problems {
        assert!(
            matches!(result, Err(Error::InvalidPointer { which, .. }) if which == name),
            "{result:?}: {name}"
        );
    }
    call(at(34) + 1, at(36) + 1, at(50)).unwrap();
    memory.fill(0.0);
}

/// Tests ranks whose calls differ in one argument: all ranks get an error.
#[test]
fn ranks_that_differ() {
    type Differ = fn(usize) -> (usize, f32, bool, bool);
    let differences: [Differ; 4] = [
        |rank| (4 << rank, 0.0, true, false),
        |rank| (4, rank as f32, true, false),
        |rank| (4, 0.0, rank == 0, false),
        |rank| (4, 0.0, true, rank == 0),
    ];
    for (number, differ) in differences.into_iter().enumerate() {
        threads(2, |rank| {
            let communicator = Setup::default().build(&rank);
            let (hidden, epsilon, weighted, unit_offset) = differ(rank.rank());
            let weight = vec![1.0_f32; hidden];
            let (mut residual, mut output) = ([1.0; 8], [0.0; 8]);
            let norm = Norm::Rms { epsilon, unit_offset };
            let mut fused = Fused::on_host(&mut residual).norm(norm, hidden).rows(&mut output);
            if weighted {
                fused = fused.weight(&weight);
            }
            let error = communicator.all_reduce_fused(&[1.0; 8], fused).unwrap_err();
            assert!(matches!(error, Error::Disagreement { .. }), "{number}: {error:?}");
            let text = error.to_string();
            assert!(
                text.contains("all_reduce_fused of 8 f32") && text.contains("rms norm, rows of 4"),
                "{text}"
            );
        });
    }
}

/// Tests ranks whose calls differ in two arguments, without checked calls. The arguments are adjacent in the compared
/// hash, and such differences once cancelled out.
#[test]
fn ranks_that_differ_in_two() {
    type Differ = fn(usize) -> (usize, f32, bool);
    let differences: [Differ; 2] = [
        |rank| (64, [1.0, 1.25][rank], rank == 0),
        |rank| (64 << rank, f32::from_bits(1e-5_f32.to_bits() ^ (192 * rank as u32)), false),
    ];
    for (number, differ) in differences.into_iter().enumerate() {
        threads(2, |rank| {
            let (hidden, epsilon, unit_offset) = differ(rank.rank());
            let builder = Communicator::builder().check(false).timeout(std::time::Duration::from_secs(10));
            let communicator = builder.build(Host::new(), rank).unwrap();
            let (mut residual, mut output) = ([1.0_f32; 128], [0.0_f32; 128]);
            let norm = Norm::Rms { epsilon, unit_offset };
            let fused = Fused::on_host(&mut residual).norm(norm, hidden).rows(&mut output);
            let error = communicator.all_reduce_fused(&[1.0_f32; 128], fused).unwrap_err();
            assert!(matches!(error, Error::Disagreement { .. }), "{number}: {error:?}");
        });
    }
}

/// Tests ranks that differ in the norm, in whether there is a bias, or in whether rows in the element type are
/// requested as well as quantised numbers.
#[test]
fn ranks_that_differ_in_the_norm() {
    for difference in 0..3 {
        threads(2, |rank| {
            let communicator = Setup::default().build(&rank);
            let (is_second, bias) = (rank.rank() == 1, [0.0_f32; 4]);
            let (mut residual, mut rows, mut numbers) = ([1.0_f32; 8], [0.0_f32; 8], [0_i8; 8]);
            let layer = Norm::Layer { epsilon: 0.0, unit_offset: false };
            let is_rms = difference == 0 && is_second;
            let norm = if is_rms { Norm::Rms { epsilon: 0.0, unit_offset: false } } else { layer };
            let mut fused = Fused::on_host(&mut residual).norm(norm, 4);
            if difference == 1 && is_second {
                fused = fused.bias(&bias);
            }
            if difference != 2 || is_second {
                fused = fused.rows(&mut rows);
            }
            let error = match difference {
                2 => communicator.all_reduce_fused(&[1.0; 8], fused.quantized_by(&mut numbers, &[1.0])),
                _ => communicator.all_reduce_fused(&[1.0; 8], fused),
            };
            let error = error.unwrap_err();
            assert!(matches!(error, Error::Disagreement { .. }), "{difference}: {error:?}");
            let fact = ["rms norm, rows", ", a bias", " and in the type"][difference];
            assert!(error.to_string().contains(fact), "{error}");
            assert!(error.to_string().contains("layer norm, rows of 4"), "{error}");
        });
    }
}

/// Tests ranks that differ in whether the plain sum is requested.
#[test]
fn ranks_that_differ_in_the_sum() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let (mut sum, mut residual, mut output) = ([0.0_f32; 8], [1.0; 8], [0.0; 8]);
        let mut fused = rms(&mut residual, 4, 0.0).rows(&mut output);
        if rank.rank() == 1 {
            fused = fused.sum(&mut sum);
        }
        let error = communicator.all_reduce_fused(&[1.0; 8], fused).unwrap_err();
        assert!(matches!(error, Error::Disagreement { .. }), "{error:?}");
        assert!(error.to_string().contains("and the plain sum"), "{error}");
    });
}

/// Tests ranks that differ in the format of quantised rows, or in which elements share a scale.
#[test]
fn ranks_that_quantize_differently() {
    type How = Option<(Becomes, &'static str)>;
    let (row, group) = (Scaling::PerRow, Scaling::PerGroup);
    let to = |dtype, scaling, name| Some((Becomes(dtype, scaling), name));
    let rows = to(DType::I8, row, "to i8 with per_row scales");
    let nvfp4 = to(DType::U8, Scaling::Nvfp4, "to u8 with nvfp4 scales");
    let tiled = to(DType::U8, Scaling::Nvfp4Tiled, "to u8 with nvfp4_tiled scales");
    let differences: [[How; 2]; 6] = [
        [rows, None],
        [rows, to(DType::F8E4M3, row, "to f8e4m3 with per_row scales")],
        [
            to(DType::F8E5M2, row, "to f8e5m2 with per_row scales"),
            to(DType::F8E5M2, group, "to f8e5m2 with per_group scales"),
        ],
        [nvfp4, tiled],
        // Their codes differ only in a bit above the lowest three.
        [nvfp4, to(DType::U8, Scaling::Nvfp4Tiled8x4, "to u8 with nvfp4_8x4 scales")],
        [nvfp4, to(DType::F8E4M3, group, "to f8e4m3 with per_group scales")],
    ];
    for hows in differences {
        threads(2, |rank| {
            let communicator = Setup::default().build(&rank);
            let (input, mut memory) = ([1.0_f32; 32], [0.0_f32; 256]);
            let at = memory.as_mut_ptr() as u64;
            let (rows, scales, global) = (at + 32 * 4, at + 64 * 4, at + 255 * 4);
            let quantized = hows[rank.rank()].map(|(becomes, _)| becomes.at(rows, scales, global));
            let rows = if quantized.is_none() { rows } else { 0 };
            let fused = RawFused { residual: at, residual_out: at, rows, quantized, ..rows_of(16) };
            // SAFETY: all addresses are within `memory`.
            let result =
                unsafe { communicator.all_reduce_fused_raw(input.as_ptr().cast(), 32, DType::F32, &fused) };
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Disagreement { .. }), "{error:?}");
            let text = error.to_string();
            for (_, name) in hows.into_iter().flatten() {
                assert!(text.contains(name), "{text}");
            }
        });
    }
}

/// Tests that a rank that does not call is named, and that the communicator is poisoned, as in other collectives.
#[test]
fn a_rank_that_does_not_come() {
    for algorithm in Algorithm::DIRECT.map(Some) {
        threads(3, |rank| {
            let timeout = std::time::Duration::from_millis(300);
            let communicator = Setup { algorithm, timeout, ..Setup::default() }.build(&rank);
            let (mut residual, mut output) = ([1.0_f32; 640], [0.0; 640]);
            let mut call = || {
                let fused = rms(&mut residual, 64, 0.0).rows(&mut output);
                communicator.all_reduce_fused(&[1.0; 640], fused)
            };
            call().unwrap();
            if rank.rank() == 1 {
                // The rank is not gone, but later than the others' timeout. In a one-shot algorithm the data that it
                // needs may already be there.
                std::thread::sleep(3 * timeout);
                let late = call();
                assert!(
                    late.is_err() || residual == [7.0; 640] && output == [1.0; 640],
                    "{residual:?} {output:?}"
                );
                return;
            }
            let error = call().unwrap_err();
            assert!(error.to_string().contains("rank 1"), "{error}");
            assert_eq!(call().unwrap_err(), error);
        });
    }
}
