//! Cost of each kind of PTX instruction after ptxas: number of machine instructions, and latency of the
//! result.

use crate::ir::{Base, BinOp, Cvt, FloatOp, Instr, Op, TernOp, Val};
use crate::types::{Space, Type};

/// Cost of an instruction. Latencies of memory are not included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cost {
    /// Machine instructions to issue. 0: the instruction is folded into an operand of others.
    pub issues: u32,
    /// Latency in units of `alu_cycles`.
    pub depth: f64,
}

const FREE: Cost = cost(0, 0.0);
const SIMPLE: Cost = cost(1, 1.0);

const fn cost(issues: u32, depth: f64) -> Cost {
    Cost { issues, depth }
}

/// Returns the cost of an operation that handles each half of a wide register separately.
fn wide(ty: Type) -> Cost {
    if ty.bytes() == 8 {
        cost(2, 2.0)
    } else {
        SIMPLE
    }
}

fn binary(op: BinOp, ty: Type, b: Val) -> Cost {
    let power = matches!(b, Val::Imm(bits) if bits.is_power_of_two());
    let long = ty.bytes() == 8;
    match op {
        BinOp::MulWide | BinOp::Mul24Lo => cost(1, 1.2),
        BinOp::MulLo if long => cost(4, 3.5),
        BinOp::MulLo | BinOp::MulHi if !long => cost(1, 1.2),
        BinOp::MulHi => cost(8, 7.0),
        BinOp::Div | BinOp::Rem if power && ty.is_unsigned() => wide(ty),
        // Division by a constant is a multiplication; otherwise a reciprocal with corrections; for 64 bits
        // a function call.
        BinOp::Div | BinOp::Rem if matches!(b, Val::Imm(_)) => {
            if long {
                cost(10, 9.0)
            } else {
                cost(3, 3.0)
            }
        }
        BinOp::Div | BinOp::Rem => {
            if long {
                cost(70, 70.0)
            } else {
                cost(18, 22.0)
            }
        }
        BinOp::Shl | BinOp::Shr if long => cost(2, 1.2),
        // The two halves of a logical operation are independent.
        BinOp::And | BinOp::Or | BinOp::Xor if long => cost(2, 1.0),
        _ => wide(ty),
    }
}

fn ternary(op: TernOp, ty: Type) -> Cost {
    let long = ty.bytes() == 8;
    match op {
        TernOp::MadWide => cost(1, 1.2),
        TernOp::MadLo | TernOp::MadHi if long => cost(4, 3.5),
        TernOp::Bfe => cost(2, 2.0),
        _ => wide(ty),
    }
}

fn float(op: FloatOp, ty: Type) -> Cost {
    match op {
        FloatOp::Div => cost(10, 9.0),
        FloatOp::Sqrt | FloatOp::Rcp => cost(6, 8.0),
        FloatOp::Rsqrt => cost(2, 4.0),
        FloatOp::Neg | FloatOp::Abs => FREE,
        _ if ty == Type::F64 => cost(1, 2.0),
        _ => SIMPLE,
    }
}

fn convert(how: Cvt) -> Cost {
    let float = how.to.is_float() || how.from.is_float();
    match (float, how.to.bytes().max(how.from.bytes())) {
        // f16 and bf16 are converted by the arithmetic units; integers and f64 by a unit of a quarter of
        // the width.
        (true, 8) => cost(4, 5.0),
        (true, _) if how.to.is_integer() || how.from.is_integer() => cost(4, 4.0),
        (true, _) => SIMPLE,
        // Conversion to a wider unsigned register: the upper half is zero.
        (false, _) if !how.from.is_signed() => FREE,
        (false, _) => SIMPLE,
    }
}

pub(crate) fn of(instr: &Instr) -> Cost {
    match &instr.op {
        Op::Mov { .. } | Op::MovAddress { .. } | Op::Join { .. } | Op::Split { .. } => FREE,
        Op::Cvta { .. } | Op::Activemask { .. } => FREE,
        // Parameters are operands of other instructions.
        Op::Ld { access, addr, .. } if access.space == Space::Param || addr.base == Base::Param => FREE,
        Op::St { access, .. } if access.space == Space::Param => FREE,
        Op::MovSpecial { .. } => cost(1, 0.0),
        Op::Un { ty, .. } => wide(*ty),
        Op::Bin { op, ty, b, .. } => binary(*op, *ty, *b),
        Op::Tern { op, ty, .. } => ternary(*op, *ty),
        Op::Bfi { .. } => cost(3, 3.0),
        Op::Float { op, ty, .. } => float(*op, *ty),
        Op::Setp { ty, .. } | Op::Set { ty, .. } => {
            if ty.bytes() == 8 {
                cost(2, 2.2)
            } else {
                cost(1, 1.2)
            }
        }
        Op::Selp { ty, .. } => {
            if ty.bytes() == 8 {
                cost(2, 1.0)
            } else {
                SIMPLE
            }
        }
        Op::Cvt { how, .. } => convert(*how),
        Op::CvtPack { .. } => SIMPLE,
        Op::Isspacep { .. } => cost(2, 2.0),
        Op::Testp { .. } => SIMPLE,
        // The callee is not analysed.
        Op::Call { .. } => cost(20, 20.0),
        Op::Nanosleep | Op::Dependents { .. } => cost(1, 0.0),
        Op::Ld { .. } | Op::St { .. } | Op::Atom { .. } | Op::Fence { .. } | Op::Bar { .. } => cost(1, 0.0),
        Op::MultimemLd { .. } | Op::MultimemSt { .. } | Op::AliasFence => cost(1, 0.0),
        Op::Mapa { .. } => cost(2, 2.0),
        Op::ClusterBar { .. } => cost(1, 0.0),
        Op::Warp { .. } | Op::Bra { .. } | Op::Ret | Op::Exit | Op::Trap => cost(1, 0.0),
        Op::BrxIdx { .. } => cost(3, 6.0),
    }
}
