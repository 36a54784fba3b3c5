//! Parses the text of a module into a [`Module`]: directives here, bodies in `body`, operands in `operand`.

mod body;
mod data;
mod operand;

use std::collections::HashMap;

use crate::errors::{LoadError, LoadResult};
use crate::ir::{Function, Module};
use crate::lexer::{lex, Lexed, Token};
use crate::types::{Space, Type};

pub(crate) use operand::{Raw, RawBase};

/// Newest supported `.version`.
const NEWEST: (u32, u32) = (9, 1);

/// Parses a module. Functions that wait are inlined into their callers; with `inline_all`, all functions
/// are. `approximate`: whether instructions that a GPU approximates are allowed.
///
/// # Errors
///
/// An unknown or wrong word, with its line.
pub fn parse(text: &str, inline_all: bool, approximate: bool) -> LoadResult<Module> {
    let tokens = lex(text)?;
    let end = tokens.last().map_or(1, |last| last.line);
    let mut parser = Parser {
        tokens,
        at: 0,
        end,
        module: Module::default(),
        variables: HashMap::new(),
        signatures: HashMap::new(),
        inlined: HashMap::new(),
        approximate,
    };
    parser.find_inlined(inline_all)?;
    parser.module()?;
    Ok(parser.module)
}

/// Maximum number of blocks of a cluster; beyond 8, kernels must ask the driver for it.
const MOST_CLUSTER: u32 = 16;

/// A variable of the module or of a function.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Variable {
    pub space: Space,
    /// Offset in its space; for dynamic shared memory from its beginning.
    pub offset: u64,
    /// Whether it is dynamic shared memory.
    pub dynamic: bool,
}

/// Signature that a call must match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Signature {
    pub returns: u32,
    pub params: Vec<u32>,
}

pub(crate) struct Parser<'a> {
    tokens: Vec<Lexed<'a>>,
    at: usize,
    end: u32,
    module: Module,
    variables: HashMap<&'a str, Variable>,
    signatures: HashMap<String, Signature>,
    inlined: HashMap<&'a str, Inlined<'a>>,
    approximate: bool,
}

/// A function that is inlined.
#[derive(Debug, Clone)]
pub(crate) struct Inlined<'a> {
    /// Names of its `.param` variables.
    pub params: Vec<&'a str>,
    pub returned: Option<&'a str>,
    /// Tokens of its body, from the opening brace to the token after the closing one.
    pub body: std::ops::Range<usize>,
}

/// A declaration of a `.param`, `.shared`, ... variable.
pub(crate) struct Declared<'a> {
    pub name: &'a str,
    pub align: u64,
    pub bytes: u64,
    pub element: Type,
    /// `name[]`: an array of unknown size.
    pub open: bool,
    /// `name<n>`: n variables.
    pub copies: u32,
}

pub(crate) fn align_up(at: u64, align: u64) -> u64 {
    at.saturating_add(align - 1) / align * align
}

/// Prefixes of instructions at which a thread waits for other threads.
const WAITS: [&str; 8] =
    ["bar.", "barrier.", "shfl.", "vote.", "match.", "redux.", "nanosleep", "griddepcontrol."];

impl<'a> Parser<'a> {
    pub fn line(&self) -> u32 {
        self.tokens.get(self.at).map_or(self.end, |lexed| lexed.line)
    }

    pub fn error<T>(&self, what: impl Into<String>) -> LoadResult<T> {
        Err(LoadError::new(self.line(), what))
    }

    pub fn peek(&self) -> Option<&Token<'a>> {
        self.tokens.get(self.at).map(|lexed| &lexed.token)
    }

    pub fn next(&mut self) -> LoadResult<Token<'a>> {
        match self.tokens.get(self.at) {
            Some(lexed) => {
                self.at += 1;
                Ok(lexed.token.clone())
            }
            None => self.error("unexpected end of the text within a module"),
        }
    }

    pub fn is_mark(&self, mark: u8) -> bool {
        self.peek() == Some(&Token::Mark(mark))
    }

    pub fn take_mark(&mut self, mark: u8) -> bool {
        let is = self.is_mark(mark);
        self.at += usize::from(is);
        is
    }

    pub fn expect(&mut self, mark: u8) -> LoadResult<()> {
        if self.take_mark(mark) {
            return Ok(());
        }
        let found = self.peek().cloned();
        self.error(format!("expected {:?}, found {found:?}", char::from(mark)))
    }

    pub fn take_word(&mut self, word: &str) -> bool {
        let is = self.peek() == Some(&Token::Word(word));
        self.at += usize::from(is);
        is
    }

    pub fn word(&mut self) -> LoadResult<&'a str> {
        match self.peek() {
            Some(&Token::Word(word)) => {
                self.at += 1;
                Ok(word)
            }
            other => {
                let found = other.cloned();
                self.error(format!("expected a name, found {found:?}"))
            }
        }
    }

    pub fn int(&mut self) -> LoadResult<u64> {
        let negative = self.take_mark(b'-');
        match self.next()? {
            Token::Int(value) if negative => Ok(value.wrapping_neg()),
            Token::Int(value) => Ok(value),
            other => self.error(format!("expected a number, found {other:?}")),
        }
    }

    pub fn small(&mut self) -> LoadResult<u32> {
        let value = self.int()?;
        u32::try_from(value).or_else(|_| self.error(format!("{value} is too large here")))
    }

    fn module(&mut self) -> LoadResult<()> {
        self.header()?;
        while self.at < self.tokens.len() {
            self.directive()?;
        }
        Ok(())
    }

    fn header(&mut self) -> LoadResult<()> {
        if !self.take_word(".version") {
            return self.error("a module begins with .version");
        }
        // The lexer reads `9.0` as a word that begins with a digit: a number, then `.0`.
        let major = self.small()?;
        let minor = self.word()?.strip_prefix('.').and_then(|minor| minor.parse().ok());
        let Some(minor) = minor else { return self.error(".version needs a number such as 9.0") };
        if (major, minor) > NEWEST {
            return self.error(format!(
                "PTX ISA {major}.{minor} is newer than {}.{}, the newest known",
                NEWEST.0, NEWEST.1
            ));
        }
        self.module.version = (major, minor);
        if !self.take_word(".target") {
            return self.error(".target was expected");
        }
        self.module.target = self.word()?.to_owned();
        while self.take_mark(b',') {
            self.word()?;
        }
        if !self.take_word(".address_size") || self.int()? != 64 {
            return self.error(".address_size 64 was expected");
        }
        Ok(())
    }

    fn directive(&mut self) -> LoadResult<()> {
        let linkage =
            [".visible", ".extern", ".weak", ".common"].into_iter().find(|word| self.take_word(word));
        match self.word()? {
            ".file" => self.file(),
            ".section" => self.section(),
            ".entry" => self.function(true),
            ".func" => self.function(false),
            ".shared" => self.module_shared(linkage == Some(".extern")),
            ".global" => self.module_data(false),
            ".const" => self.module_data(true),
            ".alias" | ".pragma" => self.error("unknown directive"),
            other => self.error(format!("unknown directive {other:?}")),
        }
    }

    fn file(&mut self) -> LoadResult<()> {
        let number = self.small()?;
        let Token::Text(name) = self.next()? else { return self.error(".file requires a name") };
        self.module.files.insert(number, name.to_owned());
        while self.take_mark(b',') {
            self.int()?;
        }
        Ok(())
    }

    /// Skips debugging information.
    fn section(&mut self) -> LoadResult<()> {
        if !self.word()?.starts_with(".debug") {
            return self.error("only sections of debugging information are known");
        }
        self.expect(b'{')?;
        let mut depth = 1;
        while depth > 0 {
            match self.next()? {
                Token::Mark(b'{') => depth += 1,
                Token::Mark(b'}') => depth -= 1,
                _ => {}
            }
        }
        Ok(())
    }

    /// Parses `.align n`, type, name, `[n]`.
    pub fn declared(&mut self) -> LoadResult<Declared<'a>> {
        let mut align = None;
        let mut vector = 1;
        let element = loop {
            let word = self.word()?;
            match word {
                ".align" => align = Some(self.int()?),
                ".v2" => vector = 2,
                ".v4" => vector = 4,
                _ => match word.strip_prefix('.').and_then(Type::parse) {
                    Some(Type::Pred) | None => {
                        return self.error(format!("{word:?} is not a type of variables"))
                    }
                    Some(ty) => break ty,
                },
            }
        };
        // A promise about where a parameter points to, which the machine does not rely on.
        if self.take_word(".ptr") {
            let _ = [".global", ".const", ".local", ".shared"].iter().any(|space| self.take_word(space));
            if self.take_word(".align") {
                self.int()?;
            }
        }
        let name = self.word()?;
        let one = u64::from(element.bytes()) * vector;
        let align = align.unwrap_or(one);
        if !align.is_power_of_two() || align > 1 << 20 {
            return self.error(format!("{align} is not an alignment"));
        }
        let mut declared = Declared { name, align, bytes: one, element, open: false, copies: 1 };
        if self.take_mark(b'<') {
            declared.copies = self.small()?;
            self.expect(b'>')?;
        }
        while self.take_mark(b'[') {
            if self.take_mark(b']') {
                declared.open = true;
                continue;
            }
            let count = self.int()?;
            self.expect(b']')?;
            match declared.bytes.checked_mul(count).filter(|&bytes| bytes <= 1 << 30) {
                Some(bytes) => declared.bytes = bytes,
                None => return self.error(format!("{name} is too large")),
            }
        }
        Ok(declared)
    }

    fn function(&mut self, is_entry: bool) -> LoadResult<()> {
        let mut function = Function {
            is_entry,
            line: self.line(),
            most_threads: 1024,
            most_cluster: MOST_CLUSTER,
            ..Function::default()
        };
        let mut names = HashMap::new();
        if !is_entry && self.is_mark(b'(') {
            let returns = self.parameters(&mut names, true)?;
            function.return_bytes = returns.iter().map(|&(_, bytes)| bytes).sum();
        }
        function.name = self.word()?.to_owned();
        if self.is_mark(b'(') {
            function.params = self.parameters(&mut names, false)?;
        }
        function.param_bytes = function.params.last().map_or(0, |&(offset, bytes)| offset + bytes);
        self.function_directives(&mut function)?;
        let sizes: Vec<u32> = function.params.iter().map(|&(_, bytes)| bytes).collect();
        let signature = Signature { returns: function.return_bytes, params: sizes };
        let known = self.signatures.insert(function.name.clone(), signature.clone());
        if known.is_some_and(|known| known != signature) {
            return self.error(format!("{} was declared with other parameters", function.name));
        }
        if self.take_mark(b';') {
            return Ok(());
        }
        if let Some(inlined) = self.inlined.get(&*function.name) {
            self.at = inlined.body.end;
            return Ok(());
        }
        if self.module.by_name.contains_key(&function.name) {
            return self.error(format!("{} is defined twice", function.name));
        }
        let function = self.body(function, names)?;
        self.module.by_name.insert(function.name.clone(), self.module.functions.len());
        self.module.functions.push(function);
        Ok(())
    }

    /// Finds the functions to be inlined.
    fn find_inlined(&mut self, all: bool) -> LoadResult<()> {
        for at in 0..self.tokens.len() {
            if self.tokens[at].token != Token::Word(".func") {
                continue;
            }
            self.at = at + 1;
            let mut names = HashMap::new();
            if self.is_mark(b'(') {
                self.parameters(&mut names, true)?;
            }
            let name = self.word()?;
            if self.is_mark(b'(') {
                self.parameters(&mut names, false)?;
            }
            self.function_directives(&mut Function::default())?;
            let Some(body) = self.block() else { continue };
            let waits = self.tokens[body.clone()].iter().any(|lexed| match lexed.token {
                Token::Word(word) => WAITS.iter().any(|wait| word.starts_with(wait)),
                _ => false,
            });
            if all || waits {
                let mut params: Vec<_> = names.iter().filter(|(_, param)| !param.returned).collect();
                params.sort_by_key(|(_, param)| param.offset);
                let params = params.into_iter().map(|(&name, _)| name).collect();
                let returned = names.iter().find(|(_, param)| param.returned).map(|(&name, _)| name);
                self.inlined.insert(name, Inlined { params, returned, body });
            }
        }
        self.at = 0;
        Ok(())
    }

    /// Returns the tokens from an opening brace here to the matching closing brace.
    fn block(&self) -> Option<std::ops::Range<usize>> {
        let mut depth = 0;
        for (at, lexed) in self.tokens.iter().enumerate().skip(self.at) {
            match lexed.token {
                Token::Mark(b'{') => depth += 1,
                Token::Mark(b'}') => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return (at > self.at).then_some(self.at..at + 1);
            }
        }
        None
    }

    /// Returns the offset and size of each.
    fn parameters(
        &mut self,
        names: &mut HashMap<&'a str, Param>,
        returned: bool,
    ) -> LoadResult<Vec<(u32, u32)>> {
        self.expect(b'(')?;
        let (mut params, mut at) = (Vec::new(), 0);
        while !self.take_mark(b')') {
            if !self.take_word(".param") {
                return self.error("parameters are .param variables");
            }
            let declared = self.declared()?;
            if declared.open || declared.copies != 1 {
                return self.error("a parameter has a size");
            }
            let offset = align_up(at, declared.align);
            at = offset + declared.bytes;
            if at > 32_764 {
                return self.error("parameters take more than 32764 bytes");
            }
            params.push((offset as u32, declared.bytes as u32));
            let param = Param { offset, returned };
            if names.insert(declared.name, param).is_some() {
                return self.error(format!("{} is defined twice", declared.name));
            }
            if !self.take_mark(b',') && !self.is_mark(b')') {
                return self.error("`,` or `)` was expected");
            }
        }
        if returned && params.len() > 1 {
            return self.error("more than one return value");
        }
        Ok(params)
    }

    fn function_directives(&mut self, function: &mut Function) -> LoadResult<()> {
        while let Some(&Token::Word(word)) = self.peek() {
            self.at += 1;
            match word {
                ".maxntid" => function.most_threads = self.extents()?.iter().product(),
                ".reqntid" => {
                    function.exact_threads = self.extents()?;
                    function.most_threads = function.exact_threads.iter().product();
                }
                ".reqnctapercluster" => function.exact_cluster = self.extents()?,
                ".explicitcluster" => function.explicit_cluster = true,
                ".maxclusterrank" => function.most_cluster = self.small()?.min(MOST_CLUSTER),
                // Directives about register allocation.
                ".minnctapersm" | ".maxnreg" | ".maxnctapersm" => _ = self.int()?,
                ".noreturn" => {}
                ".pragma" => self.pragma()?,
                other => return self.error(format!("unknown function directive {other:?}")),
            }
        }
        Ok(())
    }

    /// Skips a pragma, which is a hint to the assembler.
    pub fn pragma(&mut self) -> LoadResult<()> {
        match self.next()? {
            Token::Text(hint) if hint == "nounroll" || hint.starts_with("used_bytes_mask ") => {
                self.expect(b';')
            }
            other => self.error(format!("pragma {other:?} is not known")),
        }
    }

    fn extents(&mut self) -> LoadResult<[u32; 3]> {
        let mut extents = [1; 3];
        for (i, extent) in extents.iter_mut().enumerate() {
            if i > 0 && !self.take_mark(b',') {
                break;
            }
            *extent = self.small()?;
            if *extent == 0 || *extent > 1024 {
                return self.error("a block has 1 to 1024 threads");
            }
        }
        Ok(extents)
    }
}

/// A parameter of a function.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Param {
    pub offset: u64,
    pub returned: bool,
}
