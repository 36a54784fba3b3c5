//! The one error type: each variant carries the facts that a caller needs to act.

use std::time::Duration;

use nix::errno::Errno;
use nix::sys::resource::{getrlimit, Resource};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the facts to act on.
///
/// It is `Clone`, because a communicator that has failed answers each later call with the same error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The world is smaller than one rank or larger than this crate supports.
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
        /// The world it was given for.
        world_size: usize,
    },

    /// Input and output do not have the same number of elements.
    #[error("input has {input} elements but output has {output}")]
    LengthMismatch {
        /// Elements of the input.
        input: usize,
        /// Elements of the output.
        output: usize,
    },

    /// A pointer is null, or not aligned to its element type.
    #[error("{which} pointer {address:#x} is {problem} (element size {element_size} bytes)")]
    InvalidPointer {
        /// `"input"`, `"output"`, or what a fused call reads or writes besides: `"residual"`, `"rows"`, `"scales"` and so on.
        which: &'static str,
        /// The address.
        address: usize,
        /// What is wrong with it.
        problem: &'static str,
        /// Bytes of one element.
        element_size: usize,
    },

    /// Input and output overlap without being the same buffer.
    #[error("input at {input:#x} and output at {output:#x} overlap in their {bytes} bytes; pass the same pointer to reduce in place")]
    Overlap {
        /// Address of the input.
        input: usize,
        /// Address of the output.
        output: usize,
        /// Length of each in bytes.
        bytes: usize,
    },

    /// A setting is outside its range.
    #[error("{name} = {value} is not valid: {expected}")]
    InvalidSetting {
        /// The setting: a builder method or an environment variable.
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
        /// What is wrong with it, and where, or why it is not for this machine.
        reason: String,
    },

    /// Memory that peers are to map could not be allocated.
    #[error("cannot allocate {bytes} bytes of shared memory: {reason}")]
    Allocation {
        /// Bytes asked for.
        bytes: usize,
        /// Why not.
        reason: String,
    },

    /// Some ranks did not arrive in time, in a collective or at the rendezvous.
    #[error("{operation} (epoch {epoch}) timed out after {waited:?} waiting for {}{}", ranks(.missing), seen(.last_seen))]
    Timeout {
        /// The operation that was waiting.
        operation: &'static str,
        /// Number of the launch, 0 where there is none.
        epoch: u32,
        /// The ranks that were waited for.
        missing: Vec<usize>,
        /// The limit that ran out.
        waited: Duration,
        /// What they were last seen doing, in words; empty where that is not known.
        last_seen: String,
    },

    /// A peer ended, or its connection broke.
    #[error("{} is gone: {reason}", ranks(std::slice::from_ref(.rank)))]
    PeerLost {
        /// The rank that is gone.
        rank: usize,
        /// What was seen.
        reason: String,
    },

    /// A collective step failed on another rank, and so on all.
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

    /// The ranks found no common rendezvous, or it ended.
    #[error("rendezvous failed: {reason}")]
    Rendezvous {
        /// What failed.
        reason: String,
    },

    /// A process that does not belong to this world spoke to the rendezvous, or this one does not belong.
    #[error("refused at the rendezvous: {reason}")]
    Refused {
        /// Which check failed.
        reason: String,
    },

    /// A message from a peer does not decode.
    #[error("malformed message from {}: {reason}", ranks(std::slice::from_ref(.rank)))]
    Malformed {
        /// The rank that it came from.
        rank: usize,
        /// What is wrong with it.
        reason: String,
    },

    /// Ranks do not agree on something that all must share.
    #[error("ranks disagree on {what}: rank {rank} has {theirs}, rank {own_rank} has {ours}")]
    Disagreement {
        /// What they disagree on.
        what: &'static str,
        /// The other rank.
        rank: usize,
        /// Its value.
        theirs: String,
        /// This rank.
        own_rank: usize,
        /// This rank's value.
        ours: String,
    },

    /// This build or this machine cannot do it.
    #[error("{what} is not available: {reason}")]
    Unavailable {
        /// What was asked for.
        what: String,
        /// Why it is not available, and what to do.
        reason: String,
    },

    /// A stream is of another CUDA context than the communicator.
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
        /// The driver's code.
        code: u32,
        /// Its name and text; its number where the driver has no name for it.
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

    /// NCCL refused a call, or an operation of it failed.
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
    /// For `map_err` on a system call's result.
    pub(crate) fn system(call: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { call, errno }
    }

    /// For `map_err` on an I/O result of the standard library.
    pub(crate) fn io(call: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::System { call, errno: Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)) }
    }
}

/// An error number in words; of a limit on descriptors, which it is and how to raise it.
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

/// A stream that a communicator cannot use, by the ordinals of their devices.
fn wrong_stream(stream: usize, device: usize) -> String {
    match stream == device {
        true => format!(
            "the stream is of another context of device {device} than the communicator: make the stream in the communicator's \
             context, or the communicator in the stream's (Cuda::new; Cuda::open takes the primary context, as the CUDA runtime does)"
        ),
        false => {
            format!("the stream is of a context of device {stream}, the communicator of one of device {device}")
        }
    }
}

/// What is behind the ranks that were missing.
fn seen(last_seen: &str) -> String {
    match last_seen {
        "" => String::new(),
        last_seen => format!(": {last_seen}"),
    }
}

/// "rank 3" or "ranks 1, 2".
fn ranks(ranks: &[usize]) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks.len() {
        1 => format!("rank {list}"),
        _ => format!("ranks {list}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_descriptors_names_the_limit_and_the_way_out() {
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
