//! Predictions as a table and as JSON.

use std::fmt::Write as _;

use fast_allreduce_ptx_machine::clock::{Cause, Machine, Timing, Traffic};

use crate::job::Call;
use crate::plan::{self, Row};
use crate::published::{Published, PUBLISHED};

/// A call and its prediction.
pub struct Predicted {
    pub call: Call,
    pub blocks: u32,
    pub threads: u32,
    pub timing: Timing,
    /// Bytes of the kernel's code, if known, and the estimated fraction that is executed.
    pub code: Option<(usize, f64)>,
}

impl Predicted {
    pub fn us(&self) -> f64 {
        self.timing.call_ns / 1e3
    }
}

/// A published figure and the prediction for its reference kernel.
pub struct Compared {
    pub published: &'static Published,
    pub bytes: usize,
    pub us: f64,
    pub reference: &'static str,
    pub predicted_us: f64,
}

impl Compared {
    /// Returns the error in per cent.
    pub fn off(&self) -> f64 {
        (self.predicted_us / self.us - 1.0) * 100.0
    }
}

pub struct Results {
    pub machine: Machine,
    pub dtype: &'static str,
    pub rows: Vec<Row>,
    pub ours: Vec<Predicted>,
    pub compared: Vec<Compared>,
}

/// Formats a size as 8K, 1M and so on.
pub fn size(bytes: usize) -> String {
    match bytes {
        usize::MAX => "any size".to_owned(),
        _ if bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{}K", bytes >> 10),
        _ => bytes.to_string(),
    }
}

fn sorted<T: Ord + Copy>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut all: Vec<T> = all.collect();
    all.sort_unstable();
    all.dedup();
    all
}

impl Results {
    pub fn of(&self, ranks: usize) -> impl Iterator<Item = &Predicted> {
        self.ours.iter().filter(move |result| result.call.ranks == ranks)
    }

    pub fn ranks(&self) -> Vec<usize> {
        sorted(self.ours.iter().map(|result| result.call.ranks))
    }

    pub fn sizes(&self, ranks: usize) -> Vec<usize> {
        sorted(self.of(ranks).map(|result| result.call.bytes))
    }

    /// Returns the algorithms in the order of the request.
    pub fn algorithms(&self, ranks: usize) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for result in self.of(ranks) {
            if !names.contains(&result.call.algorithm.as_str()) {
                names.push(&result.call.algorithm);
            }
        }
        names
    }

    pub fn at(&self, ranks: usize, algorithm: &str, bytes: usize) -> Option<&Predicted> {
        self.of(ranks).find(|result| result.call.algorithm == algorithm && result.call.bytes == bytes)
    }

    /// Returns the published figures for this machine and number of ranks.
    pub fn published(&self, ranks: usize) -> impl Iterator<Item = &'static Published> + '_ {
        PUBLISHED
            .iter()
            .filter(move |published| published.machine == self.machine.name && published.ranks == ranks)
    }

    /// Formats a table of times in us: algorithms by sizes.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for ranks in self.ranks() {
            let names = self.algorithms(ranks);
            let _ = write!(text, "{}, {ranks} ranks, {}, us\n{:>8}", self.machine.name, self.dtype, "");
            names.iter().for_each(|name| _ = write!(text, " {name:>16}"));
            text.push('\n');
            for bytes in self.sizes(ranks) {
                let _ = write!(text, "{:>8}", size(bytes));
                for name in &names {
                    let cell = self
                        .at(ranks, name, bytes)
                        .map_or("-".to_owned(), |result| format!("{:.2}", result.us()));
                    let _ = write!(text, " {cell:>16}");
                }
                text.push('\n');
            }
            for published in self.published(ranks) {
                let points: Vec<String> =
                    published.points.iter().map(|(bytes, us)| format!("{} {us}", size(*bytes))).collect();
                let _ = writeln!(text, "  published, {}: {}", published.title(), points.join(", "));
            }
            for (what, registered) in [("any input", false), ("registered inputs", true)] {
                let found = plan::crossovers(self, ranks, registered);
                let _ = writeln!(text, "  fastest, {what}: {}", in_words(&found));
            }
            let planned: Vec<(usize, String)> = self
                .rows
                .iter()
                .filter(|row| row.ranks.0 <= ranks && ranks <= row.ranks.1)
                .map(|row| (row.max_bytes, row.algorithm.clone()))
                .collect();
            let _ = writeln!(text, "  the plan has: {}\n", in_words(&planned));
        }
        for compared in &self.compared {
            let Compared { published, bytes, us, reference, predicted_us } = compared;
            let _ = writeln!(
                text,
                "{:<20} {} ranks {:>5}: published {us:>5.1} us, {reference} predicted {predicted_us:>6.2} us, {:+.0} %",
                published.title(),
                published.ranks,
                size(*bytes),
                compared.off()
            );
        }
        text
    }

    /// Formats all results as JSON.
    pub fn json(&self) -> String {
        let constants: Vec<String> =
            self.machine.constants().iter().map(|(name, value, ..)| format!("\"{name}\": {value}")).collect();
        let ours: Vec<String> = self.ours.iter().map(|one| predicted(&self.machine, one)).collect();
        let compared: Vec<String> = self
            .compared
            .iter()
            .map(|one| {
                let Compared { published, bytes, us, reference, predicted_us } = one;
                format!(
                    "{{\"name\": \"{}\", \"ranks\": {}, \"bytes\": {bytes}, \"published_us\": {us}, \
                     \"reference\": \"{reference}\", \"predicted_us\": {predicted_us:.3}}}",
                    published.name, published.ranks
                )
            })
            .collect();
        format!(
            "{{\"machine\": \"{}\", \"dtype\": \"{}\",\n\"constants\": {{{}}},\n\"predicted\": \
                [\n{}\n],\n\"references\": [\n{}\n]}}\n",
            self.machine.name,
            self.dtype,
            constants.join(", "),
            ours.join(",\n"),
            compared.join(",\n")
        )
    }
}

/// Formats rows as `a up to 64K, then b`.
pub fn in_words(rows: &[(usize, String)]) -> String {
    let last = rows.len().saturating_sub(1);
    let word = |(i, (up_to, name)): (usize, &(usize, String))| match i == last {
        true => name.clone(),
        false => format!("{name} up to {}", size(*up_to)),
    };
    rows.iter().enumerate().map(word).collect::<Vec<_>>().join(", then ")
}

fn traffic(all: &std::collections::BTreeMap<usize, Traffic>) -> String {
    let each = all.iter().map(|(device, traffic)| {
        let Traffic { bytes, sectors, partial, wire } = traffic;
        format!(
            "\"{device}\": {{\"bytes\": {bytes:.0}, \"sectors\": {sectors:.0}, \"partial_sectors\": \
                {partial:.0}, \"wire_bytes\": {wire:.0}}}"
        )
    });
    each.collect::<Vec<_>>().join(", ")
}

/// Returns the extra time of a call that finds none of its code in a cache.
pub fn cold_us(machine: &Machine, executed_bytes: f64) -> f64 {
    executed_bytes / 128.0 * machine.cold_line_cycles / machine.ghz / 1e3
}

fn predicted(machine: &Machine, result: &Predicted) -> String {
    let Predicted { call, blocks, threads, timing, code } = result;
    let causes: Vec<String> = Cause::ALL
        .iter()
        .filter_map(|cause| Some(format!("\"{}\": {:.1}", cause.name(), timing.causes.get(cause)?)))
        .collect();
    let counts = &timing.counts;
    let code = code.map_or(String::new(), |(bytes, executed)| {
        let cold = cold_us(machine, executed);
        format!(
            ", \"code_bytes\": {bytes}, \"code_bytes_executed\": {executed:.0}, \"cold_code_us\": {cold:.2}"
        )
    });
    format!(
        "{{\"algorithm\": \"{}\", \"ranks\": {}, \"bytes\": {}, \"blocks\": {blocks}, \"threads\": {threads}, \
            \"us\": {:.3}, \
         \"round_trips\": {}, \"flights\": {}, \"instructions_per_warp\": {:.0}, \"most_instructions\": {:.0}, \
         \"syncs\": {}, \"fences\": {}, \"looks\": {:.0}{code}, \"path_ns\": {{{}}}, \"loads\": {{{}}}, \
             \"stores\": {{{}}}}}",
        call.algorithm,
        call.ranks,
        call.bytes,
        result.us(),
        timing.round_trips,
        timing.flights,
        counts.instructions / counts.warps.max(1.0),
        counts.most_instructions,
        counts.syncs,
        counts.fences,
        counts.looks,
        causes.join(", "),
        traffic(&counts.loads),
        traffic(&counts.stores)
    )
}
