//! A module as it is after decoding: every instruction with its operands resolved.

use std::collections::HashMap;

use crate::types::{Order, Scope, Space, Type};

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Laneid,
    Warpid,
    Nwarpid,
    /// lt, le, eq, ge, gt
    LaneMask(Mask),
    Clock,
    Clock64,
    GlobalTimer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    Lt,
    Le,
    Eq,
    Ge,
    Gt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnOp {
    Neg,
    Not,
    Abs,
    Clz,
    Popc,
    Brev,
    Bfind { shift_amount: bool },
    Cnot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BinOp {
    Add,
    AddSat,
    Sub,
    SubSat,
    MulLo,
    MulHi,
    MulWide,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    /// 24 bits of each.
    Mul24Lo,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TernOp {
    MadLo,
    MadHi,
    MadWide,
    Sad,
    Lop3(u8),
    Bfe,
    Prmt(Prmt),
    ShfLeft {
        wrap: bool,
    },
    ShfRight {
        wrap: bool,
    },
    /// d = c >= 0 ? a : b, c of this type.
    Slct(Type),
    Dp4a {
        signed_a: bool,
        signed_b: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prmt {
    Index,
    F4e,
    B4e,
    Rc8,
    Ecl,
    Ecr,
    Rc16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatOp {
    Add,
    Sub,
    Mul,
    Div,
    Min { nan: bool },
    Max { nan: bool },
    Fma,
    Neg,
    Abs,
    Sqrt,
    Rcp,
    Copysign,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// Unordered or, of floats.
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bool {
    And,
    Or,
    Xor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// To nearest even, to zero, down, up; of a float.
    Rn,
    Rz,
    Rm,
    Rp,
    /// To nearest, away from zero.
    Rna,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cvt {
    pub to: Type,
    pub from: Type,
    /// Of a result that is a float: `rn` and so on; of one that is an integer: `rni` and so on. None: exact.
    pub round: Option<Round>,
    /// Float to float of the same type, to an integral value.
    pub integral: bool,
    pub ftz: bool,
    pub sat: bool,
    pub relu: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    pub space: Space,
    pub order: Order,
    pub scope: Scope,
    pub ty: Type,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomOp {
    Add,
    And,
    Or,
    Xor,
    Min,
    Max,
    Exch,
    Cas,
    Inc,
    Dec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarKind {
    Sync,
    Arrive,
    RedPopc,
    RedAnd,
    RedOr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VoteKind {
    All,
    Any,
    Uni,
    Ballot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShflKind {
    Up,
    Down,
    Bfly,
    Idx,
}

/// What the threads of a warp do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarpOp {
    Sync,
    Vote(VoteKind),
    Shfl(ShflKind),
    MatchAny,
    MatchAll,
    Redux(BinOp, bool),
    Elect,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    Nop,
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
    Fence {
        order: Order,
        scope: Scope,
    },
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestP {
    Finite,
    Infinite,
    Number,
    Nan,
    Normal,
    Subnormal,
}
