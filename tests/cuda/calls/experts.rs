//! Tests inputs that are computed from experts' rows: typed calls, and tables with entries that are no rows, which the
//! kernel finds. `fused.rs` has experts in one of three messages.

use cudarc::driver::CudaSlice;
use fast_allreduce::{Algorithm, Error, Experts, Fused, Norm};

use crate::fixtures::fixture::Setup;
use crate::fixtures::gpu::{gpu, Gpus};
use crate::fixtures::threads::threads;

tests! {
    gpu =>
        slices,
        an_entry_that_is_no_row;
}

const RMS: Norm = Norm::Rms { epsilon: 0.0, unit_offset: false };

fn slices(_: Gpus) {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let slice = |values: &[f32]| stream.clone_htod(values).unwrap();
        let values = |slice: &CudaSlice<f32>| stream.clone_dtoh(slice).unwrap();
        let input = slice(&[1.0, 2.0, 10.0, 20.0, 100.0, 200.0]);
        let (weights, shared) = (slice(&[0.5, 2.0, f32::NAN, f32::NAN]), slice(&[1.0, 0.0, 0.0, 1.0]));
        let table = stream.clone_htod(&[2, 1, -1, -1]).unwrap();
        let (mut residual, mut rows) = (slice(&[0.0; 4]), slice(&[f32::NAN; 4]));
        communicator.barrier().unwrap();
        let experts = Experts::on_cuda(&table, 2).weights(&weights).shared(&shared).routed_scale(0.5);
        let fused = Fused::on_cuda(&mut residual).norm(RMS, 2).experts(experts).rows(&mut rows);
        communicator.all_reduce_fused(&stream, &input, fused).unwrap();
        communicator.synchronize(&stream).unwrap();
        assert_eq!(values(&residual), [72.0, 140.0, 0.0, 2.0]);
        let scale = 1.0 / ((72.0_f32 * 72.0 + 140.0 * 140.0) / 2.0).sqrt();
        assert_eq!(values(&rows)[0], 72.0 * scale);
        let fused = Fused::on_cuda(&mut residual).norm(RMS, 2).experts(Experts::on_cuda(&table, 3));
        let refused = communicator.all_reduce_fused(&stream, &input, fused.rows(&mut rows));
        assert!(matches!(refused, Err(Error::InvalidSetting { name: "expert_table", .. })), "{refused:?}");
        communicator.barrier().unwrap();
    });
}

/// Tests that a rank with such an entry names it and sends nothing, so that no rank writes anything, and that the other
/// rank names that rank.
fn an_entry_that_is_no_row(_: Gpus) {
    for algorithm in Algorithm::DIRECT {
        threads(2, 1, |rank, context| {
            let timeout = std::time::Duration::from_millis(500);
            let setup = Setup { algorithm: Some(algorithm), timeout, ..Setup::default() };
            let communicator = setup.try_build(context.clone(), rank).unwrap();
            let own = communicator.rank();
            let stream = context.new_stream().unwrap();
            let slice = |values: &[f32]| stream.clone_htod(values).unwrap();
            let (input, mut residual, mut rows) = (slice(&[1.0; 64]), slice(&[5.0; 96]), slice(&[7.0; 96]));
            let table = stream.clone_htod(&[0, 1, -1, 1, if own == 1 { 2 } else { 0 }, 0]).unwrap();
            communicator.barrier().unwrap();
            let fused = Fused::on_cuda(&mut residual).norm(RMS, 32).experts(Experts::on_cuda(&table, 2));
            communicator.all_reduce_fused(&stream, &input, fused.rows(&mut rows)).unwrap();
            let error = communicator.synchronize(&stream).unwrap_err().to_string();
            assert!(error.contains(["rank 1", "expert_table = entry 4"][own]), "{algorithm:?}: {error}");
            let values = |slice: &CudaSlice<f32>| stream.clone_dtoh(slice).unwrap();
            assert_eq!((values(&residual), values(&rows)), (vec![5.0; 96], vec![7.0; 96]), "{algorithm:?}");
        });
    }
}
