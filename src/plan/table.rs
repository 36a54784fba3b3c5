//! A device's rules as rows, and what they come to for one world.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::choice::{size, Choice, DeviceKind, Step, MAX};
use super::links::Links;
use super::{Algorithm, Order};
use crate::abi::MAX_RANKS;
use crate::catalogue::PlannedCall;
use crate::error::{Error, Result};
use crate::topology::LinkClass;

/// The largest integer of a file.
const MAX_UP_TO: u64 = i64::MAX as u64;

/// One row of a [`Table`]: what is done in these calls, for these ranks and links, up to that size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    pub calls: PlannedCall,
    /// First and last world size.
    pub ranks: (usize, usize),
    pub links: Links,
    pub max_bytes: u64,
    pub choice: Choice,
}

impl Row {
    pub fn is_for(&self, calls: PlannedCall, world_size: usize, link: LinkClass) -> bool {
        self.calls == calls
            && (self.ranks.0..=self.ranks.1).contains(&world_size)
            && self.links.contains(link)
    }

    /// The parts of it that are for another call, world or link.
    fn without(self, calls: PlannedCall, world_size: usize, link: LinkClass) -> Vec<Self> {
        if !self.is_for(calls, world_size, link) {
            return vec![self];
        }
        let (first, last) = self.ranks;
        let parts = [
            Self { ranks: (first, world_size - 1), ..self },
            Self { ranks: (world_size, world_size), links: self.links.without(link), ..self },
            Self { ranks: (world_size + 1, last), ..self },
        ];
        let is_some = |row: &Self| row.ranks.0 <= row.ranks.1 && row.links != Links::NONE;
        parts.into_iter().filter(is_some).collect()
    }
}

/// The plan for every call on one kind of device: rows of calls, world sizes, links and message sizes, each with an algorithm and its
/// largest grid. The first row that a call fits decides; every allreduce fits one. Other calls for which there are no rows have the
/// grid and pieces of a one-shot allreduce. All ranks must have the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    pub(super) device: DeviceKind,
    /// Every world size and link class has rows of allreduces, with increasing sizes up to `MAX`; rows of another call, if there are
    /// some, too. On the host every row is for all links.
    pub(super) rows: Cow<'static, [Row]>,
}

impl Table {
    /// One choice for every call.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for a choice that is not one of this device.
    pub fn uniform(device: DeviceKind, choice: Choice) -> Result<Self> {
        let calls = PlannedCall::AllReduce;
        let row = Row { calls, ranks: (1, MAX_RANKS), links: Links::ALL, max_bytes: MAX, choice };
        Self::new(device, vec![row]).map_err(|(_, reason)| invalid(reason))
    }

    /// A table of rows that keep its invariants, or what is wrong with them and in which row.
    pub(super) fn new(device: DeviceKind, rows: Vec<Row>) -> Result<Self, (Option<usize>, String)> {
        for (index, row) in rows.iter().enumerate() {
            row.choice.check(device).map_err(|reason| (Some(index), reason))?;
            if row.calls != PlannedCall::AllReduce && row.choice.algorithm != Algorithm::OneShotPull {
                return Err((Some(index), format!("{} has no choice of algorithms", row.calls)));
            }
            if row.max_bytes != MAX && row.max_bytes > MAX_UP_TO {
                return Err((Some(index), format!("{} bytes are more than any message has", row.max_bytes)));
            }
        }
        check_cover(device, &rows)?;
        Ok(Self { device, rows: Cow::Owned(rows) })
    }

    /// The device whose calls it plans.
    pub fn device(&self) -> DeviceKind {
        self.device
    }

    /// What is done with allreduces of a world, by size. World sizes are taken as 1 to 16; on the host links do not matter.
    pub fn steps(&self, world_size: usize, link: LinkClass) -> Vec<Step> {
        self.steps_of(PlannedCall::AllReduce, world_size, link)
    }

    /// The same of other calls, by the size of a rank's share, or of all messages of a launch; empty where the table has no rows for
    /// them. Their algorithm is [`Algorithm::OneShotPull`], for the form.
    pub fn steps_of(&self, calls: PlannedCall, world_size: usize, link: LinkClass) -> Vec<Step> {
        let world_size = world_size.clamp(1, MAX_RANKS);
        let rows = self.rows.iter().filter(|row| row.is_for(calls, world_size, link));
        rows.map(|row| Step { max_bytes: row.max_bytes, choice: row.choice }).collect()
    }

    /// The same table, but with these steps for allreduces of a world. On the host they are for every link.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] unless the sizes increase up to `u64::MAX` and every choice is one of the device.
    pub fn with_steps(&self, world_size: usize, link: LinkClass, steps: &[Step]) -> Result<Self> {
        self.with_steps_of(PlannedCall::AllReduce, world_size, link, steps)
    }

    /// The same for other calls, which may have none.
    ///
    /// # Errors
    ///
    /// As [`Table::with_steps`], and for another algorithm than [`Algorithm::OneShotPull`] where there is no choice.
    pub fn with_steps_of(
        &self,
        calls: PlannedCall,
        world_size: usize,
        link: LinkClass,
        steps: &[Step],
    ) -> Result<Self> {
        if !(1..=MAX_RANKS).contains(&world_size) {
            return Err(Error::WorldSize { world_size });
        }
        let links = match self.device {
            DeviceKind::Host => Links::ALL,
            DeviceKind::Cuda => Links::NONE.with(link),
        };
        let row = |step: &Step| Row {
            calls,
            ranks: (world_size, world_size),
            links,
            max_bytes: step.max_bytes,
            choice: step.choice,
        };
        let mut rows: Vec<_> = steps.iter().map(row).collect();
        let mut others = self.rows.to_vec();
        for link in links.iter() {
            others = others.into_iter().flat_map(|row| row.without(calls, world_size, link)).collect();
        }
        rows.extend(others);
        Self::new(self.device, rows).map_err(|(_, reason)| invalid(reason))
    }

    /// What is done for a world in words, a line for each range of sizes, allreduces first:
    /// `"up to 512 KiB: one-shot-push, up to 64 blocks of 512 threads"`.
    pub fn describe(&self, world_size: usize, link: LinkClass) -> String {
        let mut text = String::new();
        for calls in PlannedCall::ALL {
            let steps = self.steps_of(calls, world_size, link);
            for Step { max_bytes, choice } in &steps {
                let range = match *max_bytes {
                    MAX if steps.len() == 1 => "any size".to_owned(),
                    MAX => "any larger size".to_owned(),
                    bytes => format!("up to {}", size(bytes)),
                };
                // Writing to a string does not fail.
                let _ = match calls {
                    PlannedCall::AllReduce if !choice.algorithm.is_direct() => {
                        writeln!(text, "{range}: {choice}, with order any")
                    }
                    PlannedCall::AllReduce => writeln!(text, "{range}: {choice}"),
                    _ => writeln!(text, "{calls}, {range}: {}", choice.grid()),
                };
            }
        }
        text
    }
}

/// What a table says for one kind of call of one world: all that a call needs to look at.
#[derive(Debug)]
pub(crate) struct Steps {
    device: DeviceKind,
    /// Of increasing sizes, the last without limit.
    steps: Box<[Step]>,
}

impl Steps {
    /// Under [`Order::Fixed`] other algorithms than the direct ones are left out: what is larger than every step that is left is
    /// done as by the last of those.
    pub fn new(table: &Table, calls: PlannedCall, world_size: usize, link: LinkClass, order: Order) -> Self {
        let mut steps = table.steps_of(calls, world_size, link);
        if calls == PlannedCall::AllReduce && order == Order::Fixed {
            steps.retain(|step| step.choice.algorithm.is_direct());
            match steps.last_mut() {
                Some(last) => last.max_bytes = MAX,
                None => {
                    let choice = Choice::forced(table.device, Algorithm::TwoShotPush);
                    steps.push(Step { max_bytes: MAX, choice });
                }
            }
        }
        Self { device: table.device, steps: steps.into() }
    }

    /// Of calls that a table need not have rows for.
    #[inline]
    pub fn choice_if_any(&self, bytes: usize) -> Option<Choice> {
        self.steps.iter().find(|step| bytes as u64 <= step.max_bytes).map(|step| step.choice)
    }

    #[inline]
    pub fn choice(&self, bytes: usize, forced: Option<Algorithm>) -> Choice {
        let fits = |step: &&Step| bytes as u64 <= step.max_bytes;
        let Some(forced) = forced else {
            let step = self.steps.iter().find(fits);
            return step
                .expect("steps go up to u64::MAX for every world and link: the invariant of a table")
                .choice;
        };
        let mut steps = self.steps.iter().filter(|step| step.choice.algorithm == forced);
        // The step for the nearest size at which the table itself takes this algorithm.
        let last = steps.clone().next_back();
        steps.find(fits).or(last).map_or(Choice::forced(self.device, forced), |step| step.choice)
    }
}

/// The invariant of a table: the first row that fits exists, and is not hidden by another.
fn check_cover(device: DeviceKind, rows: &[Row]) -> Result<(), (Option<usize>, String)> {
    PlannedCall::ALL.into_iter().try_for_each(|calls| check_cover_of(calls, device, rows))
}

fn check_cover_of(
    calls: PlannedCall,
    device: DeviceKind,
    rows: &[Row],
) -> Result<(), (Option<usize>, String)> {
    let of = if calls == PlannedCall::AllReduce { String::new() } else { format!("{calls} of ") };
    for world_size in 1..=MAX_RANKS {
        for link in LinkClass::ALL {
            let who = match device {
                DeviceKind::Host => format!("{of}world size {world_size}"),
                DeviceKind::Cuda => format!("{of}world size {world_size} on {link}"),
            };
            let mut before = None;
            let own = rows.iter().enumerate().filter(|(_, row)| row.is_for(calls, world_size, link));
            for (index, row) in own {
                if before.is_some_and(|(_, bytes)| row.max_bytes <= bytes) {
                    let (here, before) = (size(row.max_bytes), size(before.map_or(0, |(_, bytes)| bytes)));
                    let reason = format!("{who} has {here} after {before}: sizes must increase");
                    return Err((Some(index), reason));
                }
                before = Some((index, row.max_bytes));
            }
            match before {
                Some((_, MAX)) => {}
                Some((index, bytes)) => {
                    let reason =
                        format!("{who} has nothing above {}: its last row has no up_to", size(bytes));
                    return Err((Some(index), reason));
                }
                None if calls == PlannedCall::AllReduce => return Err((None, format!("{who} has no row"))),
                None => {}
            }
        }
    }
    Ok(())
}

fn invalid(reason: String) -> Error {
    Error::InvalidSetting { name: "plan table", value: reason, expected: "rows as Table describes them" }
}
