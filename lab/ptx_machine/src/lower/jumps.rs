//! Ends of blocks, and places where a thread stops.

use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{types, Block, BlockArg, InstBuilder};
use std::mem::offset_of;

use super::{flags, Lower, FRAME_HEAD};
use crate::context::{reason, Context};
use crate::errors::{Fault, LoadResult};
use crate::flow::analysis::{Back, Set};
use crate::ir::{Instr, Label, Op, Reg, Val};
use crate::runtime::what;

impl Lower<'_, '_> {
    pub(super) fn guarded(&mut self, instr: &Instr, (p, negated): (Reg, bool)) -> LoadResult<()> {
        let (taken, after) = (self.b.create_block(), self.b.create_block());
        let p = self.get(p);
        let (yes, no) = if negated { (after, taken) } else { (taken, after) };
        self.b.ins().brif(p, yes, &[], no, &[]);
        self.b.switch_to_block(taken);
        self.cover(self.at, self.at + 1);
        self.tell_clock(what::TAKEN);
        self.instr(instr)?;
        self.b.ins().jump(after, &[]);
        self.b.switch_to_block(after);
        Ok(())
    }

    /// Lowers the last instruction of a block.
    pub(super) fn end(&mut self, instr: &Instr) -> LoadResult<()> {
        let next = &self.flow.blocks[self.block].next;
        match (&instr.op, instr.guard) {
            (Op::Bra { .. }, None) => self.jump(next[0]),
            (Op::Bra { .. }, Some((p, negated))) => {
                let p = self.get(p);
                let (falls, jumps) = (self.edge(next[0]), self.edge(next[1]));
                let (yes, no) = if negated { (falls, jumps) } else { (jumps, falls) };
                self.b.ins().brif(p, yes, &[], no, &[]);
                self.fill_edges(&[(falls, next[0]), (jumps, next[1])]);
            }
            (Op::BrxIdx { index, to }, None) => self.switch(*index, to),
            (op, None) => self.leave(op),
            (Op::BrxIdx { .. }, Some(_)) => return self.error("a guarded brx.idx is not supported"),
            (op, Some((p, negated))) => {
                let p = self.get(p);
                let (leaves, falls) = (self.b.create_block(), self.edge(next[0]));
                let (yes, no) = if negated { (falls, leaves) } else { (leaves, falls) };
                self.b.ins().brif(p, yes, &[], no, &[]);
                self.b.switch_to_block(leaves);
                self.cover(self.at, self.at + 1);
                self.leave(op);
                self.fill_edges(&[(falls, next[0])]);
            }
        }
        Ok(())
    }

    fn switch(&mut self, index: Val, to: &[Label]) {
        let index = self.val(index, 4);
        let next = self.flow.blocks[self.block].next.clone();
        let edges: Vec<Block> = next.iter().map(|&to| self.edge(to)).collect();
        let bad = self.b.create_block();
        let mut switch = cranelift_frontend::Switch::new();
        (0..to.len()).for_each(|i| switch.set_entry(i as u128, edges[i]));
        switch.emit(&mut self.b, index, bad);
        self.b.switch_to_block(bad);
        let no = self.b.ins().iconst(types::I8, 0);
        self.or_fault(no, Fault::Trap);
        self.b.ins().jump(self.trap, &[]);
        let edges: Vec<(Block, usize)> = edges.into_iter().zip(next).collect();
        self.fill_edges(&edges);
    }

    fn leave(&mut self, op: &Op) {
        if matches!(op, Op::Trap) {
            let no = self.b.ins().iconst(types::I8, 0);
            self.or_fault(no, Fault::Trap);
        }
        let code = self.b.ins().iconst(types::I32, i64::from(reason::END));
        self.b.ins().return_(&[code]);
    }

    /// Returns the block to jump to for an edge: its target, or for a back edge a new block for `fill_edges`.
    fn edge(&mut self, to: usize) -> Block {
        match self.flow.back.contains_key(&(self.block, to)) {
            true => self.b.create_block(),
            false => self.blocks[to],
        }
    }

    fn fill_edges(&mut self, edges: &[(Block, usize)]) {
        for &(edge, to) in edges {
            if edge != self.blocks[to] {
                self.b.switch_to_block(edge);
                self.jump(to);
            }
        }
    }

    /// Jumps to a block; on a back edge other threads may run in between.
    pub(super) fn jump(&mut self, to: usize) {
        let live = &self.flow.blocks[to].live_in;
        match self.flow.back.get(&(self.block, to)) {
            None => {}
            Some(Back::Poll) if self.function.is_entry => self.stop(reason::POLL, live),
            Some(_) => {
                let left = self.load_context(types::I64, offset_of!(Context, quantum));
                let left = self.b.ins().iadd_imm_s(left, -1);
                self.store_context(left, offset_of!(Context, quantum));
                if self.function.is_entry {
                    let (over, on) = (self.b.create_block(), self.b.create_block());
                    self.b.set_cold_block(over);
                    let more = self.b.ins().icmp_imm_s(IntCC::SignedGreaterThan, left, 0);
                    self.b.ins().brif(more, on, &[], over, &[]);
                    self.b.switch_to_block(over);
                    self.stop(reason::QUANTUM, live);
                    self.b.ins().jump(on, &[]);
                    self.b.switch_to_block(on);
                } else {
                    // A called function cannot stop. A loop that takes as long as this never ends.
                    let more = self.b.ins().icmp_imm_s(IntCC::SignedGreaterThan, left, -(1 << 26));
                    self.or_fault(more, Fault::Limit);
                }
            }
        }
        self.b.ins().jump(self.blocks[to], &[] as &[BlockArg]);
    }

    /// Returns to the scheduler with a reason; the next step resumes here. `live` is the set of registers
    /// that it needs.
    pub(super) fn stop(&mut self, why: u32, live: &Set) {
        let mut at = self.facts_local_end();
        let mut saved = Vec::new();
        for reg in live.iter() {
            for var in [Some(self.vars[reg as usize]), self.shadows.get(&reg).copied()].into_iter().flatten()
            {
                let value = self.b.use_var(var);
                saved.push((var, self.b.func.dfg.value_type(value), at));
                self.b.ins().store(flags(), value, self.frame, at as i32);
                at += 8;
            }
        }
        self.facts.frame_bytes = self.facts.frame_bytes.max(at);
        let pc = self.b.ins().iconst(types::I32, self.resumes.len() as i64);
        self.b.ins().store(flags(), pc, self.frame, 0);
        let why = self.b.ins().iconst(types::I32, i64::from(why));
        self.b.ins().return_(&[why]);
        let resume = self.b.create_block();
        self.resumes.push(resume);
        self.b.switch_to_block(resume);
        for (var, ty, at) in saved {
            let value = self.b.ins().load(ty, flags(), self.frame, at as i32);
            self.b.def_var(var, value);
        }
    }

    pub(super) fn facts_local_end(&self) -> u32 {
        FRAME_HEAD + self.function.local_bytes.next_multiple_of(16)
    }
}
