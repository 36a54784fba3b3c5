//! A message with its expected result, and a rank's memory to put it in: at any offset, private or registered, between canaries.

use std::ffi::c_void;

use fast_allreduce::{Buffer, Communicator, DType, Host, ReduceOp};

use crate::oracle;
use crate::random::{elements, Random, Values};

/// What the ranks reduce together.
pub struct Message {
    pub dtype: DType,
    pub op: ReduceOp,
    pub count: usize,
    /// By rank, as bytes.
    inputs: Vec<Vec<u8>>,
    expected: Vec<u8>,
}

impl Message {
    pub fn new(
        random: &mut Random,
        (dtype, op): (DType, ReduceOp),
        count: usize,
        world: usize,
        values: Values,
    ) -> Self {
        let inputs: Vec<_> = (0..world).map(|_| elements(random, dtype, count, values)).collect();
        let expected = oracle::reduce(dtype, op, &inputs);
        Self { dtype, op, count, inputs, expected }
    }

    pub fn bytes(&self) -> usize {
        self.expected.len()
    }
}

/// Where one side of a call lies: the offset in elements from a 64-byte boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Private(usize),
    Registered(usize),
}

/// Where a rank's input and output lie; `None`: in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    pub input: Place,
    pub output: Option<Place>,
}

impl Placement {
    /// Private memory, both sides aligned.
    pub const PLAIN: Self = Self { input: Place::Private(0), output: Some(Place::Private(0)) };

    pub fn random(random: &mut Random) -> Self {
        let mut place = || {
            let offset = random.pick(&[0, 0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 33]);
            if random.one_in(2) {
                Place::Registered(offset)
            } else {
                Place::Private(offset)
            }
        };
        let (input, output) = (place(), place());
        Self { input, output: (!random.one_in(3)).then_some(output) }
    }
}

/// Bytes on each side of what a call may touch that are checked to stay as they are.
const GUARD: usize = 128;
/// Room for offsets: 63 elements of 8 bytes.
const OFFSETS: usize = 512;
const CANARY: u8 = 0xA5;

/// Private memory that begins on a 64-byte boundary.
struct Private(Vec<[u64; 8]>, usize);

impl Private {
    fn new(bytes: usize) -> Self {
        let lines = Vec::from_iter(std::iter::repeat_n([0; 8], bytes.div_ceil(64) + 1));
        let skip = lines.as_ptr().cast::<u8>().align_offset(64);
        Self(lines, skip)
    }

    fn base(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast::<u8>().wrapping_add(self.1)
    }
}

/// A rank's communicator with memory for messages of up to so many bytes.
pub struct Seat {
    pub communicator: Communicator<Host>,
    private: [Private; 2],
    registered: Option<[Buffer<u8>; 2]>,
    room: usize,
}

impl Seat {
    /// Without registered buffers.
    pub fn new(communicator: Communicator<Host>, bytes: usize) -> Self {
        let room = bytes + OFFSETS + 2 * GUARD;
        Self { communicator, private: [Private::new(room), Private::new(room)], registered: None, room }
    }

    /// Allocates the registered buffers, again if there are some. Collective.
    pub fn register(&mut self) {
        self.registered = None;
        self.registered = Some([(); 2].map(|()| self.communicator.alloc::<u8>(self.room).unwrap()));
    }

    pub fn registered(communicator: Communicator<Host>, bytes: usize) -> Self {
        let mut seat = Self::new(communicator, bytes);
        seat.register();
        seat
    }

    /// Start of `place` for elements of `size` bytes, in the first or the second memory of its kind.
    fn address(&mut self, place: Place, which: usize, size: usize, bytes: usize) -> *mut u8 {
        let (base, offset) = match place {
            Place::Private(offset) => (self.private[which].base(), offset),
            Place::Registered(offset) => {
                let buffers = self.registered.as_mut().expect("Seat::register comes first");
                (buffers[which].as_mut_ptr(), offset)
            }
        };
        let at = GUARD + offset * size;
        assert!(at + bytes + GUARD <= self.room, "the seat is too small for {bytes} bytes at {offset}");
        base.wrapping_add(at)
    }

    /// Reduces this rank's part of `message` and compares with what is expected.
    pub fn check(&mut self, message: &Message, placement: Placement) {
        let result = self.reduce(message, placement);
        let context = || {
            let Message { dtype, op, count, .. } = message;
            let (rank, world) = (self.communicator.rank(), self.communicator.world_size());
            let plan = self.communicator.plan(*count, *dtype);
            format!("rank {rank} of {world}: {count} x {dtype} {op}, {placement:?}, {plan:?}")
        };
        if let Err(problem) = result {
            panic!("{problem}; {}", context());
        }
    }

    fn reduce(&mut self, message: &Message, placement: Placement) -> Result<(), String> {
        let &Message { dtype, op, count, .. } = message;
        let (size, bytes) = (dtype.size(), message.bytes());
        let sent = &message.inputs[self.communicator.rank()];
        let input = self.address(placement.input, 0, size, bytes);
        let output = placement.output.map_or(input, |place| self.address(place, 1, size, bytes));
        // SAFETY: `address` leaves GUARD bytes of the seat's own memory before and behind.
        let (input_room, output_room) = unsafe {
            let room = |at: *mut u8| std::slice::from_raw_parts_mut(at.sub(GUARD), bytes + 2 * GUARD);
            (room(input), (input != output).then(|| room(output)))
        };
        input_room.fill(CANARY);
        input_room[GUARD..GUARD + bytes].copy_from_slice(sent);
        if let Some(room) = output_room {
            room.fill(CANARY);
            // Wrong in every byte.
            room[GUARD..GUARD + bytes].iter_mut().zip(&message.expected).for_each(|(at, byte)| *at = !byte);
        }
        // SAFETY: as above; both are aligned to the element and nothing else uses them.
        unsafe { self.communicator.all_reduce_raw(input.cast::<c_void>(), output.cast(), count, dtype, op) }
            .map_err(|error| error.to_string())?;
        // SAFETY: as above.
        let after = |at: *mut u8| unsafe { std::slice::from_raw_parts(at.sub(GUARD), bytes + 2 * GUARD) };
        compare("the output", &after(output)[GUARD..GUARD + bytes], &message.expected, size)?;
        if input != output {
            compare("the input afterwards", &after(input)[GUARD..GUARD + bytes], sent, size)?;
        }
        for room in [after(input), after(output)] {
            compare("what is before", &room[..GUARD], &[CANARY; GUARD], 1)?;
            compare("what is behind", &room[GUARD + bytes..], &[CANARY; GUARD], 1)?;
        }
        Ok(())
    }
}

fn compare(what: &str, is: &[u8], should_be: &[u8], size: usize) -> Result<(), String> {
    if is == should_be {
        return Ok(());
    }
    let mut pairs = is.chunks(size).zip(should_be.chunks(size)).enumerate();
    let (at, (is, should_be)) = pairs.find(|(_, (a, b))| a != b).expect("they differ");
    let hex = |bytes: &[u8]| bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>();
    let different = pairs.filter(|(_, (a, b))| a != b).count() + 1;
    Err(format!("{what}: [{at}] is {} and not {}; {different} differ", hex(is), hex(should_be)))
}
