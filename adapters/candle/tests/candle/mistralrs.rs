//! The changes that the module `distributed` of mistralrs-quant 0.8 needs, with its names and signatures: see
//! docs/candle.md.
//!
//! That crate uses candle 0.10, whose tensors are other types. So these types replace its own.

use std::ffi::c_char;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Module, Result, Tensor};
use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{Communicator, Host};
use fast_allreduce_candle as far;

/// Limit for ranks to meet. Loading weights comes later, before the first call, which has a separate limit.
const RENDEZVOUS: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Copy)]
pub enum Id {
    FastAllreduce([c_char; 128]),
}

impl Id {
    /// Creates an id. Infallible, as in the server: on failure the id is zeros, which `Comm::from_device` refuses.
    pub fn new() -> Self {
        let bytes = UniqueId::new().map_or([0; 128], |id| id.as_bytes().map(|byte| byte as c_char));
        Self::FastAllreduce(bytes)
    }

    pub fn uninit(internal: [c_char; 128]) -> Self {
        Self::FastAllreduce(internal)
    }

    pub fn internal(&self) -> &[c_char; 128] {
        let Self::FastAllreduce(bytes) = self;
        bytes
    }
}

#[derive(Debug)]
pub enum Comm {
    FastAllreduce(far::Comm),
}

impl Comm {
    pub fn from_device(id: Id, dev: &Device, rank: usize, world_size: usize) -> Result<Self> {
        let wrap = candle_core::Error::wrap;
        let Id::FastAllreduce(bytes) = id;
        let id = UniqueId::from_bytes(bytes.map(|byte| byte as u8)).map_err(wrap)?;
        let local = Local::connect(&id, rank, world_size, RENDEZVOUS).map_err(wrap)?;
        let builder = Communicator::builder();
        let comm = match dev {
            Device::Cpu => far::Comm::new(builder.build(Host::new(), local).map_err(wrap)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(dev) => {
                // For a server with one communicator, or several used by one thread.
                let gpu = far::Comm::gpu(dev)?.one_at_a_time();
                far::Comm::new(builder.build(gpu, local).map_err(wrap)?)
            }
            dev => candle_core::bail!("fast-allreduce has no ranks on {dev:?}"),
        };
        Ok(Self::FastAllreduce(comm))
    }

    pub fn rank(&self) -> usize {
        let Self::FastAllreduce(comm) = self;
        comm.rank()
    }

    pub fn world_size(&self) -> usize {
        let Self::FastAllreduce(comm) = self;
        comm.world_size()
    }
}

#[derive(Clone, Debug)]
pub struct SumAllReduce(far::AllReduce);

impl SumAllReduce {
    pub fn new(comm: &Arc<Comm>) -> Self {
        let Comm::FastAllreduce(comm) = &**comm;
        Self(far::AllReduce::sum(comm))
    }

    pub fn sum_all_reduce(&self, xs: &Tensor) -> Result<Tensor> {
        self.0.forward(xs)
    }
}

#[derive(Clone, Debug)]
pub struct AllGather(far::AllGather);

impl AllGather {
    pub fn new(comm: &Arc<Comm>, dim: usize) -> Self {
        let Comm::FastAllreduce(comm) = &**comm;
        Self(far::AllGather::new(comm, dim))
    }

    pub fn all_gather(&self, xs: &Tensor) -> Result<Tensor> {
        self.0.forward(xs)
    }
}

/// Makes a `Comm` as `prepare_distributed_mapper` does: an id that travels as 128 chars, and three ranks, which is no
/// power of two.
#[test]
fn a_comm_as_mistralrs_makes_it() {
    let id = Id::new();
    let ranks = (0..3).map(|rank| {
        std::thread::spawn(move || {
            let comm =
                Arc::new(Comm::from_device(Id::uninit(*id.internal()), &Device::Cpu, rank, 3).unwrap());
            assert_eq!((comm.rank(), comm.world_size()), (rank, 3));
            let xs = Tensor::full(rank as f32 + 1.0, (1, 2), &Device::Cpu).unwrap();
            let sum = SumAllReduce::new(&comm).sum_all_reduce(&xs).unwrap().to_vec2::<f32>().unwrap();
            let all = AllGather::new(&comm, 1).all_gather(&xs).unwrap().to_vec2::<f32>().unwrap();
            (sum, all)
        })
    });
    for rank in ranks.collect::<Vec<_>>() {
        assert_eq!(rank.join().unwrap(), (vec![vec![6.0; 2]], vec![vec![1.0, 1.0, 2.0, 2.0, 3.0, 3.0]]));
    }
    let error = Comm::from_device(Id::uninit([0; 128]), &Device::Cpu, 0, 2).unwrap_err().to_string();
    assert!(error.contains("bytes that are not an id"), "{error}");
}

/// Makes calls from several threads of a runtime, one after the other.
#[test]
fn a_comm_is_used_by_the_threads_of_a_pool() {
    let id = Id::new();
    let ranks = (0..2).map(|rank| {
        std::thread::spawn(move || {
            let comm = Arc::new(Comm::from_device(id, &Device::Cpu, rank, 2).unwrap());
            let sum = SumAllReduce::new(&comm);
            let mut value = 1.0;
            for _ in 0..20 {
                let (sum, from) = (sum.clone(), value);
                value = std::thread::spawn(move || {
                    let xs = Tensor::full(from as f32, 1, &Device::Cpu).unwrap();
                    f64::from(sum.sum_all_reduce(&xs).unwrap().to_vec1::<f32>().unwrap()[0])
                })
                .join()
                .unwrap();
            }
            value
        })
    });
    for rank in ranks.collect::<Vec<_>>() {
        assert_eq!(rank.join().unwrap(), f64::from(1 << 20));
    }
}
