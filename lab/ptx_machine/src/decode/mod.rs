//! Decodes an opcode with its modifiers and operands into an [`Op`]. Anything unknown is an error.

mod alu;
mod control;
mod convert;
mod memory;
mod multimem;
mod warp;

use crate::errors::{LoadError, LoadResult};
use crate::ir::{Addr, Base, Op, Reg, Register, Val};
use crate::parser::{Raw, RawBase};
use crate::types::{Space, Type};

pub(crate) enum Decoded<'a> {
    Op(Op),
    Branch(&'a str),
    Switch(Val),
    Call { returns: Vec<&'a str>, name: &'a str, args: Vec<&'a str> },
}

/// Looks up a variable in scope: space, base and offset.
pub(crate) type Variables<'c> = dyn Fn(&str) -> Option<(Space, Base, u64)> + 'c;

/// Meaning of names at an instruction.
pub(crate) struct Context<'c> {
    pub line: u32,
    pub registers: &'c [Register],
    pub variable: &'c Variables<'c>,
    /// Whether approximations are allowed.
    pub approximate: bool,
}

pub(crate) fn decode<'a>(
    context: &Context,
    opcode: &'a str,
    operands: &[Raw<'a>],
) -> LoadResult<Decoded<'a>> {
    let mut parts = opcode.split('.');
    let name = parts.next().unwrap_or_default();
    let mut instr = Decoder { context, opcode, name, modifiers: parts.collect(), at: 0, operands };
    let decoded = match name {
        "bra" | "brx" | "call" | "ret" | "exit" | "trap" | "brkpt" => instr.control()?,
        "mov" | "ld" | "ldu" | "st" | "atom" | "red" | "fence" | "membar" | "cvta" | "isspacep"
        | "prefetch" | "mapa" | "getctarank" => Decoded::Op(instr.memory()?),
        "multimem" => Decoded::Op(instr.multimem()?),
        "bar" | "barrier" | "vote" | "shfl" | "match" | "activemask" | "redux" | "elect" | "nanosleep"
        | "griddepcontrol" => Decoded::Op(instr.warp()?),
        "cvt" => Decoded::Op(instr.convert()?),
        _ => Decoded::Op(instr.alu()?),
    };
    instr.finish()?;
    Ok(decoded)
}

pub(crate) struct Decoder<'c, 'a> {
    context: &'c Context<'c>,
    opcode: &'a str,
    name: &'a str,
    modifiers: Vec<&'a str>,
    at: usize,
    operands: &'c [Raw<'a>],
}

impl<'c, 'a> Decoder<'c, 'a> {
    fn error<T>(&self, what: impl AsRef<str>) -> LoadResult<T> {
        Err(LoadError::new(self.context.line, format!("{}: {}", self.opcode, what.as_ref())))
    }

    fn peek(&self) -> &'a str {
        self.modifiers.get(self.at).copied().unwrap_or("")
    }

    fn take(&mut self, modifier: &str) -> bool {
        let is = self.at < self.modifiers.len() && self.peek() == modifier;
        self.at += usize::from(is);
        is
    }

    /// Takes the next modifier if `parse` accepts it.
    fn take_if<T>(&mut self, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let taken = self.modifiers.get(self.at).and_then(|modifier| parse(modifier));
        self.at += usize::from(taken.is_some());
        taken
    }

    fn want<T>(&mut self, what: &str, parse: impl Fn(&str) -> Option<T>) -> LoadResult<T> {
        match self.take_if(parse) {
            Some(taken) => Ok(taken),
            None => self.error(format!("expected {what}, found {:?}", self.peek())),
        }
    }

    fn ty(&mut self) -> LoadResult<Type> {
        self.want("a type", Type::parse)
    }

    /// Takes a type that the instruction supports.
    fn ty_of(&mut self, fits: impl Fn(Type) -> bool) -> LoadResult<Type> {
        let ty = self.ty()?;
        if fits(ty) {
            Ok(ty)
        } else {
            self.error("not for this type")
        }
    }

    fn finish(&self) -> LoadResult<()> {
        if self.at == self.modifiers.len() {
            Ok(())
        } else {
            self.error(format!(".{} is not known here", self.peek()))
        }
    }

    fn count(&self, counts: std::ops::RangeInclusive<usize>) -> LoadResult<()> {
        if counts.contains(&self.operands.len()) {
            Ok(())
        } else {
            self.error(format!("{} operands", self.operands.len()))
        }
    }

    fn of_reg(&self, reg: Reg) -> Type {
        self.context.registers[reg as usize].ty
    }

    /// Checks that a register is wide enough for a value of this type.
    fn check_size(&self, reg: Reg, ty: Type, wider: bool) -> LoadResult<Reg> {
        let own = self.of_reg(reg);
        let fits = match (own == Type::Pred, ty == Type::Pred) {
            (true, true) => true,
            (false, false) => own.bytes() == ty.bytes() || (wider && own.bytes() > ty.bytes()),
            _ => false,
        };
        if fits {
            Ok(reg)
        } else {
            let name = &self.context.registers[reg as usize].name;
            self.error(format!("the register {name} is of type {own:?}"))
        }
    }

    fn reg(&self, i: usize, ty: Type) -> LoadResult<Reg> {
        match self.operands.get(i) {
            Some(&Raw::Reg(reg)) => self.check_size(reg, ty, false),
            other => self.error(format!("operand {i} must be a register, but is {other:?}")),
        }
    }

    fn pred(&self, i: usize) -> LoadResult<Reg> {
        self.reg(i, Type::Pred)
    }

    /// Returns a predicate that may be negated.
    fn condition(&self, i: usize) -> LoadResult<(Val, bool)> {
        match self.operands.get(i) {
            Some(&Raw::Reg(reg)) => Ok((Val::Reg(self.check_size(reg, Type::Pred, false)?), false)),
            Some(&Raw::Not(reg)) => Ok((Val::Reg(self.check_size(reg, Type::Pred, false)?), true)),
            Some(raw @ Raw::Int(_)) => Ok((self.val_of(raw, Type::Pred, false)?, false)),
            other => self.error(format!("operand {i} must be a predicate, but is {other:?}")),
        }
    }

    fn val(&self, i: usize, ty: Type) -> LoadResult<Val> {
        match self.operands.get(i) {
            Some(raw) => self.val_of(raw, ty, false),
            None => self.error("too few operands"),
        }
    }

    fn val_of(&self, raw: &Raw, ty: Type, wider: bool) -> LoadResult<Val> {
        let float = ty.is_float() || ty.is_packed() || ty.is_untyped();
        match *raw {
            Raw::Reg(reg) => Ok(Val::Reg(self.check_size(reg, ty, wider)?)),
            // Every constant except zero is true, which a register represents as 1.
            Raw::Int(value) if ty == Type::Pred => Ok(Val::Imm(u64::from(value != 0))),
            Raw::Int(value) if ty.is_integer() || ty.is_untyped() => Ok(Val::Imm(value)),
            Raw::F32(bits) if float && ty.bytes() == 4 => Ok(Val::F32(bits)),
            Raw::F64(bits) if float && ty.bytes() == 8 => Ok(Val::F64(bits)),
            // Hexadecimal f16 and bf16 constants are integers.
            Raw::Int(value) if float && ty.bytes() == 2 => Ok(Val::Imm(value)),
            ref other => self.error(format!("an operand of type {ty:?} must be a value, but is {other:?}")),
        }
    }

    /// Parses an address in a space: `[%r+8]`, `[name]`.
    fn addr(&self, i: usize, space: Space) -> LoadResult<Addr> {
        let Some(&Raw::Mem(base, offset)) = self.operands.get(i) else {
            return self.error(format!("operand {i} must be an address"));
        };
        match base {
            RawBase::Reg(reg) => {
                let ty = self.of_reg(reg);
                // Addresses of shared memory and parameters may have 32 bits.
                let narrow = ty.bytes() == 4
                    && matches!(space, Space::Shared | Space::SharedCluster | Space::Local | Space::Const);
                if ty == Type::Pred || !(ty.bytes() == 8 || narrow) {
                    return self.error("the register holds no address");
                }
                Ok(Addr { base: Base::Reg(reg), offset })
            }
            RawBase::None => Ok(Addr { base: Base::None, offset }),
            RawBase::Name(name) => {
                let Some((own, base, at)) = (self.context.variable)(name) else {
                    return self.error(format!("{name:?} is not known"));
                };
                let of_module = own == Space::Global || own == Space::Const;
                let in_cluster = own == Space::Shared && space == Space::SharedCluster;
                if own != space && !in_cluster && !(space == Space::Generic && of_module) {
                    return self.error(format!("{name:?} is not in this space"));
                }
                Ok(Addr { base, offset: offset.wrapping_add(at as i64) })
            }
        }
    }
}

/// Accepts each modifier of `names` at most once, in any order.
pub(crate) fn is_one_of(modifier: &str, names: &[&str]) -> Option<()> {
    names.contains(&modifier).then_some(())
}
