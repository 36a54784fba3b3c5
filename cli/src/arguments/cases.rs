//! The cases of `bench` and `compare`: every requested combination of collective, type, operation and size.

use std::fmt;

use fast_allreduce::{CallKind, DType, ReduceOp};

use super::Bench;
use crate::failure::Failure;

/// One of the combinations.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub kind: CallKind,
    pub dtype: DType,
    pub op: ReduceOp,
    pub root: usize,
    pub bytes: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, dtype, op, bytes, .. } = self;
        write!(f, "{} {bytes} B {dtype}", kind.name())?;
        if kind.reduces() {
            write!(f, " {op}")?;
        }
        Ok(())
    }
}

impl Bench {
    /// Returns the cases in the order of the rows. Collectives that do not reduce have one operation, which is ignored.
    pub fn cases(&self) -> impl Iterator<Item = Case> + '_ {
        let root = self.root.unwrap_or(0);
        self.collectives.0.iter().flat_map(move |&kind| {
            let ops = if kind.reduces() { &self.ops.0[..] } else { &[ReduceOp::Sum] };
            let kinds =
                self.dtypes().into_iter().flat_map(move |dtype| ops.iter().map(move |&op| (dtype, op)));
            kinds.flat_map(move |(dtype, op)| {
                self.sizes().map(move |bytes| Case { kind, dtype, op, root, bytes })
            })
        })
    }

    /// Returns the collective's name, or "all".
    pub fn collective(&self) -> &'static str {
        match self.collectives.0[..] {
            [kind] => kind.name(),
            _ => "all",
        }
    }

    /// Returns whether only allreduces are measured.
    pub fn is_all_reduce(&self) -> bool {
        self.collectives.0 == [CallKind::AllReduce]
    }

    /// Refuses options of other collectives, and operations that a type does not have.
    pub(super) fn validate_collective(&self) -> Result<(), Failure> {
        let name = self.collective();
        let lacks = |&Case { kind, dtype, op, .. }: &Case| kind.reduces() && !op.is_of(dtype);
        if let Some(Case { dtype, op, .. }) = self.cases().find(lacks) {
            let kind = if dtype.is_float() { "integers" } else { "floats" };
            return Err(Failure::Usage(format!(
                "-o {op} is an operation of {kind}: {dtype} does not have it"
            )));
        }
        if self.algorithms.is_some() && !self.is_all_reduce() && !self.is_fused() {
            let reason =
                format!("--algo is an option of all_reduce: {name} has no algorithms to choose from");
            return Err(Failure::Usage(reason));
        }
        if self.root.is_some() && !self.collectives.0.iter().any(|kind| kind.has_root()) {
            let reason =
                format!("--root is an option of broadcast, reduce, gather and scatter: {name} has no root");
            return Err(Failure::Usage(reason));
        }
        Ok(())
    }

    /// Refuses a root that is not a rank.
    pub fn check_root(&self, world_size: usize) -> Result<(), Failure> {
        match self.root {
            Some(root) if root >= world_size => Err(Failure::Usage(format!(
                "--root {root} is not a rank: a world of {world_size} has ranks 0 to {}",
                world_size - 1
            ))),
            _ => Ok(()),
        }
    }
}
