//! Variables of a module: `.shared`, `.global` and `.const`.

use super::{align_up, Parser, Variable};
use crate::errors::LoadResult;
use crate::lexer::Token;
use crate::types::Space;

/// Maximum shared memory of a block on any GPU.
const MOST_SHARED: u64 = 228 << 10;

impl Parser<'_> {
    pub(super) fn module_shared(&mut self, external: bool) -> LoadResult<()> {
        let declared = self.declared()?;
        self.expect(b';')?;
        let offset = align_up(u64::from(self.module.shared_bytes), declared.align);
        if declared.open && !external {
            return self.error("only an .extern variable has no size");
        }
        let bytes = if declared.open { 0 } else { declared.bytes };
        if offset + bytes > MOST_SHARED {
            return self.error("more shared memory than a block has");
        }
        // Dynamic shared memory follows all variables of known size. All names of it have one address.
        let variable = Variable {
            space: Space::Shared,
            offset: if declared.open { 0 } else { offset },
            dynamic: declared.open,
        };
        if !declared.open {
            self.module.shared_bytes = (offset + bytes) as u32;
        }
        self.variables.insert(declared.name, variable);
        Ok(())
    }

    pub(super) fn module_data(&mut self, constant: bool) -> LoadResult<()> {
        let declared = self.declared()?;
        if declared.open || declared.copies != 1 {
            return self.error("a variable of a module must have a size");
        }
        let space = if constant { Space::Const } else { Space::Global };
        let offset = align_up(self.module.data.len() as u64, declared.align.max(16));
        let mut bytes = Vec::new();
        if self.take_mark(b'=') {
            if self.take_mark(b'{') {
                while !self.take_mark(b'}') {
                    self.initial(declared.element.bytes(), &mut bytes)?;
                    if !self.take_mark(b',') && !self.is_mark(b'}') {
                        return self.error("`,` or `}` was expected");
                    }
                }
            } else {
                self.initial(declared.element.bytes(), &mut bytes)?;
            }
        }
        self.expect(b';')?;
        if bytes.len() as u64 > declared.bytes {
            return self.error("more initial values than elements");
        }
        bytes.resize(declared.bytes as usize, 0);
        self.module.data.resize(offset as usize, 0);
        self.module.data.extend(bytes);
        self.variables.insert(declared.name, Variable { space, offset, dynamic: false });
        Ok(())
    }

    fn initial(&mut self, bytes: u32, to: &mut Vec<u8>) -> LoadResult<()> {
        let value = match self.peek() {
            Some(&Token::F32(bits)) if bytes == 4 => u64::from(bits),
            Some(&Token::F64(bits)) if bytes == 8 => bits,
            Some(Token::Int(_) | Token::Mark(b'-')) if bytes <= 8 => {
                let value = self.int()?;
                to.extend(&value.to_le_bytes()[..bytes as usize]);
                return Ok(());
            }
            _ => return self.error("this initial value is not supported"),
        };
        self.at += 1;
        to.extend(&value.to_le_bytes()[..bytes as usize]);
        Ok(())
    }
}
