//! What came of one call: by which algorithm, and what is wrong with it.

use std::fmt;
use std::ops::Range;

use fast_allreduce::{Algorithm, CallKind, Communicator, DType, Host};

use crate::harness::check::Promise;
use crate::harness::elements::Elements;
use crate::harness::inputs::Inputs;
use crate::harness::work::Work;

/// What made the call.
pub struct Made {
    pub kind: CallKind,
    /// Of an allreduce.
    pub algorithm: Option<Algorithm>,
}

impl Made {
    pub fn of(communicator: &Communicator<Host>, work: &Work, dtype: DType) -> Self {
        let is_all_reduce = work.kind == CallKind::AllReduce;
        let algorithm = is_all_reduce.then(|| communicator.plan(work.count(), dtype).algorithm);
        Self { kind: work.kind, algorithm }
    }

    /// What its results are held to.
    pub fn promise(&self) -> Promise {
        match self.algorithm {
            Some(algorithm) if !algorithm.is_direct() => Promise::AnyOrder,
            _ => Promise::SameBits,
        }
    }
}

impl fmt::Display for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.algorithm.map_or(self.kind.name(), Algorithm::name))
    }
}

/// What an output is held to.
pub struct Judge<'a> {
    pub inputs: &'a Inputs,
    pub work: &'a Work,
    /// Those of the work's type.
    pub elements: &'a dyn Elements,
    pub promise: Promise,
}

/// What is wrong with a result.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    wrong: u64,
    first: usize,
    count: usize,
    overwritten: u64,
    changed: u64,
}

impl Found {
    /// `None` if nothing is wrong. Elements before the first wrong one are right.
    pub fn new(
        wrong: u64,
        first: Option<usize>,
        count: usize,
        overwritten: u64,
        changed: u64,
    ) -> Option<Self> {
        let is_right = (wrong, overwritten, changed) == (0, 0, 0);
        (!is_right).then_some(Self { wrong, first: first.unwrap_or(0), count, overwritten, changed })
    }
}

impl Judge<'_> {
    /// What is wrong with this output, beside which so many bytes are overwritten, and of whose call so many elements of the input
    /// have changed.
    pub fn find(&self, output: &[u8], overwritten: u64, changed: u64) -> Option<Found> {
        let count = output.len() / self.work.dtype.size();
        let count_wrong = |count| {
            let output = &output[..self.work.bytes(count)];
            self.elements.judge(self.inputs, self.work, output, self.promise).wrong
        };
        let wrong = count_wrong(count);
        if wrong == 0 {
            return Found::new(0, None, count, overwritten, changed);
        }
        let (mut right, mut end) = (0, count);
        while right < end {
            let middle = right + (end - right) / 2;
            match count_wrong(middle + 1) {
                0 => right = middle + 1,
                _ => end = middle,
            }
        }
        Found::new(wrong, Some(right), count, overwritten, changed)
    }
}

/// Some of the work's elements. None are nowhere.
pub fn part<'a>(memory: &'a mut [u8], work: &Work, range: &Range<usize>) -> &'a mut [u8] {
    match range.is_empty() {
        true => &mut [],
        false => &mut memory[work.bytes(range.start)..work.bytes(range.end)],
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wrong, first, count, overwritten, changed } = self;
        if *wrong > 0 {
            write!(f, "{wrong} of {count} elements are wrong, the first is number {first}")?;
        } else {
            write!(f, "all {count} elements are right")?;
        }
        if *overwritten > 0 {
            write!(f, "; {overwritten} bytes beside the output were written")?;
        }
        if *changed > 0 {
            write!(f, "; {changed} elements of or bytes beside the input have changed")?;
        }
        Ok(())
    }
}
