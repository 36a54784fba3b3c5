//! Splits PTX text into tokens with line numbers.

use crate::errors::{LoadError, LoadResult};

#[derive(Debug, Clone, PartialEq)]
pub enum Token<'a> {
    /// Identifiers, directives, registers and opcodes with their modifiers: `ld.global.u32`, `.reg`, `%tid.x`, `a::b`.
    Word(&'a str),
    Int(u64),
    /// The bits of an f32 or f64 constant: `0f3F800000`, `0d3FF0000000000000`.
    F32(u32),
    F64(u64),
    Text(&'a str),
    Mark(u8),
}

#[derive(Debug, Clone)]
pub struct Lexed<'a> {
    pub token: Token<'a>,
    pub line: u32,
}

pub fn lex(text: &str) -> LoadResult<Vec<Lexed<'_>>> {
    let mut lexer = Lexer { text, bytes: text.as_bytes(), at: 0, line: 1 };
    let mut tokens = Vec::with_capacity(text.len() / 5);
    while let Some(token) = lexer.next()? {
        tokens.push(token);
    }
    Ok(tokens)
}

struct Lexer<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    line: u32,
}

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

impl<'a> Lexer<'a> {
    fn error<T>(&self, what: impl Into<String>) -> LoadResult<T> {
        Err(LoadError::new(self.line, what))
    }

    fn peek(&self, ahead: usize) -> u8 {
        self.bytes.get(self.at + ahead).copied().unwrap_or(0)
    }

    fn next(&mut self) -> LoadResult<Option<Lexed<'a>>> {
        self.skip_space()?;
        let line = self.line;
        let Some(&byte) = self.bytes.get(self.at) else { return Ok(None) };
        let token = match byte {
            b'"' => self.text_constant()?,
            b'0'..=b'9' => self.number()?,
            _ if in_word(byte) => self.word(),
            b'(' | b')' | b'{' | b'}' | b'[' | b']' | b'<' | b'>' | b',' | b';' | b':' | b'+' | b'-'
            | b'!' | b'@' | b'=' | b'|' => {
                self.at += 1;
                Token::Mark(byte)
            }
            _ => return self.error(format!("unexpected character {:?}", char::from(byte))),
        };
        Ok(Some(Lexed { token, line }))
    }

    fn skip_space(&mut self) -> LoadResult<()> {
        loop {
            match (self.peek(0), self.peek(1)) {
                (b'\n', _) => {
                    self.line += 1;
                    self.at += 1;
                }
                (b' ' | b'\t' | b'\r', _) => self.at += 1,
                (b'/', b'/') => {
                    while self.at < self.bytes.len() && self.bytes[self.at] != b'\n' {
                        self.at += 1;
                    }
                }
                (b'/', b'*') => {
                    let Some(length) = self.text.as_bytes()[self.at..].windows(2).position(|w| w == b"*/")
                    else {
                        return self.error("an unterminated comment");
                    };
                    let comment = &self.bytes[self.at..self.at + length];
                    self.line += comment.iter().filter(|&&b| b == b'\n').count() as u32;
                    self.at += length + 2;
                }
                _ => return Ok(()),
            }
        }
    }

    fn text_constant(&mut self) -> LoadResult<Token<'a>> {
        let start = self.at + 1;
        let end = self.bytes[start..].iter().position(|&b| b == b'"' || b == b'\n');
        match end {
            Some(length) if self.bytes[start + length] == b'"' => {
                self.at = start + length + 1;
                Ok(Token::Text(&self.text[start..start + length]))
            }
            _ => self.error("an unterminated string"),
        }
    }

    fn word(&mut self) -> Token<'a> {
        let start = self.at;
        loop {
            if in_word(self.peek(0)) {
                self.at += 1;
            } else if self.peek(0) == b':' && self.peek(1) == b':' {
                self.at += 2;
            } else {
                return Token::Word(&self.text[start..self.at]);
            }
        }
    }

    fn number(&mut self) -> LoadResult<Token<'a>> {
        let start = self.at;
        while self.peek(0).is_ascii_alphanumeric() {
            self.at += 1;
        }
        let text = &self.text[start..self.at];
        let bytes = text.as_bytes();
        let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
        let token = match (bytes[0], bytes.get(1)) {
            (b'0', Some(b'f' | b'F')) if text.len() == 10 => {
                hex(&text[2..]).map(|bits| Token::F32(bits as u32))
            }
            (b'0', Some(b'd' | b'D')) if text.len() == 18 => hex(&text[2..]).map(Token::F64),
            (b'0', Some(b'x' | b'X')) => hex(text[2..].trim_end_matches('U')).map(Token::Int),
            (b'0', Some(b'b' | b'B')) => {
                u64::from_str_radix(text[2..].trim_end_matches('U'), 2).ok().map(Token::Int)
            }
            (b'0', Some(b'0'..=b'7')) => {
                u64::from_str_radix(text[1..].trim_end_matches('U'), 8).ok().map(Token::Int)
            }
            _ => text.trim_end_matches('U').parse().ok().map(Token::Int),
        };
        match token {
            Some(token) => Ok(token),
            None => self.error(format!("{text:?} is not a supported number")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_numbers_and_marks() {
        let tokens =
            lex("@!%p1 ld.shared::cta.u32 %r1, [%rd2+-8]; // x\n0f3F800000 0x10U /* a\nb */ \"t\"").unwrap();
        let expected = [
            Token::Mark(b'@'),
            Token::Mark(b'!'),
            Token::Word("%p1"),
            Token::Word("ld.shared::cta.u32"),
            Token::Word("%r1"),
            Token::Mark(b','),
            Token::Mark(b'['),
            Token::Word("%rd2"),
            Token::Mark(b'+'),
            Token::Mark(b'-'),
            Token::Int(8),
            Token::Mark(b']'),
            Token::Mark(b';'),
            Token::F32(0x3F80_0000),
            Token::Int(16),
            Token::Text("t"),
        ];
        assert!(tokens.iter().map(|lexed| &lexed.token).eq(&expected), "{tokens:?}");
        assert_eq!(tokens.last().map(|lexed| lexed.line), Some(3));
    }

    #[test]
    fn what_is_no_token_has_its_line() {
        assert_eq!(lex("a\n#").unwrap_err().line, 2);
        assert!(lex("\"abc").is_err());
        assert!(lex("/* abc").is_err());
        assert!(lex("99999999999999999999999").is_err());
    }
}
