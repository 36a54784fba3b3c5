//! The libraries that this crate is compared with.

mod gloo;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "mpi")]
#[rustfmt::skip]
mod mpi_names;
pub mod naive;
#[cfg(feature = "cuda")]
pub mod nccl;

use self::gloo::Gloo;
use self::naive::Naive;
use crate::arguments::RivalName;
use crate::harness::contender::Rival;
#[cfg(feature = "cuda")]
use crate::harness::device::cuda::Gpu;
use crate::harness::device::host::Cpu;
use crate::harness::device::MeasuredRank;
use crate::harness::session::Session;

/// A measured rank with which other libraries can be compared.
pub trait Compared: MeasuredRank {
    /// The default rivals: the first one that is available is used.
    const USUAL_RIVALS: &[RivalName];

    /// Readies another library, or returns why it is not available. Collective, but ranks may get different results.
    fn rival(&self, name: RivalName, session: &Session) -> Result<Box<dyn Rival<Self>>, String>;
}

impl Compared for Cpu {
    const USUAL_RIVALS: &[RivalName] = &[RivalName::Mpi, RivalName::Naive];

    fn rival(&self, name: RivalName, session: &Session) -> Result<Box<dyn Rival<Self>>, String> {
        match name {
            RivalName::Gloo => Ok(Box::new(Gloo::new(session)?)),
            RivalName::Naive if session.nodes() > 1 => {
                Err("its ranks share memory: they are on one node".into())
            }
            RivalName::Naive => Ok(Box::new(Naive::new(session)?)),
            #[cfg(feature = "mpi")]
            RivalName::Mpi => Ok(Box::new(mpi::Mpi::new()?)),
            #[cfg(not(feature = "mpi"))]
            RivalName::Mpi => {
                Err("this build is without the feature `mpi`: build it with `--features mpi`".into())
            }
            RivalName::Nccl => Err("it reduces memory of GPUs: give --device cuda".into()),
            RivalName::Memcpy => Err("it is not a library".into()),
        }
    }
}

#[cfg(feature = "cuda")]
impl Compared for Gpu {
    const USUAL_RIVALS: &[RivalName] = &[RivalName::Nccl];

    fn rival(&self, name: RivalName, session: &Session) -> Result<Box<dyn Rival<Self>>, String> {
        match name {
            RivalName::Nccl => Ok(Box::new(nccl::Nccl::new(self, session)?)),
            RivalName::Mpi | RivalName::Gloo | RivalName::Naive => {
                Err("it is compared on the host: give --device host".into())
            }
            RivalName::Memcpy => Err("it is not a library".into()),
        }
    }
}
