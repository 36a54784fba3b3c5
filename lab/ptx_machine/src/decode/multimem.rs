//! Accesses to multicast addresses.

use super::Decoder;
use crate::errors::LoadResult;
use crate::ir::{Access, AtomOp, Op, Reg, Val};
use crate::parser::Raw;
use crate::types::{Order, Scope, Space, Type};

impl Decoder<'_, '_> {
    pub(super) fn multimem(&mut self) -> LoadResult<Op> {
        let what = self.want("ld_reduce, st or red", |m| {
            Some(match m {
                "ld_reduce" => "ld_reduce",
                "st" => "st",
                "red" => "red",
                _ => return None,
            })
        })?;
        let order = self.take_if(|m| {
            Some(match m {
                "weak" if what != "red" => Order::Weak,
                "relaxed" => Order::Relaxed,
                "acquire" if what == "ld_reduce" => Order::Acquire,
                "release" if what != "ld_reduce" => Order::Release,
                _ => return None,
            })
        });
        let order = order.unwrap_or(if what == "red" { Order::Relaxed } else { Order::Weak });
        let scope = match order {
            Order::Weak => Scope::Sys,
            _ => self.want("a scope", Scope::parse)?,
        };
        self.take("global");
        let op = match what {
            "st" => None,
            _ => Some(self.want("an operation that is supported", |m| match m {
                "add" => Some(AtomOp::Add),
                "and" => Some(AtomOp::And),
                "or" => Some(AtomOp::Or),
                "xor" => Some(AtomOp::Xor),
                _ => None,
            })?),
        };
        let wide = what == "ld_reduce" && op == Some(AtomOp::Add) && self.take("acc::f32");
        let count = self.take_if(|m| match m {
            "v2" => Some(2),
            "v4" => Some(4),
            _ => None,
        });
        let ty = self.ty()?;
        let count = count.unwrap_or(1);
        let vector = matches!(ty, Type::F32 | Type::F16x2 | Type::Bf16x2);
        let scalar =
            matches!(ty, Type::B32 | Type::B64 | Type::U32 | Type::U64 | Type::S32 | Type::S64 | Type::F64);
        let fits = match op {
            _ if wide && !ty.is_packed() => false,
            None => vector || (scalar && count == 1),
            Some(AtomOp::Add) => vector || (scalar && count == 1 && !ty.is_untyped()),
            Some(_) => matches!(ty, Type::B32 | Type::B64) && count == 1,
        };
        if !fits {
            return self.error("not for this type");
        }
        self.count(2..=2)?;
        let access = Access { space: Space::Global, order, scope, ty };
        if what == "ld_reduce" {
            let d: LoadResult<Vec<Option<Reg>>> = self
                .elements(0, count)?
                .iter()
                .map(|raw| match raw {
                    Raw::Sink if count > 1 => Ok(None),
                    Raw::Reg(reg) => self.check_size(*reg, ty, false).map(Some),
                    other => self.error(format!("{other:?} is not a register")),
                })
                .collect();
            let (d, addr) = (d?, self.addr(1, Space::Global)?);
            return Ok(Op::MultimemLd { op: op.unwrap_or(AtomOp::Add), wide, access, d, addr });
        }
        let a: LoadResult<Vec<Val>> =
            self.elements(1, count)?.iter().map(|raw| self.val_of(raw, ty, false)).collect();
        Ok(Op::MultimemSt { op, access, a: a?, addr: self.addr(0, Space::Global)? })
    }
}
