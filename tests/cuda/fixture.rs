//! A message with its expected result, and a rank that reduces its part of it: from memory of any kind, at any offset, with
//! canaries around what it may write.

use std::sync::Arc;

use cudarc::driver::{result, CudaContext, CudaSlice, CudaStream, DevicePtr};
use fast_allreduce::{Algorithm, Buffer, Collective, Communicator, Cuda, DType, Order, ReduceOp};

use crate::oracle;
use crate::random::{elements, Random, Values};

/// What the ranks reduce together.
pub struct Message {
    pub dtype: DType,
    pub op: ReduceOp,
    pub count: usize,
    /// By rank, as bytes.
    pub inputs: Vec<Vec<u8>>,
    pub expected: Vec<u8>,
}

impl Message {
    pub fn new(random: &mut Random, (dtype, op): (DType, ReduceOp), count: usize, world: usize) -> Self {
        let values = random.pick(&Values::ALL);
        let inputs: Vec<_> = (0..world).map(|_| elements(random, dtype, count, values)).collect();
        let expected = oracle::reduce(dtype, op, &inputs);
        Self { dtype, op, count, inputs, expected }
    }

    /// Of a random type and operation.
    pub fn random(random: &mut Random, count: usize, world: usize) -> Self {
        let kind = (random.pick(&DType::ALL), random.pick(&ReduceOp::ARITHMETIC));
        Self::new(random, kind, count, world)
    }

    /// Wrong in every byte.
    pub fn poison(&self) -> Vec<u8> {
        self.expected.iter().map(|byte| !byte).collect()
    }
}

/// What a call is made on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// `cuMemAlloc`.
    Plain,
    /// The device's stream-ordered pool.
    Pool,
    /// `Communicator::alloc`.
    Registered,
}

impl MemoryKind {
    pub const ALL: [Self; 3] = [Self::Plain, Self::Pool, Self::Registered];
}

/// Where a call's input and output lie, with offsets in elements; `None`: in place.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    pub input: (MemoryKind, usize),
    pub output: Option<(MemoryKind, usize)>,
}

impl Placement {
    pub const fn of(kind: MemoryKind) -> Self {
        Self { input: (kind, 0), output: Some((kind, 0)) }
    }

    pub fn random(random: &mut Random) -> Self {
        let mut place =
            || (random.pick(&MemoryKind::ALL), random.pick(&[0, 0, 1, 2, 3, 5, 7, 8, 13, 16, 31]));
        let (input, output) = (place(), place());
        Self { input, output: (!random.one_in(3)).then_some(output) }
    }
}

const GUARD: usize = 128;
const OFFSETS: usize = 31 * 8;
const CANARY: u8 = 0xC3;

/// Memory of `cuMemAlloc`.
pub struct Plain {
    context: Arc<CudaContext>,
    pub address: u64,
}

impl Plain {
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Self {
        context.bind_to_thread().unwrap();
        // SAFETY: a context is current.
        let address = unsafe { result::malloc_sync(bytes) }.unwrap();
        Self { context: Arc::clone(context), address }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: allocated by `new`, and freed once; whoever used it has waited for that.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Copies to device memory, in the order of the stream.
pub fn upload(stream: &CudaStream, address: u64, bytes: &[u8]) {
    stream.context().bind_to_thread().unwrap();
    // SAFETY: the tests' own memory, large enough; the source is pageable, which is copied before the call returns.
    unsafe { result::memcpy_htod_async(address, bytes, stream.cu_stream()) }.unwrap();
}

/// Copies from device memory, after all that is on the stream.
pub fn download(stream: &CudaStream, address: u64, bytes: usize) -> Vec<u8> {
    stream.context().bind_to_thread().unwrap();
    let mut copy = vec![0; bytes];
    // SAFETY: the tests' own memory, large enough; the copy is waited for.
    unsafe { result::memcpy_dtoh_async(&mut copy, address, stream.cu_stream()) }.unwrap();
    stream.synchronize().unwrap();
    copy
}

/// A rank with memory of each kind for messages of up to so many bytes.
pub struct Fixture {
    pub communicator: Communicator<Cuda>,
    pub stream: Arc<CudaStream>,
    /// By kind. Asking a slice for its address makes the stream wait for an event, which a capture does not allow.
    bases: [[u64; 2]; 3],
    // Before the others, which may be graph inputs: with the last buffer the peers' mappings of those end.
    _registered: [Buffer<u8, Cuda>; 2],
    _plain: [Plain; 2],
    _pool: [CudaSlice<u8>; 2],
    room: usize,
}

impl Fixture {
    /// Collective.
    pub fn new(communicator: Communicator<Cuda>, bytes: usize) -> Self {
        let room = bytes + OFFSETS + 2 * GUARD;
        let context = Arc::clone(communicator.device().context());
        let stream = context.new_stream().unwrap();
        let plain = [(); 2].map(|()| Plain::new(&context, room));
        let pool = [(); 2].map(|()| stream.alloc_zeros(room).unwrap());
        let registered = [(); 2].map(|()| communicator.alloc::<u8>(room).unwrap());
        let fixture = Self {
            bases: [
                [0, 1].map(|which: usize| plain[which].address),
                [0, 1].map(|which: usize| pool[which].device_ptr(&stream).0),
                [0, 1].map(|which: usize| registered[which].device_ptr(&stream).0),
            ],
            _plain: plain,
            _pool: pool,
            _registered: registered,
            communicator,
            stream,
            room,
        };
        fixture.stream.synchronize().unwrap();
        // No rank's kernel spins while another still allocates.
        fixture.communicator.barrier().unwrap();
        fixture
    }

    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// The address of a place, in the first or second memory of its kind.
    pub fn address(&self, (kind, offset): (MemoryKind, usize), which: usize, size: usize) -> u64 {
        self.bases[kind as usize][which] + (GUARD + offset * size) as u64
    }

    /// Input and output of a placement.
    fn addresses(&self, placement: Placement, size: usize) -> (u64, u64) {
        let input = self.address(placement.input, 0, size);
        (input, placement.output.map_or(input, |place| self.address(place, 1, size)))
    }

    /// Puts the message in place, and poison and canaries around and where the output will be.
    pub fn prepare(&self, message: &Message, placement: Placement) {
        let (input, output) = self.addresses(placement, message.dtype.size());
        let framed = |bytes: &[u8]| [&[CANARY; GUARD], bytes, &[CANARY; GUARD]].concat();
        assert!(message.expected.len() + OFFSETS + 2 * GUARD <= self.room, "the fixture is too small");
        if input != output {
            upload(&self.stream, output - GUARD as u64, &framed(&message.poison()));
        }
        upload(&self.stream, input - GUARD as u64, &framed(&message.inputs[self.rank()]));
    }

    /// Starts the call on a stream.
    pub fn start(
        &self,
        stream: &CudaStream,
        message: &Message,
        placement: Placement,
    ) -> fast_allreduce::Result<()> {
        let (input, output) = self.addresses(placement, message.dtype.size());
        let &Message { dtype, op, count, .. } = message;
        // SAFETY: the fixture's own memory, aligned to the element, which lives until the stream has been waited for.
        unsafe {
            self.communicator.collective_raw(
                stream.cu_stream(),
                Collective::AllReduce(op),
                input,
                output,
                count,
                dtype,
            )
        }
    }

    /// Waits, and compares with what is expected.
    pub fn compare(&self, message: &Message, placement: Placement) -> Result<(), String> {
        self.communicator.synchronize(&self.stream).map_err(|error| error.to_string())?;
        let (input, output) = self.addresses(placement, message.dtype.size());
        let bytes = message.expected.len();
        let frame = |address: u64| download(&self.stream, address - GUARD as u64, bytes + 2 * GUARD);
        let mut sides = vec![("the output", frame(output), &message.expected)];
        if input != output {
            sides.push(("the input afterwards", frame(input), &message.inputs[self.rank()]));
        }
        for (what, is, should_be) in sides {
            if is[..GUARD] != [CANARY; GUARD] || is[GUARD + bytes..] != [CANARY; GUARD] {
                return Err(format!("{what} was written outside of its bounds"));
            }
            compare(&is[GUARD..GUARD + bytes], should_be, message.dtype.size())
                .map_err(|problem| format!("{what}{problem}"))?;
        }
        Ok(())
    }

    /// One eager call from beginning to end.
    pub fn check(&self, message: &Message, placement: Placement) {
        self.prepare(message, placement);
        let result = self.start(&self.stream, message, placement).map_err(|error| error.to_string());
        self.report(message, placement, result.and_then(|()| self.compare(message, placement)));
    }

    pub fn report(&self, message: &Message, placement: Placement, result: Result<(), String>) {
        let Err(problem) = result else { return };
        let &Message { dtype, op, count, .. } = message;
        let world = self.communicator.world_size();
        let plan = self.communicator.plan(count, dtype);
        panic!("rank {} of {world}: {problem}; {count} x {dtype} {op}, {placement:?}, {plan:?}", self.rank());
    }
}

/// The first difference, as `[3] is 01 and not 02; 5 differ`.
pub fn compare(is: &[u8], should_be: &[u8], size: usize) -> Result<(), String> {
    if is == should_be {
        return Ok(());
    }
    let mut pairs = is.chunks(size).zip(should_be.chunks(size)).enumerate();
    let Some((at, (first, wanted))) = pairs.find(|(_, (a, b))| a != b) else {
        return Err(format!(": {} bytes and not {}", is.len(), should_be.len()));
    };
    let hex = |bytes: &[u8]| bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>();
    let different = pairs.filter(|(_, (a, b))| a != b).count() + 1;
    Err(format!("[{at}] is {} and not {}; {different} differ", hex(first), hex(wanted)))
}

/// How a communicator is made.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub algorithm: Option<Algorithm>,
    pub order: Order,
    pub max_bytes: usize,
    pub first_epoch: u32,
    pub graph_registration: bool,
    pub programmatic: bool,
    pub sharing: Option<fast_allreduce::device::cuda::Sharing>,
    /// As of the builder.
    pub check: Option<bool>,
    pub timeout: std::time::Duration,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            algorithm: None,
            order: Order::Fixed,
            max_bytes: 32 << 10,
            first_epoch: 0,
            graph_registration: false,
            programmatic: false,
            sharing: None,
            check: None,
            timeout: crate::gpu::LIMIT,
        }
    }
}

impl Setup {
    pub fn with(algorithm: impl Into<Option<Algorithm>>) -> Self {
        Self { algorithm: algorithm.into(), ..Self::default() }
    }

    pub fn try_build(
        &self,
        context: Arc<CudaContext>,
        bootstrap: impl fast_allreduce::bootstrap::Bootstrap + 'static,
    ) -> fast_allreduce::Result<Communicator<Cuda>> {
        let mut device = Cuda::new(context)?
            .graph_registration(self.graph_registration)
            .programmatic_launch(self.programmatic);
        if let Some(sharing) = self.sharing {
            device = device.sharing(sharing);
        }
        Communicator::builder()
            .algorithm(self.algorithm)
            .order(self.order)
            .max_bytes(self.max_bytes)
            .first_epoch(self.first_epoch)
            .timeout(self.timeout)
            .check(self.check)
            .build(device, bootstrap)
    }
}
