//! The topology of this machine's GPUs.

use fast_allreduce::topology::{LinkClass, Topology};
use fast_allreduce::{Error, Result};

use crate::runner::{Found, Missing};

tests! {
    gpus => every_gpu_is_found;
    no_gpus => without_nvml_there_is_a_reason;
}

fn gpus() -> Found<Result<Topology>> {
    match Topology::discover() {
        Err(Error::Unavailable { reason, .. }) => Err(Missing::new("nvml", reason)),
        other => Ok(other),
    }
}

fn no_gpus() -> Found<Error> {
    Topology::discover().err().ok_or_else(|| Missing::new("no-nvml", "this machine has NVML and GPUs"))
}

fn every_gpu_is_found(discovered: Result<Topology>) {
    let topology = discovered.unwrap();
    for (index, gpu) in topology.gpus().iter().enumerate() {
        assert_eq!(topology.find(gpu.pci.unwrap()), Some(index));
        assert_eq!(topology.class(&[index]).unwrap(), LinkClass::SameDevice);
    }
}

fn without_nvml_there_is_a_reason(error: Error) {
    assert!(matches!(&error, Error::Unavailable { reason, .. } if !reason.is_empty()), "{error}");
}
