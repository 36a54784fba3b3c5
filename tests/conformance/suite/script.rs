//! A script: all that the ranks of a world do, the same for every rank that reads it.

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

/// What is done with the communicators.
#[derive(Default)]
pub struct Act {
    pub messages: Vec<Message>,
    pub steps: Vec<Step>,
}

impl Act {
    /// Every message once on every communicator, one communicator after the other.
    pub fn each_on_each(
        messages: Vec<Message>,
        communicators: usize,
        mut placements: impl FnMut() -> Vec<Placement>,
    ) -> Self {
        let pairs = (0..communicators).flat_map(|one| (0..messages.len()).map(move |message| (one, message)));
        let call = |(communicator, message)| Step::Call { communicator, message, placements: placements() };
        Self { steps: pairs.map(call).collect(), messages }
    }

    /// Leaves one in `thin` of the calls, at another place in each `thin` that follow each other.
    pub fn thinned(mut self, thin: usize, first: usize) -> Self {
        let mut number = first;
        self.steps.retain(|step| {
            number += 1;
            !matches!(step, Step::Call { .. }) || (number + number / thin) % thin == 0
        });
        self
    }
}

/// What the communicators of a script plan: by their numbers.
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

type Write<'a> = dyn Fn(&Plans) -> Act + Sync + 'a;

/// Communicators, and what is done with them, which may depend on what they plan.
pub struct Script<'a> {
    setups: Vec<Setup>,
    write: Box<Write<'a>>,
    /// Written by the first rank of this process that comes, and kept while one plays it.
    act: Mutex<Weak<Act>>,
}

impl<'a> Script<'a> {
    /// `write` must come to the same act on every rank.
    pub fn new(setups: impl IntoIterator<Item = Setup>, write: impl Fn(&Plans) -> Act + Sync + 'a) -> Self {
        Self { setups: setups.into_iter().collect(), write: Box::new(write), act: Mutex::new(Weak::new()) }
    }

    /// Plays the part of some ranks. `join` makes them members of a world.
    pub fn play<R: Ranks>(&self, join: impl FnMut(&Setup) -> R) {
        let mut communicators: Vec<R> = self.setups.iter().map(join).collect();
        let plan = |number: usize, count, dtype| communicators[number].plan(count, dtype);
        let act = self.act(&Plans { pack_bytes: R::PACK_BYTES, plan: &plan });
        let room = room_for(act.messages.iter().map(Message::bytes).max().unwrap_or(0));
        communicators.iter_mut().for_each(|ranks| ranks.make_room(room));
        for step in &act.steps {
            match step {
                Step::Call { communicator, message, placements } => {
                    let (ranks, message) = (&mut communicators[*communicator], &act.messages[*message]);
                    if ranks.supports(message) {
                        check(ranks, message, placements);
                    }
                }
                Step::MakeRoom { communicator } => communicators[*communicator].make_room(room),
            }
        }
    }

    fn act(&self, plans: &Plans) -> Arc<Act> {
        let mut written = self.act.lock().unwrap_or_else(PoisonError::into_inner);
        written.upgrade().unwrap_or_else(|| {
            let act = Arc::new((self.write)(plans));
            *written = Arc::downgrade(&act);
            act
        })
    }
}
