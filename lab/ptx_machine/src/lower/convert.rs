//! `cvt` between integers and from wide floats; `soft` has the other conversions.

use cranelift_codegen::ir::{types, InstBuilder, Value};

use super::{int, Lower};
use crate::errors::LoadResult;
use crate::ir::{Cvt, Op, Val};
use crate::soft;
use crate::types::Type;

impl Lower<'_, '_> {
    pub(super) fn convert(&mut self, op: &Op) -> LoadResult<()> {
        match op {
            Op::Cvt { how, d, a } => {
                let value = match (how.to.is_float(), how.from.is_float()) {
                    (false, false) => self.integer(how, *a),
                    _ if how.from == Type::Bf16 && how.to == Type::F32 && !how.ftz && !how.sat => {
                        let bits = self.val(*a, 2);
                        let wide = self.half_to_f32(bits, Type::Bf16);
                        let float = self.as_f32(wide);
                        self.canonical(float)
                    }
                    _ => self.by_soft(how, *a),
                };
                self.set_typed(*d, value, how.to);
            }
            Op::CvtPack { how, d, a, b } if how.to.is_f8_pair() => {
                let (high, low) = (self.by_soft(how, *a), self.by_soft(how, *b));
                let high = self.b.ins().ishl_imm_u(high, 8);
                let both = self.b.ins().bor(high, low);
                self.set(*d, both);
            }
            Op::CvtPack { how, d, a, b } => {
                let to = if how.to == Type::F16x2 { Type::F16 } else { Type::Bf16 };
                let how = Cvt { to, ..*how };
                let (high, low) = (self.by_soft(&how, *a), self.by_soft(&how, *b));
                let (high, low) =
                    (self.b.ins().uextend(types::I32, high), self.b.ins().uextend(types::I32, low));
                let high = self.b.ins().ishl_imm_u(high, 16);
                let both = self.b.ins().bor(high, low);
                self.set(*d, both);
            }
            _ => return self.error("no conversion"),
        }
        Ok(())
    }

    fn integer(&mut self, how: &Cvt, a: Val) -> Value {
        let (to, from) = (how.to, how.from);
        let mut value = self.val(a, from.bytes());
        if how.sat {
            return self.by_soft(how, a);
        }
        if to.bytes() > from.bytes() {
            value = match from.is_signed() {
                true => self.b.ins().sextend(int(to.bytes()), value),
                false => self.b.ins().uextend(int(to.bytes()), value),
            };
        } else if to.bytes() < from.bytes() {
            value = self.b.ins().ireduce(int(to.bytes()), value);
        }
        value
    }

    /// Converts the bits of a half to f32; for f16 by a helper function.
    pub(super) fn half_to_f32(&mut self, bits: Value, ty: Type) -> Value {
        if ty == Type::Bf16 {
            let wide = self.b.ins().uextend(types::I32, bits);
            return self.b.ins().ishl_imm_u(wide, 16);
        }
        let how = Cvt {
            to: Type::F32,
            from: ty,
            round: None,
            integral: false,
            ftz: false,
            sat: false,
            relu: false,
        };
        let bits = self.b.ins().uextend(types::I64, bits);
        let value = self.call_soft(&how, bits);
        self.b.ins().ireduce(types::I32, value)
    }

    fn by_soft(&mut self, how: &Cvt, a: Val) -> Value {
        let mut bits = self.val(a, how.from.bytes());
        if how.from.bytes() < 8 {
            bits = match how.from.is_signed() {
                true => self.b.ins().sextend(types::I64, bits),
                false => self.b.ins().uextend(types::I64, bits),
            };
        }
        let value = self.call_soft(how, bits);
        if how.to.bytes() < 8 {
            self.b.ins().ireduce(int(how.to.bytes()), value)
        } else {
            value
        }
    }

    fn call_soft(&mut self, how: &Cvt, bits: Value) -> Value {
        let code = self.b.ins().iconst(types::I32, i64::from(soft::convert_code(how)));
        self.call(self.helpers.convert, &[code, bits])
    }
}
