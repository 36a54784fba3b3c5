//! What ends the program early: the facts, whose fault it is, and the exit status.

use std::fmt;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use fast_allreduce::Error;
use nix::errno::Errno;

/// The exit status where what was computed is wrong.
pub const EXIT_WRONG: u8 = 1;

/// Says what is wrong, on a line. In one piece: a process that is ended meanwhile says all of it or nothing.
pub fn say(what: impl fmt::Display) {
    let line = format!("error: {what}\n");
    // Where even that cannot be written, the status is left.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Why the program cannot go on.
#[derive(Debug)]
pub enum Failure {
    /// What was asked for cannot be.
    Usage(String),
    /// The library's answer.
    Library(Error),
    /// The results cannot be written.
    Output(io::Error),
    /// They cannot be written to that file.
    File(PathBuf, io::Error),
    /// The system refused something; the text says what.
    System(&'static str, io::Error),
    /// The CUDA driver refused a call.
    #[cfg(feature = "cuda")]
    Driver(&'static str, String),
    /// Something failed while that was done.
    During(String, Box<Failure>),
    /// The ranks' launcher saw this.
    Ranks(String),
    /// One of the others, of a rank that has no launcher to tell.
    OfRank(String, Box<Failure>),
}

impl Failure {
    /// True for what every rank finds alike, because all have the same command line. One of them says it.
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

    /// True where another rank's end or absence is what this rank suffers from.
    pub fn is_consequence(&self) -> bool {
        use Error::{PeerLost, Rendezvous, Timeout};
        match self {
            Self::Library(error) => matches!(error, PeerLost { .. } | Rendezvous { .. } | Timeout { .. }),
            Self::During(_, failure) => failure.is_consequence(),
            _ => false,
        }
    }

    /// True if there is nobody to tell: the reader of the results has gone.
    pub fn is_silent(&self) -> bool {
        match self {
            Self::Output(error) => error.kind() == io::ErrorKind::BrokenPipe,
            Self::OfRank(_, failure) => failure.is_silent(),
            _ => false,
        }
    }

    /// 2; or that of a process that SIGPIPE ended, where the results found no reader.
    pub fn status(&self) -> u8 {
        const SIGPIPE_STATUS: u8 = 128 + nix::libc::SIGPIPE as u8;
        if self.is_silent() {
            SIGPIPE_STATUS
        } else {
            2
        }
    }

    /// The status, to return from `main`.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.status())
    }

    /// Says it, if there is somebody to tell and no other rank that does, and returns the status.
    pub fn end(self) -> ExitCode {
        if !self.is_silent() && (!self.is_common() || crate::environment::is_first_rank()) {
            say(&self);
        }
        self.exit_code()
    }

    /// The same, naming the rank of this process unless it is the first.
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
                // The library knows the way out of a lack of descriptors.
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

/// What may be done about an error of the library, where that has a name of its own here.
fn remedy(error: &Error) -> Option<&'static str> {
    match error {
        Error::Timeout { operation: "rendezvous", .. } => {
            Some("all ranks have to be started, in the same environment, within that time (FAST_ALLREDUCE_JOIN_TIMEOUT)")
        }
        Error::Timeout { .. } => Some(
            "look whether it is stopped (a debugger, SIGSTOP) or shares its core with others; --timeout SECONDS allows more time",
        ),
        _ => None,
    }
}

/// The refusal of a build that knows no GPU.
#[cfg(not(feature = "cuda"))]
pub fn without_cuda() -> Failure {
    Failure::Library(Error::Unavailable {
        what: "the CUDA device".into(),
        reason: "this build is without the feature `cuda`".into(),
    })
}

/// For `map_err` on the result of a call of the driver or of cudarc.
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
