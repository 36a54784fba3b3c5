//! The plan's built-in rows for GPUs (src/plan/built_in.rs), and the rows that predictions suggest.

use fast_allreduce_ptx_machine::clock::Machine;

use crate::results::Results;

const SOURCE: &str = include_str!("../../../../../src/plan/built_in.rs");

/// A row of the plan: number of ranks, and largest number of bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub ranks: (usize, usize),
    pub links: String,
    pub max_bytes: usize,
    /// Algorithm, by its name in kernels.
    pub algorithm: String,
    pub blocks: u32,
    pub threads: u32,
}

/// Parses expressions such as `2 * MIB`.
fn bytes(text: &str) -> Option<usize> {
    text.split('*').map(str::trim).try_fold(1usize, |product, factor| {
        product.checked_mul(match factor {
            "KIB" => 1 << 10,
            "MIB" => 1 << 20,
            "MAX" => return Some(usize::MAX),
            number => number.parse().ok()?,
        })
    })
}

/// Converts `OneShotPush` to `one_shot_push`.
fn snake(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.extend(letter.to_lowercase());
    }
    text
}

fn row(line: &str) -> Option<Row> {
    let inside = line.trim().strip_prefix("cuda(")?.strip_suffix("),")?;
    let parts: Vec<&str> = inside.split(',').map(str::trim).collect();
    let [first, last, links, most, algorithm, blocks, threads] = parts[..] else { return None };
    Some(Row {
        ranks: (first.parse().ok()?, last.parse().ok()?),
        links: links.strip_prefix("Links::")?.to_owned(),
        max_bytes: bytes(most)?,
        algorithm: snake(algorithm),
        blocks: blocks.parse().ok()?,
        threads: threads.parse().ok()?,
    })
}

/// Returns the name of the table for a machine's links.
fn table(machine: &Machine) -> &'static str {
    match machine.name.as_str() {
        "a100" => "NVLINK_OF_AMPERE",
        "b200" => "NVLINK_OF_BLACKWELL",
        name if name.starts_with("pcie") => "OTHER_LINKS",
        _ => "NVLINK_OF_HOPPER",
    }
}

/// Returns the rows for a machine's links.
pub fn rows(machine: &Machine) -> Vec<Row> {
    let links = if machine.name.starts_with("pcie") { "PCIE" } else { "NVLINK" };
    let begin = format!("const {}:", table(machine));
    let of_table =
        SOURCE.lines().skip_while(|line| !line.starts_with(&begin)).take_while(|line| *line != "];");
    of_table.filter_map(row).filter(|row| row.links == links).collect()
}

/// Returns the blocks and threads that the plan uses for an algorithm.
pub fn shape(rows: &[Row], algorithm: &str, ranks: usize) -> (u32, u32) {
    let of_ranks = |row: &&Row| row.ranks.0 <= ranks && ranks <= row.ranks.1;
    let of_algorithm = |row: &&Row| row.algorithm == algorithm;
    let found = rows.iter().filter(of_ranks).find(of_algorithm).or_else(|| rows.iter().find(of_algorithm));
    found.map_or((64, 512), |row| (row.blocks, row.threads))
}

/// Returns the blocks and threads of a call of shares: those of a one-shot pull, or of an algorithm without a row for
/// these ranks (src/plan/choice.rs).
pub fn shape_of_shares(rows: &[Row], ranks: usize) -> (u32, u32) {
    let is_own =
        |row: &&Row| row.ranks.0 <= ranks && ranks <= row.ranks.1 && row.algorithm == "one_shot_pull";
    rows.iter().find(is_own).map_or((36, 512), |row| (row.blocks, row.threads))
}

/// Returns the row that the plan uses at a size.
pub fn planned(rows: &[Row], ranks: usize, bytes: usize) -> Option<&Row> {
    rows.iter().find(|row| row.ranks.0 <= ranks && ranks <= row.ranks.1 && bytes <= row.max_bytes)
}

/// Returns the fastest algorithms, each with the largest predicted size up to which it is the fastest.
pub fn crossovers(results: &Results, ranks: usize, registered: bool) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    for bytes in results.sizes(ranks) {
        let all = results.of(ranks).filter(|result| result.call.bytes == bytes);
        // Pushes work with any input, registered or not.
        let all = all.filter(|result| {
            let name = &result.call.algorithm;
            name.contains("push") || name.ends_with('+') == registered
        });
        let Some(best) = all.min_by(|a, b| a.us().total_cmp(&b.us())) else { continue };
        match found.last_mut() {
            Some((up_to, name)) if *name == best.call.algorithm => *up_to = bytes,
            _ => found.push((bytes, best.call.algorithm.clone())),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_rows_are_read() {
        for machine in ["h100", "a100", "b200", "pcie5", "pcie4"] {
            let rows = rows(&Machine::named(machine).unwrap());
            assert!(rows.len() > 5, "{machine}: {rows:?}");
            for ranks in 2..=16 {
                assert!(planned(&rows, ranks, 1 << 30).is_some(), "{machine}: {ranks} ranks");
            }
        }
        // The largest message of the first row (a one-shot) for four ranks.
        let first = |machine: &str| {
            let rows = rows(&Machine::named(machine).unwrap());
            planned(&rows, 4, 1).map(|row| row.max_bytes)
        };
        assert_eq!(["a100", "h100", "b200"].map(first), [96 << 10, 128 << 10, 256 << 10].map(Some));
        let shares = |ranks| shape_of_shares(&rows(&Machine::named("h100").unwrap()), ranks);
        assert_eq!([2, 4, 8].map(shares), [(64, 512), (36, 512), (36, 512)]);
        assert_eq!(bytes("512 * KIB"), Some(512 << 10));
        assert_eq!(snake("HalvingDoubling"), "halving_doubling");
    }
}
