//! Arithmetic, logic, comparisons and selections.

use super::{is_one_of, Decoder};
use crate::errors::LoadResult;
use crate::ir::{BinOp, Bool, Cmp, FloatOp, Op, Prmt, TernOp, TestP, UnOp, Val};
use crate::parser::Raw;
use crate::types::Type;

fn is_int(ty: Type) -> bool {
    ty.is_integer() && ty.bytes() >= 2
}

fn is_bits(ty: Type) -> bool {
    matches!(ty, Type::Pred | Type::B16 | Type::B32 | Type::B64)
}

fn is_word(ty: Type) -> bool {
    matches!(ty, Type::B32 | Type::B64)
}

impl Decoder<'_, '_> {
    pub(super) fn alu(&mut self) -> LoadResult<Op> {
        match self.name {
            "add" | "sub" | "mul" | "div" | "min" | "max" | "abs" | "neg" | "fma" | "mad" | "sqrt"
            | "rcp" | "rsqrt" | "copysign"
                if self.is_floating() =>
            {
                self.floating()
            }
            "add" | "sub" => {
                let saturates = self.take("sat");
                let ty = self.ty_of(is_int)?;
                let op = match (self.name, saturates) {
                    (_, true) if ty != Type::S32 => return self.error(".sat requires .s32"),
                    ("add", false) => BinOp::Add,
                    ("add", true) => BinOp::AddSat,
                    (_, false) => BinOp::Sub,
                    (_, true) => BinOp::SubSat,
                };
                self.binary(op, ty, ty, ty)
            }
            "mul" => self.multiply(),
            "mad" => self.multiply_add(),
            "mul24" => {
                self.want("lo", |m| (m == "lo").then_some(()))?;
                let ty = self.ty_of(|ty| matches!(ty, Type::S32 | Type::U32))?;
                self.binary(BinOp::Mul24Lo, ty, ty, ty)
            }
            "div" | "rem" => {
                let op = if self.name == "div" { BinOp::Div } else { BinOp::Rem };
                let ty = self.ty_of(is_int)?;
                self.binary(op, ty, ty, ty)
            }
            "min" | "max" => {
                let op = if self.name == "min" { BinOp::Min } else { BinOp::Max };
                let ty = self.ty_of(is_int)?;
                self.binary(op, ty, ty, ty)
            }
            "and" | "or" | "xor" => {
                let op = match self.name {
                    "and" => BinOp::And,
                    "or" => BinOp::Or,
                    _ => BinOp::Xor,
                };
                let ty = self.ty_of(is_bits)?;
                self.binary(op, ty, ty, ty)
            }
            "shl" => {
                let ty = self.ty_of(|ty| is_bits(ty) && ty != Type::Pred)?;
                self.binary(BinOp::Shl, ty, ty, Type::U32)
            }
            "shr" => {
                let ty = self.ty_of(|ty| is_int(ty) || (is_bits(ty) && ty != Type::Pred))?;
                self.binary(BinOp::Shr, ty, ty, Type::U32)
            }
            "not" | "cnot" | "neg" | "abs" | "clz" | "popc" | "brev" | "bfind" => self.unary(),
            "sad" | "lop3" | "bfe" | "prmt" | "shf" | "slct" | "dp4a" => self.ternary(),
            "bfi" => {
                self.count(5..=5)?;
                let ty = self.ty_of(is_word)?;
                let args =
                    [self.val(1, ty)?, self.val(2, ty)?, self.val(3, Type::U32)?, self.val(4, Type::U32)?];
                Ok(Op::Bfi { ty, d: self.reg(0, ty)?, args })
            }
            "setp" | "set" => self.compare(),
            "selp" => {
                self.count(4..=4)?;
                let ty = self
                    .ty_of(|ty| ty.bytes() >= 2 && ty != Type::B128 && !ty.is_packed() && ty != Type::Pred)?;
                let (p, negated) = self.condition(3)?;
                let (a, b) = (self.val(1, ty)?, self.val(2, ty)?);
                let (a, b) = if negated { (b, a) } else { (a, b) };
                Ok(Op::Selp { ty, d: self.reg(0, ty)?, a, b, p })
            }
            "testp" => {
                self.count(2..=2)?;
                let test = self.want("a test", |m| {
                    Some(match m {
                        "finite" => TestP::Finite,
                        "infinite" => TestP::Infinite,
                        "number" => TestP::Number,
                        "notanumber" => TestP::Nan,
                        "normal" => TestP::Normal,
                        "subnormal" => TestP::Subnormal,
                        _ => return None,
                    })
                })?;
                let ty = self.ty_of(|ty| matches!(ty, Type::F32 | Type::F64))?;
                Ok(Op::Testp { test, ty, d: self.pred(0)?, a: self.val(1, ty)? })
            }
            _ => self.error("unknown instruction"),
        }
    }

    fn binary(&mut self, op: BinOp, to: Type, ty: Type, second: Type) -> LoadResult<Op> {
        self.count(3..=3)?;
        Ok(Op::Bin { op, ty, d: self.reg(0, to)?, a: self.val(1, ty)?, b: self.val(2, second)? })
    }

    fn product(&mut self) -> LoadResult<&'static str> {
        self.want("lo, hi or wide", |m| ["lo", "hi", "wide"].into_iter().find(|&name| name == m))
    }

    fn wide(&self, ty: Type) -> LoadResult<Type> {
        match ty {
            Type::U16 => Ok(Type::U32),
            Type::S16 => Ok(Type::S32),
            Type::U32 => Ok(Type::U64),
            Type::S32 => Ok(Type::S64),
            _ => self.error("wide requires 16 or 32 bits"),
        }
    }

    fn multiply(&mut self) -> LoadResult<Op> {
        let half = self.product()?;
        let ty = self.ty_of(is_int)?;
        match half {
            "lo" => self.binary(BinOp::MulLo, ty, ty, ty),
            "hi" => self.binary(BinOp::MulHi, ty, ty, ty),
            _ => self.binary(BinOp::MulWide, self.wide(ty)?, ty, ty),
        }
    }

    fn multiply_add(&mut self) -> LoadResult<Op> {
        self.count(4..=4)?;
        let half = self.product()?;
        let ty = self.ty_of(is_int)?;
        let (op, to) = match half {
            "lo" => (TernOp::MadLo, ty),
            "hi" => (TernOp::MadHi, ty),
            _ => (TernOp::MadWide, self.wide(ty)?),
        };
        Ok(Op::Tern {
            op,
            ty,
            d: self.reg(0, to)?,
            a: self.val(1, ty)?,
            b: self.val(2, ty)?,
            c: self.val(3, to)?,
        })
    }

    fn unary(&mut self) -> LoadResult<Op> {
        self.count(2..=2)?;
        let shift_amount = self.take("shiftamt");
        let ty = self.ty()?;
        let (op, fits, to) = match self.name {
            "not" => (UnOp::Not, is_bits(ty), ty),
            "cnot" => (UnOp::Cnot, is_bits(ty) && ty != Type::Pred, ty),
            "neg" => (UnOp::Neg, ty.is_signed() && is_int(ty), ty),
            "abs" => (UnOp::Abs, ty.is_signed() && is_int(ty), ty),
            "clz" => (UnOp::Clz, is_word(ty), Type::U32),
            "popc" => (UnOp::Popc, is_word(ty), Type::U32),
            "brev" => (UnOp::Brev, is_word(ty), ty),
            _ => (UnOp::Bfind { shift_amount }, is_int(ty) && ty.bytes() >= 4, Type::U32),
        };
        if !fits || (shift_amount && self.name != "bfind") {
            return self.error("not for this type");
        }
        Ok(Op::Un { op, ty, d: self.reg(0, to)?, a: self.val(1, ty)? })
    }

    fn ternary(&mut self) -> LoadResult<Op> {
        let mut second = None;
        let op = match self.name {
            "sad" => TernOp::Sad,
            "lop3" => {
                self.count(5..=5)?;
                let Some(&Raw::Int(table)) = self.operands.get(4) else {
                    return self.error("a table was expected");
                };
                TernOp::Lop3(table as u8)
            }
            "bfe" => TernOp::Bfe,
            "shf" => {
                let left = self.take("l");
                if !left {
                    self.want("l or r", |m| (m == "r").then_some(()))?;
                }
                let wrap = self.want("wrap or clamp", |m| match m {
                    "wrap" => Some(true),
                    "clamp" => Some(false),
                    _ => None,
                })?;
                if left {
                    TernOp::ShfLeft { wrap }
                } else {
                    TernOp::ShfRight { wrap }
                }
            }
            "dp4a" => {
                let sign = |m: &str| match m {
                    "s32" => Some(true),
                    "u32" => Some(false),
                    _ => None,
                };
                let signed_a = self.want("a type", sign)?;
                let signed_b = self.want("a type", sign)?;
                let ty = if signed_a || signed_b { Type::S32 } else { Type::U32 };
                self.count(4..=4)?;
                let (a, b, c) = (self.val(1, ty)?, self.val(2, ty)?, self.val(3, ty)?);
                return Ok(Op::Tern {
                    op: TernOp::Dp4a { signed_a, signed_b },
                    ty,
                    d: self.reg(0, ty)?,
                    a,
                    b,
                    c,
                });
            }
            "slct" => {
                let ftz = self.take("ftz");
                let ty = self.ty_of(|ty| ty.bytes() >= 2 && ty != Type::Pred && ty != Type::B128)?;
                let by = self.ty_of(|ty| matches!(ty, Type::S32 | Type::F32))?;
                if ftz {
                    return self.error(".ftz is not supported");
                }
                second = Some((ty, by));
                TernOp::Slct(by)
            }
            _ => TernOp::Prmt(Prmt::Index),
        };
        let ty = match second {
            Some((ty, _)) => ty,
            None => self.ty()?,
        };
        let fits = match op {
            TernOp::Sad => is_int(ty),
            TernOp::Lop3(_) | TernOp::ShfLeft { .. } | TernOp::ShfRight { .. } | TernOp::Prmt(_) => {
                ty == Type::B32
            }
            TernOp::Bfe => is_int(ty) && ty.bytes() >= 4,
            _ => true,
        };
        if !fits {
            return self.error("not for this type");
        }
        let op = if self.name == "prmt" { TernOp::Prmt(self.prmt_mode()) } else { op };
        let third = match op {
            TernOp::Sad | TernOp::Lop3(_) => ty,
            TernOp::Bfe => return self.bit_field(ty),
            TernOp::Slct(by) => by,
            _ => Type::B32,
        };
        if !matches!(op, TernOp::Lop3(_)) {
            self.count(4..=4)?;
        }
        Ok(Op::Tern {
            op,
            ty,
            d: self.reg(0, ty)?,
            a: self.val(1, ty)?,
            b: self.val(2, ty)?,
            c: self.val(3, third)?,
        })
    }

    fn bit_field(&mut self, ty: Type) -> LoadResult<Op> {
        self.count(4..=4)?;
        let (a, b, c) = (self.val(1, ty)?, self.val(2, Type::U32)?, self.val(3, Type::U32)?);
        Ok(Op::Tern { op: TernOp::Bfe, ty, d: self.reg(0, ty)?, a, b, c })
    }

    fn prmt_mode(&mut self) -> Prmt {
        let mode = self.take_if(|m| {
            Some(match m {
                "f4e" => Prmt::F4e,
                "b4e" => Prmt::B4e,
                "rc8" => Prmt::Rc8,
                "ecl" => Prmt::Ecl,
                "ecr" => Prmt::Ecr,
                "rc16" => Prmt::Rc16,
                _ => return None,
            })
        });
        mode.unwrap_or(Prmt::Index)
    }

    /// Returns whether the type (the last modifier) is a floating-point type.
    fn is_floating(&self) -> bool {
        let ty = self.modifiers.last().and_then(|m| Type::parse(m));
        ty.is_some_and(|ty| ty.is_float() || ty.is_packed())
    }

    fn floating(&mut self) -> LoadResult<Op> {
        let approximate =
            self.context.approximate && self.take_if(|m| is_one_of(m, &["approx", "full"])).is_some();
        // An approximation is computed exactly and rounded, which is within every bound of the ISA.
        let rounded = self.take("rn") || approximate;
        let (ftz, nan, sat) = (self.take("ftz"), self.take("NaN"), self.take("sat"));
        let ty = self.ty()?;
        let single = matches!(ty, Type::F32 | Type::F64);
        let (op, sources, fits) = match self.name {
            "add" => (FloatOp::Add, 2, true),
            "sub" => (FloatOp::Sub, 2, true),
            "mul" => (FloatOp::Mul, 2, true),
            // mad of floats has been fma since sm_20.
            "fma" | "mad" => (FloatOp::Fma, 3, rounded),
            "div" => (FloatOp::Div, 2, rounded && single),
            "min" => (FloatOp::Min { nan }, 2, !rounded),
            "max" => (FloatOp::Max { nan }, 2, !rounded),
            "neg" => (FloatOp::Neg, 1, !rounded),
            "abs" => (FloatOp::Abs, 1, !rounded),
            "sqrt" => (FloatOp::Sqrt, 1, rounded && single),
            "rcp" => (FloatOp::Rcp, 1, rounded && single),
            "rsqrt" => (FloatOp::Rsqrt, 1, approximate && ty == Type::F32),
            _ => (FloatOp::Copysign, 2, !rounded && single),
        };
        let minmax = matches!(op, FloatOp::Min { .. } | FloatOp::Max { .. });
        if !fits
            || (nan && !minmax)
            || (ftz && !matches!(ty, Type::F32 | Type::F16 | Type::F16x2))
            || (sat && ty == Type::F64)
        {
            return self.error("not with these modifiers");
        }
        // Variants that csrc does not use are not implemented.
        if ty.is_packed()
            && !matches!(
                op,
                FloatOp::Add
                    | FloatOp::Sub
                    | FloatOp::Mul
                    | FloatOp::Fma
                    | FloatOp::Neg
                    | FloatOp::Abs
                    | FloatOp::Min { .. }
                    | FloatOp::Max { .. }
            )
        {
            return self.error("not for this type");
        }
        self.count(sources + 1..=sources + 1)?;
        let mut args = [Val::Imm(0); 3];
        for (i, arg) in args.iter_mut().enumerate().take(sources) {
            *arg = self.val(i + 1, ty)?;
        }
        Ok(Op::Float { op, ty, d: self.reg(0, ty)?, args, ftz, sat })
    }

    fn compare(&mut self) -> LoadResult<Op> {
        let (cmp, unsigned) = self.want("a comparison", parse_cmp)?;
        let combine = self.take_if(|m| {
            Some(match m {
                "and" => Bool::And,
                "or" => Bool::Or,
                "xor" => Bool::Xor,
                _ => return None,
            })
        });
        let ftz = self.take("ftz");
        let to = match self.name {
            "set" => Some(self.ty_of(|ty| matches!(ty, Type::U32 | Type::S32 | Type::F32))?),
            _ => None,
        };
        let ty =
            self.ty_of(|ty| ty.bytes() >= 2 && ty != Type::B128 && !ty.is_packed() && ty != Type::Pred)?;
        let fits = match cmp {
            Cmp::Eq | Cmp::Ne => true,
            Cmp::Lt | Cmp::Le | Cmp::Gt | Cmp::Ge => !ty.is_untyped() && (!unsigned || ty.is_unsigned()),
            _ => ty.is_float(),
        };
        if !fits || (ftz && ty != Type::F32 && ty != Type::F16) {
            return self.error("not for this type");
        }
        let (a, b) = (self.val(1, ty)?, self.val(2, ty)?);
        if let Some(to) = to {
            if combine.is_some() {
                return self.error("combined results are not supported");
            }
            self.count(3..=3)?;
            return Ok(Op::Set { cmp, to, ty, ftz, d: self.reg(0, to)?, a, b });
        }
        let combine = match combine {
            Some(how) => {
                self.count(4..=4)?;
                let (value, negated) = self.condition(3)?;
                Some((how, value, negated))
            }
            None => {
                self.count(3..=3)?;
                None
            }
        };
        let (d, q) = match self.operands[0] {
            Raw::Pair(d, q) => (d, q),
            _ => (Some(self.pred(0)?), None),
        };
        for reg in [d, q].into_iter().flatten() {
            self.check_size(reg, Type::Pred, false)?;
        }
        Ok(Op::Setp { cmp, ty, ftz, d, q, a, b, combine })
    }
}

/// Parses a comparison. Also returns whether its name exists for unsigned integers only.
fn parse_cmp(text: &str) -> Option<(Cmp, bool)> {
    let plain = |cmp| Some((cmp, false));
    match text {
        "eq" => plain(Cmp::Eq),
        "ne" => plain(Cmp::Ne),
        "lt" => plain(Cmp::Lt),
        "le" => plain(Cmp::Le),
        "gt" => plain(Cmp::Gt),
        "ge" => plain(Cmp::Ge),
        "lo" => Some((Cmp::Lt, true)),
        "ls" => Some((Cmp::Le, true)),
        "hi" => Some((Cmp::Gt, true)),
        "hs" => Some((Cmp::Ge, true)),
        "equ" => plain(Cmp::Equ),
        "neu" => plain(Cmp::Neu),
        "ltu" => plain(Cmp::Ltu),
        "leu" => plain(Cmp::Leu),
        "gtu" => plain(Cmp::Gtu),
        "geu" => plain(Cmp::Geu),
        "num" => plain(Cmp::Num),
        "nan" => plain(Cmp::Nan),
        _ => None,
    }
}
