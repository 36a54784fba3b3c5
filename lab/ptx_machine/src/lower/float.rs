//! Floating-point arithmetic and comparisons. f32 and f64 use the CPU's arithmetic, which rounds once, as
//! PTX does; halves use `soft`.

use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{types, InstBuilder, Value};

use super::Lower;
use crate::errors::LoadResult;
use crate::ir::{Bool, Cmp, FloatOp, Op, TestP, Val};
use crate::soft;
use crate::types::Type;

/// The NaN that every f32 instruction returns, whatever the payloads of its operands.
const NAN_F32: i64 = 0x7FFF_FFFF;

impl Lower<'_, '_> {
    pub(super) fn float(&mut self, op: &Op) -> LoadResult<()> {
        match op {
            Op::Float { op, ty, d, args, ftz, sat } => {
                let value = match ty {
                    Type::F32 | Type::F64 => self.native(*op, *ty, args, *ftz, *sat),
                    _ => self.soft(*op, *ty, args, *ftz, *sat),
                };
                self.set(*d, value);
            }
            Op::Setp { cmp, ty, ftz, d, q, a, b, combine } => {
                let result = self.compare(*cmp, *ty, *ftz, *a, *b);
                let inverse = self.b.ins().bxor_imm_u(result, 1);
                for (d, value) in [(d, result), (q, inverse)] {
                    if let &Some(d) = d {
                        let value = self.combine(value, *combine);
                        self.set(d, value);
                    }
                }
            }
            Op::Set { cmp, to, ty, ftz, d, a, b } => {
                let result = self.compare(*cmp, *ty, *ftz, *a, *b);
                let yes = self.constant(if *to == Type::F32 { 0x3F80_0000 } else { 0xFFFF_FFFF }, 4);
                let no = self.constant(0, 4);
                let value = self.b.ins().select(result, yes, no);
                self.set(*d, value);
            }
            Op::Testp { test, ty, d, a } => {
                let value = self.test(*test, *ty, *a);
                self.set(*d, value);
            }
            _ => return self.error("not a floating-point instruction"),
        }
        Ok(())
    }

    fn combine(&mut self, value: Value, with: Option<(Bool, Val, bool)>) -> Value {
        let Some((how, c, negated)) = with else { return value };
        let c = self.val(c, 1);
        let c = if negated { self.b.ins().bxor_imm_u(c, 1) } else { c };
        match how {
            Bool::And => self.b.ins().band(value, c),
            Bool::Or => self.b.ins().bor(value, c),
            Bool::Xor => self.b.ins().bxor(value, c),
        }
    }

    pub(super) fn as_f32(&mut self, bits: Value) -> Value {
        self.b.ins().bitcast(types::F32, cranelift_codegen::ir::MemFlagsData::new(), bits)
    }

    pub(super) fn as_f64(&mut self, bits: Value) -> Value {
        self.b.ins().bitcast(types::F64, cranelift_codegen::ir::MemFlagsData::new(), bits)
    }

    pub(super) fn as_float(&mut self, bits: Value) -> Value {
        if self.b.func.dfg.value_type(bits) == types::I32 {
            self.as_f32(bits)
        } else {
            self.as_f64(bits)
        }
    }

    pub(super) fn as_bits(&mut self, float: Value) -> Value {
        let to = if self.b.func.dfg.value_type(float) == types::F32 { types::I32 } else { types::I64 };
        self.b.ins().bitcast(to, cranelift_codegen::ir::MemFlagsData::new(), float)
    }

    /// Flushes a subnormal f32 to zero of the same sign.
    pub(super) fn flush(&mut self, bits: Value) -> Value {
        let exponent = self.b.ins().band_imm_u(bits, 0x7F80_0000);
        let sign = self.b.ins().band_imm_u(bits, 0x8000_0000);
        let small = self.b.ins().icmp_imm_s(IntCC::Equal, exponent, 0);
        self.b.ins().select(small, sign, bits)
    }

    /// Returns the bits of a result; a NaN becomes the instruction's NaN.
    pub(super) fn canonical(&mut self, float: Value) -> Value {
        let bits = self.as_bits(float);
        if self.b.func.dfg.value_type(float) == types::F64 {
            return bits;
        }
        let nan = self.b.ins().fcmp(FloatCC::Unordered, float, float);
        let canonical = self.b.ins().iconst(types::I32, NAN_F32);
        self.b.ins().select(nan, canonical, bits)
    }

    fn native(&mut self, op: FloatOp, ty: Type, args: &[Val; 3], ftz: bool, sat: bool) -> Value {
        let bits = args.map(|arg| {
            let bits = self.val(arg, ty.bytes());
            if ftz {
                self.flush(bits)
            } else {
                bits
            }
        });
        match op {
            // These change only the sign, also of NaNs.
            FloatOp::Neg | FloatOp::Abs | FloatOp::Copysign => {
                let sign = self.constant(1 << (ty.bits() - 1), ty.bytes());
                let magnitude = self.b.ins().band_not(bits[0], sign);
                return match op {
                    FloatOp::Neg => self.b.ins().bxor(bits[0], sign),
                    FloatOp::Abs => magnitude,
                    _ => {
                        // copysign takes the sign of the first operand and the magnitude of the second.
                        let own = self.b.ins().band(bits[0], sign);
                        let other = self.b.ins().band_not(bits[1], sign);
                        self.b.ins().bor(own, other)
                    }
                };
            }
            _ => {}
        }
        let [a, b, c] = bits.map(|bits| self.as_float(bits));
        let value = match op {
            FloatOp::Add => self.b.ins().fadd(a, b),
            FloatOp::Sub => self.b.ins().fsub(a, b),
            FloatOp::Mul => self.b.ins().fmul(a, b),
            FloatOp::Div => self.b.ins().fdiv(a, b),
            FloatOp::Fma => self.b.ins().fma(a, b, c),
            FloatOp::Sqrt => self.b.ins().sqrt(a),
            FloatOp::Rsqrt => {
                let wide = self.b.ins().fpromote(types::F64, a);
                let (root, one) = (self.b.ins().sqrt(wide), self.b.ins().f64const(1.0));
                let value = self.b.ins().fdiv(one, root);
                self.b.ins().fdemote(types::F32, value)
            }
            FloatOp::Rcp => {
                let one =
                    if ty == Type::F32 { self.b.ins().f32const(1.0) } else { self.b.ins().f64const(1.0) };
                self.b.ins().fdiv(one, a)
            }
            FloatOp::Min { nan } | FloatOp::Max { nan } => {
                let least = matches!(op, FloatOp::Min { .. });
                let both = if least { self.b.ins().fmin(a, b) } else { self.b.ins().fmax(a, b) };
                if nan {
                    both
                } else {
                    // If one operand is a NaN, the result is the other.
                    let (a_nan, b_nan) = (
                        self.b.ins().fcmp(FloatCC::Unordered, a, a),
                        self.b.ins().fcmp(FloatCC::Unordered, b, b),
                    );
                    let or_a = self.b.ins().select(b_nan, a, both);
                    self.b.ins().select(a_nan, b, or_a)
                }
            }
            FloatOp::Neg | FloatOp::Abs | FloatOp::Copysign => a,
        };
        let mut bits = self.canonical(value);
        if ftz {
            bits = self.flush(bits);
        }
        if sat {
            bits = self.saturate(bits);
        }
        bits
    }

    /// Clamps to [0, 1]; a NaN becomes 0.
    pub(super) fn saturate(&mut self, bits: Value) -> Value {
        let value = self.as_float(bits);
        let wide = self.b.func.dfg.value_type(value) == types::F64;
        let (zero, one) = match wide {
            true => (self.b.ins().f64const(0.0), self.b.ins().f64const(1.0)),
            false => (self.b.ins().f32const(0.0), self.b.ins().f32const(1.0)),
        };
        let above = self.b.ins().fcmp(FloatCC::GreaterThan, value, one);
        let within = self.b.ins().fcmp(FloatCC::GreaterThan, value, zero);
        let low = self.b.ins().select(within, value, zero);
        let both = self.b.ins().select(above, one, low);
        self.as_bits(both)
    }

    fn soft(&mut self, op: FloatOp, ty: Type, args: &[Val; 3], ftz: bool, sat: bool) -> Value {
        let code = self.b.ins().iconst(types::I32, i64::from(soft::float_code(op, ty, ftz, sat)));
        let [a, b, c] = args.map(|arg| {
            let bits = self.val(arg, ty.bytes());
            if ty.bytes() < 4 {
                self.b.ins().uextend(types::I32, bits)
            } else {
                bits
            }
        });
        let value = self.call(self.helpers.float, &[code, a, b, c]);
        if ty.bytes() == 2 {
            self.b.ins().ireduce(types::I16, value)
        } else {
            value
        }
    }

    fn compare(&mut self, cmp: Cmp, ty: Type, ftz: bool, a: Val, b: Val) -> Value {
        let (mut a, mut b) = (self.val(a, ty.bytes()), self.val(b, ty.bytes()));
        if !ty.is_float() {
            let signed = ty.is_signed();
            let cc = match (cmp, signed) {
                (Cmp::Eq, _) => IntCC::Equal,
                (Cmp::Ne, _) => IntCC::NotEqual,
                (Cmp::Lt, true) => IntCC::SignedLessThan,
                (Cmp::Lt, false) => IntCC::UnsignedLessThan,
                (Cmp::Le, true) => IntCC::SignedLessThanOrEqual,
                (Cmp::Le, false) => IntCC::UnsignedLessThanOrEqual,
                (Cmp::Gt, true) => IntCC::SignedGreaterThan,
                (Cmp::Gt, false) => IntCC::UnsignedGreaterThan,
                (_, true) => IntCC::SignedGreaterThanOrEqual,
                (_, false) => IntCC::UnsignedGreaterThanOrEqual,
            };
            return self.b.ins().icmp(cc, a, b);
        }
        if ty.bytes() == 2 {
            // f32 represents every half exactly.
            (a, b) = (self.half_to_f32(a, ty), self.half_to_f32(b, ty));
        }
        if ftz {
            (a, b) = (self.flush(a), self.flush(b));
        }
        let (a, b) = (self.as_float(a), self.as_float(b));
        let cc = match cmp {
            Cmp::Eq => FloatCC::Equal,
            Cmp::Ne => FloatCC::OrderedNotEqual,
            Cmp::Lt => FloatCC::LessThan,
            Cmp::Le => FloatCC::LessThanOrEqual,
            Cmp::Gt => FloatCC::GreaterThan,
            Cmp::Ge => FloatCC::GreaterThanOrEqual,
            Cmp::Equ => FloatCC::UnorderedOrEqual,
            Cmp::Neu => FloatCC::NotEqual,
            Cmp::Ltu => FloatCC::UnorderedOrLessThan,
            Cmp::Leu => FloatCC::UnorderedOrLessThanOrEqual,
            Cmp::Gtu => FloatCC::UnorderedOrGreaterThan,
            Cmp::Geu => FloatCC::UnorderedOrGreaterThanOrEqual,
            Cmp::Num => FloatCC::Ordered,
            Cmp::Nan => FloatCC::Unordered,
        };
        self.b.ins().fcmp(cc, a, b)
    }

    fn test(&mut self, test: TestP, ty: Type, a: Val) -> Value {
        let bits = self.val(a, ty.bytes());
        let (mantissa, infinity) = if ty == Type::F32 { (23, 0xFFu64 << 23) } else { (52, 0x7FFu64 << 52) };
        let sign = self.constant(1 << (ty.bits() - 1), ty.bytes());
        let magnitude = self.b.ins().band_not(bits, sign);
        let (infinity, smallest) =
            (self.constant(infinity, ty.bytes()), self.constant(1 << mantissa, ty.bytes()));
        match test {
            TestP::Finite => self.b.ins().icmp(IntCC::UnsignedLessThan, magnitude, infinity),
            TestP::Infinite => self.b.ins().icmp(IntCC::Equal, magnitude, infinity),
            TestP::Number => self.b.ins().icmp(IntCC::UnsignedLessThanOrEqual, magnitude, infinity),
            TestP::Nan => self.b.ins().icmp(IntCC::UnsignedGreaterThan, magnitude, infinity),
            TestP::Normal => {
                let finite = self.b.ins().icmp(IntCC::UnsignedLessThan, magnitude, infinity);
                let large = self.b.ins().icmp(IntCC::UnsignedGreaterThanOrEqual, magnitude, smallest);
                self.b.ins().band(finite, large)
            }
            TestP::Subnormal => {
                let small = self.b.ins().icmp(IntCC::UnsignedLessThan, magnitude, smallest);
                let some = self.b.ins().icmp_imm_s(IntCC::NotEqual, magnitude, 0);
                self.b.ins().band(small, some)
            }
        }
    }
}
