//! Forms of fused calls: `--form`.

use std::fmt;
use std::sync::OnceLock;

use fast_allreduce::{CallKind, DType, Norm, Scaling};

/// Added to the mean of the squares, as in common models.
pub const EPSILON: f32 = 1e-5;

/// What a call computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `all_reduce_fused`.
    Rows,
    /// `all_reduce_fused` of experts' rows.
    Experts,
    /// `reduce_scatter_fused`, equal shares.
    Scattered,
    /// `all_gather_rows`, equal shares.
    Gathered,
    /// `sharded_rms_norm`, equal shares of each row.
    Sharded,
}

#[derive(Debug)]
pub struct Form {
    name: String,
    pub call: Call,
    pub norm: Norm,
    /// Whether 1 is added to each weight.
    pub offset: bool,
    pub scaling: Option<Scaling>,
}

impl Form {
    /// Returns all forms: with every norm of the catalogue, and every format of quantised rows.
    pub fn all() -> &'static [Self] {
        static ALL: OnceLock<Vec<Form>> = OnceLock::new();
        ALL.get_or_init(|| {
            let rms = Norm::Rms { epsilon: EPSILON, unit_offset: false };
            let form = |name: &str, call, norm: Norm, scaling| {
                let offset = norm != Norm::None && Norm::of_code(norm.code(), EPSILON, true) == Ok(norm);
                Self { name: name.to_owned(), call, norm, offset, scaling }
            };
            let mut forms = Vec::new();
            for norm in (1..).map_while(|code| Norm::of_code(code, EPSILON, false).ok()) {
                forms.push(form(norm.name(), Call::Rows, norm, None));
                if let Ok(offset) = Norm::of_code(norm.code(), EPSILON, true) {
                    forms.push(form(&format!("{}_offset", norm.name()), Call::Rows, offset, None));
                }
            }
            let formats = || Scaling::ALL.into_iter();
            forms.extend(formats().map(|one| form(one.name(), Call::Rows, rms, Some(one))));
            forms.push(form("experts", Call::Experts, rms, None));
            forms.push(form("scatter", Call::Scattered, rms, None));
            let scattered =
                formats().map(|one| form(&format!("scatter_{one}"), Call::Scattered, rms, Some(one)));
            forms.extend(scattered);
            let gathered = formats().filter(|one| !one.is_given());
            forms.extend(
                gathered.map(|one| form(&format!("gather_{one}"), Call::Gathered, Norm::None, Some(one))),
            );
            forms.push(form("sharded", Call::Sharded, rms, None));
            forms
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the type of quantised numbers.
    pub fn numbers(&self) -> DType {
        match self.scaling {
            Some(scaling) if scaling.bits() == 4 => DType::U8,
            _ => DType::F8E4M3,
        }
    }

    /// Returns the rows of the message for a requested number: whole shares.
    pub fn rows(&self, rows: usize, world_size: usize) -> usize {
        match self.call {
            Call::Scattered | Call::Gathered => rows.next_multiple_of(world_size),
            _ => rows,
        }
    }

    /// Returns the collective.
    pub fn kind(&self) -> CallKind {
        match self.call {
            Call::Rows | Call::Experts => CallKind::AllReduceFused,
            Call::Scattered => CallKind::ReduceScatterFused,
            Call::Gathered => CallKind::AllGatherRows,
            Call::Sharded => CallKind::ShardedRmsNorm,
        }
    }

    /// Returns the number that the length of a row is a multiple of in the form's format.
    fn multiple(&self) -> usize {
        self.scaling.map_or(1, |scaling| match scaling.scale_type() {
            DType::U8 => scaling.group().unwrap_or(1),
            _ => 1,
        })
    }

    /// Returns the least length of a row from `hidden` on that has the form.
    pub fn fitting(&self, hidden: usize, world_size: usize) -> usize {
        hidden.next_multiple_of(if self.call == Call::Sharded { world_size } else { self.multiple() })
    }

    /// Returns why rows of this length do not have the form; `None` if they do.
    pub fn refusal(&self, hidden: usize, world_size: usize) -> Option<String> {
        let multiple = self.multiple();
        if self.fitting(hidden, 1) != hidden {
            return Some(format!("--hidden {hidden}: rows in {self} are multiples of {multiple} elements"));
        }
        (self.fitting(hidden, world_size) != hidden)
            .then(|| format!("--hidden {hidden} is not divided among {world_size} ranks"))
    }
}

// Names are unique.
impl std::hash::Hash for Form {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}
