//! Greedy generation: reads a prompt and continues it, always with the likeliest token.

use std::time::Instant;

use candle_core::{Device, Module as _, Tensor};
use fast_allreduce_candle::{AllGather, Comm};

use crate::backend::{Backends, Spent};
use crate::model::Model;
use crate::Result;

/// Number of tokens of a prompt that are read at once: allreduces have 2 MiB for 512 channels.
const CHUNK: usize = 512;

/// A continuation, and its cost.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    pub tokens: Vec<u32>,
    pub prompt: Phase,
    pub decode: Phase,
    /// A hash of this rank's logits. The sum over the ranks does not depend on how logits are divided.
    pub digest: u64,
}

/// The cost of one phase: the prompt, or decoding.
#[derive(Debug, Clone, Copy, Default)]
pub struct Phase {
    pub tokens: usize,
    pub seconds: f64,
    pub spent: Spent,
}

pub struct Generator<'a> {
    pub model: Model,
    pub comm: Comm,
    pub backends: &'a Backends,
}

impl Generator<'_> {
    /// Continues `prompt` by at most `most` tokens. `write` receives each token and returns whether it is the last.
    pub fn run(
        &mut self,
        prompt: &[u32],
        most: usize,
        write: &mut dyn FnMut(u32) -> Result<bool>,
    ) -> Result<Outcome> {
        self.model.clear(prompt.len() + most)?;
        let mut outcome = Outcome::default();
        let (start, before) = (Instant::now(), self.backends.spent());
        let mut position = 0;
        let mut logits = Vec::new();
        for chunk in prompt.chunks(CHUNK) {
            logits = self.model.forward(chunk, position)?;
            position += chunk.len();
        }
        let mut token = self.likeliest(&logits)?;
        outcome.prompt = Phase {
            tokens: prompt.len(),
            seconds: start.elapsed().as_secs_f64(),
            spent: self.backends.spent().since(before),
        };
        outcome.digest = digest(&logits, self.model.first_token());
        let (start, before) = (Instant::now(), self.backends.spent());
        loop {
            outcome.tokens.push(token);
            if write(token)? || outcome.tokens.len() == most {
                break;
            }
            logits = self.model.forward(&[token], position)?;
            position += 1;
            token = self.likeliest(&logits)?;
        }
        outcome.decode = Phase {
            // The first token came from the prompt.
            tokens: outcome.tokens.len() - 1,
            seconds: start.elapsed().as_secs_f64(),
            spent: self.backends.spent().since(before),
        };
        outcome.digest = outcome.digest.wrapping_add(digest(&logits, self.model.first_token()));
        Ok(outcome)
    }

    /// Returns the token with the largest logit of all ranks, the first of equal ones.
    fn likeliest(&self, logits: &[f32]) -> Result<u32> {
        let mut own = (f32::NEG_INFINITY, 0);
        for (token, &logit) in (self.model.first_token()..).zip(logits) {
            if !logit.is_finite() {
                return Err(format!(
                    "the logit of token {token} is {logit}: the weights are damaged, or of another architecture"
                )
                .into());
            }
            if logit > own.0 {
                own = (logit, token);
            }
        }
        // Both are exact in f64.
        let own = Tensor::new(&[[f64::from(own.0), own.1 as f64]], &Device::Cpu)?;
        let all = AllGather::new(&self.comm, 0).forward(&own)?.to_vec2::<f64>()?;
        let best = all.iter().fold((f64::NEG_INFINITY, 0.0), |best, theirs| {
            if theirs[0] > best.0 {
                (theirs[0], theirs[1])
            } else {
                best
            }
        });
        Ok(best.1 as u32)
    }
}

fn digest(logits: &[f32], first: usize) -> u64 {
    let of = |(token, logit): (usize, &f32)| {
        let word = (token as u64) << 32 | u64::from(logit.to_bits());
        (word ^ word >> 29)
            .wrapping_mul(0xbf58_476d_1ce4_e5b9)
            .rotate_left(31)
            .wrapping_mul(0x94d0_49bb_1331_11eb)
    };
    (first..).zip(logits).map(of).fold(0, u64::wrapping_add)
}
