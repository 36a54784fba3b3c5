//! Conversion of text to tokens and back.

use std::collections::HashSet;

use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::tokenizer::TokenizerFromGguf as _;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::Tokenizer;

use crate::Result;

/// The mapping between text and tokens.
pub enum Text {
    Tokenizer {
        tokenizer: Box<Tokenizer>,
        ends: Vec<u32>,
    },
    /// For random weights: reads bytes, prints numbers.
    Numbers,
}

/// Checks that merged tokens are in the vocabulary: the tokenizer library panics otherwise.
fn check_merges(content: &Content) -> Result {
    let strings = |key: &str| {
        content.metadata.get(&format!("tokenizer.ggml.{key}")).and_then(|value| value.to_vec().ok())
    };
    let (Some(tokens), Some(merges)) = (strings("tokens"), strings("merges")) else {
        return Err("the file has no tokens and merges of a tokenizer".into());
    };
    let tokens: HashSet<&str> =
        tokens.iter().filter_map(|token| token.to_string().ok()).map(String::as_str).collect();
    for merge in merges {
        let merge = merge.to_string()?;
        let is_known = |(left, right): (&str, &str)| {
            [left, right, &format!("{left}{right}")].into_iter().all(|token| tokens.contains(token))
        };
        if !merge.split_once(' ').is_some_and(is_known) {
            return Err(format!("the tokenizer merges {merge:?}, which is not in its vocabulary").into());
        }
    }
    Ok(())
}

impl Text {
    pub fn of_gguf(content: &Content) -> Result<Self> {
        check_merges(content)?;
        let mut tokenizer = Tokenizer::from_gguf(content)?;
        let value = |key: &str| content.metadata.get(&format!("tokenizer.ggml.{key}"));
        if value("pre").and_then(|pre| pre.to_string().ok()).is_some_and(|pre| pre == "smollm") {
            // candle uses GPT-2's, which puts a space before the text and does not split numbers.
            let parts = vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
            tokenizer.with_pre_tokenizer(Some(Sequence::new(parts)));
        }
        let ends = ["eos_token_id", "unknown_token_id"]
            .into_iter()
            .filter_map(|key| value(key)?.to_u32().ok())
            .collect();
        Ok(Self::Tokenizer { tokenizer: Box::new(tokenizer), ends })
    }

    pub fn tokens(&self, text: &str, vocabulary: usize) -> Result<Vec<u32>> {
        let tokens = match self {
            Self::Tokenizer { tokenizer, .. } => tokenizer.encode(text, true)?.get_ids().to_vec(),
            Self::Numbers => text.bytes().map(|byte| u32::from(byte) % vocabulary as u32).collect(),
        };
        match tokens.iter().find(|&&token| token as usize >= vocabulary) {
            Some(token) => Err(format!("token {token} is not one of the vocabulary's {vocabulary}").into()),
            None if tokens.is_empty() => Err("the prompt is empty".into()),
            None => Ok(tokens),
        }
    }

    /// Returns whether the model ends its text with this token.
    pub fn is_end(&self, token: u32) -> bool {
        matches!(self, Self::Tokenizer { ends, .. } if ends.contains(&token))
    }

    /// Returns a function that passes the text of tokens to `write` once characters are complete.
    pub fn writer<'a>(&'a self, write: &'a mut dyn FnMut(&str)) -> Box<dyn FnMut(u32) -> Result + 'a> {
        match self {
            Self::Numbers => Box::new(|token| {
                write(&format!("{token} "));
                Ok(())
            }),
            Self::Tokenizer { tokenizer, .. } => {
                let mut stream = tokenizer.decode_stream(true);
                Box::new(move |token| {
                    // A character of several tokens is complete with the last of them.
                    if let Some(text) = stream.step(token)? {
                        write(&text);
                    }
                    Ok(())
                })
            }
        }
    }
}
