//! All ranks of a world in one cooperative launch: the form in which the kernels are proven on one GPU.

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use fast_allreduce::device::cuda::CudaWorld;
use fast_allreduce::{Algorithm, DType, Element, Error, ReduceOp};

use crate::gpu::{gpus, LIMIT};
use crate::random::Random;
use crate::seat::{compare, download, upload, Message};

/// One call of a world.
#[derive(Debug, Clone, Copy)]
struct Call {
    algorithm: Algorithm,
    grid: (usize, usize),
    offset: usize,
    registered: bool,
    in_place: bool,
}

/// A slice that holds `bytes` at an element offset, and poison elsewhere.
fn slice<T: Element + cudarc::driver::DeviceRepr>(
    stream: &std::sync::Arc<CudaStream>,
    offset: usize,
    bytes: &[u8],
) -> CudaSlice<T> {
    const BEHIND: usize = 5;
    let offset_bytes = offset * size_of::<T>();
    let mut all = vec![0x5C; offset_bytes + bytes.len() + BEHIND * size_of::<T>()];
    all[offset_bytes..offset_bytes + bytes.len()].copy_from_slice(bytes);
    // SAFETY: filled by the next line.
    let slice = unsafe { stream.alloc::<T>(all.len() / size_of::<T>()) }.unwrap();
    upload(stream, slice.device_ptr(stream).0, &all);
    slice
}

fn reduce<T: Element + cudarc::driver::DeviceRepr>(
    world: &mut CudaWorld,
    message: &Message,
    call: Call,
) -> Result<(), String> {
    let Call { algorithm, grid, offset, registered, in_place } = call;
    let stream = &std::sync::Arc::clone(world.stream());
    let inputs: Vec<_> = message.inputs.iter().map(|bytes| slice::<T>(stream, offset, bytes)).collect();
    let poison = message.poison();
    let separate: Vec<_> = inputs.iter().map(|_| slice::<T>(stream, offset, &poison)).collect();
    stream.synchronize().unwrap();
    let (inputs, mut outputs) = if in_place { (Vec::new(), inputs) } else { (inputs, separate) };
    world
        .all_reduce(&inputs, &mut outputs, offset, message.count, message.op, algorithm, grid, registered)
        .map_err(|error| error.to_string())?;
    let check = |what: &str, slice: &CudaSlice<T>, expected: &[u8]| {
        let bytes = download(stream, slice.device_ptr(stream).0, slice.num_bytes());
        let (before, rest) = bytes.split_at(offset * size_of::<T>());
        let (result, behind) = rest.split_at(expected.len());
        if before.iter().chain(behind).any(|&byte| byte != 0x5C) {
            return Err(format!("{what} was written outside of its bounds"));
        }
        compare(result, expected, size_of::<T>()).map_err(|problem| format!("{what}{problem}"))
    };
    for (rank, output) in outputs.iter().enumerate() {
        check(&format!("the output of rank {rank}"), output, &message.expected)?;
    }
    for (rank, input) in inputs.iter().enumerate() {
        check(&format!("the input of rank {rank} afterwards"), input, &message.inputs[rank])?;
    }
    Ok(())
}

fn reduce_any(world: &mut CudaWorld, message: &Message, call: Call) -> Result<(), String> {
    match message.dtype {
        DType::F16 => reduce::<half::f16>(world, message, call),
        DType::Bf16 => reduce::<half::bf16>(world, message, call),
        DType::F32 => reduce::<f32>(world, message, call),
        DType::F64 => reduce::<f64>(world, message, call),
        DType::I8 => reduce::<i8>(world, message, call),
        DType::U8 => reduce::<u8>(world, message, call),
        DType::I32 => reduce::<i32>(world, message, call),
        DType::U32 => reduce::<u32>(world, message, call),
        DType::I64 => reduce::<i64>(world, message, call),
        DType::U64 => reduce::<u64>(world, message, call),
        dtype => unreachable!("a type that the test does not know: {dtype}"),
    }
}

/// Every type and operation comes up with every algorithm and world, in turn.
fn sweep(name: &str, worlds: &[usize], rounds: usize) {
    let Some(_gpus) = gpus(1) else { return };
    let mut random = Random::new(name);
    const MAX_BYTES: usize = 16 << 10;
    for &size in worlds {
        // The epoch passes its wrap-around on the way.
        let mut world = CudaWorld::new(0, size, MAX_BYTES, u32::MAX - 20, LIMIT).unwrap();
        for algorithm in Algorithm::ALL {
            for round in 0..rounds {
                let dtype = DType::ALL[round % DType::ALL.len()];
                let op = random.pick(&ReduceOp::ALL);
                let most = 3 * MAX_BYTES / dtype.size();
                let random_count = random.below(most);
                let count = random.pick(&[0, 1, 2, 7, 63, 64, 65, 1000, 1023, random_count, most + 3]);
                let call = Call {
                    algorithm,
                    grid: (1 + random.below(world.max_blocks().min(9)), random.pick(&[32, 64, 160, 512])),
                    offset: random.pick(&[0, 0, 1, 3, 8, 13]),
                    registered: random.one_in(2),
                    in_place: random.one_in(3),
                };
                let message = Message::new(&mut random, (dtype, op), count, size);
                if let Err(problem) = reduce_any(&mut world, &message, call) {
                    panic!("world of {size}: {problem}; {count} x {dtype} {op}, {call:?}");
                }
            }
        }
    }
}

#[test]
fn worlds_of_two_to_four() {
    sweep("world::worlds_of_two_to_four", &[1, 2, 3, 4], 30);
}

#[test]
fn worlds_of_five_to_eight() {
    sweep("world::worlds_of_five_to_eight", &[5, 6, 7, 8], 20);
}

#[test]
fn the_largest_world() {
    sweep("world::the_largest_world", &[16], 10);
}

#[test]
fn what_a_world_refuses() {
    let Some(_gpus) = gpus(1) else { return };
    assert_eq!(CudaWorld::new(0, 17, 4096, 0, LIMIT).err(), Some(Error::WorldSize { world_size: 17 }));
    let mut world = CudaWorld::new(0, 2, 4096, 0, LIMIT).unwrap();
    let (stream, max_blocks) = (std::sync::Arc::clone(world.stream()), world.max_blocks());
    let slices = |count: usize, length: usize| -> Vec<CudaSlice<f32>> {
        (0..count).map(|_| stream.alloc_zeros(length).unwrap()).collect()
    };
    let mut call = |inputs: &[CudaSlice<f32>], outputs: &mut [CudaSlice<f32>], (offset, count), grid| {
        let push = Algorithm::OneShotPush;
        world.all_reduce(inputs, outputs, offset, count, ReduceOp::Sum, push, grid, false)
    };
    let good = (1, 32);
    assert_eq!(call(&slices(2, 8), &mut slices(2, 8), (0, 8), good), Ok(()));
    let mismatch = |result| assert!(matches!(result, Err(Error::LengthMismatch { .. })), "{result:?}");
    mismatch(call(&slices(2, 8), &mut slices(1, 8), (0, 8), good));
    mismatch(call(&slices(1, 8), &mut slices(2, 8), (0, 8), good));
    mismatch(call(&slices(2, 7), &mut slices(2, 8), (0, 8), good));
    mismatch(call(&[], &mut slices(2, 8), (1, 8), good));
    mismatch(call(&[], &mut slices(2, 8), (usize::MAX, 8), good));
    for grid in [(0, 32), (1, 0), (1, 31), (1, 513), (max_blocks + 1, 32)] {
        let result = call(&[], &mut slices(2, 8), (0, 8), grid);
        assert!(matches!(result, Err(Error::InvalidSetting { name: "grid", .. })), "{result:?}");
    }
}

/// A prepared call, started several times and as a part of a graph.
#[test]
fn a_prepared_call_is_started_again() {
    let Some(_gpus) = gpus(1) else { return };
    let mut random = Random::new("world::a_prepared_call_is_started_again");
    const CALLS: usize = 5;
    for algorithm in Algorithm::ALL {
        for registered in [false, true] {
            let mut world = CudaWorld::new(0, 3, 8 << 10, u32::MAX - 9, LIMIT).unwrap();
            // SAFETY: one stream uses the slices, and each is waited for before it is looked at.
            unsafe { world.stream().context().disable_event_tracking() };
            let stream = std::sync::Arc::clone(world.stream());
            // Several pieces, each a launch.
            let message = Message::new(&mut random, (DType::I32, ReduceOp::Sum), 5003, 3);
            let inputs: Vec<_> =
                message.inputs.iter().map(|bytes| slice::<i32>(&stream, 1, &vec![0; bytes.len()])).collect();
            let mut outputs: Vec<_> =
                inputs.iter().map(|_| slice::<i32>(&stream, 1, &message.poison())).collect();
            let of = |slices: &[CudaSlice<i32>]| -> Vec<u64> {
                slices.iter().map(|slice| slice.device_ptr(&stream).0 + 4).collect()
            };
            let (from, to) = (of(&inputs), of(&outputs));
            let mut call = world
                .prepare(&inputs, &mut outputs, 1, 5003, ReduceOp::Sum, algorithm, (3, 64), registered)
                .unwrap();
            let mode = cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            stream.begin_capture(mode).unwrap();
            (0..CALLS).for_each(|_| call.enqueue().unwrap());
            let flags = cudarc::driver::sys::CUgraphInstantiate_flags(0);
            let graph = stream.end_capture(flags).unwrap().expect("a graph with nodes");
            for replayed in [false, true, false] {
                from.iter()
                    .zip(&message.inputs)
                    .for_each(|(&address, bytes)| upload(&stream, address, bytes));
                to.iter().for_each(|&address| upload(&stream, address, &message.poison()));
                match replayed {
                    true => graph.launch().unwrap(),
                    false => (0..CALLS).for_each(|_| call.enqueue().unwrap()),
                }
                call.finish().unwrap();
                for &address in &to {
                    compare(&download(&stream, address, message.expected.len()), &message.expected, 4)
                        .unwrap();
                }
            }
        }
    }
}
