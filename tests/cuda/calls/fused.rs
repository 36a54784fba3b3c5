//! Tests sums with a residual and an RMSNorm: on raw pointers of every shape, on slices, and of all ranks in one
//! launch.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRank, CooperativeRanks};
use fast_allreduce::{
    Algorithm, Collective, Communicator, Cuda, DType, Error, Fused, GatheredRows, Norm, RawFused, Result,
    Scaling,
};

use crate::fixtures::fixture::{download, upload, Plain, Setup};
use crate::fixtures::gpu::{gpu, Gpus, LIMIT};
use crate::fixtures::threads::threads;
use crate::launches::graphs::capture;
use crate::random::{Random, Values};
use crate::suite::quantized_rows::Becomes;
use crate::suite::rows::{Caller, Placement, Prepared, Rows};

tests! {
    gpu =>
        every_shape,
        rows_of_many_chunks,
        captured_calls,
        a_world_in_one_launch,
        scattered_rows_in_one_launch,
        gathered_rows_of_many_ranks,
        slices,
        quantized_slices,
        slices_of_shares,
        nvfp4_slices,
        a_rank_that_does_not_come,
        a_grid_that_cuts_rows_is_refused;
}

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];
/// Numbers of rows and of elements in a row.
const SHAPES: [(usize, usize); 8] =
    [(5, 1), (3, 7), SHORT_ROWS, (4, 33), (1, 513), (9, 512), (2, 1000), SHARED_ROWS];
/// Rows that a thread or two have, and rows that several blocks share in a push.
const SHORT_ROWS: (usize, usize) = (140, 16);
const SHARED_ROWS: (usize, usize) = (3, 2048);
/// Rows of more chunks than are added at once, and than a warp has lanes.
const LONG_ROWS: [(usize, usize); 2] = [(1, 5128), (1, 17_416)];

/// Cases of quantised rows: the offset in elements from an aligned address, whether the plain sum is requested, and the
/// format of the rows.
const ROWS_OF_FEWER_BITS: [(usize, bool, Becomes); 15] = [
    (0, true, Becomes(DType::U8, Scaling::Nvfp4)),
    (1, false, Becomes(DType::U8, Scaling::Nvfp4Tiled)),
    (0, false, Becomes(DType::F8E4M3, Scaling::PerGroup)),
    (1, true, Becomes(DType::I8, Scaling::PerRow)),
    (0, false, Becomes(DType::F8E4M3, Scaling::PerRow)),
    (0, false, Becomes(DType::F8E5M2, Scaling::Given)),
    (1, false, Becomes(DType::I8, Scaling::PerGroupColumns)),
    (0, true, Becomes(DType::F8E4M3, Scaling::PerGroupUe8m0)),
    (0, false, Becomes(DType::F8E5M2, Scaling::Mxfp8)),
    (1, false, Becomes(DType::F8E4M3, Scaling::Mxfp8Tiled)),
    (0, true, Becomes(DType::U8, Scaling::Mxfp4)),
    (0, false, Becomes(DType::U8, Scaling::Mxfp4Tiled)),
    (1, true, Becomes(DType::U8, Scaling::Nvfp4Tiled8x4)),
    (0, false, Becomes(DType::F8E4M3, Scaling::Mxfp8Tiled8x4)),
    (0, false, Becomes(DType::F8E4M3, Scaling::Per32Ue8m0)),
];

/// A rank with a stream and buffers.
pub struct GpuCaller {
    pub communicator: Communicator<Cuda>,
    pub stream: Arc<CudaStream>,
    pub plain: [Plain; 2],
}

impl Caller for GpuCaller {
    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    fn room(&mut self, other: bool, _bytes: usize) -> u64 {
        self.plain[usize::from(other)].address
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        upload(&self.stream, address, bytes);
    }

    fn read(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        download(&self.stream, address, bytes)
    }

    fn call(
        &mut self,
        collective: Collective<'_>,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        let stream = self.stream.cu_stream();
        // SAFETY: the memory is the test's, is aligned to the element, and lives until the stream is synchronised.
        unsafe { self.communicator.collective_raw(stream, collective, input, output, count, dtype) }?;
        self.communicator.synchronize(&self.stream)
    }
}

fn every_shape(gpus: Gpus) {
    for size in [2, 3] {
        let random = Random::new(&format!("calls::fused::every_shape {size}"));
        for algorithm in Algorithm::DIRECT.map(Some).into_iter().chain([None, Some(Algorithm::Ring)]) {
            threads(size, gpus.count.min(2), |rank, context| {
                // Messages are divided into pieces, except by two-shot push, whose regions have the least room: where
                // rows do not fit, another algorithm is chosen.
                let max_bytes = if algorithm == Some(Algorithm::TwoShotPush) { 256 << 10 } else { 16 << 10 };
                let setup = Setup { algorithm, check: Some(true), max_bytes, ..Setup::default() };
                let communicator = setup.try_build(context.clone(), rank).unwrap();
                let own = communicator.rank();
                let stream = context.new_stream().unwrap();
                let plain = [(); 2].map(|()| Plain::new(&context, 320 << 10));
                let mut caller = GpuCaller { communicator, stream, plain };
                caller.communicator.barrier().unwrap();
                for (number, &shape) in SHAPES.iter().enumerate() {
                    for dtype in TYPES {
                        let mut random = random.fork(4 * number + dtype as usize);
                        for offset in [None, Some(1 + number % 4)] {
                            let rows = Rows::new(&mut random, dtype, shape, size);
                            let mut placement = Placement::random(&mut random).of_rank(&random, own);
                            // Each kernel meets every misalignment that its type can have.
                            placement.offset = offset.unwrap_or(placement.offset);
                            rows.check(&mut caller, placement);
                        }
                        // Runs every format in each kernel, independently of the random choice above, and on a row
                        // shared by several blocks.
                        for (offset, plain_sum, becomes) in ROWS_OF_FEWER_BITS {
                            let becomes = Some(becomes);
                            if shape == SHORT_ROWS || shape == SHARED_ROWS && offset == 0 {
                                let rows = Rows::new(&mut random, dtype, shape, size);
                                let placement = Placement::random(&mut random);
                                rows.check(
                                    &mut caller,
                                    Placement { offset, plain_sum, becomes, stops: false, ..placement },
                                );
                            }
                        }
                    }
                }
                caller.communicator.barrier().unwrap();
            });
        }
    }
}

/// Tests long rows: in pushes by teams of blocks, in a pull by one block for each row.
fn rows_of_many_chunks(gpus: Gpus) {
    let random = Random::new("calls::fused::rows_of_many_chunks");
    let mut all = Vec::new();
    for (number, (shape, dtype)) in LONG_ROWS.into_iter().zip([DType::Bf16, DType::F32]).enumerate() {
        all.extend(Rows::of_every_norm(&mut random.fork(number), &[Values::Plain], dtype, shape, 2));
    }
    for algorithm in [Algorithm::OneShotPush, Algorithm::TwoShotPush, Algorithm::TwoShotPull] {
        threads(2, gpus.count.min(2), |rank, context| {
            let setup = Setup { algorithm: Some(algorithm), max_bytes: 1 << 20, ..Setup::default() };
            let communicator = setup.try_build(context.clone(), rank).unwrap();
            let stream = context.new_stream().unwrap();
            let plain = [(); 2].map(|()| Plain::new(&context, 4 << 20));
            let mut caller = GpuCaller { communicator, stream, plain };
            caller.communicator.barrier().unwrap();
            let formats = [Becomes(DType::F8E4M3, Scaling::PerRow), Becomes(DType::I8, Scaling::PerGroup)];
            for (number, rows) in all.iter().enumerate() {
                let mut random = random.fork(10 + number);
                let becomes = Some(random.pick(&formats));
                let placement = Placement::random(&mut random);
                // At these addresses teams share rows.
                let placement = Placement { offset: 0, stops: false, scatters: false, ..placement };
                rows.check(&mut caller, Placement { becomes, also_rows: true, ..placement });
            }
            caller.communicator.barrier().unwrap();
        });
    }
}

/// Captures several calls in one graph and replays each on rewritten memory.
fn captured_calls(gpus: Gpus) {
    const REPLAYS: usize = 3;
    for size in [2, 3] {
        let random = Random::new(&format!("calls::fused::captured_calls {size}"));
        for algorithm in Algorithm::DIRECT.map(Some).into_iter().chain([None]) {
            threads(size, gpus.count.min(2), |rank, context| {
                let setup = Setup { algorithm, max_bytes: 256 << 10, ..Setup::default() };
                // The stream of the last call is dropped after the communicator. Creating a stream waits for the
                // default stream, which the driver refuses while another stream is being captured.
                let stream = context.new_stream().unwrap();
                let communicator = setup.try_build(context.clone(), rank).unwrap();
                communicator.barrier().unwrap();
                let mut replays = 0;
                for (number, shape) in [(40, 8), (4, 33), (3, 2048)].into_iter().enumerate() {
                    let mut random = random.fork(number);
                    let rows = TYPES.map(|dtype| Rows::new(&mut random, dtype, shape, size));
                    let placements = TYPES.map(|_| Placement::random(&mut random));
                    let mut callers = TYPES.map(|_| {
                        let plain = Plain::new(&context, 320 << 10);
                        WorldMemory { rank: communicator.rank(), stream: Arc::clone(&stream), plain }
                    });
                    let prepare = |callers: &mut [WorldMemory; 3]| -> Vec<_> {
                        let calls = rows.iter().zip(callers).zip(placements);
                        calls.map(|((rows, caller), placement)| rows.prepare(caller, placement)).collect()
                    };
                    let calls = prepare(&mut callers);
                    let graph = capture(&stream, || {
                        for (rows, call) in rows.iter().zip(&calls) {
                            let (stream, collective) = (stream.cu_stream(), call.collective());
                            let &Prepared { input, count, .. } = call;
                            // SAFETY: the memory is the test's, is aligned to the element, and outlives the graph.
                            unsafe {
                                communicator.collective_raw(stream, collective, input, 0, count, rows.dtype)
                            }
                            .unwrap();
                        }
                    });
                    communicator.register_graph_buffers().unwrap();
                    for _ in 0..REPLAYS {
                        let calls = prepare(&mut callers);
                        graph.launch().unwrap();
                        communicator.synchronize(&stream).unwrap();
                        for ((rows, caller), call) in rows.iter().zip(&mut callers).zip(&calls) {
                            rows.compare(caller, call);
                            replays += 1;
                        }
                        communicator.barrier().unwrap();
                    }
                }
                assert_eq!(replays, 3 * 3 * REPLAYS);
            });
        }
    }
}

fn slices(_: Gpus) {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let slice = |values: &[f32]| stream.clone_htod(values).unwrap();
        let values = |slice: &CudaSlice<f32>| stream.clone_dtoh(slice).unwrap();
        let (input, weight) = (slice(&[1.0, -2.0, 3.0, 0.5]), slice(&[7.0, 1.0, 0.0]));
        let (mut residual, mut output) = (slice(&[2.0, 8.0, -6.0, 3.0]), slice(&[f32::NAN; 4]));
        communicator.barrier().unwrap();
        let weight = weight.slice(1..3);
        let norm = Norm::Rms { epsilon: 0.0, unit_offset: true };
        let fused = Fused::on_cuda(&mut residual).norm(norm, 2).weight(&weight).rows(&mut output);
        communicator.all_reduce_fused(&stream, &input, fused).unwrap();
        communicator.synchronize(&stream).unwrap();
        let last = 4.0 * (1.0 / 8.0_f32.sqrt());
        assert_eq!(
            (values(&residual), values(&output)),
            (vec![4.0, 4.0, 0.0, 4.0], vec![2.0, 1.0, 0.0, last])
        );
        let mut data = slice(&[1.0, -2.0, 3.0, 0.5]);
        let norm = Norm::Rms { epsilon: 1.0, unit_offset: false };
        let fused = Fused::on_cuda(&mut residual).norm(norm, 4);
        communicator.all_reduce_fused_in_place(&stream, &mut data, fused).unwrap();
        communicator.all_reduce_fused(&stream, &input, Fused::on_cuda(&mut residual)).unwrap();
        communicator.synchronize(&stream).unwrap();
        let scale = 1.0 / (97.0_f32 / 4.0 + 1.0).sqrt();
        assert_eq!(values(&data), [6.0, 0.0, 6.0, 5.0].map(|x| x * scale));
        assert_eq!(values(&residual), [8.0, -4.0, 12.0, 6.0]);
        let three = slice(&[1.0; 3]);
        let refused = communicator.all_reduce_fused(&stream, &three, Fused::on_cuda(&mut residual));
        assert!(matches!(refused, Err(Error::LengthMismatch { input: 3, output: 4 })));
        let fused = Fused::on_cuda(&mut residual).norm(norm, 3);
        let refused = communicator.all_reduce_fused_in_place(&stream, &mut data, fused);
        assert!(matches!(refused, Err(Error::InvalidSetting { name: "hidden", .. })));
        communicator.barrier().unwrap();
    });
}

/// Quantises a rank's rows, and gathers those of all ranks.
fn slices_of_shares(_: Gpus) {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let slice = |values: &[f32]| stream.clone_htod(values).unwrap();
        let own = communicator.rank();
        // Rank 0 has one row, rank 1 two.
        let (input, counts) = (slice(&[0.5, -0.5, 1.0, 0.0, 0.0, 1.0]), [2, 4]);
        let mut residual = slice(&vec![0.0; counts[own]]);
        let mut numbers = stream.clone_htod(&vec![9_i8; counts[own]]).unwrap();
        let mut scales = slice(&vec![7.0; counts[own] / 2]);
        let (mut all, mut all_scales) = (stream.clone_htod(&[9_i8; 6]).unwrap(), slice(&[7.0; 3]));
        communicator.barrier().unwrap();
        let fused = Fused::on_cuda(&mut residual).norm(RMS, 2);
        let fused = fused.quantized(Scaling::PerRow, &mut numbers, &mut scales);
        communicator.reduce_scatter_fused_v(&stream, &input, fused, &counts).unwrap();
        let rows =
            GatheredRows::on_cuda(Scaling::PerRow, 2, (&numbers, &scales), (&mut all, &mut all_scales));
        communicator.all_gather_rows_v(&stream, rows, &counts).unwrap();
        communicator.synchronize(&stream).unwrap();
        let root = 2.0_f32.sqrt() / 127.0;
        assert_eq!(stream.clone_dtoh(&all).unwrap(), [127, -127, 127, 0, 0, 127]);
        assert_eq!(stream.clone_dtoh(&all_scales).unwrap(), [1.0 / 127.0, root, root]);
        // Equal shares do not fit this input.
        let refused = communicator.reduce_scatter_fused(&stream, &input, Fused::on_cuda(&mut residual));
        assert!(matches!(refused, Err(Error::LengthMismatch { .. })), "{refused:?}");
        communicator.barrier().unwrap();
    });
}

fn quantized_slices(_: Gpus) {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let slice = |values: &[f32]| stream.clone_htod(values).unwrap();
        let (input, given) = (slice(&[0.5, -0.5, 0.0, 1.0]), slice(&[0.25]));
        let (mut output, mut scales) = (stream.clone_htod(&[9_i8; 4]).unwrap(), slice(&[7.0, 7.0]));
        communicator.barrier().unwrap();
        let root = 2.0_f32.sqrt() / 127.0;
        // The last scale is given, and its numbers are in quarters.
        let expected = [([127_i8, -127, 0, 127], [1.0 / 127.0, root]), ([4, -4, 0, 6], [7.0, 7.0])];
        for (number, (numbers, after)) in [0, 0, 1].into_iter().map(|which| expected[which]).enumerate() {
            let mut residual = slice(&[0.0; 4]);
            let fused = Fused::on_cuda(&mut residual).norm(RMS, 2);
            let fused = match number {
                0 => fused.quantized(Scaling::PerRow, &mut output, &mut scales),
                1 => fused.quantized(Scaling::PerGroup, &mut output, &mut scales),
                _ => fused.quantized_by(&mut output, &given),
            };
            communicator.all_reduce_fused(&stream, &input, fused).unwrap();
            communicator.synchronize(&stream).unwrap();
            assert_eq!(stream.clone_dtoh(&output).unwrap(), numbers, "{number}");
            if number < 2 {
                assert_eq!(stream.clone_dtoh(&scales).unwrap(), after, "{number}");
            }
            scales = slice(&[7.0, 7.0]);
            output = stream.clone_htod(&[9_i8; 4]).unwrap();
        }
        let mut residual = slice(&[0.0; 4]);
        let mut few = slice(&[0.0]);
        let fused = Fused::on_cuda(&mut residual).norm(RMS, 2);
        let fused = fused.quantized(Scaling::PerRow, &mut output, &mut few);
        let refused = communicator.all_reduce_fused(&stream, &input, fused);
        assert!(matches!(refused, Err(Error::InvalidSetting { name: "scales", .. })), "{refused:?}");
        communicator.barrier().unwrap();
    });
}

fn nvfp4_slices(_: Gpus) {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let slice = |values: &[f32]| stream.clone_htod(values).unwrap();
        // The elements of a row alternate between 1 and -1.
        let (input, global) = (slice(&[0.5, -0.5].repeat(24)), slice(&[6.0]));
        let (mut residual, mut output) = (slice(&[0.0; 48]), stream.clone_htod(&[9_u8; 24]).unwrap());
        let mut scales = stream.clone_htod(&[9_u8; 512]).unwrap();
        communicator.barrier().unwrap();
        let tiled = Scaling::Nvfp4Tiled;
        let fused = Fused::on_cuda(&mut residual).norm(RMS, 48);
        let fused = fused.quantized_blocks(tiled, &mut output, &mut scales, &global);
        communicator.all_reduce_fused(&stream, &input, fused).unwrap();
        communicator.synchronize(&stream).unwrap();
        assert_eq!(stream.clone_dtoh(&output).unwrap(), [0xF7; 24]);
        let bytes = stream.clone_dtoh(&scales).unwrap();
        assert_eq!((&bytes[..3], &bytes[3..]), (&[0x38; 3][..], &[9; 509][..]));
        let mut call = |scaling, global: &CudaSlice<f32>, hidden| {
            let fused = Fused::on_cuda(&mut residual).norm(RMS, hidden);
            let fused = fused.quantized_blocks(scaling, &mut output, &mut scales, global);
            communicator.all_reduce_fused(&stream, &input, fused)
        };
        let refused = [
            (call(Scaling::Nvfp4, &global, 48), "scales"),
            (call(Scaling::PerRow, &global, 48), "scaling"),
            (call(tiled, &slice(&[1.0; 2]), 48), "global scale"),
            (call(tiled, &global, 24), "hidden"),
        ];
        for (result, which) in refused {
            assert!(
                matches!(&result, Err(Error::InvalidSetting { name, .. }) if *name == which),
                "{which}: {result:?}"
            );
        }
        communicator.barrier().unwrap();
    });
}

const RMS: Norm = Norm::Rms { epsilon: 0.0, unit_offset: false };

/// Describes an RMSNorm of rows with `hidden` elements.
fn rows_of(hidden: usize, residual: u64, rows: u64) -> RawFused {
    RawFused { residual, residual_out: residual, norm: RMS, hidden, rows, ..RawFused::default() }
}

/// Tests that every kernel times out if another rank does not call.
fn a_rank_that_does_not_come(_: Gpus) {
    for algorithm in Algorithm::DIRECT.map(Some) {
        for dtype in TYPES {
            threads(2, 1, |rank, context| {
                let timeout = std::time::Duration::from_millis(300);
                let setup = Setup { algorithm, ..Setup::default() };
                let stream = context.new_stream().unwrap();
                let communicator = setup.try_build(context.clone(), rank).unwrap();
                let memory = Plain::new(&context, 40 << 10);
                communicator.barrier().unwrap();
                communicator.set_timeout(timeout);
                if communicator.rank() == 1 {
                    // This rank stays alive without calling until the other has timed out.
                    std::thread::sleep(3 * timeout);
                    return;
                }
                // In a push several blocks share each of the two rows.
                let fused = rows_of(1096, memory.address + (12 << 10), memory.address + (24 << 10));
                let (stream_of, input) = (stream.cu_stream(), memory.address);
                // SAFETY: the memory is the test's and outlives the launch.
                unsafe { communicator.all_reduce_fused_raw(stream_of, input, 2 * 1096, dtype, &fused) }
                    .unwrap();
                let error = communicator.synchronize(&stream).unwrap_err();
                assert!(error.to_string().contains("rank 1"), "{error}");
            });
        }
    }
}

/// Tests all ranks in one launch, with grids that have fewer and more blocks than there are rows.
fn a_world_in_one_launch(_: Gpus) {
    let random = Random::new("calls::fused::a_world_in_one_launch");
    for size in [2, 3, 5] {
        for algorithm in Algorithm::DIRECT {
            // Pulled messages are divided into pieces. Mailboxes have less room, and each row has to fit into one.
            let pulls = matches!(algorithm, Algorithm::OneShotPull | Algorithm::TwoShotPull);
            let max_bytes = if pulls { 16 << 10 } else { 256 << 10 };
            let mut world = CooperativeRanks::new(0, size, max_bytes, 0, LIMIT).unwrap();
            let cases = SHAPES.iter().flat_map(|&shape| TYPES.map(|dtype| (shape, dtype)));
            for (number, (shape, dtype)) in cases.enumerate() {
                let mut random = random.fork(16 * number + algorithm as usize);
                let whole = shape.1 * dtype.size() % 16 == 0;
                let blocks = if whole { random.pick(&[1, 2, 3]) } else { 1 };
                let threads = random.pick(&[32, 128, 512]);
                let rows = Rows::new(&mut random, dtype, shape, size);
                let plan = CooperativePlan { algorithm, blocks, threads, registered: random.one_in(2) };
                check_world(&rows, &mut world, plan, Placement::random(&mut random));
            }
        }
    }
}

/// Tests every norm with every format of a reduce-scatter's rows, and their gather.
fn scattered_rows_in_one_launch(_: Gpus) {
    let random = Random::new("calls::fused::scattered_rows_in_one_launch");
    let algorithm = Algorithm::TwoShotPull;
    let mut world = CooperativeRanks::new(0, 2, 16 << 10, 0, LIMIT).unwrap();
    for dtype in TYPES {
        let mut random = random.fork(dtype as usize);
        // Rows of a whole chunk of squares and a part of one, in groups of up to 128 elements.
        for rows in Rows::of_every_norm(&mut random, &Values::ALL, dtype, (3, 640), 2) {
            for (offset, _, becomes) in ROWS_OF_FEWER_BITS {
                let plan = CooperativePlan { algorithm, blocks: 2, threads: 128, registered: offset != 0 };
                let placement = Placement::random(&mut random);
                let becomes = Some(becomes);
                let placement = Placement { offset, becomes, scatters: true, stops: false, ..placement };
                check_world(&rows, &mut world, plan, placement);
            }
        }
    }
}

/// Tests gathers of rows between six and seven ranks, of which a kernel reads four together and the others later, with
/// rows of whole packs and of parts, of which ranks have different numbers.
fn gathered_rows_of_many_ranks(_: Gpus) {
    let random = Random::new("calls::fused::gathered_rows_of_many_ranks");
    for size in [6, 7] {
        let mut world = CooperativeRanks::new(0, size, 16 << 10, 0, LIMIT).unwrap();
        for (number, shape) in [(60, 80), (9, 640)].into_iter().enumerate() {
            let mut random = random.fork(2 * size + number);
            for (offset, _, becomes) in ROWS_OF_FEWER_BITS {
                let rows = Rows::new(&mut random, DType::Bf16, shape, size);
                let (algorithm, blocks) = (Algorithm::TwoShotPull, random.pick(&[1, 3]));
                let plan = CooperativePlan { algorithm, blocks, threads: 64, registered: offset != 0 };
                let placement = Placement::random(&mut random);
                let becomes = Some(becomes);
                let placement = Placement { offset, becomes, scatters: true, stops: false, ..placement };
                check_world(&rows, &mut world, plan, placement);
            }
        }
    }
}

/// Buffers of one rank of a world in one launch.
pub struct WorldMemory {
    pub rank: usize,
    pub stream: Arc<CudaStream>,
    pub plain: Plain,
}

impl Caller for WorldMemory {
    fn rank(&self) -> usize {
        self.rank
    }

    fn room(&mut self, _: bool, _: usize) -> u64 {
        self.plain.address
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        upload(&self.stream, address, bytes);
    }

    fn read(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        download(&self.stream, address, bytes)
    }

    fn call(&mut self, _: Collective<'_>, _: u64, _: u64, _: usize, _: DType) -> Result<()> {
        unreachable!("all ranks call at once")
    }
}

fn check_world(rows: &Rows, world: &mut CooperativeRanks, plan: CooperativePlan, placement: Placement) {
    let (stream, size) = (Arc::clone(world.stream()), world.world_size());
    let memory = |rank| {
        let plain = Plain::new(stream.context(), 320 << 10);
        WorldMemory { rank, stream: Arc::clone(&stream), plain }
    };
    let mut memories: Vec<_> = (0..size).map(memory).collect();
    let calls: Vec<_> = memories.iter_mut().map(|memory| rows.prepare(memory, placement)).collect();
    let mut ranks = Vec::new();
    for call in &calls {
        ranks.push(CooperativeRank { collective: call.collective(), input: call.input, output: 0 });
    }
    // SAFETY: the memory is the test's, is aligned to the element, and outlives the call.
    let mut call = unsafe { world.prepare_raw(&ranks, calls[0].count, rows.dtype, plan) }.unwrap();
    call.enqueue().unwrap();
    call.finish().unwrap();
    drop(call);
    for (memory, call) in memories.iter_mut().zip(&calls) {
        rows.compare(memory, call);
    }
    let mut gathers = Vec::new();
    for gather in calls.iter().filter_map(|call| call.gather.as_ref()) {
        let (collective, input, output) = (gather.collective(), gather.input, gather.output);
        gathers.push((CooperativeRank { collective, input, output }, gather));
    }
    let Some(&(_, first)) = gathers.first() else { return };
    let ranks: Vec<_> = gathers.iter().map(|(rank, _)| *rank).collect();
    // SAFETY: as above.
    let mut call = unsafe { world.prepare_raw(&ranks, first.count, first.dtype, plan) }.unwrap();
    call.enqueue().unwrap();
    call.finish().unwrap();
    for (memory, call) in memories.iter_mut().zip(&calls) {
        rows.compare_gathered(memory, call);
    }
}

fn a_grid_that_cuts_rows_is_refused(_: Gpus) {
    let mut world = CooperativeRanks::new(0, 2, 16 << 10, 0, LIMIT).unwrap();
    let context = Arc::clone(world.stream().context());
    let memory = Plain::new(&context, 4096);
    let fused = rows_of(7, memory.address + 1024, memory.address + 2048);
    let collective = Collective::AllReduceFused(&fused);
    let rank = CooperativeRank { collective, input: memory.address, output: 0 };
    for (algorithm, blocks, name) in [(Algorithm::OneShotPush, 2, "grid"), (Algorithm::Ring, 1, "algorithm")]
    {
        let plan = CooperativePlan { algorithm, blocks, threads: 64, registered: false };
        // SAFETY: the call is refused, so nothing is launched.
        let refused = unsafe { world.prepare_raw(&[rank; 2], 14, DType::F32, plan) };
        assert!(matches!(refused.map(drop), Err(Error::InvalidSetting { name: what, .. }) if what == name));
    }
}
