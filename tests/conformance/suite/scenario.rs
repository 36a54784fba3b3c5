//! A scenario: all that the ranks of a world do, the same for every rank that reads it.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use fast_allreduce::{Algorithm, DType, Plan, ReduceOp};

use super::launch::LIMIT;
use super::message::{Message, Placement};
use super::order::Order;
use super::ranks::{check, room_for, Ranks};

/// How a communicator is made.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub algorithm: Option<Algorithm>,
    /// Where none is given: each has its sizes, and small messages have large grids and pieces. Of the host.
    pub every_algorithm: bool,
    pub max_bytes: usize,
    /// Worker threads of the host; GPUs plan their grids.
    pub workers: usize,
    pub first_epoch: u32,
    pub timeout: Duration,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            algorithm: None,
            every_algorithm: false,
            max_bytes: 64 << 10,
            workers: 1,
            first_epoch: 0,
            timeout: LIMIT / 2,
        }
    }
}

impl Setup {
    pub fn with(algorithm: impl Into<Option<Algorithm>>) -> Self {
        Self { algorithm: algorithm.into(), ..Self::default() }
    }
}

/// One thing that all ranks do. Communicators and messages by number.
pub enum Step {
    Call {
        communicator: usize,
        message: usize,
        placements: Vec<Placement>,
    },
    /// Drops all memory to call from and makes it anew.
    MakeRoom {
        communicator: usize,
    },
}

/// How many steps a sequence must have. Whoever writes it tells, and counts no list that the steps are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    Exactly(usize),
    /// Where it depends on what is planned.
    AtLeast(usize),
}

impl Expected {
    fn thinned(self, thin: usize) -> Self {
        match self {
            Self::Exactly(steps) => Self::Exactly(steps.div_ceil(thin)),
            Self::AtLeast(steps) => Self::AtLeast(steps.div_ceil(thin)),
        }
    }

    fn is_met_by(self, made: usize) -> bool {
        match self {
            Self::Exactly(steps) => made == steps,
            Self::AtLeast(steps) => made >= steps,
        }
    }
}

impl From<usize> for Expected {
    fn from(steps: usize) -> Self {
        Self::Exactly(steps)
    }
}

/// What is done with the communicators.
pub struct Sequence {
    pub messages: Vec<Message>,
    steps: Vec<Step>,
    expected: Expected,
}

impl Sequence {
    pub fn new(expected: impl Into<Expected>, messages: Vec<Message>, steps: Vec<Step>) -> Self {
        Self { messages, steps, expected: expected.into() }
    }

    /// Every message once on every communicator, one communicator after the other.
    pub fn each_on_each(
        expected: impl Into<Expected>,
        messages: Vec<Message>,
        communicators: usize,
        mut placements: impl FnMut() -> Vec<Placement>,
    ) -> Self {
        let pairs = (0..communicators).flat_map(|one| (0..messages.len()).map(move |message| (one, message)));
        let call = |(communicator, message)| Step::Call { communicator, message, placements: placements() };
        let steps = pairs.map(call).collect();
        Self::new(expected, messages, steps)
    }

    /// Leaves one of each `thin` steps that follow each other, and of the rest at the end: each time at the next place.
    pub fn thinned(mut self, thin: usize, first: usize) -> Self {
        let (all, mut numbers) = (self.steps.len(), 0..);
        self.steps.retain(|_| {
            let number = numbers.next().expect("endless");
            let (group, place) = (number / thin, number % thin);
            place == (group + first) % thin.min(all - group * thin)
        });
        self.expected = self.expected.thinned(thin);
        self
    }
}

/// What the communicators of a scenario plan: by their numbers.
pub struct Plans<'a> {
    /// Bytes of the device's unit of work.
    pub pack_bytes: usize,
    plan: &'a dyn Fn(usize, usize, DType) -> Plan,
}

impl Plans<'_> {
    pub fn plan(&self, communicator: usize, count: usize, dtype: DType) -> Plan {
        (self.plan)(communicator, count, dtype)
    }

    /// The order in which an allreduce combines the ranks' elements.
    pub fn order(&self, communicator: usize, kind: (DType, ReduceOp), count: usize) -> Order {
        Order::of(&self.plan(communicator, count, kind.0), kind, self.pack_bytes)
    }
}

type Write<'a> = dyn Fn(&Plans) -> Sequence + Sync + 'a;

/// Communicators, and what is done with them, which may depend on what they plan.
pub struct Scenario<'a> {
    setups: Vec<Setup>,
    write: Box<Write<'a>>,
    /// Written by the first rank of this process that comes, and kept while one runs it.
    sequence: Mutex<Weak<Sequence>>,
}

impl<'a> Scenario<'a> {
    /// `write` must come to the same sequence on every rank.
    pub fn new(
        setups: impl IntoIterator<Item = Setup>,
        write: impl Fn(&Plans) -> Sequence + Sync + 'a,
    ) -> Self {
        Self {
            setups: setups.into_iter().collect(),
            write: Box::new(write),
            sequence: Mutex::new(Weak::new()),
        }
    }

    /// Runs the part of some ranks. `join` makes them members of a world.
    ///
    /// # Panics
    ///
    /// If anything is not as expected: what came of a call, or the number of steps.
    pub fn run<R: Ranks>(&self, join: impl FnMut(&Setup) -> R) {
        let mut communicators: Vec<R> = self.setups.iter().map(join).collect();
        let plan = |number: usize, count, dtype| communicators[number].plan(count, dtype);
        let sequence = self.sequence(&Plans { pack_bytes: R::PACK_BYTES, plan: &plan });
        let room = room_for(sequence.messages.iter().map(Message::bytes).max().unwrap_or(0));
        communicators.iter_mut().for_each(|ranks| ranks.make_room(room));
        let mut made = 0;
        for step in &sequence.steps {
            match step {
                Step::Call { communicator, message, placements } => {
                    check(&mut communicators[*communicator], &sequence.messages[*message], placements);
                }
                Step::MakeRoom { communicator } => communicators[*communicator].make_room(room),
            }
            made += 1;
        }
        assert!(
            sequence.expected.is_met_by(made),
            "{made} steps were made, expected: {:?}",
            sequence.expected
        );
    }

    fn sequence(&self, plans: &Plans) -> Arc<Sequence> {
        let mut written = self.sequence.lock().unwrap_or_else(PoisonError::into_inner);
        written.upgrade().unwrap_or_else(|| {
            let sequence = Arc::new((self.write)(plans));
            *written = Arc::downgrade(&sequence);
            sequence
        })
    }
}
