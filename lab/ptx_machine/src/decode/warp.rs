//! Instructions that involve several threads: barriers, votes, shuffles.

use super::Decoder;
use crate::errors::LoadResult;
use crate::ir::{BarKind, BinOp, Op, Reg, ShflKind, Val, VoteKind, WarpOp};
use crate::parser::Raw;
use crate::types::Type;

const ALL: Val = Val::Imm(0xFFFF_FFFF);
const NONE: Val = Val::Imm(0);

impl Decoder<'_, '_> {
    pub(super) fn warp(&mut self) -> LoadResult<Op> {
        match self.name {
            "bar" | "barrier" => self.barrier(),
            "vote" => self.vote(),
            "shfl" => self.shuffle(),
            "match" => self.matches(),
            "redux" => self.reduce(),
            "elect" => {
                self.take_sync()?;
                self.count(2..=2)?;
                let (d, p) = self.pair(0)?;
                Ok(Op::Warp {
                    op: WarpOp::Elect,
                    mask: self.val(1, Type::B32)?,
                    a: NONE,
                    negated: false,
                    b: NONE,
                    c: NONE,
                    d,
                    p,
                })
            }
            "activemask" => {
                let ty = self.ty_of(|ty| ty == Type::B32)?;
                self.count(1..=1)?;
                Ok(Op::Activemask { d: self.reg(0, ty)? })
            }
            "nanosleep" => {
                let ty = self.ty_of(|ty| ty == Type::U32)?;
                self.count(1..=1)?;
                self.val(0, ty)?;
                Ok(Op::Nanosleep)
            }
            // Launches of a stream are sequential here: the previous launch has ended.
            _ => {
                let waits = self.want("wait or launch_dependents", |m| match m {
                    "wait" => Some(true),
                    "launch_dependents" => Some(false),
                    _ => None,
                })?;
                self.count(0..=0)?;
                Ok(Op::Dependents { waits })
            }
        }
    }

    fn take_sync(&mut self) -> LoadResult<()> {
        self.want("sync", |m| (m == "sync").then_some(()))
    }

    /// Parses `%r|%p`, or `%r` alone.
    fn pair(&self, i: usize) -> LoadResult<(Option<Reg>, Option<Reg>)> {
        match self.operands[i] {
            Raw::Pair(d, p) => {
                if let Some(d) = d {
                    self.check_size(d, Type::B32, false)?;
                }
                if let Some(p) = p {
                    self.check_size(p, Type::Pred, false)?;
                }
                Ok((d, p))
            }
            _ => Ok((Some(self.reg(i, Type::B32)?), None)),
        }
    }

    fn barrier(&mut self) -> LoadResult<Op> {
        if self.name == "bar" && self.take("warp") {
            self.take_sync()?;
            self.count(1..=1)?;
            let mask = self.val(0, Type::B32)?;
            return Ok(Op::Warp {
                op: WarpOp::Sync,
                mask,
                a: NONE,
                negated: false,
                b: NONE,
                c: NONE,
                d: None,
                p: None,
            });
        }
        if self.name == "barrier" && self.take("cluster") {
            return self.cluster_barrier();
        }
        self.take("cta");
        if self.take("red") {
            return self.barrier_reduction();
        }
        let kind = self.want("sync, arrive or red", |m| match m {
            "sync" => Some(BarKind::Sync),
            "arrive" => Some(BarKind::Arrive),
            _ => None,
        })?;
        let aligned = self.name == "bar" || self.take("aligned");
        self.count(1..=2)?;
        let count = if self.operands.len() == 2 { Some(self.val(1, Type::B32)?) } else { None };
        if kind == BarKind::Arrive && count.is_none() {
            return self.error("a number of threads was expected");
        }
        Ok(Op::Bar { kind, aligned, id: self.val(0, Type::B32)?, count, p: None, d: None })
    }

    fn cluster_barrier(&mut self) -> LoadResult<Op> {
        let waits = self.want("arrive or wait", |m| match m {
            "arrive" => Some(false),
            "wait" => Some(true),
            _ => None,
        })?;
        // An arrival releases, and a wait acquires, unless the arrival is relaxed.
        let relaxed = !waits && self.take("relaxed");
        if !relaxed {
            self.take(if waits { "acquire" } else { "release" });
        }
        let aligned = self.take("aligned");
        self.count(0..=0)?;
        Ok(Op::ClusterBar { waits, releases: !waits && !relaxed, aligned })
    }

    fn barrier_reduction(&mut self) -> LoadResult<Op> {
        let kind = self.want("popc, and or or", |m| match m {
            "popc" => Some(BarKind::RedPopc),
            "and" => Some(BarKind::RedAnd),
            "or" => Some(BarKind::RedOr),
            _ => None,
        })?;
        let aligned = self.name == "bar" || self.take("aligned");
        let ty = self.ty_of(|ty| ty == if kind == BarKind::RedPopc { Type::U32 } else { Type::Pred })?;
        self.count(3..=4)?;
        let last = self.operands.len() - 1;
        let count = if last == 3 { Some(self.val(2, Type::B32)?) } else { None };
        let d = Some(self.reg(0, ty)?);
        Ok(Op::Bar { kind, aligned, id: self.val(1, Type::B32)?, count, p: Some(self.condition(last)?), d })
    }

    fn vote(&mut self) -> LoadResult<Op> {
        self.take_sync()?;
        let kind = self.want("all, any, uni or ballot", |m| {
            Some(match m {
                "all" => VoteKind::All,
                "any" => VoteKind::Any,
                "uni" => VoteKind::Uni,
                "ballot" => VoteKind::Ballot,
                _ => return None,
            })
        })?;
        let ballot = kind == VoteKind::Ballot;
        let ty = self.ty_of(|ty| ty == if ballot { Type::B32 } else { Type::Pred })?;
        self.count(3..=3)?;
        let (a, negated) = self.condition(1)?;
        let reg = Some(self.reg(0, ty)?);
        let (d, p) = if ballot { (reg, None) } else { (None, reg) };
        Ok(Op::Warp {
            op: WarpOp::Vote(kind),
            mask: self.val(2, Type::B32)?,
            a,
            negated,
            b: NONE,
            c: NONE,
            d,
            p,
        })
    }

    fn shuffle(&mut self) -> LoadResult<Op> {
        self.take_sync()?;
        let kind = self.want("up, down, bfly or idx", |m| {
            Some(match m {
                "up" => ShflKind::Up,
                "down" => ShflKind::Down,
                "bfly" => ShflKind::Bfly,
                "idx" => ShflKind::Idx,
                _ => return None,
            })
        })?;
        let ty = self.ty_of(|ty| ty == Type::B32)?;
        self.count(5..=5)?;
        let (d, p) = self.pair(0)?;
        let (a, b, c) = (self.val(1, ty)?, self.val(2, ty)?, self.val(3, ty)?);
        Ok(Op::Warp { op: WarpOp::Shfl(kind), mask: self.val(4, ty)?, a, negated: false, b, c, d, p })
    }

    fn matches(&mut self) -> LoadResult<Op> {
        let any = self.take("any");
        if !any {
            self.want("any or all", |m| (m == "all").then_some(()))?;
        }
        self.take_sync()?;
        let ty = self.ty_of(|ty| matches!(ty, Type::B32 | Type::B64))?;
        self.count(3..=3)?;
        let (d, p) = self.pair(0)?;
        let op = if any { WarpOp::MatchAny } else { WarpOp::MatchAll };
        let mask = self.val(2, Type::B32)?;
        Ok(Op::Warp { op, mask, a: self.val(1, ty)?, negated: false, b: NONE, c: NONE, d, p })
    }

    fn reduce(&mut self) -> LoadResult<Op> {
        self.take_sync()?;
        let op = self.want("an operation", |m| {
            Some(match m {
                "add" => BinOp::Add,
                "min" => BinOp::Min,
                "max" => BinOp::Max,
                "and" => BinOp::And,
                "or" => BinOp::Or,
                "xor" => BinOp::Xor,
                _ => return None,
            })
        })?;
        let bits = matches!(op, BinOp::And | BinOp::Or | BinOp::Xor);
        let ty = self.ty_of(|ty| if bits { ty == Type::B32 } else { matches!(ty, Type::S32 | Type::U32) })?;
        self.count(3..=3)?;
        let op = WarpOp::Redux(op, ty.is_signed());
        let d = Some(self.reg(0, ty)?);
        Ok(Op::Warp {
            op,
            mask: self.val(2, Type::B32)?,
            a: self.val(1, ty)?,
            negated: false,
            b: NONE,
            c: ALL,
            d,
            p: None,
        })
    }
}
