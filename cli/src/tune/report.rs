//! The printed results of a world: for each size, the times, the winner, and its gain.

use std::io::{self, Write};
use std::time::Duration;

use fast_allreduce::plan::{Choice, PlannedCall};
use fast_allreduce::Algorithm;

use super::select::Size;
use crate::harness::progress::Progress;
use crate::harness::row::DeviceFacts;
use crate::harness::session::Session;

/// Prints on the first rank, and does nothing on the others.
pub struct Report {
    progress: Option<Progress>,
}

impl Report {
    /// Prints the header.
    pub fn start(
        session: &Session,
        facts: &DeviceFacts,
        candidates: usize,
        budget: Duration,
    ) -> io::Result<Self> {
        if session.rank() > 0 {
            return Ok(Self { progress: None });
        }
        let mut out = io::stdout().lock();
        writeln!(out, "# fast-allreduce {} tune", env!("CARGO_PKG_VERSION"))?;
        writeln!(out, "# ranks {} {facts}", session.world_size())?;
        if let Some(warning) = facts.warning() {
            writeln!(out, "# {warning}")?;
        }
        writeln!(out, "# {} candidates, about {:.1} s", candidates, budget.as_secs_f64())?;
        out.flush()?;
        Ok(Self { progress: Some(Progress::new(0)) })
    }

    /// Shows the current size on a terminal.
    pub fn show(&self, bytes: usize) {
        if let Some(progress) = &self.progress {
            progress.show(&format!("{bytes} B"));
        }
    }

    /// Prints the table. `picked` and `ratios` are by size.
    pub fn rows(
        &self,
        calls: PlannedCall,
        sizes: &[Size],
        choices: &[Choice],
        picked: &[Option<Choice>],
        ratios: &[f64],
    ) -> io::Result<()> {
        let Some(progress) = &self.progress else {
            return Ok(());
        };
        progress.clear();
        let mut out = io::stdout().lock();
        let algorithms: &[Algorithm] = match calls {
            PlannedCall::AllReduce => &Algorithm::DIRECT,
            _ => &[Algorithm::OneShotPull],
        };
        writeln!(out, "#\n# {calls}")?;
        match calls {
            PlannedCall::AllReduce => {
                writeln!(
                    out,
                    "# medians of a call (us); for each algorithm that of its best grid; -: much slower"
                )?;
            }
            _ => writeln!(out, "# medians of a call (us), and of the best grid")?,
        }
        write!(out, "#{:>11} {:>10}", "size (B)", "built-in")?;
        for algorithm in algorithms {
            let name = if calls == PlannedCall::AllReduce { algorithm.name() } else { "best" };
            write!(out, " {name:>13}")?;
        }
        writeln!(out, "  {:>8}  best", "ratio")?;
        for ((size, picked), ratio) in sizes.iter().zip(picked).zip(ratios) {
            write!(out, "{:>12} {:>10}", size.bytes, microseconds(size.median(0)))?;
            for algorithm in algorithms {
                let own = (0..choices.len()).filter(|&index| choices[index].algorithm == *algorithm);
                // Candidate 0 is the built-in plan.
                let best = own.filter_map(|index| size.median(index + 1)).min_by(f64::total_cmp);
                write!(out, " {:>13}", microseconds(best))?;
            }
            let best = picked.map_or("as built-in".to_owned(), |choice| choice.to_string());
            writeln!(out, "  {ratio:>8.3}  {best}")?;
        }
        let logarithms: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
        let mean = (logarithms / ratios.len().max(1) as f64).exp();
        writeln!(
            out,
            "# ratio: time of this plan / built-in plan, timed in turns; geometric mean {mean:.3}\n"
        )?;
        out.flush()
    }
}

fn microseconds(seconds: Option<f64>) -> String {
    seconds.map_or("-".to_owned(), |seconds| format!("{:.2}", seconds * 1e6))
}
