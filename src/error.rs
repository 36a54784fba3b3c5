//! The one error type. Each variant carries the facts that a caller needs to act.

use std::time::Duration;

use nix::errno::Errno;
use nix::sys::resource::{getrlimit, Resource};

/// A `Result` whose error is [`Error`] by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. Its text says what happened and what to do; its fields are for programs.
///
/// [`Communicator`](crate::Communicator#errors-of-every-call) lists the errors that any call may return, and which of
/// them end the communicator. The type is `Clone`, because a communicator that has failed returns the same error from
/// each later call.
///
/// ```
#[doc = include_str!("example_ranks.txt")]
/// # ranks(2, |communicator| {
/// match communicator.all_reduce(&[1.0_f32; 3], &mut [0.0; 4], ReduceOp::Sum) {
///     Err(Error::LengthMismatch { input: 3, output: 4 }) => {} // Refused: nothing has changed.
///     Err(Error::Timeout { missing, .. }) => println!("ranks {missing:?} did not come"),
///     Err(error) => println!("{error}; this communicator has ended"),
///     Ok(()) => unreachable!(),
/// }
/// # Ok(()) });
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The world has no rank, or more ranks than this crate supports.
    #[error("world size {world_size} is not supported: 1 to {max} ranks are", max = crate::abi::MAX_RANKS)]
    WorldSize {
        /// The world size that was asked for.
        world_size: usize,
    },

    /// The rank is not below the world size.
    #[error("rank {rank} is out of range for a world of {world_size}")]
    RankOutOfRange {
        /// The rank that was given.
        rank: usize,
        /// The number of ranks.
        world_size: usize,
    },

    /// Input, output or other memory of a call does not have the length that the call needs.
    #[error("input has {input} elements but output has {output}")]
    LengthMismatch {
        /// The number of elements of the input, or the number that is needed.
        input: usize,
        /// The number of elements of the output.
        output: usize,
    },

    /// A pointer is null, misaligned, or of another device.
    #[error("{which} pointer {address:#x} is {problem} (element size {element_size} bytes)")]
    InvalidPointer {
        /// `"input"`, `"output"`, or other memory of a fused call: `"residual"`, `"rows"`, `"scales"` and so on.
        which: &'static str,
        /// The address.
        address: usize,
        /// What is wrong with it.
        problem: &'static str,
        /// Size of one element in bytes.
        element_size: usize,
    },

    /// Two buffers overlap, other than in the collective's in-place form.
    #[error(
        "input at {input:#x} and output at {output:#x} overlap within {bytes} bytes; \
         pass the same pointer to reduce in place"
    )]
    Overlap {
        /// Address of the input, or of the first buffer.
        input: usize,
        /// Address of the output, or of the second buffer.
        output: usize,
        /// Length of the shorter one in bytes.
        bytes: usize,
    },

    /// A setting or an argument has a value that is not accepted.
    #[error("{name} = {value} is not valid: {expected}")]
    InvalidSetting {
        /// The setting (a builder method or an environment variable), or the argument.
        name: &'static str,
        /// The value given.
        value: String,
        /// What is accepted.
        expected: &'static str,
    },

    /// A tuning file cannot be used.
    #[error("the tuning file {file} is refused: {reason}")]
    Tuning {
        /// Its path.
        file: String,
        /// What is wrong with it and where, or why it is not for this machine.
        reason: String,
    },

    /// Shared memory could not be allocated.
    #[error("cannot allocate {bytes} bytes of shared memory: {reason}")]
    Allocation {
        /// The number of bytes that was asked for.
        bytes: usize,
        /// Why not.
        reason: String,
    },

    /// Some ranks did not come in time, to a call or to the rendezvous.
    #[error(
        "{operation} (epoch {epoch}) timed out after {waited:?} waiting for {}{}",
        ranks(.missing),
        seen(.last_seen)
    )]
    Timeout {
        /// The operation that waited.
        operation: &'static str,
        /// The epoch of the launch; 0 if there is no launch.
        epoch: u32,
        /// The ranks that did not come.
        missing: Vec<usize>,
        /// The limit that was exceeded.
        waited: Duration,
        /// What they were last seen doing, in words; empty if that is not known.
        last_seen: String,
    },

    /// The process of a peer ended, the peer closed its communicator, or the connection to it broke.
    #[error("{} is gone: {reason}", ranks(std::slice::from_ref(.rank)))]
    PeerLost {
        /// The rank that is gone.
        rank: usize,
        /// What was observed.
        reason: String,
    },

    /// A call or a step failed on another rank, and therefore on all.
    #[error("rank {rank} failed: {reason}")]
    PeerFailed {
        /// The first rank that failed.
        rank: usize,
        /// What it reported.
        reason: String,
    },

    /// This process is a fork of the one that made the communicator, which is still the rank.
    #[error("this process is a fork of the one that made the communicator: only that one can use it")]
    Forked,

    /// `abort` was called while the operation waited.
    #[error("the communicator was aborted")]
    Aborted,

    /// The ranks did not find a common rendezvous, or it ended.
    #[error("rendezvous failed: {reason}")]
    Rendezvous {
        /// What failed.
        reason: String,
    },

    /// A process that is not a rank of this world came to the rendezvous, or this process is not a rank of the world.
    #[error("refused at the rendezvous: {reason}")]
    Refused {
        /// Which check failed.
        reason: String,
    },

    /// A message from a peer cannot be decoded.
    #[error("malformed message from {}: {reason}", ranks(std::slice::from_ref(.rank)))]
    Malformed {
        /// The rank that sent it.
        rank: usize,
        /// What is wrong with it.
        reason: String,
    },

    /// Ranks differ in something that must be the same on all: a setting, a call, a step.
    #[error("ranks disagree on {what}: rank {rank} has {theirs}, rank {own_rank} has {ours}")]
    Disagreement {
        /// What they disagree on.
        what: &'static str,
        /// The rank that has the other value.
        rank: usize,
        /// Its value.
        theirs: String,
        /// The rank that it is compared with: this one, or for all ranks the first.
        own_rank: usize,
        /// Its value.
        ours: String,
    },

    /// This build, this machine or the current state does not permit it.
    #[error("{what} is not available: {reason}")]
    Unavailable {
        /// What was asked for.
        what: String,
        /// Why it is not available, and what to do.
        reason: String,
    },

    /// A stream belongs to another CUDA context than the communicator.
    #[error("{}", wrong_stream(*.stream, *.device))]
    InvalidStream {
        /// Ordinal of the stream's device.
        stream: usize,
        /// Ordinal of the communicator's device.
        device: usize,
    },

    /// The CUDA driver refused a call.
    #[error("{call} failed: {message}")]
    Driver {
        /// The call, with its subject.
        call: &'static str,
        /// The driver's error code.
        code: u32,
        /// The name and text of the code; its number if the driver has no name for it.
        message: String,
    },

    /// MPI refused a call.
    #[error("{call} failed: {message}")]
    Mpi {
        /// The call.
        call: &'static str,
        /// MPI's text.
        message: String,
    },

    /// NCCL refused a call, or one of its operations failed.
    #[error("{call} failed: {message}")]
    Nccl {
        /// The call.
        call: &'static str,
        /// NCCL's text.
        message: String,
    },

    /// A system call failed.
    #[error("{call} failed: {}", explained(*.errno))]
    System {
        /// The call, with its subject.
        call: &'static str,
        /// The error number.
        errno: Errno,
    },
}

impl Error {
    /// Returns a function for `map_err` on the result of a system call.
    pub(crate) fn system(call: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { call, errno }
    }

    /// Returns a function for `map_err` on an I/O result of the standard library.
    pub(crate) fn io(call: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::System { call, errno: Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)) }
    }
}

/// Returns an error number in words. For a limit on descriptors, it names the limit and how to raise it.
pub(crate) fn explained(errno: Errno) -> String {
    match errno {
        Errno::EMFILE => {
            let limits = getrlimit(Resource::RLIMIT_NOFILE);
            let limits = limits.map_or_else(
                |_| "RLIMIT_NOFILE".to_owned(),
                |(limit, most)| format!("RLIMIT_NOFILE is {limit}, its hard limit {most}"),
            );
            format!(
                "{errno}: this process has no descriptors left ({limits}); raise the limit with `ulimit -n`"
            )
        }
        Errno::ENFILE => {
            format!("{errno}: this machine has no files left; raise the limit with `sysctl fs.file-max`")
        }
        errno => errno.to_string(),
    }
}

/// Describes a stream that a communicator cannot use, by the ordinals of their devices.
fn wrong_stream(stream: usize, device: usize) -> String {
    match stream == device {
        true => format!(
            "the stream is of another context of device {device} than the communicator: make the stream in the \
             communicator's context, or the communicator in the stream's (Cuda::new; Cuda::open takes the primary \
             context, as the CUDA runtime does)"
        ),
        false => {
            format!("the stream is of a context of device {stream}, the communicator of one of device {device}")
        }
    }
}

/// Returns what follows the missing ranks in the text.
fn seen(last_seen: &str) -> String {
    match last_seen {
        "" => String::new(),
        last_seen => format!(": {last_seen}"),
    }
}

/// Returns "rank 3" or "ranks 1, 2".
fn ranks(ranks: &[usize]) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks.len() {
        // A spare does not know the ranks.
        0 => "others".into(),
        1 => format!("rank {list}"),
        _ => format!("ranks {list}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_descriptors_names_the_limit_and_how_to_raise_it() {
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let text = Error::System { call: "socket", errno: Errno::EMFILE }.to_string();
        for fact in ["socket failed: EMFILE", &format!("RLIMIT_NOFILE is {limit},"), "`ulimit -n`"] {
            assert!(text.contains(fact), "{text}");
        }
        let text = Error::io("dup")(std::io::Error::from_raw_os_error(libc::ENFILE)).to_string();
        assert!(text.contains("fs.file-max"), "{text}");
        let text = Error::System { call: "socket", errno: Errno::EACCES }.to_string();
        assert_eq!(text, "socket failed: EACCES: Permission denied");
    }
}
