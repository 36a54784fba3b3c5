//! Branches, calls and ends of functions.

use super::{Decoded, Decoder};
use crate::errors::LoadResult;
use crate::ir::Op;
use crate::parser::Raw;
use crate::types::Type;

impl<'a> Decoder<'_, 'a> {
    pub(super) fn control(&mut self) -> LoadResult<Decoded<'a>> {
        // A promise of convergence, which the machine does not rely on.
        if self.name != "brx" {
            self.take("uni");
        }
        match (self.name, self.operands) {
            ("bra", &[Raw::Name(label, 0)]) => Ok(Decoded::Branch(label)),
            ("brx", [_, Raw::Name(..)]) => {
                self.want("idx", |m| (m == "idx").then_some(()))?;
                self.take("uni");
                Ok(Decoded::Switch(self.val(0, Type::U32)?))
            }
            ("call", operands) => self.call(operands),
            ("ret", []) => Ok(Decoded::Op(Op::Ret)),
            ("exit", []) => Ok(Decoded::Op(Op::Exit)),
            ("trap", []) => Ok(Decoded::Op(Op::Trap)),
            _ => self.error("not with these operands"),
        }
    }

    fn call(&self, operands: &[Raw<'a>]) -> LoadResult<Decoded<'a>> {
        let names = |list: &[Raw<'a>]| -> Option<Vec<&'a str>> {
            list.iter().map(|raw| if let &Raw::Name(name, 0) = raw { Some(name) } else { None }).collect()
        };
        let (returns, name, args) = match operands {
            [Raw::List(returns), Raw::Name(name, 0), Raw::List(args)] => (names(returns), *name, names(args)),
            [Raw::List(returns), Raw::Name(name, 0)] => (names(returns), *name, Some(Vec::new())),
            [Raw::Name(name, 0), Raw::List(args)] => (Some(Vec::new()), *name, names(args)),
            [Raw::Name(name, 0)] => (Some(Vec::new()), *name, Some(Vec::new())),
            _ => return self.error("unknown form of a call"),
        };
        match (returns, args) {
            (Some(returns), Some(args)) => Ok(Decoded::Call { returns, name, args }),
            _ => self.error("arguments of a call are .param variables"),
        }
    }
}
