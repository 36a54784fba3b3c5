//! What the ranks do together, with the expected results; and where in memory a rank does its part.

use fast_allreduce::{DType, ReduceOp};

use super::oracle;
use super::random::{elements, Random, Values};

/// Which collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    AllReduce(ReduceOp),
}

/// One call of a collective: what each rank puts in, and what must come out.
pub struct Message {
    pub collective: Collective,
    pub dtype: DType,
    /// Elements, as the call counts them.
    pub count: usize,
    /// By rank, as bytes.
    inputs: Vec<Vec<u8>>,
    expected: Vec<u8>,
}

impl Message {
    /// An allreduce.
    pub fn new(
        random: &mut Random,
        (dtype, op): (DType, ReduceOp),
        count: usize,
        world: usize,
        values: Values,
    ) -> Self {
        let inputs: Vec<_> = (0..world).map(|_| elements(random, dtype, count, values)).collect();
        let expected = oracle::reduce(dtype, op, &inputs);
        Self { collective: Collective::AllReduce(op), dtype, count, inputs, expected }
    }

    /// What a rank puts in.
    pub fn input(&self, rank: usize) -> &[u8] {
        &self.inputs[rank]
    }

    /// What must come out at a rank.
    pub fn expected(&self, _rank: usize) -> &[u8] {
        &self.expected
    }

    /// The most bytes that a rank has on one side.
    pub fn bytes(&self) -> usize {
        self.inputs.iter().map(Vec::len).chain([self.expected.len()]).max().unwrap_or(0)
    }
}

/// What memory a side of a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As the system's allocator gives it: on a GPU that of `cuMemAlloc`.
    Plain,
    /// Of a GPU's stream-ordered pool; elsewhere plain.
    Pool,
    /// Registered.
    Registered,
}

/// Where one side of a call lies: the offset in elements from a 64-byte boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub kind: Kind,
    pub offset: usize,
}

impl Place {
    pub const fn plain(offset: usize) -> Self {
        Self { kind: Kind::Plain, offset }
    }

    pub const fn registered(offset: usize) -> Self {
        Self { kind: Kind::Registered, offset }
    }
}

/// Where a rank's input and output lie; `None`: in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    pub input: Place,
    pub output: Option<Place>,
}

impl Placement {
    pub fn random(random: &mut Random) -> Self {
        let mut place = || Place {
            kind: random.pick(&[Kind::Plain, Kind::Pool, Kind::Registered, Kind::Registered]),
            offset: random.pick(&[0, 0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 33]),
        };
        let (input, output) = (place(), place());
        Self { input, output: (!random.one_in(3)).then_some(output) }
    }

    /// One for each rank.
    pub fn randoms(random: &mut Random, world: usize) -> Vec<Self> {
        (0..world).map(|_| Self::random(random)).collect()
    }
}
