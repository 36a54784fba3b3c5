//! Waits for other threads: barriers and warp instructions.

use cranelift_codegen::ir::{types, InstBuilder, Value};
use std::mem::offset_of;

use super::{Lower, Watch};
use crate::context::{reason, Context, Request};
use crate::errors::LoadResult;
use crate::ir::{Op, Reg, Val};

impl Lower<'_, '_> {
    pub(super) fn together(&mut self, op: &Op) -> LoadResult<()> {
        if !self.function.is_entry {
            return self.error("a called function that waits is not supported");
        }
        match op {
            Op::Bar { id, count, p, d, .. } => {
                let count = count.unwrap_or(Val::Imm(0));
                let (p, negated) = p.unwrap_or((Val::Imm(0), false));
                let args = [self.wide(*id, 4), self.wide(count, 4), self.flag(p, negated)];
                self.wait(reason::BARRIER, &args, *d, None);
            }
            Op::ClusterBar { .. } => self.wait(reason::BARRIER, &[], None, None),
            Op::Warp { mask, a, negated, b, c, d, p, op } => {
                let mask = self.wide(*mask, 4);
                let a = match op {
                    crate::ir::WarpOp::Vote(_) => self.flag(*a, *negated),
                    _ => self.any(*a),
                };
                let args = [mask, a, self.wide(*b, 4), self.wide(*c, 4)];
                self.wait(reason::WARP, &args, *d, *p);
            }
            // PTX does not define which threads run together from one instruction to the next: each runs
            // alone.
            Op::Activemask { d } => {
                let lane = self.load_context(types::I32, offset_of!(Context, lane));
                let one = self.constant(1, 4);
                let own = self.b.ins().ishl(one, lane);
                self.set(*d, own);
            }
            Op::Nanosleep => self.wait(reason::POLL, &[], None, None),
            // With the clock, launches of a stream may overlap.
            Op::Dependents { waits: true } if self.watch == Watch::Clock => {
                self.wait(reason::BARRIER, &[], None, None)
            }
            Op::Dependents { .. } => {}
            _ => return self.error("nothing to wait for"),
        }
        Ok(())
    }

    fn wide(&mut self, val: Val, bytes: u32) -> Value {
        let value = self.val(val, bytes);
        self.b.ins().uextend(types::I64, value)
    }

    fn any(&mut self, val: Val) -> Value {
        let bytes = match val {
            Val::Reg(reg) => self.function.registers[reg as usize].ty.bytes(),
            _ => 8,
        };
        if bytes == 8 {
            self.val(val, 8)
        } else {
            self.wide(val, bytes)
        }
    }

    fn flag(&mut self, p: Val, negated: bool) -> Value {
        let p = self.wide(p, 1);
        if negated {
            self.b.ins().bxor_imm_u(p, 1)
        } else {
            p
        }
    }

    /// Stores the request, stops, and takes the results when it resumes.
    fn wait(&mut self, why: u32, args: &[Value], d: Option<Reg>, p: Option<Reg>) {
        let request = offset_of!(Context, request);
        for (i, &arg) in args.iter().enumerate() {
            self.store_context(arg, request + offset_of!(Request, args) + i * 8);
        }
        let here = self.here();
        self.store_context(here, request + offset_of!(Request, at));
        let mut live = self.flow.live_before(self.function, self.block, self.at + 1);
        if self.function.code[self.at].guard.is_none() {
            [d, p].into_iter().flatten().for_each(|reg| live.remove(reg));
        }
        self.stop(why, &live);
        for (i, reg) in [d, p].into_iter().enumerate() {
            if let Some(reg) = reg {
                let result = self.load_context(types::I64, offset_of!(Context, result) + i * 8);
                let bytes = self.function.registers[reg as usize].ty.bytes();
                let value = if bytes < 8 { self.b.ins().ireduce(super::int(bytes), result) } else { result };
                self.set(reg, value);
            }
        }
    }
}
