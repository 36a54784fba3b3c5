//! Operations of instructions, without their operands.

use crate::types::{Order, Scope, Space, Type};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    /// The block's place in its cluster, and the cluster's size, in blocks.
    ClusterCtaid(u8),
    ClusterNctaid(u8),
    /// The cluster's place in the grid, and the grid's size, in clusters.
    Clusterid(u8),
    Nclusterid(u8),
    ClusterCtarank,
    ClusterNctarank,
    IsExplicitCluster,
    DynamicSmemSize,
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
    /// Product of the lower 24 bits of both operands.
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
    /// d = c >= 0 ? a : b, where c has this type.
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
    Rsqrt,
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
    /// Unordered, or equal; for floats.
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
    /// To nearest even, to zero, down, up; the result is a float.
    Rn,
    Rz,
    Rm,
    Rp,
    /// To nearest, ties away from zero.
    Rna,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cvt {
    pub to: Type,
    pub from: Type,
    /// `rn` and so on for a float result, `rni` and so on for an integer result. None: exact.
    pub round: Option<Round>,
    /// Rounds a float to an integral value of the same type.
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

/// Operations that the threads of a warp execute together.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestP {
    Finite,
    Infinite,
    Number,
    Nan,
    Normal,
    Subnormal,
}
