//! The values of arguments: sizes, names, numbers.

use std::time::Duration;

use fast_allreduce::device::host::Isa;
use fast_allreduce::plan::PlannedCall;
use fast_allreduce::{Algorithm, CallKind, DType, ReduceOp};

use super::Form;

/// The values that one argument stands for: one, or all.
#[derive(Debug, Clone)]
pub struct Choice<T>(pub Vec<T>);

impl<T: Clone> Choice<T> {
    /// Reads a name, or `all`.
    fn read<N: AsRef<str>>(
        text: &str,
        all: &[T],
        names: impl IntoIterator<Item = N>,
        one: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Self, String> {
        if text == "all" {
            return Ok(Self(all.to_vec()));
        }
        one(text).map(|value| Self(vec![value])).ok_or_else(|| {
            let names: Vec<_> = names.into_iter().map(|name| name.as_ref().to_owned()).collect();
            format!("one of {}, all", names.join(", "))
        })
    }
}

pub fn size(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((end, 'k' | 'K')) => (&text[..end], 10),
        Some((end, 'm' | 'M')) => (&text[..end], 20),
        Some((end, 'g' | 'G')) => (&text[..end], 30),
        Some((end, 't' | 'T')) => (&text[..end], 40),
        _ => (text, 0),
    };
    let number: usize =
        digits.parse().map_err(|_| "a size is a number, optionally followed by K, M, G or T")?;
    number.checked_mul(1 << shift).ok_or_else(|| "it does not fit 64 bits".into())
}

pub fn positive(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|&count| count > 0).ok_or_else(|| "a number from 1 on".into())
}

pub fn seconds(text: &str) -> Result<Duration, String> {
    duration(text, 1.0).ok_or_else(|| "a positive number of seconds".into())
}

pub fn minutes(text: &str) -> Result<Duration, String> {
    duration(text, 60.0).ok_or_else(|| "a positive number of minutes".into())
}

fn duration(text: &str, unit: f64) -> Option<Duration> {
    let duration = Duration::try_from_secs_f64(text.parse::<f64>().ok()? * unit).ok();
    duration.filter(|duration| !duration.is_zero())
}

pub fn dtypes(text: &str) -> Result<Choice<DType>, String> {
    Choice::read(text, &DType::ALL, DType::ALL.map(DType::name), |name| name.parse().ok())
}

pub fn ops(text: &str) -> Result<Choice<ReduceOp>, String> {
    let names = ["sum, prod, min, max, avg, band, bor, bxor, premul_sum:SCALE"];
    Choice::read(text, &ReduceOp::ARITHMETIC, names, |name| name.parse().ok())
}

pub fn algorithms(text: &str) -> Result<Choice<Option<Algorithm>>, String> {
    let names = ["auto"].into_iter().chain(Algorithm::ALL.map(Algorithm::name));
    Choice::read(text, &Algorithm::ALL.map(Some), names, |name| match name {
        "auto" => Some(None),
        name => name.parse().ok().map(Some),
    })
}

pub fn collectives(text: &str) -> Result<Choice<CallKind>, String> {
    let kinds = || CallKind::MEASURED.into_iter().chain([CallKind::AllReduceFused]);
    Choice::read(text, &CallKind::MEASURED, kinds().map(CallKind::name), |name| {
        kinds().find(|kind| kind.name() == name)
    })
}

pub fn forms(text: &str) -> Result<Choice<&'static Form>, String> {
    let all: Vec<_> = Form::all().iter().collect();
    Choice::read(text, &all, all.iter().map(|form| form.name()), |name| {
        all.iter().copied().find(|form| form.name() == name)
    })
}

pub fn planned_calls(text: &str) -> Result<Choice<PlannedCall>, String> {
    Choice::read(text, &PlannedCall::ALL, PlannedCall::ALL.map(PlannedCall::name), |name| {
        PlannedCall::ALL.into_iter().find(|calls| calls.name() == name)
    })
}

/// Reads the ranks of one world.
pub fn ranks(text: &str) -> Result<usize, String> {
    let max = fast_allreduce::MAX_RANKS;
    let ranks = text.parse().ok().filter(|ranks| (1..=max).contains(ranks));
    ranks.ok_or_else(|| format!("a world has 1 to {max} ranks"))
}

/// Numbers of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Worlds {
    All,
    /// 2 to 16.
    Of(usize),
}

impl Worlds {
    /// Returns the numbers; `most` limits those of `All`. There is always one.
    pub fn up_to(self, most: usize) -> Vec<usize> {
        match self {
            Self::All => (2..=most.clamp(2, fast_allreduce::MAX_RANKS)).collect(),
            Self::Of(ranks) => vec![ranks],
        }
    }
}

pub fn worlds(text: &str) -> Result<Worlds, String> {
    let range = 2..=fast_allreduce::MAX_RANKS;
    match text {
        "all" => Ok(Worlds::All),
        number => {
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
