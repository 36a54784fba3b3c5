//! Compiles a function to native code.
//!
//! A kernel becomes `step(frame, context) -> reason`: it runs a thread from where it stopped until it has
//! to wait, a poll fails, or it ends. Between two steps the live registers are in the frame, after the
//! number of the place to resume at. Functions that kernels call become `call(context, arguments, result)
//! -> reason`, and do not stop.

mod alu;
mod cluster;
mod convert;
mod float;
mod jumps;
mod memory;
mod together;

use cranelift_codegen::ir::{types, AbiParam, InstBuilder, MemFlagsData, Type as Clif, Value};
use cranelift_codegen::ir::{Block, FuncRef};
use cranelift_codegen::isa::TargetFrontendConfig;
use cranelift_frontend::{FunctionBuilder, Variable};
use std::collections::HashMap;
use std::mem::offset_of;

use crate::context::{reason, Context};
use crate::errors::{Fault, LoadError, LoadResult};
use crate::flow::analysis::{Flow, Set};
use crate::ir::{Function, Instr, Op, Reg, Val};
use crate::runtime::what;
use crate::types::Type;

/// Bytes at the start of a frame for the number of the place to resume at. Local memory and saved registers follow.
pub(crate) const FRAME_HEAD: u32 = 16;

/// Runtime functions that compiled code calls.
#[derive(Clone, Copy)]
pub(crate) struct Helpers {
    pub access: FuncRef,
    pub shared: FuncRef,
    pub observe: FuncRef,
    pub hold: FuncRef,
    pub is_in: FuncRef,
    pub fault: FuncRef,
    pub float: FuncRef,
    pub convert: FuncRef,
    pub atomic: FuncRef,
    pub multimem: FuncRef,
    pub timer: FuncRef,
    pub cluster: FuncRef,
}

/// Level of observation: which events compiled code reports by calling `observe`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Watch {
    Nobody,
    /// Every access and fence.
    Races,
    /// Blocks and guarded instructions too. Threads stop before they look at other threads' stores.
    Clock,
}

/// Facts about compiled code.
#[derive(Debug, Default, Clone)]
pub(crate) struct Facts {
    pub frame_bytes: u32,
    /// Number of instructions that access memory; each has its own [`Site`](crate::context::Site).
    pub sites: u32,
    /// For each coverage place: the instructions that are executed when it is reached.
    pub covers: Vec<Covered>,
}

/// A range of instructions of a function that are executed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Covered {
    pub function: u32,
    pub first: u32,
    pub last: u32,
}

pub(crate) struct Lower<'a, 'b> {
    pub b: FunctionBuilder<'b>,
    pub function: &'a Function,
    pub number: usize,
    pub flow: &'a Flow,
    pub helpers: Helpers,
    pub callees: &'a HashMap<String, (FuncRef, &'a Function)>,
    pub watch: Watch,
    target: TargetFrontendConfig,
    dynamic: u32,
    unwritten: bool,
    pub facts: Facts,
    vars: Vec<Variable>,
    shadows: HashMap<Reg, Variable>,
    blocks: Vec<Block>,
    resumes: Vec<Block>,
    frame: Value,
    context: Value,
    /// Address of the parameters; the next is that of the function's result.
    params: Value,
    returned: Option<Value>,
    sites: Value,
    covered: Value,
    trap: Block,
    slots: Vec<cranelift_codegen::ir::StackSlot>,
    /// Index of the instruction that is being compiled.
    at: usize,
    block: usize,
    /// The block in which every thread has already stopped for a look.
    looked: Option<usize>,
}

pub(crate) fn flags() -> MemFlagsData {
    MemFlagsData::trusted()
}

pub(crate) fn int(bytes: u32) -> Clif {
    match bytes {
        1 => types::I8,
        2 => types::I16,
        4 => types::I32,
        _ => types::I64,
    }
}

/// Sets parameters and result of one of the two kinds of functions.
pub(crate) fn signature(entry: bool, signature: &mut cranelift_codegen::ir::Signature) {
    let count = if entry { 2 } else { 3 };
    signature.params.extend((0..count).map(|_| AbiParam::new(types::I64)));
    signature.returns.push(AbiParam::new(types::I32));
}

/// Environment that a function is compiled in.
pub(crate) struct Around<'a> {
    pub number: usize,
    pub function: &'a Function,
    pub flow: &'a Flow,
    pub helpers: Helpers,
    pub callees: &'a HashMap<String, (FuncRef, &'a Function)>,
    pub watch: Watch,
    pub target: TargetFrontendConfig,
    /// Offset of dynamic shared memory.
    pub dynamic: u32,
    /// Whether a register that is read before it is written is zero instead of an error.
    pub unwritten: bool,
}

/// Lowers a function. `before`: facts of the functions that share tables with this one; this function's
/// entries come after theirs.
pub(crate) fn lower(b: FunctionBuilder, around: Around, before: &Facts) -> LoadResult<Facts> {
    let flow = around.flow;
    let mut lower = Lower::new(b, around);
    lower.facts.sites = before.sites;
    lower.facts.covers.clone_from(&before.covers);
    for block in 0..flow.blocks.len() {
        lower.block(block)?;
    }
    Ok(lower.finish())
}

impl<'a, 'b> Lower<'a, 'b> {
    fn new(mut b: FunctionBuilder<'b>, around: Around<'a>) -> Self {
        let Around { number, function, flow, helpers, callees, watch, target, dynamic, unwritten } = around;
        let vars: Vec<Variable> =
            function.registers.iter().map(|register| b.declare_var(int(register.ty.bytes()))).collect();
        let shadows: HashMap<Reg, Variable> =
            flow.doubtful.iter().map(|reg| (reg, b.declare_var(types::I8))).collect();
        let entry = b.create_block();
        let blocks: Vec<Block> = flow.blocks.iter().map(|_| b.create_block()).collect();
        let dispatch = b.create_block();
        let trap = b.create_block();
        b.append_block_params_for_function_params(entry);
        b.switch_to_block(entry);
        let given = b.block_params(entry).to_vec();
        let (frame, context) = if function.is_entry { (given[0], given[1]) } else { (given[0], given[0]) };
        let load = |b: &mut FunctionBuilder, at: usize| b.ins().load(types::I64, flags(), context, at as i32);
        let (params, returned) = match function.is_entry {
            true => (load(&mut b, offset_of!(Context, params)), None),
            false => (given[1], Some(given[2])),
        };
        let (sites, covered) = match function.is_entry {
            true => (offset_of!(Context, sites), offset_of!(Context, covered)),
            false => (offset_of!(Context, function_sites), offset_of!(Context, function_covered)),
        };
        let (sites, covered) = (load(&mut b, sites), load(&mut b, covered));
        let zero = b.ins().iconst(types::I8, 0);
        shadows.values().for_each(|&shadow| b.def_var(shadow, zero));
        b.ins().jump(dispatch, &[]);
        let slots = function
            .slots
            .iter()
            .map(|&bytes| {
                use cranelift_codegen::ir::{StackSlotData, StackSlotKind};
                b.create_sized_stack_slot(StackSlotData::new(StackSlotKind::ExplicitSlot, bytes.max(8), 4))
            })
            .collect();
        let facts =
            Facts { frame_bytes: FRAME_HEAD + function.local_bytes.next_multiple_of(16), ..Facts::default() };
        let resumes = vec![dispatch];
        Self {
            b,
            function,
            number,
            flow,
            helpers,
            callees,
            watch,
            target,
            dynamic,
            unwritten,
            facts,
            vars,
            shadows,
            blocks,
            resumes,
            frame,
            context,
            params,
            returned,
            sites,
            covered,
            trap,
            slots,
            at: 0,
            block: 0,
            looked: None,
        }
    }

    fn finish(mut self) -> Facts {
        let (dispatch, resumes) = (self.resumes[0], self.resumes.split_off(1));
        self.b.switch_to_block(dispatch);
        if resumes.is_empty() {
            self.b.ins().jump(self.blocks[0], &[]);
        } else {
            let pc = self.b.ins().load(types::I32, flags(), self.frame, 0);
            let mut switch = cranelift_frontend::Switch::new();
            switch.set_entry(0, self.blocks[0]);
            resumes.iter().enumerate().for_each(|(i, &resume)| switch.set_entry(i as u128 + 1, resume));
            switch.emit(&mut self.b, pc, self.trap);
        }
        self.b.switch_to_block(self.trap);
        self.b.set_cold_block(self.trap);
        let code = self.b.ins().iconst(types::I32, i64::from(reason::FAULT));
        self.b.ins().return_(&[code]);
        self.b.seal_all_blocks();
        self.b.finalize(self.target);
        self.facts
    }

    fn error<T>(&self, what: &str) -> LoadResult<T> {
        Err(LoadError::new(self.function.code[self.at].line, what))
    }

    /// Returns the number of the instruction, for reports.
    fn here(&mut self) -> Value {
        let at = (self.number as i64) << 32 | self.at as i64;
        self.b.ins().iconst(types::I64, at)
    }

    fn get(&mut self, reg: Reg) -> Value {
        self.b.use_var(self.vars[reg as usize])
    }

    fn set(&mut self, reg: Reg, value: Value) {
        self.b.def_var(self.vars[reg as usize], value);
        if let Some(&shadow) = self.shadows.get(&reg) {
            let one = self.b.ins().iconst(types::I8, 1);
            self.b.def_var(shadow, one);
        }
    }

    /// Returns a value as an integer of `bytes` bytes: the low bytes of a wider register.
    fn val(&mut self, val: Val, bytes: u32) -> Value {
        let bits = match val {
            Val::Reg(reg) => {
                let value = self.get(reg);
                return if self.b.func.dfg.value_type(value).bytes() > bytes {
                    self.b.ins().ireduce(int(bytes), value)
                } else {
                    value
                };
            }
            Val::Imm(bits) => bits,
            Val::F32(bits) => u64::from(bits),
            Val::F64(bits) => bits,
        };
        self.constant(bits, bytes)
    }

    fn constant(&mut self, bits: u64, bytes: u32) -> Value {
        let kept = if bytes == 8 { bits } else { bits & ((1 << (bytes * 8)) - 1) };
        self.b.ins().iconst(int(bytes), kept as i64)
    }

    /// Sets a register from a value of the instruction's type, extended by its signedness to a wider
    /// register.
    fn set_typed(&mut self, reg: Reg, value: Value, ty: Type) {
        let own = self.function.registers[reg as usize].ty.bytes();
        let value = if own > self.b.func.dfg.value_type(value).bytes() {
            if ty.is_signed() {
                self.b.ins().sextend(int(own), value)
            } else {
                self.b.ins().uextend(int(own), value)
            }
        } else {
            value
        };
        self.set(reg, value);
    }

    fn load_context(&mut self, ty: Clif, at: usize) -> Value {
        self.b.ins().load(ty, flags(), self.context, at as i32)
    }

    fn store_context(&mut self, value: Value, at: usize) {
        self.b.ins().store(flags(), value, self.context, at as i32);
    }

    fn call(&mut self, helper: FuncRef, args: &[Value]) -> Value {
        let call = self.b.ins().call(helper, args);
        self.b.inst_results(call).first().copied().unwrap_or(self.context)
    }

    /// Continues if `ok` is not 0; otherwise the launch fails.
    fn or_fault(&mut self, ok: Value, fault: Fault) {
        let (bad, good) = (self.b.create_block(), self.b.create_block());
        self.b.set_cold_block(bad);
        self.b.ins().brif(ok, good, &[], bad, &[]);
        self.b.switch_to_block(bad);
        let code = self.b.ins().iconst(types::I32, fault as i64);
        let here = self.here();
        self.b.ins().call(self.helpers.fault, &[self.context, code, here]);
        self.b.ins().jump(self.trap, &[]);
        self.b.switch_to_block(good);
    }

    /// Continues if a helper function has returned 0.
    fn or_trap(&mut self, failed: Value) {
        let good = self.b.create_block();
        self.b.ins().brif(failed, self.trap, &[], good, &[]);
        self.b.switch_to_block(good);
    }

    /// Records that instructions `first..last` are executed.
    fn cover(&mut self, first: usize, last: usize) {
        let at = self.facts.covers.len() as i32;
        self.facts.covers.push(Covered {
            function: self.number as u32,
            first: first as u32,
            last: last as u32,
        });
        let one = self.b.ins().iconst(types::I8, 1);
        self.b.ins().store(flags(), one, self.covered, at);
    }

    fn block(&mut self, number: usize) -> LoadResult<()> {
        let block = &self.flow.blocks[number];
        self.block = number;
        self.b.switch_to_block(self.blocks[number]);
        if !block.reachable {
            // An unreachable block; it still needs an end.
            let function = self.number as u32;
            self.facts.covers.push(Covered { function, first: block.first as u32, last: block.last as u32 });
            self.b.ins().jump(self.trap, &[]);
            return Ok(());
        }
        self.cover(block.first, block.last);
        self.at = block.first;
        self.tell_clock(what::REACHED);
        let mut written = block.written.clone();
        for at in block.first..block.last {
            self.at = at;
            let instr = &self.function.code[at];
            self.check_reads(instr, &written);
            if instr.ends_block() {
                return self.end(instr);
            }
            match instr.guard {
                None => {
                    self.instr(instr)?;
                    instr.writes(&mut |reg| written.insert(reg));
                }
                Some(guard) => self.guarded(instr, guard)?,
            }
        }
        self.jump(block.next[0]);
        Ok(())
    }

    fn check_reads(&mut self, instr: &Instr, written: &Set) {
        if self.unwritten {
            return;
        }
        let mut unsure = Vec::new();
        instr.reads(&mut |reg| {
            if !written.has(reg) && !unsure.contains(&reg) {
                unsure.push(reg);
            }
        });
        let guard = instr.guard.map(|(reg, _)| reg);
        for reg in unsure {
            let shadow = self.b.use_var(self.shadows[&reg]);
            // Operands of an instruction that is not executed are not read.
            let ok = match instr.guard {
                Some((p, negated)) if Some(reg) != guard => {
                    let p = self.get(p);
                    let skipped = if negated { p } else { self.b.ins().bxor_imm_u(p, 1) };
                    self.b.ins().bor(shadow, skipped)
                }
                _ => shadow,
            };
            self.or_fault(ok, Fault::UndefinedRegister);
        }
    }

    fn instr(&mut self, instr: &Instr) -> LoadResult<()> {
        match &instr.op {
            Op::Mov { .. }
            | Op::Join { .. }
            | Op::Split { .. }
            | Op::Un { .. }
            | Op::Bin { .. }
            | Op::Tern { .. }
            | Op::Bfi { .. }
            | Op::Selp { .. } => self.alu(&instr.op),
            Op::Float { .. } | Op::Setp { .. } | Op::Set { .. } | Op::Testp { .. } => self.float(&instr.op),
            Op::Cvt { .. } | Op::CvtPack { .. } => self.convert(&instr.op),
            Op::MovSpecial { .. }
            | Op::MovAddress { .. }
            | Op::Cvta { .. }
            | Op::Isspacep { .. }
            | Op::Mapa { .. }
            | Op::Ld { .. }
            | Op::St { .. }
            | Op::Atom { .. }
            | Op::MultimemLd { .. }
            | Op::MultimemSt { .. }
            | Op::Fence { .. }
            | Op::AliasFence
            | Op::Call { .. } => self.memory(&instr.op),
            Op::Bar { .. }
            | Op::ClusterBar { .. }
            | Op::Warp { .. }
            | Op::Activemask { .. }
            | Op::Nanosleep
            | Op::Dependents { .. } => self.together(&instr.op),
            Op::Bra { .. } | Op::BrxIdx { .. } | Op::Ret | Op::Exit | Op::Trap => {
                self.error("a block end in the middle of a block")
            }
        }
    }
}
