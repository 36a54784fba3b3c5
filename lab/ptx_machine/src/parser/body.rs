//! Reads the body of a function: declarations, labels and instructions, in nested scopes.

use std::collections::HashMap;

use super::{align_up, Inlined, Param, Parser, Raw, Signature, Variable};
use crate::decode::{self, Context};
use crate::errors::{LoadError, LoadResult};
use crate::ir::{Base, Function, Instr, Label, Loc, Op, Reg, Register};
use crate::lexer::Token;
use crate::types::{Space, Type};

/// State of a function that is being read.
pub(crate) struct Body<'a> {
    pub function: Function,
    params: HashMap<&'a str, Param>,
    /// Names of the open scopes, the innermost last.
    scopes: Vec<Names<'a>>,
    /// Labels, by number of the function that defines them (0: this function; others: inlined calls) and
    /// name.
    labels: HashMap<(u32, &'a str), Label>,
    /// Number of inlined calls so far; the next: the innermost open one and its place of return.
    inlined: u32,
    within: Option<(u32, Label)>,
    /// For each label: where it is defined, and the line of its first use.
    defined: Vec<Option<u32>>,
    used: Vec<u32>,
    targets: HashMap<&'a str, Vec<Label>>,
    loc: Loc,
    /// Bytes of the function's own shared variables.
    shared_bytes: u64,
}

#[derive(Default)]
struct Names<'a> {
    registers: HashMap<&'a str, Reg>,
    /// Ranges such as `%r<5>`: first register and number, by prefix.
    ranges: HashMap<&'a str, (Reg, u32)>,
    slots: HashMap<&'a str, u32>,
    variables: HashMap<&'a str, Variable>,
}

/// Maximum number of registers of a thread. A GPU has 255, but PTX precedes register allocation.
const MOST_REGISTERS: usize = 1 << 16;
/// Maximum static shared memory of a block, and local memory of a thread (Programming Guide, Technical
/// Specifications).
const MOST_SHARED: u64 = 48 << 10;
const MOST_LOCAL: u64 = 512 << 10;
/// Maximum bytes of the shared variables of all functions; here each has its own place.
const MOST_SHARED_OF_ALL: u64 = 64 << 20;

impl<'a> Body<'a> {
    pub fn register(&self, name: &str) -> Option<Reg> {
        if !name.starts_with(['%', '_', '$']) && !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
            return None;
        }
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let (prefix, number) = name.split_at(name.len() - digits);
        for names in self.scopes.iter().rev() {
            if let Some(&reg) = names.registers.get(name) {
                return Some(reg);
            }
            if let (Some(&(first, count)), Ok(number)) = (names.ranges.get(prefix), number.parse::<u32>()) {
                if number < count {
                    return Some(first + number);
                }
            }
        }
        None
    }

    pub fn slot(&self, name: &str) -> Option<u32> {
        self.scopes.iter().rev().find_map(|names| names.slots.get(name).copied())
    }

    /// Returns space, base and offset of a variable.
    fn variable(&self, name: &str) -> Option<(Space, Base, u64)> {
        if let Some(param) = self.params.get(name) {
            return Some((
                Space::Param,
                if param.returned { Base::Return } else { Base::Param },
                param.offset,
            ));
        }
        if let Some(slot) = self.slot(name) {
            return Some((Space::Param, Base::Slot(slot), 0));
        }
        let variable = self.scopes.iter().rev().find_map(|names| names.variables.get(name))?;
        Some((variable.space, base_of(variable), variable.offset))
    }

    /// Returns a label, which may be defined later.
    fn label(&mut self, name: &'a str, line: u32) -> Label {
        let next = self.defined.len() as Label;
        let whose = self.within.map_or(0, |(whose, _)| whose);
        let label = *self.labels.entry((whose, name)).or_insert(next);
        if label == next {
            self.defined.push(None);
            self.used.push(line);
        }
        label
    }
}

fn base_of(variable: &Variable) -> Base {
    match variable.space {
        Space::Shared if variable.dynamic => Base::Dynamic,
        Space::Shared => Base::Shared,
        Space::Local => Base::Local,
        _ => Base::Data,
    }
}

impl<'a> Parser<'a> {
    pub(super) fn body(
        &mut self,
        function: Function,
        params: HashMap<&'a str, Param>,
    ) -> LoadResult<Function> {
        let mut body = Body {
            function,
            params,
            scopes: Vec::new(),
            labels: HashMap::new(),
            inlined: 0,
            within: None,
            defined: Vec::new(),
            used: Vec::new(),
            targets: HashMap::new(),
            loc: Loc::default(),
            shared_bytes: 0,
        };
        if !self.is_mark(b'{') {
            return self.error("a body was expected");
        }
        loop {
            self.statement(&mut body)?;
            if body.scopes.is_empty() {
                break;
            }
        }
        for (i, defined) in body.defined.iter().enumerate() {
            match defined {
                Some(at) => body.function.labels.push(*at),
                None => {
                    let name = body
                        .labels
                        .iter()
                        .find(|(_, &label)| label as usize == i)
                        .map_or("", |((_, name), _)| name);
                    return Err(LoadError::new(body.used[i], format!("{name:?} is not a label")));
                }
            }
        }
        Ok(body.function)
    }

    fn statement(&mut self, body: &mut Body<'a>) -> LoadResult<()> {
        match self.next()? {
            Token::Mark(b'{') => {
                if body.scopes.len() > 30 {
                    return self.error("scopes are nested too deeply");
                }
                body.scopes.push(Names::default());
                Ok(())
            }
            Token::Mark(b'}') => {
                body.scopes.pop();
                Ok(())
            }
            Token::Mark(b';') => Ok(()),
            Token::Mark(b'@') => {
                let negated = self.take_mark(b'!');
                let name = self.word()?;
                let Some(guard) = body.register(name) else {
                    return self.error(format!("{name:?} is not a register"));
                };
                if body.function.registers[guard as usize].ty != Type::Pred {
                    return self.error(format!("{name:?} is not a predicate"));
                }
                let opcode = self.word()?;
                self.instruction(body, opcode, Some((guard, negated)))
            }
            Token::Word(word) if self.is_mark(b':') => self.label_or_targets(body, word),
            Token::Word(word) if word.starts_with('.') => self.declaration(body, word),
            Token::Word(word) => self.instruction(body, word, None),
            other => self.error(format!("no statement begins with {other:?}")),
        }
    }

    fn label_or_targets(&mut self, body: &mut Body<'a>, name: &'a str) -> LoadResult<()> {
        self.expect(b':')?;
        if self.take_word(".branchtargets") {
            let mut targets = Vec::new();
            loop {
                let line = self.line();
                let target = self.word()?;
                targets.push(body.label(target, line));
                if !self.take_mark(b',') {
                    break;
                }
            }
            body.targets.insert(name, targets);
            return self.expect(b';');
        }
        let line = self.line();
        let label = body.label(name, line) as usize;
        let at = body.function.code.len() as u32;
        if body.defined[label].replace(at).is_some() {
            return self.error(format!("the label {name} is defined twice"));
        }
        Ok(())
    }

    fn declaration(&mut self, body: &mut Body<'a>, word: &'a str) -> LoadResult<()> {
        match word {
            ".reg" => return self.registers(body),
            ".loc" => return self.loc(body),
            ".pragma" => return self.pragma(),
            ".param" | ".local" | ".shared" => {}
            other => return self.error(format!("{other:?} is not known in a body")),
        }
        let declared = self.declared()?;
        if declared.open || declared.copies != 1 {
            return self.error("a variable of a body must have a size");
        }
        self.expect(b';')?;
        let module_shared = &mut self.module.shared_bytes;
        let function = &mut body.function;
        let Some(names) = body.scopes.last_mut() else {
            return self.error("a declaration outside of a body");
        };
        let (space, end) = match word {
            ".param" => {
                names.slots.insert(declared.name, function.slots.len() as u32);
                function.slots.push(declared.bytes as u32);
                return Ok(());
            }
            ".local" => (Space::Local, &mut function.local_bytes),
            // Each function's variables have their own place in the module, independent of the kernel.
            _ => (Space::Shared, module_shared),
        };
        let offset = align_up(u64::from(*end), declared.align);
        let last = offset + declared.bytes;
        let fits = match space {
            Space::Local => last <= MOST_LOCAL,
            _ => {
                body.shared_bytes += declared.bytes;
                body.shared_bytes <= MOST_SHARED && last <= MOST_SHARED_OF_ALL
            }
        };
        if !fits {
            let whose = if space == Space::Local {
                "local memory than a thread"
            } else {
                "shared memory than a block"
            };
            return self.error(format!("more {whose} has"));
        }
        *end = last as u32;
        names.variables.insert(declared.name, Variable { space, offset, dynamic: false });
        Ok(())
    }

    fn registers(&mut self, body: &mut Body<'a>) -> LoadResult<()> {
        let word = self.word()?;
        let Some(ty) = word.strip_prefix('.').and_then(Type::parse) else {
            return self.error(format!("{word:?} is not a type of registers"));
        };
        loop {
            let name = self.word()?;
            let count = if self.take_mark(b'<') {
                let count = self.small()?;
                self.expect(b'>')?;
                Some(count)
            } else {
                None
            };
            let first = body.function.registers.len() as Reg;
            if first as usize + count.unwrap_or(1) as usize > MOST_REGISTERS {
                return self.error("too many registers");
            }
            let Some(names) = body.scopes.last_mut() else {
                return self.error("a register outside of a body");
            };
            match count {
                Some(count) => {
                    names.ranges.insert(name, (first, count));
                    let all = (0..count).map(|i| Register { name: format!("{name}{i}"), ty });
                    body.function.registers.extend(all);
                }
                None => {
                    names.registers.insert(name, first);
                    body.function.registers.push(Register { name: name.to_owned(), ty });
                }
            }
            if !self.take_mark(b',') {
                return self.expect(b';');
            }
        }
    }

    fn loc(&mut self, body: &mut Body<'a>) -> LoadResult<()> {
        let (file, line, _column) = (self.small()?, self.small()?, self.small()?);
        body.loc = Loc { file, line, into: (0, 0) };
        if !self.take_mark(b',') {
            return Ok(());
        }
        if !self.take_word("function_name") {
            return self.error("function_name was expected");
        }
        self.word()?;
        if self.take_mark(b'+') {
            self.int()?;
        }
        self.expect(b',')?;
        if !self.take_word("inlined_at") {
            return self.error("inlined_at was expected");
        }
        body.loc.into = (self.small()?, self.small()?);
        self.small()?;
        Ok(())
    }

    fn instruction(
        &mut self,
        body: &mut Body<'a>,
        opcode: &'a str,
        guard: Option<(Reg, bool)>,
    ) -> LoadResult<()> {
        let line = self.tokens[self.at - 1].line;
        let operands = self.operands(body)?;
        let targets = match &operands[..] {
            [.., Raw::Name(name, 0)] => body.targets.get(name).cloned(),
            _ => None,
        };
        let variables = &self.variables;
        let known = |name: &str| {
            let of_module = || variables.get(name).map(|v| (v.space, base_of(v), v.offset));
            body.variable(name).or_else(of_module)
        };
        let approximate = self.approximate;
        let context = Context { line, registers: &body.function.registers, variable: &known, approximate };
        let op = match decode::decode(&context, opcode, &operands)? {
            decode::Decoded::Op(op) => op,
            decode::Decoded::Branch(name) => Op::Bra { to: body.label(name, line) },
            decode::Decoded::Switch(index) => {
                let Some(to) = targets else {
                    return self.error("brx.idx needs .branchtargets that come before it");
                };
                Op::BrxIdx { index, to }
            }
            decode::Decoded::Call { returns, name, args } => {
                let slot = |name: &&str| body.slot(name);
                let all: Option<Vec<u32>> = args.iter().map(slot).collect();
                let returns: Option<Vec<u32>> = returns.iter().map(slot).collect();
                let (Some(args), Some(returns)) = (all, returns) else {
                    return self.error("arguments of a call are .param variables");
                };
                let bytes = |slot: &u32| body.function.slots[*slot as usize];
                let signature = Signature {
                    returns: returns.iter().map(bytes).sum(),
                    params: args.iter().map(bytes).collect(),
                };
                if self.signatures.get(name) != Some(&signature) || returns.len() > 1 {
                    return self.error(format!("{name} was not declared with such parameters"));
                }
                if let Some(inlined) = self.inlined.get(name).cloned() {
                    if guard.is_some() {
                        return self.error("a guarded call of a function that waits is not supported");
                    }
                    return self.inline(body, &inlined, &args, returns.first().copied());
                }
                Op::Call { name: name.to_owned(), returns: returns.first().copied(), args }
            }
        };
        let op = match (op, body.within) {
            (Op::Ret, Some((_, end))) => Op::Bra { to: end },
            (op, _) => op,
        };
        body.function.code.push(Instr { line, loc: body.loc, guard, op });
        Ok(())
    }

    /// Inlines a function. Its parameters are the call's slots, which must outlive waits.
    fn inline(
        &mut self,
        body: &mut Body<'a>,
        inlined: &Inlined<'a>,
        args: &[u32],
        returns: Option<u32>,
    ) -> LoadResult<()> {
        if body.within.is_some() {
            return self.error("a function that waits and is called by another is not supported");
        }
        let mut names = Names::default();
        names.slots.extend(inlined.params.iter().copied().zip(args.iter().copied()));
        names.slots.extend(inlined.returned.zip(returns));
        for &slot in args {
            let (at, bytes) =
                (align_up(u64::from(body.function.local_bytes), 16), body.function.slots[slot as usize]);
            body.function.kept.insert(slot, at as u32);
            body.function.local_bytes = at as u32 + bytes;
        }
        let (after, loc, depth) = (self.at, body.loc, body.scopes.len());
        let end = body.defined.len() as Label;
        body.defined.push(None);
        body.used.push(self.line());
        body.inlined += 1;
        body.within = Some((body.inlined, end));
        body.scopes.push(names);
        self.at = inlined.body.start;
        loop {
            self.statement(body)?;
            if body.scopes.len() == depth + 1 {
                break;
            }
        }
        body.scopes.pop();
        body.within = None;
        body.defined[end as usize] = Some(body.function.code.len() as u32);
        (self.at, body.loc) = (after, loc);
        Ok(())
    }
}
