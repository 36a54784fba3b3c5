//! Rank processes: the launcher starts this program once for each rank and waits until all have ended.
//!
//! A rank's standard input is a socket to the launcher: the rank writes to it why it failed, and when it closes,
//! the rank has ended. No rank outlives the launcher, whatever ends the launcher.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::UniqueId;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::{prctl, signal::Signal};

use crate::environment::{self, LAUNCHER, RANK, UNIQUE_ID, WORLD_SIZE};
use crate::failure::{Failure, EXIT_WRONG};

/// Time in which the other ranks may report, once one has failed.
const GRACE: Duration = Duration::from_secs(1);

/// A rank's channel to its launcher.
pub struct Launcher(UnixStream);

impl Launcher {
    /// Makes this rank end with its launcher. Returns `None` for ranks that another program started.
    pub fn of_this_process() -> Result<Option<Self>, Failure> {
        let Some(launcher) = std::env::var_os(LAUNCHER) else {
            return Ok(None);
        };
        prctl::set_pdeathsig(Signal::SIGKILL).map_err(|errno| Failure::System("prctl", errno.into()))?;
        // The launcher may have ended before prctl.
        if launcher.to_str() != Some(&nix::unistd::getppid().to_string()) {
            return Err(Failure::Ranks(format!(
                "the launcher, process {}, has ended",
                launcher.to_string_lossy()
            )));
        }
        let channel = std::io::stdin().as_fd().try_clone_to_owned();
        let channel = channel.map_err(|error| Failure::System("dup of standard input", error))?;
        Ok(Some(Self(channel.into())))
    }

    /// Tells the launcher why this rank failed.
    pub fn report(mut self, failure: &Failure) {
        let cause = Cause::of(failure) as u8;
        // If the launcher has ended, this process is about to be killed.
        let _ = self.0.write_all(&[&[cause], failure.to_string().as_bytes()].concat());
    }
}

/// Runs as a rank, and reports a failure to the launcher.
pub fn as_rank(run: impl FnOnce() -> Result<bool, Failure>) -> Result<ExitCode, Failure> {
    let launcher = Launcher::of_this_process()?;
    let outcome = run().map(|is_right| ExitCode::from(if is_right { 0 } else { EXIT_WRONG }));
    match (outcome, launcher) {
        (Err(failure), Some(launcher)) => {
            launcher.report(&failure);
            Ok(failure.exit_code())
        }
        (Err(failure), None) => Err(failure.of_rank()),
        (outcome, _) => outcome,
    }
}

/// How a rank failed; the best explanation first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    /// The reader of the results has closed the pipe.
    Silent = b'0' as isize,
    /// The rank was killed, or ended without a report.
    Ended,
    /// The rank itself failed.
    Own,
    /// Another rank's failure caused it.
    Consequence,
}

impl Cause {
    fn of(failure: &Failure) -> Self {
        match failure {
            failure if failure.is_silent() => Self::Silent,
            failure if failure.is_consequence() => Self::Consequence,
            _ => Self::Own,
        }
    }
}

/// The launcher's view of a failed rank.
#[derive(Debug, PartialEq, Eq)]
struct Report {
    cause: Cause,
    rank: usize,
    text: String,
}

/// The process of a rank.
struct Rank {
    rank: usize,
    process: Child,
    channel: UnixStream,
}

/// Runs this program as `ranks` ranks with these arguments. The exit code is [`EXIT_WRONG`] if one found a wrong
/// element.
pub fn launch(ranks: usize, arguments: impl IntoIterator<Item = OsString>) -> Result<ExitCode, Failure> {
    let arguments: Vec<_> = arguments.into_iter().collect();
    // With a directory the first rank serves the rendezvous, and no id is needed.
    let id = match environment::socket_directory() {
        Some(_) => None,
        None => Some(UniqueId::new()?),
    };
    let mut running = Running(Vec::with_capacity(ranks));
    for rank in 0..ranks {
        running.0.push(start(id.as_ref(), rank, ranks, &arguments)?);
    }
    let (mut reports, mut is_right) = (Vec::new(), true);
    let mut deadline = None;
    while !running.0.is_empty() {
        let ended = running.wait(deadline)?;
        if ended.is_empty() {
            // The grace time is over; dropping the others kills them.
            break;
        }
        for (rank, status, said) in ended {
            match status.code() {
                Some(0) => {}
                Some(code) if code == i32::from(EXIT_WRONG) => is_right = false,
                _ => reports.push(Report::new(rank, status, &said)),
            }
        }
        if !reports.is_empty() {
            deadline.get_or_insert_with(|| Instant::now() + GRACE);
        }
    }
    drop(running);
    match explanation(&reports) {
        None => Ok(ExitCode::from(if is_right { 0 } else { EXIT_WRONG })),
        Some(report) if report.cause == Cause::Silent => {
            Err(Failure::Output(std::io::ErrorKind::BrokenPipe.into()))
        }
        Some(report) => Err(Failure::Ranks(sentence(report, &reports))),
    }
}

fn start(id: Option<&UniqueId>, rank: usize, ranks: usize, arguments: &[OsString]) -> Result<Rank, Failure> {
    let fail = |what| move |error| Failure::System(what, error);
    let (channel, theirs) = UnixStream::pair().map_err(fail("socketpair"))?;
    let mut command = Command::new("/proc/self/exe");
    let process = command
        .args(arguments)
        .envs(id.map(|id| (UNIQUE_ID, id.to_string())))
        .env(RANK, rank.to_string())
        .env(WORLD_SIZE, ranks.to_string())
        .env(LAUNCHER, std::process::id().to_string())
        .stdin(OwnedFd::from(theirs))
        .stdout(if rank == 0 { Stdio::inherit() } else { Stdio::null() })
        .spawn()
        .map_err(fail("starting a rank's process (/proc/self/exe)"))?;
    Ok(Rank { rank, process, channel })
}

/// The ranks that have not ended. Drop kills them.
struct Running(Vec<Rank>);

impl Running {
    /// Waits for ranks to end, and returns their numbers, statuses and reports; nothing once the deadline has passed.
    fn wait(&mut self, deadline: Option<Instant>) -> Result<Vec<(usize, ExitStatus, Vec<u8>)>, Failure> {
        let mut channels: Vec<_> =
            self.0.iter().map(|rank| PollFd::new(rank.channel.as_fd(), PollFlags::POLLIN)).collect();
        let timeout = deadline.map_or(PollTimeout::NONE, |deadline| {
            let left = deadline.saturating_duration_since(Instant::now()).as_millis() + 1;
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut channels, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(Failure::System("poll", errno.into())),
        }
        let is_ready: Vec<_> = channels.iter().map(|channel| channel.any() == Some(true)).collect();
        if !is_ready.contains(&true) && deadline.is_none_or(|deadline| Instant::now() < deadline) {
            return self.wait(deadline);
        }
        let mut ended = Vec::new();
        for index in (0..self.0.len()).filter(|&index| is_ready[index]).rev() {
            let mut rank = self.0.swap_remove(index);
            let mut said = Vec::new();
            // After its report a rank closes the channel. If the report is cut off, the status tells why.
            let _ = rank.channel.read_to_end(&mut said);
            let status = rank.process.wait().map_err(|error| Failure::System("wait", error))?;
            ended.push((rank.rank, status, said));
        }
        Ok(ended)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            // An error means that it has already ended.
            let _ = rank.process.kill();
        }
        for rank in &mut self.0 {
            let _ = rank.process.wait();
        }
    }
}

impl Report {
    fn new(rank: usize, status: ExitStatus, said: &[u8]) -> Self {
        let (cause, text) = match said.split_first() {
            Some((cause, text)) => {
                let causes = [Cause::Silent, Cause::Own];
                let cause =
                    causes.into_iter().find(|known| *known as u8 == *cause).unwrap_or(Cause::Consequence);
                (cause, String::from_utf8_lossy(text).into_owned())
            }
            None => (Cause::Ended, end(status)),
        };
        Self { cause, rank, text }
    }
}

fn end(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit status {code}"),
        (_, Some(signal)) => {
            let name = Signal::try_from(signal).map_or("unknown", Signal::as_str);
            format!("was killed by signal {signal} ({name})")
        }
        _ => format!("ended: {status}"),
    }
}

/// Returns the report that explains most; of equals, the first one.
fn explanation(reports: &[Report]) -> Option<&Report> {
    reports.iter().min_by_key(|report| report.cause)
}

/// Returns the report's text with its rank, unless several ranks report the same.
fn sentence(report: &Report, reports: &[Report]) -> String {
    let is_shared = reports.iter().filter(|other| other.text == report.text).count() > 1;
    match report.cause {
        Cause::Ended => format!("rank {} {}", report.rank, report.text),
        _ if is_shared => report.text.clone(),
        _ => format!("rank {}: {}", report.rank, report.text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rank: usize, wait_status: i32, said: &[u8]) -> Report {
        Report::new(rank, ExitStatus::from_raw(wait_status), said)
    }

    fn printed(reports: &[Report]) -> String {
        sentence(explanation(reports).unwrap(), reports)
    }

    fn said(cause: Cause, text: &str) -> Vec<u8> {
        [&[cause as u8], text.as_bytes()].concat()
    }

    #[test]
    fn a_killed_rank_explains_the_others() {
        let lost = said(Cause::Consequence, "rank 1 is gone");
        let reports = [report(0, 2 << 8, &lost), report(1, 9, &[]), report(2, 2 << 8, &lost)];
        assert_eq!(printed(&reports), "rank 1 was killed by signal 9 (SIGKILL)");
    }

    #[test]
    fn an_own_failure_comes_before_its_consequences() {
        let reports = [
            report(0, 2 << 8, &said(Cause::Consequence, "rank 1 is gone")),
            report(1, 2 << 8, &said(Cause::Own, "no memory")),
        ];
        assert_eq!(printed(&reports), "rank 1: no memory");
    }

    #[test]
    fn common_failures_are_printed_once() {
        let same = said(Cause::Own, "max_bytes = 1 is not valid");
        assert_eq!(
            printed(&[report(2, 2 << 8, &same), report(0, 2 << 8, &same)]),
            "max_bytes = 1 is not valid"
        );
    }

    #[test]
    fn a_panic_is_reported_by_its_status() {
        assert_eq!(printed(&[report(3, 101 << 8, &[])]), "rank 3 ended with exit status 101");
    }
}
