//! A transport for tensor parallelism that the program registers, so that mistralrs-quant depends on none.
//!
//! edit.py adds this file to mistralrs-quant as `distributed::external`.

use std::ffi::c_char;
use std::fmt::Debug;
use std::sync::{Arc, OnceLock};

use candle_core::{Device, Result, Tensor};

use super::Comm;

/// Collectives between the ranks, for tensors of any layout.
pub trait Collectives: Debug + Send + Sync {
    fn rank(&self) -> usize;
    fn world_size(&self) -> usize;
    fn sum_all_reduce(&self, xs: &Tensor) -> Result<Tensor>;
    /// Concatenates the ranks' tensors along `dim`, in rank order.
    fn all_gather(&self, xs: &Tensor, dim: usize) -> Result<Tensor>;
}

/// Makes communicators.
#[derive(Debug)]
pub struct Transport {
    /// Creates the id by which ranks meet. Zeros mean that none could be made; `connect` refuses them.
    pub id: fn() -> [c_char; 128],
    /// Joins the ranks. Parameters are the id, the device, this rank and the number of ranks.
    pub connect: fn([c_char; 128], &Device, usize, usize) -> Result<Arc<dyn Collectives>>,
}

static TRANSPORT: OnceLock<Transport> = OnceLock::new();

/// Registers the transport, before a model is loaded. A second call has no effect.
pub fn register(transport: Transport) {
    let _ = TRANSPORT.set(transport);
}

/// Returns the transport and the number of ranks if a model runs on several. The variable is that of NCCL's ranks.
pub fn active() -> Option<(&'static Transport, usize)> {
    let ranks = std::env::var("MISTRALRS_MN_LOCAL_WORLD_SIZE").ok()?.parse().ok()?;
    Some((TRANSPORT.get().filter(|_| ranks > 1)?, ranks))
}

#[derive(Clone, Debug)]
pub struct SumAllReduce(Arc<Comm>);

impl SumAllReduce {
    pub fn new(comm: &Arc<Comm>) -> Self {
        Self(comm.clone())
    }

    pub fn sum_all_reduce(&self, xs: &Tensor) -> Result<Tensor> {
        match &*self.0 {
            Comm::External(comm) => comm.sum_all_reduce(xs),
            _ => Ok(xs.clone()),
        }
    }
}

#[derive(Clone, Debug)]
pub struct AllGather(Arc<Comm>, usize);

impl AllGather {
    pub fn new(comm: &Arc<Comm>, dim: usize) -> Self {
        Self(comm.clone(), dim)
    }

    pub fn all_gather(&self, xs: &Tensor) -> Result<Tensor> {
        match &*self.0 {
            Comm::External(comm) => comm.all_gather(xs, self.1),
            _ => Ok(xs.clone()),
        }
    }
}
