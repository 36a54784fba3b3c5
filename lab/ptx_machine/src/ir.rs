//! Intermediate representation: a decoded module, with the operands of every instruction resolved.

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
    /// Bytes of the module's `.shared` variables, which every block has.
    pub shared_bytes: u32,
    /// Initial values of `.global` and `.const` variables, at the offsets of [`Base::Data`].
    pub data: Vec<u8>,
    /// Files by number, from `.file`.
    pub files: HashMap<u32, String>,
}

impl Module {
    /// Returns the offset of dynamic shared memory: the first multiple of its largest alignment.
    pub fn dynamic_shared(&self) -> u32 {
        self.shared_bytes.next_multiple_of(128)
    }
}

#[derive(Debug, Default)]
pub struct Function {
    pub name: String,
    pub is_entry: bool,
    pub line: u32,
    pub registers: Vec<Register>,
    pub code: Vec<Instr>,
    /// Labels by number: an index into `code`, or its length.
    pub labels: Vec<u32>,
    /// Offset and size of each parameter.
    pub params: Vec<(u32, u32)>,
    pub param_bytes: u32,
    pub return_bytes: u32,
    /// Bytes of each `.param` variable in the body, by slot.
    pub slots: Vec<u32>,
    /// Slots that outlive a wait, with their offset in local memory.
    pub kept: HashMap<u32, u32>,
    pub local_bytes: u32,
    pub most_threads: u32,
    /// `.reqntid`, or 0.
    pub exact_threads: [u32; 3],
    /// `.reqnctapercluster`, or 0.
    pub exact_cluster: [u32; 3],
    /// `.explicitcluster`: launches must say how many blocks a cluster has, unless `exact_cluster` does.
    pub explicit_cluster: bool,
    /// `.maxclusterrank`, or the maximum of any GPU.
    pub most_cluster: u32,
}

#[derive(Debug, Clone)]
pub struct Register {
    pub name: String,
    pub ty: Type,
}

/// A source location: `.loc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Loc {
    pub file: u32,
    pub line: u32,
    /// File and line of the call if the code is inlined, otherwise 0.
    pub into: (u32, u32),
}

#[derive(Debug, Clone)]
pub struct Instr {
    /// Line of the PTX.
    pub line: u32,
    pub loc: Loc,
    /// Guard: executes if this register is not 0 (or, if the flag is set, if it is 0).
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
    /// No base: an absolute address.
    None,
    /// A parameter of this function, or its return value.
    Param,
    Return,
    /// A `.param` variable of the body.
    Slot(u32),
    Shared,
    /// Shared memory whose size the launch decides; it follows the module's variables.
    Dynamic,
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
    /// Joins parts into one register, the lowest part first.
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
    /// d = a cmp b, combined with c; q = the complement of a cmp b, also combined with c.
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
    /// Like Setp, with a result of -1 or 1.0 in a register of type `to`.
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
    /// Packs two f32 into one register; `a` becomes the upper half.
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
    /// `multimem.ld_reduce`. Wide: halves are summed in f32.
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
    /// `barrier.cluster.arrive` or `.wait`. `releases`: an arrival that publishes earlier stores.
    ClusterBar {
        waits: bool,
        releases: bool,
        aligned: bool,
    },
    /// `mapa`: the address in a block of the cluster that corresponds to `a`; or, without a rank,
    /// `getctarank`. Generic addresses, or those of [`Space::SharedCluster`].
    Mapa {
        space: Space,
        d: Reg,
        a: Addr,
        rank: Option<Val>,
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
