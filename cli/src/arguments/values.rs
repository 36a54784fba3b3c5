//! The values of arguments: sizes, names, numbers.

use std::time::Duration;

use fast_allreduce::device::host::Isa;
use fast_allreduce::plan::PlannedCall;
use fast_allreduce::{Algorithm, CallKind, DType, ReduceOp};

/// Several values that one argument stands for.
#[derive(Debug, Clone)]
pub struct Choice<T>(pub Vec<T>);

pub fn size(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((end, 'k' | 'K')) => (&text[..end], 10),
        Some((end, 'm' | 'M')) => (&text[..end], 20),
        Some((end, 'g' | 'G')) => (&text[..end], 30),
        Some((end, 't' | 'T')) => (&text[..end], 40),
        _ => (text, 0),
    };
    let number: usize =
        digits.parse().map_err(|_| "a size is a number, with K, M, G or T behind it or not")?;
    number.checked_mul(1 << shift).ok_or_else(|| "it does not fit 64 bits".into())
}

pub fn positive(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|&count| count > 0).ok_or_else(|| "a number from 1 on".into())
}

pub fn seconds(text: &str) -> Result<Duration, String> {
    let duration = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.filter(|duration| !duration.is_zero()).ok_or_else(|| "a positive number of seconds".into())
}

pub fn dtypes(text: &str) -> Result<Choice<DType>, String> {
    if text == "all" {
        return Ok(Choice(DType::ALL.into()));
    }
    let found = text.parse().map(|dtype| Choice(vec![dtype]));
    found.map_err(|_| format!("one of {}, all", DType::ALL.map(DType::name).join(", ")))
}

pub fn ops(text: &str) -> Result<Choice<ReduceOp>, String> {
    if text == "all" {
        return Ok(Choice(ReduceOp::ARITHMETIC.into()));
    }
    let found = text.parse().map(|op| Choice(vec![op]));
    found.map_err(|_| "one of sum, prod, min, max, avg, band, bor, bxor, premul_sum:SCALE, all".into())
}

pub fn algorithms(text: &str) -> Result<Choice<Option<Algorithm>>, String> {
    match text {
        "auto" => Ok(Choice(vec![None])),
        "all" => Ok(Choice(Algorithm::ALL.map(Some).into())),
        name => name.parse().map(|algorithm| Choice(vec![Some(algorithm)])).map_err(|_| {
            let names = Algorithm::ALL.map(Algorithm::name);
            format!("one of auto, {}, all", names.join(", "))
        }),
    }
}

pub fn collectives(text: &str) -> Result<Choice<CallKind>, String> {
    if text == "all" {
        return Ok(Choice(CallKind::MEASURED.into()));
    }
    let mut kinds = CallKind::MEASURED.to_vec();
    kinds.push(CallKind::AllReduceFused);
    let names: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
    let found = kinds.iter().find(|kind| kind.name() == text);
    found.map(|&kind| Choice(vec![kind])).ok_or_else(|| format!("one of {}, all", names.join(", ")))
}

pub fn planned_calls(text: &str) -> Result<Choice<PlannedCall>, String> {
    if text == "all" {
        return Ok(Choice(PlannedCall::ALL.into()));
    }
    let found = PlannedCall::ALL.into_iter().find(|calls| calls.name() == text);
    let names = PlannedCall::ALL.map(PlannedCall::name);
    found.map(|calls| Choice(vec![calls])).ok_or_else(|| format!("one of {}, all", names.join(", ")))
}

/// Numbers of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Worlds {
    All,
    /// 2 to 16.
    Of(usize),
}

impl Worlds {
    /// The numbers, of which all end at `most`. There is always one.
    pub fn up_to(self, most: usize) -> Vec<usize> {
        match self {
            Self::All => (2..=most.clamp(2, fast_allreduce::MAX_RANKS)).collect(),
            Self::Of(ranks) => vec![ranks],
        }
    }
}

pub fn worlds(text: &str) -> Result<Worlds, String> {
    match text {
        "all" => Ok(Worlds::All),
        number => {
            let range = 2..=fast_allreduce::MAX_RANKS;
            let ranks = number.parse().ok().filter(|ranks| range.contains(ranks));
            ranks.map(Worlds::Of).ok_or_else(|| format!("{} to {}, or all", range.start(), range.end()))
        }
    }
}

pub fn isa(text: &str) -> Result<Isa, String> {
    let names: Vec<_> = Isa::supported().map(Isa::name).collect();
    let found = Isa::supported().find(|isa| isa.name() == text);
    found.ok_or_else(|| format!("this CPU has {}", names.join(", ")))
}
