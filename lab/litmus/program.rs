//! A litmus program: the threads' instructions, and the questions about its final states.

use std::fmt;

/// The content of a word: data and, in a packet's word, the tag stored with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value {
    pub data: i64,
    pub tag: Option<i64>,
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tag {
            None => write!(f, "{}", self.data),
            Some(tag) => write!(f, "{}@{tag}", self.data),
        }
    }
}

/// A pattern for values: `10`, `10@1`, `*@1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    pub data: Option<i64>,
    pub tag: Option<i64>,
}

impl Pattern {
    pub fn matches(self, value: Value) -> bool {
        self.data.is_none_or(|data| data == value.data) && self.tag.is_none_or(|tag| Some(tag) == value.tag)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    Cta,
    Gpu,
    Sys,
}

/// The strength of an access; a release load or an acquire store does not parse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    Weak,
    Relaxed(Scope),
    /// Release for a store, acquire for a load.
    Synchronizing(Scope),
}

impl Strength {
    pub fn scope(self) -> Option<Scope> {
        match self {
            Strength::Weak => None,
            Strength::Relaxed(scope) | Strength::Synchronizing(scope) => Some(scope),
        }
    }
}

/// The value that a store writes: the sum of constants and registers, and the tag of a packet's word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expression {
    pub constant: i64,
    pub registers: Vec<String>,
    pub tag: Option<i64>,
}

/// One scalar access. A vector access is several, in no order (PTX ISA 8.2.4), and so is one through a
/// multicast address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    pub location: String,
    /// Whether the access uses the location's second alias.
    pub alias: bool,
    pub value: Expression,
}

/// Like [`Store`]. With `until`, the load is a poll: the thread continues only after loading such a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    pub location: String,
    pub alias: bool,
    pub register: String,
    pub until: Option<Pattern>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Instruction {
    Store(Strength, Vec<Store>),
    Load(Strength, Vec<Load>),
    /// fence.sc if `sc`, else fence.acq_rel.
    Fence {
        sc: bool,
        scope: Scope,
    },
    /// fence.proxy.alias
    AliasFence,
    /// bar.sync (or bar.red) of all threads of the CTA.
    Barrier,
    /// The kernel ends, and the next one in the rank's stream begins.
    Launch,
    /// A placeholder for variants.
    Nop,
}

impl Instruction {
    /// Returns whether the thread may stay in the instruction for ever.
    pub fn polls(&self) -> bool {
        matches!(self, Instruction::Load(_, loads) if loads.iter().any(|load| load.until.is_some()))
    }
}

#[derive(Clone, Debug)]
pub struct Thread {
    pub name: String,
    pub rank: usize,
    pub cta: usize,
    /// Labels are the names by which variants replace instructions.
    pub body: Vec<(Option<String>, Instruction)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Register { thread: String, register: String },
    Memory(String),
}

/// `place == pattern`, or `!=`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Atom {
    pub place: Place,
    pub equal: bool,
    pub pattern: Pattern,
}

/// A disjunction of conjunctions.
pub type Condition = Vec<Vec<Atom>>;

#[derive(Clone, Debug)]
pub struct Program {
    pub name: String,
    /// GPU of each rank.
    pub gpus: Vec<usize>,
    pub threads: Vec<Thread>,
    /// Initial values of words that are not 0.
    pub initial: Vec<(String, Value)>,
    pub outcome: Condition,
    /// Whether No-Thin-Air counts the dependency of later instructions on a poll.
    pub control_dependencies: bool,
}

/// The questions about a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Some execution ends in the `outcome`.
    Outcome,
    /// Some execution has a data race (PTX ISA 8.7.1).
    Race,
    /// In some execution a thread polls for ever: all others are done or poll too, and no more writes come.
    Hang,
}

impl Question {
    pub const ALL: [Question; 3] = [Question::Outcome, Question::Race, Question::Hang];

    pub fn name(self) -> &'static str {
        match self {
            Question::Outcome => "outcome",
            Question::Race => "race",
            Question::Hang => "hang",
        }
    }
}

/// A program and the expected answers.
#[derive(Clone, Debug)]
pub struct Case {
    pub program: Program,
    /// `true`: sometimes, in some execution. `false`: never.
    pub expect: Vec<(Question, bool)>,
}
