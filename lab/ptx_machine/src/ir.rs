//! A module as it is after decoding: every instruction with its operands resolved.

mod ops;

use std::collections::HashMap;

use crate::types::{Order, Scope, Space, Type};

pub use ops::*;

/// An index into [`Function::registers`].
pub type Reg = u32;
/// An index into [`Function::code`].
pub type Label = u32;

#[derive(Debug, Default)]
pub struct Module {
    pub version: (u32, u32),
    pub target: String,
    pub functions: Vec<Function>,
    pub by_name: HashMap<String, usize>,
    /// Bytes of `.shared` variables of the module, which every block has.
    pub shared_bytes: u32,
    /// Initial values of `.global` and `.const` variables, at the offsets of [`Base::Data`].
    pub data: Vec<u8>,
    /// By number, from `.file`.
    pub files: HashMap<u32, String>,
}

#[derive(Debug, Default)]
pub struct Function {
    pub name: String,
    pub is_entry: bool,
    pub line: u32,
    pub registers: Vec<Register>,
    pub code: Vec<Instr>,
    /// By number; each is an index into `code`, or its length.
    pub labels: Vec<u32>,
    /// Offset and size of each parameter.
    pub params: Vec<(u32, u32)>,
    pub param_bytes: u32,
    pub return_bytes: u32,
    /// Bytes of each `.param` variable in the body, by slot.
    pub slots: Vec<u32>,
    /// Of those that outlive a wait, the offset in local memory.
    pub kept: HashMap<u32, u32>,
    pub local_bytes: u32,
    pub most_threads: u32,
    /// `.reqntid`, 0 where there is none.
    pub exact_threads: [u32; 3],
}

#[derive(Debug, Clone)]
pub struct Register {
    pub name: String,
    pub ty: Type,
}

/// A place in the source: `.loc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Loc {
    pub file: u32,
    pub line: u32,
    /// Where that is inlined at: file and line, 0 where nowhere.
    pub into: (u32, u32),
}

#[derive(Debug, Clone)]
pub struct Instr {
    /// Of the PTX.
    pub line: u32,
    pub loc: Loc,
    /// Executed when this register is not 0; when it is, if the flag is set.
    pub guard: Option<(Reg, bool)>,
    pub op: Op,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Val {
    Reg(Reg),
    Imm(u64),
    F32(u32),
    F64(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    Reg(Reg),
    /// None: an absolute address.
    None,
    /// A parameter of this function, and its return value.
    Param,
    Return,
    /// A `.param` variable of the body.
    Slot(u32),
    Shared,
    Local,
    /// A `.global` or `.const` variable.
    Data,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addr {
    pub base: Base,
    pub offset: i64,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    Mov {
        ty: Type,
        d: Reg,
        a: Val,
    },
    MovSpecial {
        d: Reg,
        a: Special,
    },
    MovAddress {
        d: Reg,
        a: Addr,
    },
    /// The parts of one register, the lowest first.
    Join {
        d: Reg,
        parts: Vec<Val>,
    },
    Split {
        d: Vec<Option<Reg>>,
        a: Val,
    },
    Un {
        op: UnOp,
        ty: Type,
        d: Reg,
        a: Val,
    },
    Bin {
        op: BinOp,
        ty: Type,
        d: Reg,
        a: Val,
        b: Val,
    },
    Tern {
        op: TernOp,
        ty: Type,
        d: Reg,
        a: Val,
        b: Val,
        c: Val,
    },
    Bfi {
        ty: Type,
        d: Reg,
        args: [Val; 4],
    },
    Float {
        op: FloatOp,
        ty: Type,
        d: Reg,
        args: [Val; 3],
        ftz: bool,
        sat: bool,
    },
    /// d = a cmp b, combined with c; q = its complement, likewise combined.
    Setp {
        cmp: Cmp,
        ty: Type,
        ftz: bool,
        d: Option<Reg>,
        q: Option<Reg>,
        a: Val,
        b: Val,
        combine: Option<(Bool, Val, bool)>,
    },
    /// As Setp, as -1 or 1.0 in a register of type `to`.
    Set {
        cmp: Cmp,
        to: Type,
        ty: Type,
        ftz: bool,
        d: Reg,
        a: Val,
        b: Val,
    },
    Selp {
        ty: Type,
        d: Reg,
        a: Val,
        b: Val,
        p: Val,
    },
    Testp {
        test: TestP,
        ty: Type,
        d: Reg,
        a: Val,
    },
    Cvt {
        how: Cvt,
        d: Reg,
        a: Val,
    },
    /// Two f32 to a packed register: `a` is the upper half.
    CvtPack {
        how: Cvt,
        d: Reg,
        a: Val,
        b: Val,
    },
    Cvta {
        to_space: bool,
        space: Space,
        d: Reg,
        a: Addr,
    },
    Isspacep {
        space: Space,
        d: Reg,
        a: Val,
    },
    Ld {
        access: Access,
        d: Vec<Option<Reg>>,
        addr: Addr,
    },
    St {
        access: Access,
        a: Vec<Val>,
        addr: Addr,
    },
    Atom {
        op: AtomOp,
        access: Access,
        d: Option<Reg>,
        addr: Addr,
        b: Val,
        c: Val,
    },
    /// `multimem.ld_reduce`. Wide: halves are added in f32.
    MultimemLd {
        op: AtomOp,
        wide: bool,
        access: Access,
        d: Vec<Option<Reg>>,
        addr: Addr,
    },
    /// `multimem.st`, or with an operation `multimem.red`.
    MultimemSt {
        op: Option<AtomOp>,
        access: Access,
        a: Vec<Val>,
        addr: Addr,
    },
    Fence {
        order: Order,
        scope: Scope,
    },
    /// `fence.proxy.alias`.
    AliasFence,
    Bar {
        kind: BarKind,
        aligned: bool,
        id: Val,
        count: Option<Val>,
        p: Option<(Val, bool)>,
        d: Option<Reg>,
    },
    Warp {
        op: WarpOp,
        mask: Val,
        a: Val,
        negated: bool,
        b: Val,
        c: Val,
        d: Option<Reg>,
        p: Option<Reg>,
    },
    Activemask {
        d: Reg,
    },
    Nanosleep,
    /// `griddepcontrol`.
    Dependents {
        waits: bool,
    },
    Bra {
        to: Label,
    },
    BrxIdx {
        index: Val,
        to: Vec<Label>,
    },
    Call {
        name: String,
        returns: Option<u32>,
        args: Vec<u32>,
    },
    Ret,
    Exit,
    Trap,
}
