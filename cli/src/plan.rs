//! `plan`: the plan for each number of ranks and each size, in words or as a tuning file.

use std::io::Write;

use fast_allreduce::plan::{in_force, DeviceKind, Table, Tuning};
use fast_allreduce::topology::LinkClass;
use fast_allreduce::MAX_RANKS;

use crate::arguments::Plan;
use crate::failure::Failure;

/// Prints the plan.
pub fn print(options: &Plan) -> Result<(), Failure> {
    let device = options.device.kind();
    let (source, table) = match &options.tuning {
        Some(file) => {
            let tuning = Tuning::load(file)?;
            tuning.check(&crate::harness::device::machine(options.device)?)?;
            (format!("tuning file {} (given)", file.display()), tuning.table().clone())
        }
        None => match crate::harness::device::machine(options.device) {
            Ok(machine) => {
                let (table, source) = in_force(&machine)?;
                (source.to_string(), table)
            }
            // Without a GPU there is no tuning file for one.
            Err(_) if device == DeviceKind::Cuda => {
                ("built-in (there is no GPU, and so no tuning file)".to_owned(), Table::built_in(device))
            }
            Err(failure) => return Err(failure),
        },
    };
    let mut out = std::io::stdout().lock();
    if options.toml {
        write!(out, "{}", Tuning::new(crate::harness::device::machine(options.device)?, table)?)?;
    } else {
        writeln!(out, "# device {} plan {source}", device.name())?;
        write!(out, "{}", words(&table, &options.ranks.up_to(MAX_RANKS)))?;
    }
    Ok(out.flush()?)
}

/// Describes the plan: one paragraph for all numbers of ranks with the same plan.
fn words(table: &Table, worlds: &[usize]) -> String {
    let links: &[LinkClass] = match table.device() {
        DeviceKind::Host => &[LinkClass::SameDevice],
        DeviceKind::Cuda => &LinkClass::ALL,
    };
    let mut text = String::new();
    for &link in links {
        let mut rest = worlds;
        while let Some(&first) = rest.first() {
            let said = table.describe(first, link);
            let same = rest.iter().take_while(|&&world| table.describe(world, link) == said).count();
            let last = rest[same - 1];
            let ranks =
                if first == last { format!("{first} ranks") } else { format!("{first} to {last} ranks") };
            let on = match table.device() {
                DeviceKind::Host => String::new(),
                DeviceKind::Cuda => format!(" ({link})"),
            };
            text += &format!("\n{ranks}{on}:\n");
            said.lines().for_each(|line| text += &format!("  {line}\n"));
            rest = &rest[same..];
        }
        if link == LinkClass::Unreachable && !worlds.is_empty() {
            text += THROUGH_HOST;
        }
    }
    text
}

/// What calls through pinned host memory cost: the step `link` of `gpu-check` (lab/reports/h100-580.md).
const THROUGH_HOST: &str = concat!(
    "  The ranks share pinned host memory, so each byte crosses the bus twice. Ranks of one H100, which\n",
    "  share its PCIe 5 link, took 9 us (2 ranks) and 14 us (8) at 8 KiB, 44 and 53 us at 64 KiB, 432 and\n",
    "  307 us at 512 KiB.\n"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worlds_of_one_plan_share_a_paragraph() {
        let all: Vec<_> = (2..=MAX_RANKS).collect();
        let text = words(&Table::built_in(DeviceKind::Host), &all);
        let headings: Vec<_> = text.lines().filter(|line| line.ends_with("ranks:")).collect();
        assert_eq!(headings, ["2 ranks:", "3 ranks:", "4 ranks:", "5 to 7 ranks:", "8 to 16 ranks:"]);
        let text = words(&Table::built_in(DeviceKind::Cuda), &[7]);
        assert_eq!(text.matches("7 ranks (").count(), LinkClass::ALL.len(), "{text}");
        assert_eq!(text.matches(THROUGH_HOST).count(), 1, "{text}");
    }
}
