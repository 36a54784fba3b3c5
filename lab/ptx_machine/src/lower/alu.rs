//! Integer arithmetic.

use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{types, InstBuilder, Value};

use super::{int, Lower};
use crate::errors::LoadResult;
use crate::ir::{BinOp, Op, Prmt, TernOp, UnOp, Val};
use crate::types::Type;

impl Lower<'_, '_> {
    pub(super) fn alu(&mut self, op: &Op) -> LoadResult<()> {
        match op {
            Op::Mov { ty, d, a } => {
                let a = self.val(*a, ty.bytes());
                self.set(*d, a);
            }
            Op::Join { d, parts } => self.join(*d, parts),
            Op::Split { d, a } => {
                let bytes =
                    d.iter().flatten().map(|&d| self.function.registers[d as usize].ty.bytes()).next();
                let Some(part) = bytes else { return Ok(()) };
                let whole = self.val(*a, part * d.len() as u32);
                for (i, d) in d.iter().enumerate() {
                    if let &Some(d) = d {
                        let shifted = self.b.ins().ushr_imm_u(whole, i as i64 * i64::from(part) * 8);
                        let low = self.b.ins().ireduce(int(part), shifted);
                        self.set(d, low);
                    }
                }
            }
            Op::Un { op, ty, d, a } => {
                let a = self.val(*a, ty.bytes());
                let value = self.unary(*op, *ty, a);
                self.set(*d, value);
            }
            Op::Bin { op, ty, d, a, b } => {
                let second = if matches!(op, BinOp::Shl | BinOp::Shr) { 4 } else { ty.bytes() };
                let (a, b) = (self.val(*a, ty.bytes()), self.val(*b, second));
                let value = self.binary(*op, *ty, a, b);
                self.set(*d, value);
            }
            Op::Tern { op, ty, d, a, b, c } => {
                let value = self.ternary(*op, *ty, [*a, *b, *c]);
                self.set(*d, value);
            }
            Op::Bfi { ty, d, args } => {
                let value = self.insert_bits(*ty, args);
                self.set(*d, value);
            }
            Op::Selp { ty, d, a, b, p } => {
                let (a, b, p) = (self.val(*a, ty.bytes()), self.val(*b, ty.bytes()), self.val(*p, 1));
                let value = self.b.ins().select(p, a, b);
                self.set(*d, value);
            }
            _ => return self.error("not an integer instruction"),
        }
        Ok(())
    }

    fn join(&mut self, d: u32, parts: &[Val]) {
        let whole = self.function.registers[d as usize].ty.bytes();
        let part = whole / parts.len() as u32;
        let mut value = None;
        for (i, &a) in parts.iter().enumerate() {
            let a = self.val(a, part);
            let wide = self.b.ins().uextend(int(whole), a);
            let placed = self.b.ins().ishl_imm_u(wide, i as i64 * i64::from(part) * 8);
            value = Some(match value {
                Some(rest) => self.b.ins().bor(rest, placed),
                None => placed,
            });
        }
        if let Some(value) = value {
            self.set(d, value);
        }
    }

    fn unary(&mut self, op: UnOp, ty: Type, a: Value) -> Value {
        let bits = i64::from(ty.bits());
        let narrow = |lower: &mut Self, value: Value| {
            if ty.bytes() == 8 {
                lower.b.ins().ireduce(types::I32, value)
            } else {
                value
            }
        };
        match op {
            UnOp::Neg => self.b.ins().ineg(a),
            UnOp::Not if ty == Type::Pred => self.b.ins().bxor_imm_u(a, 1),
            UnOp::Not => self.b.ins().bnot(a),
            UnOp::Cnot => {
                let zero = self.b.ins().icmp_imm_s(IntCC::Equal, a, 0);
                self.widen(zero, ty)
            }
            // The most negative integer remains unchanged, as in PTX.
            UnOp::Abs => self.b.ins().iabs(a),
            UnOp::Clz => {
                let value = self.b.ins().clz(a);
                narrow(self, value)
            }
            UnOp::Popc => {
                let value = self.b.ins().popcnt(a);
                narrow(self, value)
            }
            UnOp::Brev => self.b.ins().bitrev(a),
            UnOp::Bfind { shift_amount } => {
                // For a negative number: the first bit that differs from its sign.
                let folded = if ty.is_signed() {
                    let sign = self.b.ins().sshr_imm_u(a, bits - 1);
                    self.b.ins().bxor(a, sign)
                } else {
                    a
                };
                let zeros = self.b.ins().clz(folded);
                let zeros = narrow(self, zeros);
                let last = self.b.ins().iconst(types::I32, bits - 1);
                let at = if shift_amount { zeros } else { self.b.ins().isub(last, zeros) };
                let none = self.b.ins().icmp_imm_s(IntCC::Equal, folded, 0);
                let minus = self.b.ins().iconst(types::I32, 0xFFFF_FFFF);
                self.b.ins().select(none, minus, at)
            }
        }
    }

    fn widen(&mut self, flag: Value, ty: Type) -> Value {
        if ty.bytes() == 1 {
            flag
        } else {
            self.b.ins().uextend(int(ty.bytes()), flag)
        }
    }

    fn binary(&mut self, op: BinOp, ty: Type, a: Value, b: Value) -> Value {
        let signed = ty.is_signed();
        match op {
            BinOp::Add => self.b.ins().iadd(a, b),
            BinOp::Sub => self.b.ins().isub(a, b),
            BinOp::AddSat | BinOp::SubSat => {
                let (a, b) = (self.b.ins().sextend(types::I64, a), self.b.ins().sextend(types::I64, b));
                let wide =
                    if op == BinOp::AddSat { self.b.ins().iadd(a, b) } else { self.b.ins().isub(a, b) };
                let (low, high) = (
                    self.b.ins().iconst(types::I64, i64::from(i32::MIN)),
                    self.b.ins().iconst(types::I64, i64::from(i32::MAX)),
                );
                let above = self.b.ins().smax(wide, low);
                let within = self.b.ins().smin(above, high);
                self.b.ins().ireduce(types::I32, within)
            }
            BinOp::MulLo => self.b.ins().imul(a, b),
            BinOp::MulHi => self.high(a, b, signed),
            BinOp::MulWide => {
                let to = int(ty.bytes() * 2);
                let (a, b) = match signed {
                    true => (self.b.ins().sextend(to, a), self.b.ins().sextend(to, b)),
                    false => (self.b.ins().uextend(to, a), self.b.ins().uextend(to, b)),
                };
                self.b.ins().imul(a, b)
            }
            BinOp::Mul24Lo => {
                let cut = |lower: &mut Self, value: Value| {
                    let up = lower.b.ins().ishl_imm_u(value, 8);
                    if signed {
                        lower.b.ins().sshr_imm_u(up, 8)
                    } else {
                        lower.b.ins().ushr_imm_u(up, 8)
                    }
                };
                let (a, b) = (cut(self, a), cut(self, b));
                self.b.ins().imul(a, b)
            }
            BinOp::Div | BinOp::Rem => self.divide(op == BinOp::Div, ty, a, b),
            BinOp::Min if signed => self.b.ins().smin(a, b),
            BinOp::Min => self.b.ins().umin(a, b),
            BinOp::Max if signed => self.b.ins().smax(a, b),
            BinOp::Max => self.b.ins().umax(a, b),
            BinOp::And => self.b.ins().band(a, b),
            BinOp::Or => self.b.ins().bor(a, b),
            BinOp::Xor => self.b.ins().bxor(a, b),
            BinOp::Shl | BinOp::Shr => self.shift(op == BinOp::Shl, ty, a, b),
        }
    }

    fn high(&mut self, a: Value, b: Value, signed: bool) -> Value {
        if signed {
            self.b.ins().smulhi(a, b)
        } else {
            self.b.ins().umulhi(a, b)
        }
    }

    /// Divides. PTX leaves division by 0 open; like GPUs, returns all ones as quotient and the dividend as
    /// remainder.
    fn divide(&mut self, quotient: bool, ty: Type, a: Value, b: Value) -> Value {
        let zero = self.b.ins().icmp_imm_s(IntCC::Equal, b, 0);
        let one = self.constant(1, ty.bytes());
        let ones = self.constant(u64::MAX, ty.bytes());
        let mut divisor = self.b.ins().select(zero, one, b);
        let mut minus = None;
        if ty.is_signed() {
            // The most negative number divided by -1 traps on some CPUs. Division by -1 is a negation
            // instead.
            let is_minus = self.b.ins().icmp(IntCC::Equal, divisor, ones);
            divisor = self.b.ins().select(is_minus, one, divisor);
            minus = Some(is_minus);
        }
        let (value, by_zero, by_minus) = match (quotient, ty.is_signed()) {
            (true, true) => (self.b.ins().sdiv(a, divisor), ones, self.b.ins().ineg(a)),
            (true, false) => (self.b.ins().udiv(a, divisor), ones, a),
            (false, true) => (self.b.ins().srem(a, divisor), a, self.constant(0, ty.bytes())),
            (false, false) => (self.b.ins().urem(a, divisor), a, a),
        };
        let value = match minus {
            Some(minus) => self.b.ins().select(minus, by_minus, value),
            None => value,
        };
        self.b.ins().select(zero, by_zero, value)
    }

    /// Shifts; amounts of at least the width shift everything out.
    fn shift(&mut self, left: bool, ty: Type, a: Value, amount: Value) -> Value {
        let last = self.b.ins().iconst(types::I32, i64::from(ty.bits() - 1));
        let within = self.b.ins().umin(amount, last);
        if !left && ty.is_signed() {
            return self.b.ins().sshr(a, within);
        }
        let shifted = if left { self.b.ins().ishl(a, within) } else { self.b.ins().ushr(a, within) };
        let beyond = self.b.ins().icmp(IntCC::UnsignedGreaterThan, amount, last);
        let zero = self.constant(0, ty.bytes());
        self.b.ins().select(beyond, zero, shifted)
    }

    fn ternary(&mut self, op: TernOp, ty: Type, args: [Val; 3]) -> Value {
        let bytes = ty.bytes();
        let [a, b, c] = args;
        match op {
            TernOp::MadLo | TernOp::MadHi | TernOp::Sad => {
                let [a, b, c] = [self.val(a, bytes), self.val(b, bytes), self.val(c, bytes)];
                let first = match op {
                    TernOp::MadLo => self.b.ins().imul(a, b),
                    TernOp::MadHi => self.high(a, b, ty.is_signed()),
                    _ => {
                        let (most, least) =
                            (self.binary(BinOp::Max, ty, a, b), self.binary(BinOp::Min, ty, a, b));
                        self.b.ins().isub(most, least)
                    }
                };
                self.b.ins().iadd(first, c)
            }
            TernOp::MadWide => {
                let (a, b, c) = (self.val(a, bytes), self.val(b, bytes), self.val(c, bytes * 2));
                let product = self.binary(BinOp::MulWide, ty, a, b);
                self.b.ins().iadd(product, c)
            }
            TernOp::Lop3(table) => {
                let args = args.map(|arg| self.val(arg, 4));
                self.table_of_three(table, args)
            }
            TernOp::Bfe => self.extract_bits(ty, args),
            TernOp::Prmt(mode) => self.permute(mode, args),
            TernOp::ShfLeft { wrap } | TernOp::ShfRight { wrap } => {
                let [a, b, c] = args.map(|arg| self.val(arg, 4));
                let (low, high) = (self.b.ins().uextend(types::I64, a), self.b.ins().uextend(types::I64, b));
                let high = self.b.ins().ishl_imm_u(high, 32);
                let both = self.b.ins().bor(high, low);
                let most = self.b.ins().iconst(types::I32, 32);
                let amount = if wrap { self.b.ins().band_imm_u(c, 31) } else { self.b.ins().umin(c, most) };
                let shifted = if matches!(op, TernOp::ShfLeft { .. }) {
                    let up = self.b.ins().ishl(both, amount);
                    self.b.ins().ushr_imm_u(up, 32)
                } else {
                    self.b.ins().ushr(both, amount)
                };
                self.b.ins().ireduce(types::I32, shifted)
            }
            TernOp::Slct(by) => {
                let (a, b, c) = (self.val(a, bytes), self.val(b, bytes), self.val(c, 4));
                let takes = if by == Type::S32 {
                    self.b.ins().icmp_imm_s(IntCC::SignedGreaterThanOrEqual, c, 0)
                } else {
                    // A NaN selects b; -0 is not less than 0.
                    let c = self.as_f32(c);
                    let zero = self.b.ins().f32const(0.0);
                    self.b.ins().fcmp(cranelift_codegen::ir::condcodes::FloatCC::GreaterThanOrEqual, c, zero)
                };
                self.b.ins().select(takes, a, b)
            }
            TernOp::Dp4a { signed_a, signed_b } => self.dot_of_bytes(signed_a, signed_b, args),
        }
    }

    fn table_of_three(&mut self, table: u8, [a, b, c]: [Value; 3]) -> Value {
        let mut sum = self.constant(0, 4);
        for row in 0..8u8 {
            if table >> row & 1 == 0 {
                continue;
            }
            let mut all = self.constant(u64::MAX, 4);
            for (value, bit) in [(a, 4), (b, 2), (c, 1)] {
                let value = if row & bit != 0 { value } else { self.b.ins().bnot(value) };
                all = self.b.ins().band(all, value);
            }
            sum = self.b.ins().bor(sum, all);
        }
        sum
    }

    fn dot_of_bytes(&mut self, signed_a: bool, signed_b: bool, args: [Val; 3]) -> Value {
        let [a, b, mut sum] = args.map(|arg| self.val(arg, 4));
        for i in 0..4 {
            let byte = |lower: &mut Self, value: Value, signed: bool| {
                let up = lower.b.ins().ishl_imm_u(value, 24 - 8 * i);
                if signed {
                    lower.b.ins().sshr_imm_u(up, 24)
                } else {
                    lower.b.ins().ushr_imm_u(up, 24)
                }
            };
            let (a, b) = (byte(self, a, signed_a), byte(self, b, signed_b));
            let product = self.b.ins().imul(a, b);
            sum = self.b.ins().iadd(sum, product);
        }
        sum
    }

    fn permute(&mut self, mode: Prmt, args: [Val; 3]) -> Value {
        let [a, b, c] = args.map(|arg| self.val(arg, 4));
        let (low, high) = (self.b.ins().uextend(types::I64, a), self.b.ins().uextend(types::I64, b));
        let high = self.b.ins().ishl_imm_u(high, 32);
        let bytes = self.b.ins().bor(high, low);
        let select = self.b.ins().uextend(types::I64, c);
        let mut sum = self.constant(0, 8);
        for i in 0..4i64 {
            let (which, sign) = if mode == Prmt::Index {
                let nibble = self.b.ins().ushr_imm_u(select, 4 * i);
                (self.b.ins().band_imm_u(nibble, 7), Some(self.b.ins().band_imm_u(nibble, 8)))
            } else {
                (self.permuted_byte(mode, select, i), None)
            };
            let amount = self.b.ins().ishl_imm_u(which, 3);
            let byte = self.b.ins().ushr(bytes, amount);
            let mut byte = self.b.ins().band_imm_u(byte, 0xFF);
            if let Some(sign) = sign {
                let negative = self.b.ins().band_imm_u(byte, 0x80);
                let is_negative = self.b.ins().icmp_imm_s(IntCC::NotEqual, negative, 0);
                let (ones, zeros) = (self.constant(0xFF, 8), self.constant(0, 8));
                let spread = self.b.ins().select(is_negative, ones, zeros);
                byte = self.b.ins().select(sign, spread, byte);
            }
            let placed = self.b.ins().ishl_imm_u(byte, 8 * i);
            sum = self.b.ins().bor(sum, placed);
        }
        self.b.ins().ireduce(types::I32, sum)
    }

    /// Selects the source byte of byte `i`, by the two lowest bits of the selector.
    fn permuted_byte(&mut self, mode: Prmt, select: Value, i: i64) -> Value {
        let n = self.b.ins().band_imm_u(select, 3);
        let place = self.b.ins().iconst(types::I64, i);
        match mode {
            Prmt::F4e => self.b.ins().iadd(n, place),
            Prmt::B4e => {
                let back = self.b.ins().isub(n, place);
                self.b.ins().band_imm_u(back, 7)
            }
            Prmt::Rc8 => n,
            Prmt::Ecl => self.b.ins().umax(n, place),
            Prmt::Ecr => self.b.ins().umin(n, place),
            Prmt::Rc16 | Prmt::Index => {
                let half = self.b.ins().band_imm_u(n, 1);
                let first = self.b.ins().ishl_imm_u(half, 1);
                self.b.ins().iadd_imm_u(first, i & 1)
            }
        }
    }

    /// `bfe`: position and length are 8 bits each; bits beyond the value equal its sign.
    fn extract_bits(&mut self, ty: Type, [a, b, c]: [Val; 3]) -> Value {
        let (a, at, length) = (self.val(a, ty.bytes()), self.val(b, 4), self.val(c, 4));
        let at = self.b.ins().band_imm_u(at, 0xFF);
        let length = self.b.ins().band_imm_u(length, 0xFF);
        // Shifts left so that the field ends at the top bit, then right.
        let width = self.b.ins().iconst(types::I32, i64::from(ty.bits()));
        let end = self.b.ins().iadd(at, length);
        let end = self.b.ins().umin(end, width);
        let start = self.b.ins().umin(at, width);
        let kept = self.b.ins().isub(end, start);
        let up = self.b.ins().isub(width, end);
        let down = self.b.ins().isub(width, kept);
        let raised = self.shift(true, ty, a, up);
        let field = if !ty.is_signed() {
            self.shift(false, ty, raised, down)
        } else {
            // Where the field reaches beyond the value, its bits equal the sign of the value.
            let own = self.shift(false, ty, raised, down);
            let nothing = self.b.ins().icmp_imm_s(IntCC::Equal, kept, 0);
            let none = self.b.ins().icmp_imm_s(IntCC::Equal, length, 0);
            let sign = self.b.ins().sshr_imm_u(a, i64::from(ty.bits()) - 1);
            let beyond = self.b.ins().select(nothing, sign, own);
            let zero = self.constant(0, ty.bytes());
            self.b.ins().select(none, zero, beyond)
        };
        field
    }

    fn insert_bits(&mut self, ty: Type, args: &[Val; 4]) -> Value {
        let (a, b) = (self.val(args[0], ty.bytes()), self.val(args[1], ty.bytes()));
        let (at, length) = (self.val(args[2], 4), self.val(args[3], 4));
        let at = self.b.ins().band_imm_u(at, 0xFF);
        let length = self.b.ins().band_imm_u(length, 0xFF);
        let width = self.b.ins().iconst(types::I32, i64::from(ty.bits()));
        let capped = self.b.ins().umin(length, width);
        let cut = self.b.ins().isub(width, capped);
        let ones = self.constant(u64::MAX, ty.bytes());
        let unsigned = if ty.bytes() == 8 { Type::B64 } else { Type::B32 };
        let low = self.shift(false, unsigned, ones, cut);
        let mask = self.shift(true, unsigned, low, at);
        let placed = self.shift(true, unsigned, a, at);
        let (new, kept) = (self.b.ins().band(placed, mask), self.b.ins().band_not(b, mask));
        self.b.ins().bor(new, kept)
    }
}
