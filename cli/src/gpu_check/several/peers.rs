//! The step `peers`: every pair of GPUs, by every way of sharing memory.
//!
//! One rank at a time accesses the memory of one peer. After each pair the findings go to the first rank, which writes
//! them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::findings::{title, Findings, LOAD, ONE_MULTIPROCESSOR, OWN_LOAD, SIGNAL, TO_ALL};
use super::fit;
use super::pair::{self, Peers};
use super::{launch, ordinal};
use crate::arguments::{GpuCheck, Step};
use crate::failure::Failure;
use crate::gpu_check::budget::Budget;
use crate::gpu_check::probe::median;
use crate::gpu_check::ranks::run_threads;
use crate::gpu_check::record::{answer, check, constant, fact, out_of_time, skipped, write, Record};
use crate::harness::session::Session;

/// The ways of sharing. The constants are those of the last way that works.
const WAYS: [&str; 3] = ["pointers", "ipc", "descriptor"];
/// Between threads of one process.
const POINTERS: &str = WAYS[0];

pub fn run(options: &GpuCheck, count: usize) -> Result<(), Failure> {
    let (mut whole, mut broken) = (Vec::new(), Vec::new());
    let budget = Budget::of(options);
    for (index, way) in WAYS.into_iter().enumerate() {
        if budget.is_spent() {
            return out_of_time(format!("{way}, and later ways"));
        }
        let ways_left = (WAYS.len() - index) as u32;
        match run_way(&limited(options, budget.left() / ways_left), way, &(0..count).collect::<Vec<_>>()) {
            Ok(true) => whole.push(way),
            // The failed check names the pair.
            Ok(false) => broken.push(way),
            Err(failure) => {
                check(way, 0, Err(failure))?;
                broken.push(way);
                // Which pairs are at fault. With two GPUs there is only one.
                if count > 2 {
                    pairs(&limited(options, budget.left() / ways_left), way, count)?;
                }
            }
        }
        let shared = |ways: &[&str]| if ways.is_empty() { "none".to_owned() } else { ways.join(", ") };
        let found = match broken.is_empty() {
            true => shared(&whole),
            false => format!("{}; NOT by {}", shared(&whole), shared(&broken)),
        };
        let untried = &WAYS[index + 1..];
        answer(
            format!("By which ways do all {count} GPUs share memory?"),
            match untried.is_empty() {
                true => found,
                false => format!("{found}; not tried: {}", shared(untried)),
            },
        )?;
    }
    Ok(())
}

/// Returns the options of a part of the step, with its time.
fn limited(options: &GpuCheck, limit: Duration) -> GpuCheck {
    GpuCheck { limit: limit.as_millis() as u64, ..options.clone() }
}

/// Runs the ranks on these GPUs. Returns whether what they checked is right.
fn run_way(options: &GpuCheck, way: &str, gpus: &[usize]) -> Result<bool, Failure> {
    let list = gpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    match way {
        POINTERS => {
            let options = GpuCheck { gpus: gpus.to_vec(), ..options.clone() };
            let is_right = AtomicBool::new(true);
            run_threads(gpus.len(), &|session| {
                is_right.fetch_and(rank(session, &options, way)?, Ordering::Relaxed);
                Ok(())
            })?;
            Ok(is_right.into_inner())
        }
        _ => launch(Step::Peers, options, gpus.len(), &["--sharing", way, "--gpus", &list]),
    }
}

/// Tries each pair alone.
fn pairs(options: &GpuCheck, way: &str, count: usize) -> Result<(), Failure> {
    let budget = Budget::of(options);
    let mut works = Vec::new();
    for (a, b) in (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b))) {
        let name = format!("{way}, only GPU {a} and GPU {b}");
        if budget.is_spent() {
            out_of_time(format!("{name}, and later pairs"))?;
            break;
        }
        match run_way(&limited(options, budget.left()), way, &[a, b]) {
            Ok(true) => works.push(format!("{a}-{b}")),
            Ok(false) => {}
            Err(failure) => check(name, 0, Err(failure))?,
        }
    }
    fact(format!("{way}: pairs that work alone"), works.join(", "))
}

/// Runs as one of the ranks. Returns whether what all of them checked is right, on the first one.
pub fn rank(session: &Session, options: &GpuCheck, way: &str) -> Result<bool, Failure> {
    let budget = Budget::of(options);
    let count = session.world_size();
    let peers = Peers::new(session, options, way)?;
    let mut all = Exchange { session, all: Findings::default() };
    let mut unfinished = None;
    for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))) {
        if from == to {
            continue;
        }
        // The first rank decides for all.
        if session.of_first(u64::from(budget.is_spent()))? != 0 {
            unfinished.get_or_insert((from, to));
            break;
        }
        let mut own = Findings::default();
        let name = format!("GPU {} to GPU {}", ordinal(options, from), ordinal(options, to));
        let mut arrived = true;
        if from < to {
            session.fence()?;
            arrived = peers.signals((from, to), &mut own)?;
        }
        // Signals cannot arrive either if the peer's kernel has failed.
        let failed = session.total(own.error.is_some().into())?;
        if !arrived && failed == 0 {
            own.outcome(&name, Err(pair::broken("a signal by a store did not arrive")));
        }
        let mut failed = 0;
        if session.rank() == from {
            let measured = peers.measure(to, &mut own);
            failed = measured.is_err().into();
            own.outcome(&name, measured);
        }
        // A rank that failed has not written all that its peer would look for.
        let failed = session.total(failed)?;
        if session.rank() == to && failed == 0 {
            own.outcome(&name, peers.verify(from));
        }
        all.gather(own)?;
    }
    for from in 0..if unfinished.is_none() { count } else { 0 } {
        let mut own = Findings::default();
        session.fence()?;
        if session.rank() == from {
            let measured = peers.measure_all(&mut own);
            own.outcome(&format!("GPU {} to all", ordinal(options, from)), measured);
        }
        all.gather(own)?;
    }
    if unfinished.is_none() {
        let mut own = Findings::default();
        session.fence()?;
        let measured = peers.measure_together(&mut own);
        own.outcome("all GPUs at once", measured);
        all.gather(own)?;
    }
    peers.free()?;
    let Exchange { all, .. } = all;
    if session.rank() != 0 {
        return Ok(true);
    }
    if let Some((from, to)) = unfinished {
        out_of_time(format!("{way}: from GPU {from} to GPU {to} on"))?;
    }
    let (name, is_right) = (format!("{way}, {count} GPUs"), all.error.is_none());
    check(name, all.cases, all.error.map_or(Ok(()), |error| Err(Failure::Ranks(error))))?;
    // Figures of a broken link are none of a link.
    if is_right {
        constants(&all.records, way)?;
    }
    Ok(is_right)
}

/// The findings of all ranks, on the first one.
struct Exchange<'a> {
    session: &'a Session,
    all: Findings,
}

impl Exchange<'_> {
    /// Passes this rank's findings to the first rank, which writes the figures. Collective.
    fn gather(&mut self, own: Findings) -> Result<(), Failure> {
        let text = serde_json::to_vec(&own).map_err(std::io::Error::from)?;
        let all = self.session.exchange(&text)?;
        if self.session.rank() != 0 {
            return Ok(());
        }
        for theirs in all {
            let theirs: Findings = serde_json::from_slice(&theirs).map_err(std::io::Error::from)?;
            theirs.records.iter().try_for_each(write)?;
            self.all.records.extend(theirs.records);
            self.all.cases += theirs.cases;
            self.all.error = self.all.error.take().or(theirs.error);
        }
        Ok(())
    }
}

/// Writes the constants that the figures yield.
fn constants(records: &[Record], way: &str) -> Result<(), Failure> {
    let of = |wanted: &str| {
        let value = |record: &Record| match record {
            Record::Figure { table, value, .. } if *table == title(wanted, way) => Some(*value),
            _ => None,
        };
        median(records.iter().filter_map(value).collect())
    };
    // A signal arrives, and is seen by the next load of the peer's own memory.
    let flight = of(SIGNAL) - of(OWN_LOAD);
    for (name, value) in [
        ("remote_load_ns", of(LOAD)),
        ("remote_store_ns", flight),
        ("sm_remote_bytes", of(ONE_MULTIPROCESSOR)),
    ] {
        match value.is_nan() {
            true => skipped(name, format!("{way}: it was not measured"))?,
            false => constant(name, value)?,
        }
    }
    match fit::link(TO_ALL.map(of)) {
        Ok(link) => {
            constant("link_gbps", link.gbps)?;
            constant("link_header_bytes", link.header_bytes)?;
            constant("link_partial_bytes", link.partial_bytes)
        }
        Err(why) => skipped("link_gbps, link_header_bytes, link_partial_bytes", why),
    }
}
