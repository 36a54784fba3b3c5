//! Types, state spaces, scopes and memory orderings of PTX, parsed from modifiers.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Type {
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    E4m3x2,
    E5m2x2,
    F32,
    F64,
}

impl Type {
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "b128" => Self::B128,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "e4m3x2" => Self::E4m3x2,
            "e5m2x2" => Self::E5m2x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Returns the size in bytes; for a predicate, that of its register here.
    pub fn bytes(self) -> u32 {
        match self {
            Self::Pred | Self::B8 | Self::U8 | Self::S8 => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::Bf16 | Self::E4m3x2 | Self::E5m2x2 => 2,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 | Self::F16x2 | Self::Bf16x2 => 4,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 8,
            Self::B128 => 16,
        }
    }

    pub fn bits(self) -> u32 {
        self.bytes() * 8
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub fn is_unsigned(self) -> bool {
        matches!(self, Self::U8 | Self::U16 | Self::U32 | Self::U64)
    }

    /// Returns whether the type is `.u` or `.s`.
    pub fn is_integer(self) -> bool {
        self.is_signed() || self.is_unsigned()
    }

    pub fn is_untyped(self) -> bool {
        matches!(self, Self::B8 | Self::B16 | Self::B32 | Self::B64 | Self::B128)
    }

    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }

    pub fn is_packed(self) -> bool {
        matches!(self, Self::F16x2 | Self::Bf16x2)
    }

    /// Returns whether the type is two 8-bit floats, to which `cvt` converts.
    pub fn is_f8_pair(self) -> bool {
        matches!(self, Self::E4m3x2 | Self::E5m2x2)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    Generic,
    Global,
    Shared,
    /// Shared memory of all blocks of the cluster.
    SharedCluster,
    Param,
    Local,
    Const,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    Cta,
    Cluster,
    Gpu,
    Sys,
}

impl Scope {
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "cta" => Self::Cta,
            "cluster" => Self::Cluster,
            "gpu" => Self::Gpu,
            "sys" => Self::Sys,
            _ => return None,
        })
    }
}

/// Memory ordering of an access or a fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    Weak,
    Volatile,
    Relaxed,
    Acquire,
    Release,
    AcqRel,
    SeqCst,
}

impl Order {
    pub fn is_strong(self) -> bool {
        self != Self::Weak
    }
}
