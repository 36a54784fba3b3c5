//! Sources of a world's plan, and how its ranks agree on one.
//!
//! Each rank proposes a plan. A plan that the program or its environment names has precedence over a file that is
//! installed for the machine, and that over a built-in table. Among equals the lowest rank's proposal is used. All
//! ranks see all proposals, so all get the same result.

use std::fmt;

use super::tuning::text::{self, parse_table, write_table};
use super::tuning::{installed, BUILT_IN};
use super::{Costs, CpuMake, DeviceKind, GpuGeneration, Machine, Table, Tuning};
use crate::catalogue::settings::{variable, TUNING_VARIABLE};
use crate::error::{Error, Result};

/// Encoded name of an unknown make of CPU.
const NO_MAKE: &str = "none";

/// Limits file names, and reasons that contain them, to one line.
fn on_one_line(text: &str) -> String {
    const LONGEST: usize = 4096;
    text::on_one_line(text, LONGEST)
}

/// Where a plan comes from. `Display` adds the reason.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum SourceKind {
    /// The program, by [`Builder::table`](crate::Builder::table) or [`Builder::tuning`](crate::Builder::tuning).
    Program,
    /// The tuning file that `FAST_ALLREDUCE_TUNING` names.
    Named {
        /// Path of the file.
        file: String,
    },
    /// The tuning file that is installed for this machine.
    Installed {
        /// Path of the file.
        file: String,
    },
    /// A built-in table.
    BuiltIn {
        /// Host only: make of the CPU that the table is for. `None`: the make is unknown, and the default table is
        /// used.
        cpu: Option<CpuMake>,
        /// Measured costs that the table was chosen by, if the CPU's name did not decide.
        costs: Option<Costs>,
        /// GPUs only: generation that the table is for.
        gpu: Option<GpuGeneration>,
        /// Why no other plan is used.
        reason: String,
    },
}

impl fmt::Display for SourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Program => f.write_str("given by the program"),
            Self::Named { file } => write!(f, "tuning file {file} (FAST_ALLREDUCE_TUNING)"),
            Self::Installed { file } => write!(f, "tuning file {file} (installed for this machine)"),
            Self::BuiltIn { cpu: None, gpu: None, reason, .. } => {
                write!(f, "built-in for {}, by default ({reason})", CpuMake::DEFAULT)
            }
            Self::BuiltIn { cpu: None, gpu: Some(gpu), reason, .. } => {
                write!(f, "built-in for {gpu} (by the GPU's name; {reason})")
            }
            Self::BuiltIn { cpu: Some(cpu), costs, reason, .. } => {
                write!(f, "built-in for {cpu} (")?;
                match costs {
                    Some(costs) => write!(f, "{costs}; {reason})"),
                    None => write!(f, "by the CPU's name; {reason})"),
                }
            }
        }
    }
}

/// Source of a world's plan: its kind, and the rank that proposed it. `Display` gives both.
///
/// ```
/// use fast_allreduce::plan::{in_force, Machine, SourceKind};
///
/// let (_, source) = in_force(&Machine::host())?;
/// match &source.kind {
///     SourceKind::Installed { file } => println!("measured on this machine: {file}"),
///     _ => println!("{source}"),
/// }
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct PlanSource {
    /// Kind of source on the rank that proposed the plan.
    pub kind: SourceKind,
    /// Rank that proposed the plan.
    pub rank: usize,
    /// Ranks that proposed another plan.
    pub others: Vec<usize>,
}

impl fmt::Display for PlanSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)?;
        let others = self.others.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        match self.others.len() {
            0 => Ok(()),
            1 => write!(f, ", from rank {}; rank {others} proposed another", self.rank),
            _ => write!(f, ", from rank {}; ranks {others} proposed others", self.rank),
        }
    }
}

/// Returns the plan that ranks on `machine` use with this process's environment, and its source. A measurement of the
/// host may later replace a built-in table.
///
/// # Errors
///
/// [`Error::Tuning`] if `FAST_ALLREDUCE_TUNING` names a file that cannot be used.
///
/// # Examples
///
/// ```
/// use fast_allreduce::plan::{in_force, Machine};
/// use fast_allreduce::topology::LinkClass;
///
/// let (table, source) = in_force(&Machine::host())?;
/// println!("{source}\n{}", table.describe(2, LinkClass::SameDevice));
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
pub fn in_force(machine: &Machine) -> Result<(Table, PlanSource)> {
    let proposal = Proposal::of_environment(machine.device(), || Ok(machine.clone()), false)?;
    let Agreed { table, source, .. } = choose(vec![proposal]);
    Ok((table, source))
}

/// Plan that one rank proposes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Proposal {
    table: Table,
    kind: SourceKind,
    /// Whether a measurement may replace the table.
    may_calibrate: bool,
}

/// Plan that all ranks use.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Agreed {
    pub table: Table,
    pub source: PlanSource,
    /// Whether a measurement may select another built-in table.
    pub may_calibrate: bool,
}

impl Proposal {
    /// Creates the proposal of a program's table.
    pub fn given(table: Table) -> Self {
        Self { table, kind: SourceKind::Program, may_calibrate: false }
    }

    /// Creates the proposal of the environment: a file that it names, an installed file, or a built-in table.
    pub fn of_environment(
        device: DeviceKind,
        machine: impl Fn() -> Result<Machine>,
        may_calibrate: bool,
    ) -> Result<Self> {
        if variable(TUNING_VARIABLE).is_some_and(|value| value == BUILT_IN) {
            return Ok(Self::built_in(device, machine, "FAST_ALLREDUCE_TUNING asks for it"));
        }
        // A process may have communicators on both devices, but the file is for one of them.
        if let Some(tuning) = Tuning::from_env()?.filter(|tuning| tuning.machine().device() == device) {
            tuning.check(&machine()?)?;
            return Ok(Self::of_file(&tuning, |file| SourceKind::Named { file }));
        }
        Ok(match installed::find(installed::folder().as_deref(), device, &machine) {
            Ok(tuning) => Self::of_file(&tuning, |file| SourceKind::Installed { file }),
            Err(reason) => Self::by_name(device, machine, reason, may_calibrate),
        })
    }

    /// Creates the proposal of the built-in table, without a measurement.
    pub fn built_in(device: DeviceKind, machine: impl Fn() -> Result<Machine>, reason: &str) -> Self {
        Self::by_name(device, machine, reason.to_owned(), false)
    }

    /// Creates the proposal of the built-in table for the CPU's or GPU's name.
    fn by_name(
        device: DeviceKind,
        machine: impl Fn() -> Result<Machine>,
        reason: String,
        may_calibrate: bool,
    ) -> Self {
        match device {
            DeviceKind::Host => {
                let cpu = machine().ok().and_then(|machine| CpuMake::of(&machine));
                Self::of_cpu(cpu, reason, may_calibrate)
            }
            DeviceKind::Cuda => {
                let gpu = machine().map_or(GpuGeneration::Hopper, |machine| GpuGeneration::of(&machine));
                let kind = SourceKind::BuiltIn { cpu: None, costs: None, gpu: Some(gpu), reason };
                Self { table: Table::for_gpu(gpu), kind, may_calibrate: false }
            }
        }
    }

    /// Creates the proposal of the built-in table for a make of CPU, or the default table if the make is unknown.
    fn of_cpu(cpu: Option<CpuMake>, reason: String, may_calibrate: bool) -> Self {
        let reason = match cpu {
            Some(_) => reason,
            None => format!("the CPU is of a make without a table; {reason}"),
        };
        let table = Table::for_cpu(cpu.unwrap_or(CpuMake::DEFAULT));
        let kind = SourceKind::BuiltIn { cpu, costs: None, gpu: None, reason };
        Self { table, kind, may_calibrate: may_calibrate && cpu.is_none() }
    }

    fn of_file(tuning: &Tuning, kind: impl FnOnce(String) -> SourceKind) -> Self {
        let file = tuning.file().unwrap_or_default().to_owned();
        Self { table: tuning.table().clone(), kind: kind(file), may_calibrate: false }
    }

    /// Returns the precedence: the lowest number wins.
    fn precedence(&self) -> u8 {
        match self.kind {
            SourceKind::Program | SourceKind::Named { .. } => 0,
            SourceKind::Installed { .. } => 1,
            SourceKind::BuiltIn { cpu: None, gpu: None, .. } => 3,
            SourceKind::BuiltIn { .. } => 2,
        }
    }

    /// Encodes the proposal for the other ranks: a line of words between tabs, then the rows of a table that is not
    /// built in.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for a table that cannot be written as text.
    pub fn encode(&self) -> Result<String> {
        let rows = || {
            write_table(&self.table).map_err(|error| Error::InvalidSetting {
                name: "plan table",
                value: error.to_string(),
                expected: "rows that can be written",
            })
        };
        Ok(match &self.kind {
            SourceKind::Program => format!("program\n{}", rows()?),
            SourceKind::Named { file } => format!("named\t{}\n{}", on_one_line(file), rows()?),
            SourceKind::Installed { file } => format!("installed\t{}\n{}", on_one_line(file), rows()?),
            SourceKind::BuiltIn { cpu, gpu, reason, .. } => {
                let make = cpu.map(CpuMake::name).or(gpu.map(GpuGeneration::name)).unwrap_or(NO_MAKE);
                let may = if self.may_calibrate { "measure" } else { "keep" };
                format!("built-in\t{make}\t{may}\t{}\n", on_one_line(reason))
            }
        })
    }

    /// Decodes any bytes to a proposal for this device, or to a reason on one line.
    fn decode(device: DeviceKind, bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|_| "its plan is not UTF-8 text")?;
        let (line, rows) = text.split_once('\n').ok_or("its plan is truncated")?;
        let words: Vec<_> = line.split('\t').collect();
        let table = || {
            let table = parse_table(rows).map_err(|reason| format!("its plan: {reason}"))?;
            let is_ours = table.device() == device;
            is_ours.then_some(table).ok_or_else(|| "its plan is for another device".to_owned())
        };
        let (table, kind, may_calibrate) = match (&words[..], device) {
            (["program"], _) => (table()?, SourceKind::Program, false),
            (["named", file], _) => (table()?, SourceKind::Named { file: (*file).to_owned() }, false),
            (["installed", file], _) => (table()?, SourceKind::Installed { file: (*file).to_owned() }, false),
            (["built-in", make, may, reason], _) => {
                let cpu = [CpuMake::Amd, CpuMake::Intel].into_iter().find(|known| known.name() == *make);
                let gpu = GpuGeneration::by_name(make);
                let table = match (cpu, gpu, device) {
                    (Some(cpu), _, DeviceKind::Host) => Table::for_cpu(cpu),
                    (None, None, DeviceKind::Host) if *make == NO_MAKE => Table::for_cpu(CpuMake::DEFAULT),
                    (_, Some(gpu), DeviceKind::Cuda) => Table::for_gpu(gpu),
                    _ => return Err("its built-in plan is for another device".to_owned()),
                };
                let kind = SourceKind::BuiltIn { cpu, costs: None, gpu, reason: (*reason).to_owned() };
                (table, kind, *may == "measure" && cpu.is_none())
            }
            _ => return Err("its plan has an unknown source".to_owned()),
        };
        Ok(Self { table, kind, may_calibrate })
    }
}

/// Selects the plan of all ranks from their [encoded](Proposal::encode) proposals, indexed by rank.
///
/// # Errors
///
/// [`Error::Malformed`] naming the rank whose proposal does not decode.
pub(crate) fn agree(device: DeviceKind, encoded: &[Vec<u8>]) -> Result<Agreed> {
    let decode = |(rank, bytes): (usize, &Vec<u8>)| {
        Proposal::decode(device, bytes).map_err(|reason| Error::Malformed { rank, reason })
    };
    Ok(choose(encoded.iter().enumerate().map(decode).collect::<Result<_>>()?))
}

/// Selects a proposal. There is at least one.
fn choose(mut proposals: Vec<Proposal>) -> Agreed {
    let may_calibrate = proposals.iter().all(|proposal| proposal.may_calibrate);
    // `min_by_key` returns the first of equals.
    let ranks = 0..proposals.len();
    let rank = ranks.min_by_key(|&rank| proposals[rank].precedence()).unwrap_or_default();
    let differs = |other: &usize| proposals[*other].table != proposals[rank].table;
    let others = (0..proposals.len()).filter(differs).collect();
    let Proposal { table, kind, .. } = proposals.swap_remove(rank);
    Agreed { table, source: PlanSource { kind, rank, others }, may_calibrate }
}

impl Agreed {
    /// Selects the built-in table by measured costs, if the make of the CPU is unknown. `None`: nothing could be
    /// measured, or the measurement was disturbed.
    pub fn calibrate(&mut self, costs: Option<Costs>) {
        let SourceKind::BuiltIn { cpu: cpu @ None, costs: found, gpu: None, reason } = &mut self.source.kind
        else {
            return;
        };
        match costs {
            Some(costs) => {
                let make = CpuMake::from_costs(&costs);
                (*cpu, *found) = (Some(make), Some(costs));
                self.table = Table::for_cpu(make);
            }
            None => *reason += "; the measurement failed or was disturbed",
        }
    }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_plan_proposal, |bytes| {
    for device in [DeviceKind::Host, DeviceKind::Cuda] {
        if let Ok(proposal) = Proposal::decode(device, bytes) {
            assert!(proposal.encode().is_ok(), "it cannot be sent on");
        }
    }
});

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::Choice;
    use crate::testing::damaged::damaged;
    use crate::Algorithm::{self, OneShotPush, TwoShotPush};

    fn table(algorithm: Algorithm) -> Table {
        Table::uniform(DeviceKind::Host, Choice::host(algorithm, 2, 4096, 65536)).unwrap()
    }

    fn built_in(cpu: impl Into<Option<CpuMake>>, may_calibrate: bool) -> Proposal {
        Proposal::of_cpu(cpu.into(), "no file".into(), may_calibrate)
    }

    fn installed(algorithm: Algorithm) -> Proposal {
        let kind = SourceKind::Installed { file: "/a b.toml".into() };
        Proposal { table: table(algorithm), kind, may_calibrate: false }
    }

    fn agreed(proposals: &[Proposal]) -> Agreed {
        let encoded = proposals.iter().map(|proposal| proposal.encode().unwrap().into_bytes());
        agree(DeviceKind::Host, &encoded.collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn equal_proposals_are_used_as_they_are() {
        let agreed = agreed(&[installed(OneShotPush), installed(OneShotPush)]);
        assert_eq!(agreed.table, table(OneShotPush));
        assert_eq!(agreed.source.to_string(), "tuning file /a b.toml (installed for this machine)");
        assert!(!agreed.may_calibrate);
    }

    #[test]
    fn the_lowest_rank_with_the_highest_precedence_decides() {
        let given = Proposal::given(table(TwoShotPush));
        let all = [
            built_in(CpuMake::Amd, true),
            installed(OneShotPush),
            given.clone(),
            Proposal::given(table(OneShotPush)),
        ];
        let agreed_on = agreed(&all);
        assert_eq!((agreed_on.table.clone(), agreed_on.source.rank), (given.table, 2));
        assert_eq!(
            agreed_on.source.to_string(),
            "given by the program, from rank 2; ranks 0, 1, 3 proposed others"
        );
        let agreed_on = agreed(&all[..2]);
        assert_eq!((agreed_on.table, agreed_on.source.rank), (table(OneShotPush), 1));
        assert!(agreed_on.source.others == [0] && !agreed_on.may_calibrate);
    }

    /// The long times were recorded between two ranks on a busy AMD EPYC; on the idle machine they were 42 to 57 ns.
    #[test]
    fn a_known_make_is_not_measured() {
        for make in [CpuMake::Amd, CpuMake::Intel] {
            let mut agreed_on = agreed(&[built_in(make, true), built_in(make, true)]);
            assert!(!agreed_on.may_calibrate);
            for line_ns in [233.0, 245.0, 42.0] {
                agreed_on.calibrate(Some(Costs { line_ns }));
                assert_eq!(agreed_on.table, Table::for_cpu(make));
            }
            assert_eq!(
                agreed_on.source.to_string(),
                format!("built-in for {make} (by the CPU's name; no file)")
            );
        }
    }

    /// A container may hide the CPU's name from some ranks.
    #[test]
    fn a_rank_that_knows_the_make_decides() {
        for proposals in [
            [built_in(None, true), built_in(CpuMake::Intel, true)],
            [built_in(CpuMake::Intel, false), built_in(None, true)],
        ] {
            let agreed_on = agreed(&proposals);
            assert!(!agreed_on.may_calibrate && agreed_on.table == Table::for_cpu(CpuMake::Intel));
            assert!(agreed_on
                .source
                .to_string()
                .starts_with("built-in for Intel (by the CPU's name; no file)"));
        }
    }

    #[test]
    fn an_unknown_make_is_measured_if_all_ranks_permit_it() {
        assert!(!agreed(&[built_in(None, true), built_in(None, false)]).may_calibrate);
        let unmeasured = agreed(&[built_in(None, true), built_in(None, true)]);
        assert!(unmeasured.may_calibrate && unmeasured.table == Table::for_cpu(CpuMake::DEFAULT));
        let make = "the CPU is of a make without a table; no file";
        assert_eq!(unmeasured.source.to_string(), format!("built-in for AMD, by default ({make})"));
        for (line_ns, cpu) in [(120.0, CpuMake::Intel), (20.0, CpuMake::Amd)] {
            let mut measured = unmeasured.clone();
            measured.calibrate(Some(Costs { line_ns }));
            assert_eq!(measured.table, Table::for_cpu(cpu));
            assert_eq!(
                measured.source.to_string(),
                format!("built-in for {cpu} (a line takes {line_ns} ns; {make})")
            );
        }
        let mut disturbed = unmeasured.clone();
        disturbed.calibrate(None);
        assert_eq!(disturbed.table, unmeasured.table);
        assert!(disturbed.source.to_string().ends_with("disturbed)"), "{}", disturbed.source);
    }

    #[test]
    fn a_measurement_decides_only_between_built_in_tables() {
        let mut given = agreed(&[Proposal::given(table(OneShotPush))]);
        given.calibrate(Some(Costs { line_ns: 500.0 }));
        assert_eq!(given.table, table(OneShotPush));
        assert_eq!(CpuMake::from_costs(&Costs { line_ns: 500.0 }), CpuMake::Intel);
        // An invalid time changes nothing.
        assert_eq!(CpuMake::from_costs(&Costs { line_ns: f64::NAN }), CpuMake::DEFAULT);
    }

    #[test]
    fn a_plan_of_another_device_is_refused() {
        let cuda = Proposal::given(Table::built_in(DeviceKind::Cuda)).encode().unwrap();
        let error = agree(DeviceKind::Host, &[cuda.into_bytes()]).unwrap_err();
        assert!(
            matches!(&error, Error::Malformed { rank: 0, reason } if reason.contains("another device")),
            "{error}"
        );
    }

    #[test]
    fn the_table_of_a_generation_is_encoded_and_decoded() {
        for gpu in [GpuGeneration::Ampere, GpuGeneration::Hopper, GpuGeneration::Blackwell] {
            let kind =
                SourceKind::BuiltIn { cpu: None, costs: None, gpu: Some(gpu), reason: "no file".into() };
            let own = Proposal { table: Table::for_gpu(gpu), kind, may_calibrate: false };
            let encoded = own.encode().unwrap().into_bytes();
            assert_eq!(Proposal::decode(DeviceKind::Cuda, &encoded), Ok(own));
            let agreed = agree(DeviceKind::Cuda, &[encoded.clone(), encoded.clone()]).unwrap();
            assert_eq!(agreed.source.to_string(), format!("built-in for {gpu} (by the GPU's name; no file)"));
            assert!(agree(DeviceKind::Host, &[encoded]).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_proposal_or_refused(bytes in damaged(vec![
            built_in(CpuMake::Intel, true).encode().unwrap().into_bytes(),
            built_in(None, true).encode().unwrap().into_bytes(),
            installed(TwoShotPush).encode().unwrap().into_bytes(),
        ])) {
            match Proposal::decode(DeviceKind::Host, &bytes) {
                Ok(proposal) => {
                    let again = proposal.encode().unwrap();
                    let decoded = Proposal::decode(DeviceKind::Host, again.as_bytes()).unwrap();
                    prop_assert_eq!(decoded.table, proposal.table);
                }
                Err(reason) => prop_assert!(!reason.contains('\n')),
            }
        }
    }
}
