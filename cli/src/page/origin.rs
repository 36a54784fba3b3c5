//! The command and the time that a page was made by.

use std::borrow::Cow;
use std::path::Path;
use std::time::SystemTime;

/// Returns the command line, quoted for a shell: that of the MPI launcher if one started this process.
pub fn command() -> String {
    let words = launcher(std::process::id(), 5).unwrap_or_else(|| {
        // Ranks were started as /proc/self/exe.
        std::iter::once("fast-allreduce".into()).chain(std::env::args().skip(1)).collect()
    });
    let shown = |(index, word): (usize, &String)| {
        // Without the folders of programs.
        let is_program = index == 0 || name(word) == "fast-allreduce";
        quoted(if is_program { name(word) } else { word }).into_owned()
    };
    words.iter().enumerate().map(shown).collect::<Vec<_>>().join(" ")
}

/// Returns the command line of the nearest ancestor that is an MPI launcher, among `generations` ancestors.
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

/// Quotes a word for a shell. Only a zero byte could not be quoted, and arguments have none.
fn quoted(word: &str) -> Cow<'_, str> {
    shlex::try_quote(word).unwrap_or(Cow::Borrowed(word))
}

/// Returns the current time in UTC: year, month, day, hour and minute.
pub fn date() -> String {
    at(SystemTime::now())
}

fn at(time: SystemTime) -> String {
    // `2024-02-29T23:59:59Z`
    let text = humantime::format_rfc3339_seconds(time).to_string();
    let (date, time) = text.split_once('T').unwrap_or_default();
    format!("{date} {} UTC", time.rsplit_once(':').map_or(time, |(minutes, _)| minutes))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        // By date --utc --date=@...
        for (seconds, date) in [(0, "1970-01-01 00:00 UTC"), (1_709_251_199, "2024-02-29 23:59 UTC")] {
            assert_eq!(at(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)), date);
        }
    }

    #[test]
    fn words_survive_a_shell() {
        for word in ["--report=a/b.html", "", "it's <b>", "a\nb", "$(rm)"] {
            let line = format!("program {}", quoted(word));
            assert_eq!(shlex::split(&line), Some(vec!["program".to_owned(), word.to_owned()]), "{line}");
        }
    }
}
