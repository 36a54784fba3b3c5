//! Other libraries, as what this crate is compared with.

#[cfg(feature = "mpi")]
pub mod mpi;
pub mod naive;
#[cfg(feature = "cuda")]
pub mod nccl;

use fast_allreduce::{CallKind, DType, ReduceOp};

use self::naive::Naive;
use crate::arguments::RivalName;
use crate::failure::Failure;
use crate::harness::contender::{Placement, Rival};
use crate::harness::device::host::{Cpu, Memory};
use crate::harness::session::Session;
use crate::harness::work::Work;

/// Those that work on the host's memory.
pub enum HostRival {
    Naive(Naive),
    #[cfg(feature = "mpi")]
    Mpi(mpi::Mpi),
}

impl HostRival {
    /// As [`Endpoint::rival`](crate::harness::device::Endpoint::rival).
    pub fn new(name: RivalName, session: &Session) -> Result<Self, String> {
        match name {
            RivalName::Naive => Naive::new(session).map(Self::Naive),
            #[cfg(feature = "mpi")]
            RivalName::Mpi => mpi::Mpi::new().map(Self::Mpi),
            #[cfg(not(feature = "mpi"))]
            RivalName::Mpi => {
                Err("this build is without the feature `mpi`: build it with `--features mpi`".into())
            }
            RivalName::Nccl => Err("it reduces memory of GPUs: give --device cuda".into()),
            RivalName::Memcpy => Err("it is no library".into()),
        }
    }
}

/// Asks the one that it is.
macro_rules! forward {
    ($self:ident, $rival:ident => $value:expr) => {
        match $self {
            HostRival::Naive($rival) => $value,
            #[cfg(feature = "mpi")]
            HostRival::Mpi($rival) => $value,
        }
    };
}

impl Rival<Cpu> for HostRival {
    fn name(&self) -> &'static str {
        forward!(self, rival => rival.name())
    }

    fn library(&self) -> String {
        forward!(self, rival => rival.library())
    }

    fn refusal(&self, kind: CallKind, dtype: DType, op: ReduceOp) -> Option<&'static str> {
        forward!(self, rival => rival.refusal(kind, dtype, op))
    }

    fn has(&self, kind: CallKind, placement: Placement) -> bool {
        forward!(self, rival => rival.has(kind, placement))
    }

    fn start(&self, cpu: &Cpu, work: &Work, input: &Memory, output: &mut Memory) -> Result<(), Failure> {
        forward!(self, rival => rival.start(cpu, work, input, output))
    }

    fn start_in_place(&self, cpu: &Cpu, work: &Work, data: &mut Memory) -> Result<(), Failure> {
        forward!(self, rival => rival.start_in_place(cpu, work, data))
    }
}
