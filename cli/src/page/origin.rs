//! Where and when a page was made: the command and the date.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The command line as a shell would take it: that of the launcher of ranks, where one started this process.
pub fn command() -> String {
    let words = launcher(std::process::id(), 5).unwrap_or_else(|| {
        // A rank that this program started has another name for it.
        std::iter::once("fast-allreduce".into()).chain(std::env::args().skip(1)).collect()
    });
    let shown = |(index, word): (usize, &String)| {
        // Where programs lie is of no use elsewhere.
        let is_program = index == 0 || name(word) == "fast-allreduce";
        quoted(if is_program { name(word) } else { word })
    };
    words.iter().enumerate().map(shown).collect::<Vec<_>>().join(" ")
}

/// The words of the nearest ancestor that starts ranks; no more than so many generations back.
fn launcher(process: u32, generations: u32) -> Option<Vec<String>> {
    const LAUNCHERS: [&str; 6] = ["mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun"];
    if generations == 0 || process <= 1 {
        return None;
    }
    let folder = Path::new("/proc").join(process.to_string());
    let line = std::fs::read(folder.join("cmdline")).ok()?;
    let words: Vec<String> =
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    let words = words[..words.len().saturating_sub(1)].to_vec();
    let is_launcher = words.first().is_some_and(|word| {
        let word = name(word);
        LAUNCHERS.iter().any(|launcher| word == *launcher || word.starts_with(&format!("{launcher}.")))
    });
    if is_launcher {
        return Some(words);
    }
    let stat = std::fs::read_to_string(folder.join("stat")).ok()?;
    let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
    launcher(parent, generations - 1)
}

fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// A word as a shell takes it for one.
fn quoted(word: &str) -> String {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "-_./:=,+@%".contains(character);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Now, in UTC: year, month, day, hour and minute.
pub fn date() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    at(seconds)
}

/// The day's date in the proleptic Gregorian calendar, by eras of 400 years that begin in March, so that the day that some
/// years have more is the last of a year.
fn at(seconds: u64) -> String {
    const DAYS_TO_1970: u64 = 719_468;
    const DAYS_OF_ERA: u64 = 146_097;
    let (day, minute) = (seconds / 86_400 + DAYS_TO_1970, seconds % 86_400 / 60);
    let (era, day) = (day / DAYS_OF_ERA, day % DAYS_OF_ERA);
    let year = (day - day / 1460 + day / 36_524 - day / (DAYS_OF_ERA - 1)) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..=9 => (era * 400 + year, month + 3),
        _ => (era * 400 + year + 1, month - 9),
    };
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", minute / 60, minute % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        // By date --utc --date=@...
        let known = [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_799, "2000-02-29 23:59 UTC"),
            (1_709_251_199, "2024-02-29 23:59 UTC"),
            (1_735_689_599, "2024-12-31 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ];
        for (seconds, date) in known {
            assert_eq!(at(seconds), date);
        }
    }

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(quoted("--report=a/b.html"), "--report=a/b.html");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted("it's <b>"), r"'it'\''s <b>'");
    }
}
