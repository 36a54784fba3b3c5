//! Checks the results of one call, and says which algorithm made it.

use std::fmt;

use fast_allreduce::{Algorithm, CallKind, Communicator, Host};

use crate::harness::check::Promise;
use crate::harness::elements::Elements;
use crate::harness::inputs::Inputs;
use crate::harness::work::Work;

/// The kind of a call, and its algorithm.
pub struct Label {
    pub kind: CallKind,
    /// `Some` for allreduces.
    pub algorithm: Option<Algorithm>,
}

impl Label {
    pub fn of(communicator: &Communicator<Host>, work: &Work) -> Self {
        let is_all_reduce = work.kind == CallKind::AllReduce;
        let algorithm = is_all_reduce.then(|| communicator.plan(work.count(), work.dtype).algorithm);
        Self { kind: work.kind, algorithm }
    }

    /// Returns the promise that the results are checked against.
    pub fn promise(&self) -> Promise {
        match self.algorithm {
            Some(algorithm) if !algorithm.is_direct() => Promise::AnyOrder,
            _ => Promise::SameBits,
        }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.algorithm.map_or(self.kind.name(), Algorithm::name))
    }
}

/// The reference that an output is checked against.
pub struct Checker<'a> {
    pub inputs: &'a Inputs,
    pub work: &'a Work,
    pub elements: &'a dyn Elements,
    pub promise: Promise,
}

/// The defects of a result.
#[derive(Debug, PartialEq, Eq)]
pub struct Defects {
    wrong: u64,
    first: usize,
    count: usize,
    overwritten: u64,
    changed: u64,
}

impl Defects {
    /// Returns `None` if all three numbers are 0. `first` is the first wrong element.
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

impl Checker<'_> {
    /// Checks an output. `overwritten` bytes around the buffers and `changed` elements of the input are defects as
    /// well.
    pub fn check(&self, output: &[u8], overwritten: u64, changed: u64) -> Option<Defects> {
        let count = output.len() / self.work.dtype.size();
        let count_wrong = |count| {
            let output = &output[..self.work.bytes(count)];
            self.elements.judge(self.inputs, self.work, output, self.promise).wrong
        };
        let wrong = count_wrong(count);
        if wrong == 0 {
            return Defects::new(0, None, count, overwritten, changed);
        }
        let (mut right, mut end) = (0, count);
        while right < end {
            let middle = right + (end - right) / 2;
            match count_wrong(middle + 1) {
                0 => right = middle + 1,
                _ => end = middle,
            }
        }
        Defects::new(wrong, Some(right), count, overwritten, changed)
    }
}

impl fmt::Display for Defects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wrong, first, count, overwritten, changed } = self;
        if *wrong > 0 {
            write!(f, "{wrong} of {count} elements are wrong, the first is number {first}")?;
        } else {
            write!(f, "all {count} elements are right")?;
        }
        if *overwritten > 0 {
            write!(f, "; {overwritten} bytes around the buffers were written")?;
        }
        if *changed > 0 {
            write!(f, "; {changed} elements of the input have changed")?;
        }
        Ok(())
    }
}
