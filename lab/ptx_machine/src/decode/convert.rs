//! `cvt`.

use super::Decoder;
use crate::errors::LoadResult;
use crate::ir::{Cvt, Op, Round};
use crate::types::Type;

impl Decoder<'_, '_> {
    pub(super) fn convert(&mut self) -> LoadResult<Op> {
        let integer_rounding = self.take_if(|m| {
            Some(match m {
                "rni" => Round::Rn,
                "rzi" => Round::Rz,
                "rmi" => Round::Rm,
                "rpi" => Round::Rp,
                _ => return None,
            })
        });
        let rounding = self.take_if(|m| {
            Some(match m {
                "rn" => Round::Rn,
                "rz" => Round::Rz,
                "rm" => Round::Rm,
                "rp" => Round::Rp,
                "rna" => Round::Rna,
                _ => return None,
            })
        });
        let satfinite = self.take("satfinite");
        let (relu, ftz, sat) = (self.take("relu"), self.take("ftz"), self.take("sat"));
        let (to, from) = (self.ty()?, self.ty()?);
        let round = integer_rounding.or(rounding);
        let integral = integer_rounding.is_some() && to.is_float();
        let how = Cvt { to, from, round, integral, ftz, sat, relu };
        if satfinite != to.is_f8_pair() {
            return self.error("`satfinite` is for 8-bit floats, which have no conversion without it");
        }
        if to.is_packed() || to.is_f8_pair() {
            self.count(3..=3)?;
            if (to.is_f8_pair() && (relu || ftz || rounding != Some(Round::Rn)))
                || from != Type::F32
                || !matches!(rounding, Some(Round::Rn | Round::Rz))
                || sat
                || integer_rounding.is_some()
            {
                return self.error("not with these modifiers");
            }
            return Ok(Op::CvtPack {
                how,
                d: self.reg(0, to)?,
                a: self.val(1, from)?,
                b: self.val(2, from)?,
            });
        }
        self.count(2..=2)?;
        self.check(&how, integer_rounding.is_some(), rounding.is_some())?;
        // Narrow integers may be in wider registers, both as source and as destination.
        let operand = |i: usize| match &self.operands[i] {
            crate::parser::Raw::Reg(reg) => Ok(*reg),
            other => self.error(format!("operand {i} must be a register, but is {other:?}")),
        };
        let wider = |ty: Type| ty.is_integer();
        let d = self.check_size(operand(0)?, to, wider(to))?;
        let a = self.val_of(&self.operands[1], from, wider(from))?;
        Ok(Op::Cvt { how, d, a })
    }

    fn check(&self, how: &Cvt, to_integral: bool, rounds: bool) -> LoadResult<()> {
        let Cvt { to, from, ftz, relu, round, .. } = *how;
        let known = |ty: Type| ty.is_integer() || ty.is_float();
        if !known(to) || !known(from) {
            return self.error("not for this type");
        }
        let narrows = to.is_float() && from.is_float() && to.bytes() < from.bytes();
        let halves = to.is_float() && from.is_float() && to.bytes() == 2 && from.bytes() == 2 && to != from;
        let fits = match (to.is_float(), from.is_float()) {
            (false, false) => !to_integral && !rounds,
            (false, true) => to_integral && !rounds,
            (true, false) => rounds && !to_integral && round != Some(Round::Rna),
            (true, true) if narrows => rounds && !to_integral,
            (true, true) if to == from => !rounds,
            (true, true) => !rounds && !to_integral && !halves,
        };
        // Most GPUs have no conversion such as f64 to bf16.
        let bf16 = (to == Type::Bf16 && from != Type::F32 && from != Type::Bf16)
            || (from == Type::Bf16 && to != Type::F32 && to != Type::Bf16);
        let ftz_fits = !ftz || to == Type::F32 || from == Type::F32;
        let relu_fits = !relu || (narrows && from == Type::F32);
        let away = round == Some(Round::Rna);
        if fits && !bf16 && ftz_fits && relu_fits && !away {
            Ok(())
        } else {
            self.error("unknown conversion")
        }
    }
}
