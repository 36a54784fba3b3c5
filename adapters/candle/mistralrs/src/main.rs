//! mistral.rs's HTTP server with tensor parallelism on CPUs.
//!
//!     MISTRALRS_MN_LOCAL_WORLD_SIZE=2 fast-allreduce-mistralrs MODEL ADDRESS
//!
//! MODEL is a folder with weights in safetensors, and ADDRESS is for example 127.0.0.1:1234. Rank 0 starts the other
//! ranks with the same arguments.

use std::error::Error;
use std::ffi::c_char;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Module, Result, Tensor};
use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{Communicator, Host};
use fast_allreduce_candle::{AllGather, AllReduce, Comm};
use mistralrs_core::{initialize_logging, AutoDeviceMapParams, ModelDType, ModelSelected};
use mistralrs_quant::distributed::external::{self, Collectives, Transport};
use mistralrs_server_core::mistralrs_for_server_builder::MistralRsForServerBuilder;
use mistralrs_server_core::mistralrs_server_router_builder::MistralRsServerRouterBuilder;

/// Limit for ranks to meet. Loading weights comes later, before the first call, which has a separate limit.
const RENDEZVOUS: Duration = Duration::from_secs(600);

#[derive(Debug)]
struct Ranks(Comm);

impl Collectives for Ranks {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn sum_all_reduce(&self, xs: &Tensor) -> Result<Tensor> {
        AllReduce::sum(&self.0).forward(xs)
    }

    fn all_gather(&self, xs: &Tensor, dim: usize) -> Result<Tensor> {
        AllGather::new(&self.0, dim).forward(xs)
    }
}

fn id() -> [c_char; 128] {
    UniqueId::new().map_or([0; 128], |id| id.as_bytes().map(|byte| byte as c_char))
}

fn connect(id: [c_char; 128], device: &Device, rank: usize, ranks: usize) -> Result<Arc<dyn Collectives>> {
    if !device.is_cpu() {
        candle_core::bail!("this server has no ranks on {device:?}")
    }
    let wrap = candle_core::Error::wrap;
    let id = UniqueId::from_bytes(id.map(|byte| byte as u8)).map_err(wrap)?;
    let local = Local::connect(&id, rank, ranks, RENDEZVOUS).map_err(wrap)?;
    let communicator = Communicator::builder().build(Host::new(), local).map_err(wrap)?;
    Ok(Arc::new(Ranks(Comm::new(communicator))))
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(model), Some(address)) = (arguments.next(), arguments.next()) else {
        return Err("usage: fast-allreduce-mistralrs MODEL ADDRESS".into());
    };
    initialize_logging();
    external::register(Transport { id, connect });
    let model = ModelSelected::Plain {
        model_id: model,
        tokenizer_json: None,
        arch: None,
        dtype: ModelDType::F32,
        topology: None,
        organization: None,
        write_uqff: None,
        from_uqff: None,
        imatrix: None,
        calibration_file: None,
        max_seq_len: AutoDeviceMapParams::DEFAULT_MAX_SEQ_LEN,
        max_batch_size: AutoDeviceMapParams::DEFAULT_MAX_BATCH_SIZE,
        hf_cache_path: None,
        matformer_config_path: None,
        matformer_slice_name: None,
    };
    let server = MistralRsForServerBuilder::new().with_model(model).with_cpu(true).build().await?;
    let routes = MistralRsServerRouterBuilder::new().with_mistralrs(server).build().await?;
    let listener = tokio::net::TcpListener::bind(&address).await?;
    axum::serve(listener, routes).await?;
    Ok(())
}
