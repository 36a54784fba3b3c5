//! Parses operands.

use super::body::Body;
use super::Parser;
use crate::errors::LoadResult;
use crate::ir::Reg;
use crate::lexer::Token;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Raw<'a> {
    Reg(Reg),
    /// `%r1|%p1`
    Pair(Option<Reg>, Option<Reg>),
    Int(u64),
    F32(u32),
    F64(u64),
    /// A variable, label, special register or function, with an offset.
    Name(&'a str, i64),
    Mem(RawBase<'a>, i64),
    List(Vec<Raw<'a>>),
    Not(Reg),
    Sink,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum RawBase<'a> {
    Reg(Reg),
    Name(&'a str),
    None,
}

impl<'a> Parser<'a> {
    /// Parses the operands up to `;`.
    pub(super) fn operands(&mut self, body: &Body<'a>) -> LoadResult<Vec<Raw<'a>>> {
        let mut operands = Vec::new();
        while !self.take_mark(b';') {
            operands.push(self.operand(body, 0)?);
            if !self.take_mark(b',') && !self.is_mark(b';') {
                return self.error("`,` or `;` was expected");
            }
        }
        Ok(operands)
    }

    fn operand(&mut self, body: &Body<'a>, depth: u32) -> LoadResult<Raw<'a>> {
        match self.peek().cloned() {
            Some(Token::Int(_) | Token::Mark(b'-')) => self.int().map(Raw::Int),
            Some(Token::F32(bits)) => self.constant(Raw::F32(bits)),
            Some(Token::F64(bits)) => self.constant(Raw::F64(bits)),
            Some(Token::Mark(b'[')) => self.memory(body),
            Some(Token::Mark(open @ (b'{' | b'('))) if depth < 2 => {
                self.at += 1;
                let close = if open == b'{' { b'}' } else { b')' };
                let mut list = Vec::new();
                while !self.take_mark(close) {
                    list.push(self.operand(body, depth + 1)?);
                    if !self.take_mark(b',') && !self.is_mark(close) {
                        return self.error("`,` or the end of a list was expected");
                    }
                }
                Ok(Raw::List(list))
            }
            Some(Token::Mark(b'!')) => {
                self.at += 1;
                let name = self.word()?;
                match body.register(name) {
                    Some(reg) => Ok(Raw::Not(reg)),
                    None => self.error(format!("{name:?} is not a register")),
                }
            }
            Some(Token::Word(_)) => self.named(body),
            other => self.error(format!("expected an operand, found {other:?}")),
        }
    }

    fn constant(&mut self, value: Raw<'a>) -> LoadResult<Raw<'a>> {
        self.at += 1;
        Ok(value)
    }

    fn named(&mut self, body: &Body<'a>) -> LoadResult<Raw<'a>> {
        let name = self.word()?;
        let first = match (name, body.register(name)) {
            ("_", _) => None,
            (_, Some(reg)) => Some(reg),
            _ => {
                let offset = self.offset()?;
                return Ok(Raw::Name(name, offset));
            }
        };
        if self.take_mark(b'|') {
            let name = self.word()?;
            let second = match (name, body.register(name)) {
                ("_", _) => None,
                (_, Some(reg)) => Some(reg),
                _ => return self.error(format!("{name:?} is not a register")),
            };
            return Ok(Raw::Pair(first, second));
        }
        Ok(first.map_or(Raw::Sink, Raw::Reg))
    }

    /// Parses `+8`, `+-8`, `-8`.
    fn offset(&mut self) -> LoadResult<i64> {
        let plus = self.take_mark(b'+');
        if plus || self.is_mark(b'-') {
            return Ok(self.int()? as i64);
        }
        Ok(0)
    }

    fn memory(&mut self, body: &Body<'a>) -> LoadResult<Raw<'a>> {
        self.expect(b'[')?;
        let base = match self.peek() {
            Some(&Token::Word(name)) => {
                self.at += 1;
                body.register(name).map_or(RawBase::Name(name), RawBase::Reg)
            }
            _ => RawBase::None,
        };
        let offset = if base == RawBase::None { self.int()? as i64 } else { self.offset()? };
        self.expect(b']')?;
        Ok(Raw::Mem(base, offset))
    }
}
