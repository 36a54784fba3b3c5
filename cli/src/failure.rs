//! Failures that end the program: their text, their cause, and the exit status.

use std::fmt;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use fast_allreduce::Error;
use nix::errno::Errno;

/// Exit status if a result is wrong.
pub const EXIT_WRONG: u8 = 1;

/// Prints an error as one line, in one write: a process that is killed meanwhile prints all of it or nothing.
pub fn print_error(what: impl fmt::Display) {
    let line = format!("error: {what}\n");
    // If standard error cannot be written, the exit status remains.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Why the program ends.
#[derive(Debug)]
pub enum Failure {
    /// The options are impossible.
    Usage(String),
    /// The library returned an error.
    Library(Error),
    /// The results cannot be written.
    Output(io::Error),
    /// A file cannot be written.
    File(PathBuf, io::Error),
    /// A call of the system failed; the text names it.
    System(&'static str, io::Error),
    /// A call of the CUDA driver failed.
    #[cfg(feature = "cuda")]
    Driver(&'static str, String),
    /// A failure, and what was being done.
    During(String, Box<Failure>),
    /// A failure of ranks, or seen by their launcher.
    Ranks(String),
    /// A failure of a rank without a launcher that prints it.
    OfRank(String, Box<Failure>),
}

impl Failure {
    /// Returns whether every rank has this failure, as all have the same command line. The first rank prints it.
    pub fn is_common(&self) -> bool {
        match self {
            Self::Usage(_) => true,
            Self::Library(error) => {
                matches!(error, Error::InvalidSetting { .. } | Error::WorldSize { .. } | Error::Tuning { .. })
            }
            Self::OfRank(_, failure) | Self::During(_, failure) => failure.is_common(),
            _ => false,
        }
    }

    /// Returns whether the end or absence of another rank caused this failure.
    pub fn is_consequence(&self) -> bool {
        use Error::{PeerLost, Rendezvous, Timeout};
        match self {
            Self::Library(error) => matches!(error, PeerLost { .. } | Rendezvous { .. } | Timeout { .. }),
            Self::During(_, failure) => failure.is_consequence(),
            _ => false,
        }
    }

    /// Returns whether nothing is printed: the reader of the results has closed the pipe.
    pub fn is_silent(&self) -> bool {
        match self {
            Self::Output(error) => error.kind() == io::ErrorKind::BrokenPipe,
            Self::OfRank(_, failure) => failure.is_silent(),
            _ => false,
        }
    }

    /// Returns 2, or the status of a process ended by SIGPIPE if the reader of the results has closed the pipe.
    pub fn status(&self) -> u8 {
        const SIGPIPE_STATUS: u8 = 128 + nix::libc::SIGPIPE as u8;
        if self.is_silent() {
            SIGPIPE_STATUS
        } else {
            2
        }
    }

    /// Returns the status for `main`.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.status())
    }

    /// Prints the failure, unless it is silent or another rank prints it, and returns the status.
    pub fn end(self) -> ExitCode {
        if !self.is_silent() && (!self.is_common() || crate::environment::is_first_rank()) {
            print_error(&self);
        }
        self.exit_code()
    }

    /// Adds the rank of this process, unless all ranks have the failure.
    #[must_use]
    pub fn of_rank(self) -> Self {
        match std::env::var(crate::environment::RANK) {
            Ok(rank) if rank != "0" && !self.is_common() => Self::OfRank(rank, Box::new(self)),
            _ => self,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(what) | Self::Ranks(what) => f.write_str(what),
            Self::Library(error) => {
                error.fmt(f)?;
                remedy(error).map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
            }
            Self::Output(error) => write!(f, "cannot write the results: {error}"),
            Self::File(path, error) => write!(f, "cannot write {}: {error}", path.display()),
            Self::System(call, error) => match error.raw_os_error().map(Errno::from_raw) {
                // The library's error says how to get more descriptors.
                Some(errno @ (Errno::EMFILE | Errno::ENFILE)) => Error::System { call, errno }.fmt(f),
                _ => write!(f, "{call} failed: {error}"),
            },
            #[cfg(feature = "cuda")]
            Self::Driver(call, reason) => write!(f, "{call} failed: {reason}"),
            Self::During(what, failure) => write!(f, "{what}: {failure}"),
            Self::OfRank(rank, failure) => write!(f, "rank {rank}: {failure}"),
        }
    }
}

/// Returns what the user may do about an error of the library, in terms of this program.
fn remedy(error: &Error) -> Option<&'static str> {
    match error {
        Error::Timeout { operation: "rendezvous", .. } => {
            Some(
                "all ranks have to be started, in the same environment, within that time \
                 (FAST_ALLREDUCE_JOIN_TIMEOUT)",
            )
        }
        Error::Timeout { .. } => Some(
            "check whether it is stopped (a debugger, SIGSTOP) or shares its core with others; --timeout SECONDS \
             allows more time",
        ),
        _ => None,
    }
}

/// Returns the failure of a build without GPU support.
#[cfg(not(feature = "cuda"))]
pub fn without_cuda() -> Failure {
    Failure::Library(Error::Unavailable {
        what: "the CUDA device".into(),
        reason: "this build is without the feature `cuda`: build it with `--features cuda`".into(),
    })
}

/// Returns a function for `map_err` on results of the driver or of cudarc.
#[cfg(feature = "cuda")]
pub fn driver<C: Into<fast_allreduce::device::cuda::api::Code>>(
    call: &'static str,
) -> impl FnOnce(C) -> Failure {
    move |code| Failure::Driver(call, code.into().to_string())
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}
