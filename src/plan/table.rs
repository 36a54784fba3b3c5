//! Plan tables: the rows of a device, and the steps that they give for one world.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::choice::{format_size, Choice, DeviceKind, Step, MAX};
use super::links::Links;
use super::{Algorithm, Order};
use crate::abi::MAX_RANKS;
use crate::catalogue::PlannedCall;
use crate::error::{Error, Result};
use crate::topology::LinkClass;

/// Largest integer that a tuning file can hold.
const MAX_UP_TO: u64 = i64::MAX as u64;

/// Row of a [`Table`]: the choice for these calls, ranks and links, up to a message size.
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

    /// Returns the parts of the row that are for another call, world size or link.
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

/// Plan table: the plans of all calls on one kind of device.
///
/// A row is for a kind of call, a range of world sizes, a set of links and a range of message sizes. It gives an
/// algorithm and its largest grid. The first matching row is used. Every allreduce matches a row. Other calls without
/// rows use the grid and the pieces of a one-shot allreduce. All ranks must have the same table.
///
/// ```
/// use fast_allreduce::plan::{Choice, DeviceKind, Step, Table};
/// use fast_allreduce::topology::LinkClass;
/// use fast_allreduce::Algorithm;
///
/// let table = Table::built_in(DeviceKind::Host);
/// // Two ranks: one-shot up to 4 KiB, then two-shot.
/// let link = LinkClass::SameDevice;
/// let choice = |algorithm| Choice::host(algorithm, 64, 64 << 10, 256 << 10);
/// let steps = [
///     Step { max_bytes: 4 << 10, choice: choice(Algorithm::OneShotPull) },
///     Step { max_bytes: u64::MAX, choice: choice(Algorithm::TwoShotPull) },
/// ];
/// let changed = table.with_steps(2, link, &steps)?;
/// assert_eq!(changed.steps(2, link), steps);
/// assert_eq!(changed.steps(3, link), table.steps(3, link));
/// println!("{}", changed.describe(2, link));
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    pub(super) device: DeviceKind,
    /// Every world size and link class has rows of allreduces, with increasing sizes up to `MAX`. If there are rows of
    /// another call for a world size and link, they also increase up to `MAX`. On the host every row is for all links.
    pub(super) rows: Cow<'static, [Row]>,
}

impl Table {
    /// Creates a table with one choice for all allreduces.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if the device cannot have this choice.
    ///
    /// # Examples
    ///
    /// ```
    /// use fast_allreduce::plan::{Choice, DeviceKind, Table};
    /// use fast_allreduce::Algorithm;
    ///
    /// let choice = Choice::host(Algorithm::TwoShotPull, 4, 64 << 10, 256 << 10);
    /// let table = Table::uniform(DeviceKind::Host, choice)?;
    /// assert_eq!(table.device(), DeviceKind::Host);
    /// assert!(Table::uniform(DeviceKind::Cuda, choice).is_err());
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn uniform(device: DeviceKind, choice: Choice) -> Result<Self> {
        let calls = PlannedCall::AllReduce;
        let row = Row { calls, ranks: (1, MAX_RANKS), links: Links::ALL, max_bytes: MAX, choice };
        Self::new(device, vec![row]).map_err(|(_, reason)| invalid(reason))
    }

    /// Creates a table from rows. Returns which row breaks an invariant, and how.
    pub(super) fn new(device: DeviceKind, rows: Vec<Row>) -> Result<Self, (Option<usize>, String)> {
        for (index, row) in rows.iter().enumerate() {
            row.choice.check(device).map_err(|reason| (Some(index), reason))?;
            if row.calls != PlannedCall::AllReduce && row.choice.algorithm != Algorithm::OneShotPull {
                return Err((Some(index), format!("{} has no choice of algorithms", row.calls)));
            }
            if row.max_bytes != MAX && row.max_bytes > MAX_UP_TO {
                return Err((Some(index), format!("{} bytes exceed the largest message", row.max_bytes)));
            }
        }
        check_cover(device, &rows)?;
        Ok(Self { device, rows: Cow::Owned(rows) })
    }

    /// Returns the device whose calls the table plans.
    pub fn device(&self) -> DeviceKind {
        self.device
    }

    /// Returns the steps for allreduces of a world, by increasing size. `world_size` is clamped to 1 to 16. The host
    /// ignores `link`.
    pub fn steps(&self, world_size: usize, link: LinkClass) -> Vec<Step> {
        self.steps_of(PlannedCall::AllReduce, world_size, link)
    }

    /// Returns the steps for calls of any kind, as [`Table::steps`] does for allreduces.
    ///
    /// For other calls than allreduces, sizes are those of a rank's share, or of all messages of a launch. The result
    /// is empty if the table has no rows for the calls. Their algorithm is always [`Algorithm::OneShotPull`], and has
    /// no meaning.
    ///
    /// # Examples
    ///
    /// ```
    /// use fast_allreduce::plan::{DeviceKind, PlannedCall, Table};
    /// use fast_allreduce::topology::LinkClass;
    ///
    /// let table = Table::built_in(DeviceKind::Host);
    /// assert!(table.steps_of(PlannedCall::AllGather, 2, LinkClass::SameDevice).is_empty());
    /// ```
    pub fn steps_of(&self, calls: PlannedCall, world_size: usize, link: LinkClass) -> Vec<Step> {
        let world_size = world_size.clamp(1, MAX_RANKS);
        let rows = self.rows.iter().filter(|row| row.is_for(calls, world_size, link));
        rows.map(|row| Step { max_bytes: row.max_bytes, choice: row.choice }).collect()
    }

    /// Returns a copy of the table with these steps for allreduces of a world. On the host they hold for every link.
    /// The documentation of [`Table`] has an example.
    ///
    /// # Errors
    ///
    /// * [`Error::InvalidSetting`] unless the sizes increase up to `u64::MAX` and the device can have every choice.
    /// * [`Error::WorldSize`] for a world size outside of 1 to 16.
    pub fn with_steps(&self, world_size: usize, link: LinkClass, steps: &[Step]) -> Result<Self> {
        self.with_steps_of(PlannedCall::AllReduce, world_size, link, steps)
    }

    /// Returns a copy of the table with these steps for calls of any kind. Calls other than allreduces may have no
    /// steps.
    ///
    /// # Errors
    ///
    /// * [`Error::InvalidSetting`] unless the sizes increase up to `u64::MAX` and the device can have every choice;
    ///   for calls other than allreduces also for another algorithm than [`Algorithm::OneShotPull`].
    /// * [`Error::WorldSize`] for a world size outside of 1 to 16.
    ///
    /// # Examples
    ///
    /// ```
    /// use fast_allreduce::plan::{Choice, DeviceKind, PlannedCall, Step, Table};
    /// use fast_allreduce::topology::LinkClass;
    /// use fast_allreduce::Algorithm;
    ///
    /// let choice = Choice::host(Algorithm::OneShotPull, 4, 64 << 10, 512 << 10);
    /// let steps = [Step { max_bytes: u64::MAX, choice }];
    /// let table = Table::built_in(DeviceKind::Host);
    /// let table = table.with_steps_of(PlannedCall::AllGather, 2, LinkClass::SameDevice, &steps)?;
    /// assert_eq!(table.steps_of(PlannedCall::AllGather, 2, LinkClass::SameDevice), steps);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
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

    /// Describes the plans of a world, one line for each range of sizes, allreduces first:
    /// `"up to 512 KiB: one-shot-push, up to 64 blocks of 512 threads"`.
    pub fn describe(&self, world_size: usize, link: LinkClass) -> String {
        let mut text = String::new();
        for calls in PlannedCall::ALL {
            let steps = self.steps_of(calls, world_size, link);
            for Step { max_bytes, choice } in &steps {
                let range = match *max_bytes {
                    MAX if steps.len() == 1 => "any size".to_owned(),
                    MAX => "any larger size".to_owned(),
                    bytes => format!("up to {}", format_size(bytes)),
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

/// Steps of a table for one kind of call of one world: the part of a table that a call reads.
#[derive(Debug)]
pub(crate) struct Steps {
    device: DeviceKind,
    /// Sizes increase; the last step has no limit.
    steps: Box<[Step]>,
}

impl Steps {
    /// Selects the steps of a table. [`Order::Fixed`] leaves out all but direct algorithms; the last remaining step
    /// then holds for all larger messages.
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

    /// Returns the choice for a size; `None` if the table has no rows for these calls.
    #[inline]
    pub fn choice_if_any(&self, bytes: usize) -> Option<Choice> {
        self.steps.iter().find(|step| bytes as u64 <= step.max_bytes).map(|step| step.choice)
    }

    /// Returns the choice for a size. If an algorithm is forced, its grid is that of the nearest step that has the
    /// algorithm.
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
        // The last step with this algorithm, if all of them are for smaller messages.
        let last = steps.clone().next_back();
        steps.find(fits).or(last).map_or(Choice::forced(self.device, forced), |step| step.choice)
    }
}

/// Checks the invariant of a table: every allreduce matches a row, and sizes increase, so that no row is unreachable.
fn check_cover(device: DeviceKind, rows: &[Row]) -> Result<(), (Option<usize>, String)> {
    PlannedCall::ALL.into_iter().try_for_each(|calls| check_cover_of(calls, device, rows))
}

fn check_cover_of(
    calls: PlannedCall,
    device: DeviceKind,
    rows: &[Row],
) -> Result<(), (Option<usize>, String)> {
    let prefix = if calls == PlannedCall::AllReduce { String::new() } else { format!("{calls} of ") };
    for world_size in 1..=MAX_RANKS {
        for link in LinkClass::ALL {
            let world = match device {
                DeviceKind::Host => format!("{prefix}world size {world_size}"),
                DeviceKind::Cuda => format!("{prefix}world size {world_size} on {link}"),
            };
            let mut before = None;
            let own = rows.iter().enumerate().filter(|(_, row)| row.is_for(calls, world_size, link));
            for (index, row) in own {
                if before.is_some_and(|(_, bytes)| row.max_bytes <= bytes) {
                    let (here, before) =
                        (format_size(row.max_bytes), format_size(before.map_or(0, |(_, bytes)| bytes)));
                    let reason = format!("{world} has {here} after {before}: sizes must increase");
                    return Err((Some(index), reason));
                }
                before = Some((index, row.max_bytes));
            }
            match before {
                Some((_, MAX)) => {}
                Some((index, bytes)) => {
                    let reason = format!(
                        "{world} has nothing above {}: its last row has no up_to",
                        format_size(bytes)
                    );
                    return Err((Some(index), reason));
                }
                None if calls == PlannedCall::AllReduce => return Err((None, format!("{world} has no row"))),
                None => {}
            }
        }
    }
    Ok(())
}

fn invalid(reason: String) -> Error {
    Error::InvalidSetting { name: "plan table", value: reason, expected: "rows as Table describes them" }
}
