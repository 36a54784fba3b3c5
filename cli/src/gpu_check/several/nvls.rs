//! The step `nvls`: in-switch reduction through multicast memory of all GPUs.

use fast_allreduce::device::cuda::api;
use fast_allreduce::{Algorithm, DType, ReduceOp};

use super::{launch, ordinal};
use crate::arguments::{GpuCheck, Step};
use crate::failure::{driver, Failure};
use crate::gpu_check::budget::Budget;
use crate::gpu_check::ranks::rank_settings;
use crate::gpu_check::record::{answer, check, fact, figure, out_of_time, skipped};
use crate::harness::device::cuda::{Gpu, GpuOptions, GRAPH_CALLS, MEGABYTE};
use crate::harness::measure::{Effort, Measure};
use crate::harness::session::Session;

const QUESTION: &str = "Does in-switch reduction (NVLS) work between all GPUs?";
const NAME: &str = "in-switch reductions";
/// `CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED`, which the bindings of CUDA 12.0 lack.
const MULTICAST_SUPPORTED: u32 = 132;

pub fn run(options: &GpuCheck, count: usize) -> Result<(), Failure> {
    match launch(Step::Nvls, options, count, &[]) {
        Ok(_) => Ok(()),
        Err(failure) => {
            answer(QUESTION, format!("no: {failure}"))?;
            check(NAME, 0, Err(failure))
        }
    }
}

/// Runs as one of the ranks.
pub fn rank(session: &Session, options: &GpuCheck) -> Result<(), Failure> {
    let (gpu, budget) = (ordinal(options, session.rank()), Budget::of(options));
    let mut settings = rank_settings(options, gpu, MEGABYTE * if options.small { 1 } else { 64 })?;
    settings.set("order", "any")?;
    let gpu_options = GpuOptions { first_gpu: 0, gpus: session.world_size(), eager: false, settings };
    let supported = has_multicast(gpu)?;
    let all_supported = session.total(supported.into())? == session.world_size() as u64;
    let is_first = session.rank() == 0;
    if is_first {
        let count = if all_supported { "all GPUs" } else { "not all GPUs" };
        fact("multicast memory, by the driver's attribute", count)?;
    }
    // All ranks get the group, or an error, and `run` reports the one that explains most.
    if let Err(error) = Gpu::new(session, &gpu_options, Some(Algorithm::OneShotNvls)) {
        if all_supported {
            return Err(with_remedy(error));
        }
        if is_first {
            answer(QUESTION, format!("no: {error}"))?;
            skipped(NAME, error)?;
        }
        return Ok(());
    }
    let effort = Effort { iterations: None, warmup: GRAPH_CALLS, checks: 1, registered: false };
    let mut measure = Measure { session, effort, seed: 0x5eed, round: 0 };
    let table = "Microseconds of an allreduce in a graph of 20 calls, bf16, in-switch";
    let mut cases = 0;
    'algorithms: for algorithm in [Algorithm::OneShotNvls, Algorithm::TwoShotNvls] {
        let gpu = Gpu::new(session, &gpu_options, Some(algorithm))?;
        let sizes: &[usize] = if options.small { &[8 << 10] } else { &[8 << 10, 1 << 20, 8 << 20, 32 << 20] };
        for &bytes in sizes {
            // The first rank decides for all.
            if session.of_first(u64::from(budget.is_spent()))? != 0 {
                if is_first {
                    out_of_time(format!("{algorithm} from {bytes} B on"))?;
                }
                break 'algorithms;
            }
            let work = measure.all_reduce(DType::Bf16, bytes / 2, ReduceOp::Sum);
            let row = measure.row(&gpu, &work)?;
            let placements = [Some(&row.out_of_place), row.in_place.as_ref()];
            let mut wrong: u64 = placements.into_iter().flatten().filter_map(|timing| timing.wrong).sum();
            cases += 2;
            // The CPUs take long to check large messages.
            let others = if bytes <= MEGABYTE { &[DType::F16, DType::F32][..] } else { &[] };
            for &dtype in others {
                let work = measure.all_reduce(dtype, bytes / dtype.size(), ReduceOp::Sum);
                wrong += measure.wrong(&gpu, &work)?;
                cases += 2;
            }
            if wrong > 0 {
                return Err(Failure::Ranks(format!("{wrong} wrong elements: {algorithm} of {bytes} B")));
            }
            if is_first {
                figure(table, bytes, algorithm.name(), row.out_of_place.time_us)?;
                // Whatever ends the step later. A failure replaces it.
                answer(QUESTION, "yes")?;
            }
        }
    }
    match is_first && cases > 0 {
        true => check(NAME, cases, Ok(())),
        false => Ok(()),
    }
}

const REMEDY: &str = "the GPUs have multicast memory, so check that Fabric Manager runs, with the driver's version \
                      (systemctl status nvidia-fabricmanager; nvidia-smi -q, Fabric), that MIG is off, and that all \
                      GPUs of the partition are visible";

/// Adds the remedy to an error of a call of multicast memory, since it is the machine's setup that fails.
fn with_remedy(error: Failure) -> Failure {
    let text = error.to_string();
    match text.contains("cuMulticast") {
        true => Failure::Ranks(format!("{text}; {REMEDY}")),
        false => error,
    }
}

fn has_multicast(gpu: usize) -> Result<bool, Failure> {
    let (mut device, mut value) = (0, 0);
    // SAFETY: the driver validates the ordinal, the attribute and the device, and writes one int each.
    unsafe {
        api::cuInit(0).map_err(driver("cuInit"))?;
        api::cuDeviceGet(&mut device, gpu as i32).map_err(driver("cuDeviceGet"))?;
        // A driver that does not know the attribute has no multicast memory.
        let _ = api::cuDeviceGetAttribute(&mut value, MULTICAST_SUPPORTED, device);
    }
    Ok(value != 0)
}
