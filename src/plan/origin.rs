//! Where the plan of a world comes from, and how its ranks come to have the same.
//!
//! Each rank proposes a plan. What a program or its environment names goes before what is installed for the machine, and that
//! before a built-in table; of equals, the lowest rank's is taken. All ranks see all proposals, and so come to the same answer.

use std::fmt;

use super::text::{self, parse_table, write_table};
use super::tuning::BUILT_IN;
use super::{installed, Costs, CpuMake, DeviceKind, GpuGeneration, Machine, Table, Tuning};
use crate::catalogue::settings::{variable, TUNING_VARIABLE};
use crate::error::{Error, Result};

/// Where ranks tell each other of what make their CPU is: of none that is known.
const NO_MAKE: &str = "none";

/// Names of files and reasons that hold them.
fn on_one_line(text: &str) -> String {
    const LONGEST: usize = 4096;
    text::on_one_line(text, LONGEST)
}

/// Where a communicator's plan comes from. `Display` says it with the reason.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Origin {
    /// The program: [`Builder::table`](crate::Builder::table) or [`Builder::tuning`](crate::Builder::tuning).
    Program,
    /// The tuning file that `FAST_ALLREDUCE_TUNING` names.
    Named {
        /// Its path.
        file: String,
    },
    /// The tuning file that is installed for this machine.
    Installed {
        /// Its path.
        file: String,
    },
    /// A built-in table.
    BuiltIn {
        /// On the host: the CPU that it is for; `None`: the default, as nothing tells which it should be for.
        cpu: Option<CpuMake>,
        /// What that was chosen by, where the CPU's name does not tell.
        costs: Option<Costs>,
        /// On GPUs: the generation that it is for.
        gpu: Option<GpuGeneration>,
        /// Why there is no other plan.
        reason: String,
    },
}

impl fmt::Display for Origin {
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

/// The plan of a world: where it comes from, and whose it is. `Display` says both.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Source {
    /// Where it comes from, on the rank that it is of.
    pub origin: Origin,
    /// The rank that it is of.
    pub rank: usize,
    /// Ranks that would have had another.
    pub others: Vec<usize>,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.origin.fmt(f)?;
        let others = self.others.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        match self.others.len() {
            0 => Ok(()),
            1 => write!(f, ", of rank {}: rank {others} would have another", self.rank),
            _ => write!(f, ", of rank {}: ranks {others} would have others", self.rank),
        }
    }
}

/// The plan that a world of this process alone would have on `machine`, and where it comes from: of the host, before a measurement.
///
/// # Errors
///
/// [`Error::Tuning`] for a file that `FAST_ALLREDUCE_TUNING` names and that cannot be used.
pub fn in_force(machine: &Machine) -> Result<(Table, Source)> {
    let proposal = Proposal::of_environment(machine.device(), || Ok(machine.clone()), false)?;
    let Agreed { table, source, .. } = choose(vec![proposal]);
    Ok((table, source))
}

/// What a rank would plan by.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Proposal {
    table: Table,
    origin: Origin,
    /// It may be replaced by what is measured.
    may_calibrate: bool,
}

/// What all ranks plan by.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Agreed {
    pub table: Table,
    pub source: Source,
    /// Which built-in table it is may be decided by a measurement.
    pub may_calibrate: bool,
}

impl Proposal {
    /// A program's.
    pub fn given(table: Table) -> Self {
        Self { table, origin: Origin::Program, may_calibrate: false }
    }

    /// Where the program says nothing.
    pub fn of_environment(
        device: DeviceKind,
        machine: impl Fn() -> Result<Machine>,
        may_calibrate: bool,
    ) -> Result<Self> {
        if variable(TUNING_VARIABLE).is_some_and(|value| value == BUILT_IN) {
            return Ok(Self::built_in(device, machine, "FAST_ALLREDUCE_TUNING asks for it"));
        }
        // A process may have communicators of both devices; the file is for those of one.
        if let Some(tuning) = Tuning::from_env()?.filter(|tuning| tuning.machine().device() == device) {
            tuning.check(&machine()?)?;
            return Ok(Self::of_file(&tuning, |file| Origin::Named { file }));
        }
        Ok(match installed::find(installed::folder().as_deref(), device, &machine) {
            Ok(tuning) => Self::of_file(&tuning, |file| Origin::Installed { file }),
            Err(reason) => Self::by_name(device, machine, reason, may_calibrate),
        })
    }

    /// The built-in table, without a measurement.
    pub fn built_in(device: DeviceKind, machine: impl Fn() -> Result<Machine>, reason: &str) -> Self {
        Self::by_name(device, machine, reason.to_owned(), false)
    }

    /// The built-in table for the CPU's or GPU's name.
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
                let origin = Origin::BuiltIn { cpu: None, costs: None, gpu: Some(gpu), reason };
                Self { table: Table::of_gpu(gpu), origin, may_calibrate: false }
            }
        }
    }

    /// For a CPU of this make, if it is known.
    fn of_cpu(cpu: Option<CpuMake>, reason: String, may_calibrate: bool) -> Self {
        let reason = match cpu {
            Some(_) => reason,
            None => format!("the CPU is of a make without a table; {reason}"),
        };
        let table = Table::of_cpu(cpu.unwrap_or(CpuMake::DEFAULT));
        let origin = Origin::BuiltIn { cpu, costs: None, gpu: None, reason };
        Self { table, origin, may_calibrate: may_calibrate && cpu.is_none() }
    }

    fn of_file(tuning: &Tuning, origin: impl FnOnce(String) -> Origin) -> Self {
        let file = tuning.file().unwrap_or_default().to_owned();
        Self { table: tuning.table().clone(), origin: origin(file), may_calibrate: false }
    }

    /// Who goes first.
    fn precedence(&self) -> u8 {
        match self.origin {
            Origin::Program | Origin::Named { .. } => 0,
            Origin::Installed { .. } => 1,
            Origin::BuiltIn { cpu: None, gpu: None, .. } => 3,
            Origin::BuiltIn { .. } => 2,
        }
    }

    /// As the other ranks hear of it: a line with words between tabs, then the rows of a table that is not built in.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for a table that cannot be written.
    pub fn encode(&self) -> Result<String> {
        let rows = || {
            write_table(&self.table).map_err(|error| Error::InvalidSetting {
                name: "plan table",
                value: error.to_string(),
                expected: "rows that can be written",
            })
        };
        Ok(match &self.origin {
            Origin::Program => format!("program\n{}", rows()?),
            Origin::Named { file } => format!("named\t{}\n{}", on_one_line(file), rows()?),
            Origin::Installed { file } => format!("installed\t{}\n{}", on_one_line(file), rows()?),
            Origin::BuiltIn { cpu, gpu, reason, .. } => {
                let make = cpu.map(CpuMake::name).or(gpu.map(GpuGeneration::name)).unwrap_or(NO_MAKE);
                let may = if self.may_calibrate { "measure" } else { "keep" };
                format!("built-in\t{make}\t{may}\t{}\n", on_one_line(reason))
            }
        })
    }

    /// Total: any bytes are a proposal for this device, or a reason on one line.
    fn decode(device: DeviceKind, bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|_| "its plan is no text")?;
        let (line, rows) = text.split_once('\n').ok_or("its plan is cut short")?;
        let words: Vec<_> = line.split('\t').collect();
        let table = || {
            let table = parse_table(rows).map_err(|reason| format!("its plan: {reason}"))?;
            let is_ours = table.device() == device;
            is_ours.then_some(table).ok_or_else(|| "its plan is for another device".to_owned())
        };
        let (table, origin, may_calibrate) = match (&words[..], device) {
            (["program"], _) => (table()?, Origin::Program, false),
            (["named", file], _) => (table()?, Origin::Named { file: (*file).to_owned() }, false),
            (["installed", file], _) => (table()?, Origin::Installed { file: (*file).to_owned() }, false),
            (["built-in", make, may, reason], _) => {
                let cpu = [CpuMake::Amd, CpuMake::Intel].into_iter().find(|known| known.name() == *make);
                let gpu = GpuGeneration::by_name(make);
                let table = match (cpu, gpu, device) {
                    (Some(cpu), _, DeviceKind::Host) => Table::of_cpu(cpu),
                    (None, None, DeviceKind::Host) if *make == NO_MAKE => Table::of_cpu(CpuMake::DEFAULT),
                    (_, Some(gpu), DeviceKind::Cuda) => Table::of_gpu(gpu),
                    _ => return Err("its built-in plan is for another device".to_owned()),
                };
                let origin = Origin::BuiltIn { cpu, costs: None, gpu, reason: (*reason).to_owned() };
                (table, origin, *may == "measure" && cpu.is_none())
            }
            _ => return Err("its plan comes from nowhere".to_owned()),
        };
        Ok(Self { table, origin, may_calibrate })
    }
}

/// The plan of all, from what each rank has [encoded](Proposal::encode), by rank.
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

/// There is at least one.
fn choose(mut proposals: Vec<Proposal>) -> Agreed {
    let may_calibrate = proposals.iter().all(|proposal| proposal.may_calibrate);
    // The first of equals.
    let ranks = 0..proposals.len();
    let rank = ranks.min_by_key(|&rank| proposals[rank].precedence()).unwrap_or_default();
    let differs = |other: &usize| proposals[*other].table != proposals[rank].table;
    let others = (0..proposals.len()).filter(differs).collect();
    let Proposal { table, origin, .. } = proposals.swap_remove(rank);
    Agreed { table, source: Source { origin, rank, others }, may_calibrate }
}

impl Agreed {
    /// Takes the built-in table that these costs speak for, where the CPU's name does not tell. `None`: they could not be measured, or
    /// the measurement was disturbed.
    pub fn calibrate(&mut self, costs: Option<Costs>) {
        let Origin::BuiltIn { cpu: cpu @ None, costs: found, gpu: None, reason } = &mut self.source.origin
        else {
            return;
        };
        match costs {
            Some(costs) => {
                let make = CpuMake::by(&costs);
                (*cpu, *found) = (Some(make), Some(costs));
                self.table = Table::of_cpu(make);
            }
            None => *reason += "; nothing could be measured undisturbed",
        }
    }
}

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
        let origin = Origin::Installed { file: "/a b.toml".into() };
        Proposal { table: table(algorithm), origin, may_calibrate: false }
    }

    fn agreed(proposals: &[Proposal]) -> Agreed {
        let encoded = proposals.iter().map(|proposal| proposal.encode().unwrap().into_bytes());
        agree(DeviceKind::Host, &encoded.collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn ranks_that_are_alike_have_what_each_has() {
        let agreed = agreed(&[installed(OneShotPush), installed(OneShotPush)]);
        assert_eq!(agreed.table, table(OneShotPush));
        assert_eq!(agreed.source.to_string(), "tuning file /a b.toml (installed for this machine)");
        assert!(!agreed.may_calibrate);
    }

    #[test]
    fn the_lowest_rank_with_the_most_said_decides() {
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
            "given by the program, of rank 2: ranks 0, 1, 3 would have others"
        );
        let agreed_on = agreed(&all[..2]);
        assert_eq!((agreed_on.table, agreed_on.source.rank), (table(OneShotPush), 1));
        assert!(agreed_on.source.others == [0] && !agreed_on.may_calibrate);
    }

    /// Recorded between two ranks of an AMD EPYC that other work kept busy; idle, it was 42 to 57 ns.
    #[test]
    fn a_known_make_is_not_measured() {
        for make in [CpuMake::Amd, CpuMake::Intel] {
            let mut agreed_on = agreed(&[built_in(make, true), built_in(make, true)]);
            assert!(!agreed_on.may_calibrate);
            for line_ns in [233.0, 245.0, 42.0] {
                agreed_on.calibrate(Some(Costs { line_ns }));
                assert_eq!(agreed_on.table, Table::of_cpu(make));
            }
            assert_eq!(
                agreed_on.source.to_string(),
                format!("built-in for {make} (by the CPU's name; no file)")
            );
        }
    }

    /// A container may hide the name from some.
    #[test]
    fn a_rank_that_knows_the_make_decides() {
        for proposals in [
            [built_in(None, true), built_in(CpuMake::Intel, true)],
            [built_in(CpuMake::Intel, false), built_in(None, true)],
        ] {
            let agreed_on = agreed(&proposals);
            assert!(!agreed_on.may_calibrate && agreed_on.table == Table::of_cpu(CpuMake::Intel));
            assert!(agreed_on
                .source
                .to_string()
                .starts_with("built-in for Intel (by the CPU's name; no file)"));
        }
    }

    #[test]
    fn another_make_is_measured_with_the_leave_of_all() {
        assert!(!agreed(&[built_in(None, true), built_in(None, false)]).may_calibrate);
        let unmeasured = agreed(&[built_in(None, true), built_in(None, true)]);
        assert!(unmeasured.may_calibrate && unmeasured.table == Table::of_cpu(CpuMake::DEFAULT));
        let make = "the CPU is of a make without a table; no file";
        assert_eq!(unmeasured.source.to_string(), format!("built-in for AMD, by default ({make})"));
        for (line_ns, cpu) in [(120.0, CpuMake::Intel), (20.0, CpuMake::Amd)] {
            let mut measured = unmeasured.clone();
            measured.calibrate(Some(Costs { line_ns }));
            assert_eq!(measured.table, Table::of_cpu(cpu));
            assert_eq!(
                measured.source.to_string(),
                format!("built-in for {cpu} (a line takes {line_ns} ns; {make})")
            );
        }
        let mut disturbed = unmeasured.clone();
        disturbed.calibrate(None);
        assert_eq!(disturbed.table, unmeasured.table);
        assert!(disturbed.source.to_string().ends_with("undisturbed)"), "{}", disturbed.source);
    }

    #[test]
    fn a_measurement_decides_between_built_in_tables_alone() {
        let mut given = agreed(&[Proposal::given(table(OneShotPush))]);
        given.calibrate(Some(Costs { line_ns: 500.0 }));
        assert_eq!(given.table, table(OneShotPush));
        assert_eq!(CpuMake::by(&Costs { line_ns: 500.0 }), CpuMake::Intel);
        // Nonsense is no reason to change anything.
        assert_eq!(CpuMake::by(&Costs { line_ns: f64::NAN }), CpuMake::DEFAULT);
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
    fn the_table_of_a_generation_travels() {
        for gpu in [GpuGeneration::Ampere, GpuGeneration::Hopper, GpuGeneration::Blackwell] {
            let origin = Origin::BuiltIn { cpu: None, costs: None, gpu: Some(gpu), reason: "no file".into() };
            let own = Proposal { table: Table::of_gpu(gpu), origin, may_calibrate: false };
            let encoded = own.encode().unwrap().into_bytes();
            assert_eq!(Proposal::decode(DeviceKind::Cuda, &encoded), Ok(own));
            let agreed = agree(DeviceKind::Cuda, &[encoded.clone(), encoded.clone()]).unwrap();
            assert_eq!(agreed.source.to_string(), format!("built-in for {gpu} (by the GPU's name; no file)"));
            assert!(agree(DeviceKind::Host, &[encoded]).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_proposal_is_total(bytes in damaged(vec![
            built_in(CpuMake::Intel, true).encode().unwrap().into_bytes(),
            built_in(None, true).encode().unwrap().into_bytes(),
            installed(TwoShotPush).encode().unwrap().into_bytes(),
        ])) {
            match Proposal::decode(DeviceKind::Host, &bytes) {
                Ok(proposal) => {
                    let again = proposal.encode().unwrap();
                    prop_assert_eq!(Proposal::decode(DeviceKind::Host, again.as_bytes()).unwrap().table, proposal.table);
                }
                Err(reason) => prop_assert!(!reason.contains('\n')),
            }
        }
    }
}
