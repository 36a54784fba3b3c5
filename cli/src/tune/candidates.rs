//! The candidates of `tune`.

use fast_allreduce::plan::{Choice, DeviceKind, PlannedCall};
use fast_allreduce::Algorithm;

/// Returns the candidates for calls on a device; none if there is nothing to choose. `workers` are the threads of
/// each rank on the host.
pub fn of(calls: PlannedCall, device: DeviceKind, workers: usize) -> Vec<Choice> {
    match (calls, device) {
        (PlannedCall::AllReduce, _) => all_reduce(device, workers),
        // Other grids have not been compared on GPUs.
        (_, DeviceKind::Cuda) => Vec::new(),
        // The chunks of a message depend on its channel alone.
        (PlannedCall::Messages, DeviceKind::Host) if workers == 1 => Vec::new(),
        (PlannedCall::Messages, DeviceKind::Host) => {
            let mut choices = host(Algorithm::OneShotPull, workers);
            choices.dedup_by_key(|choice| choice.blocks);
            choices
        }
        (_, DeviceKind::Host) => host(Algorithm::OneShotPull, workers),
    }
}

/// Returns every direct algorithm with several grids.
fn all_reduce(device: DeviceKind, workers: usize) -> Vec<Choice> {
    Algorithm::DIRECT
        .into_iter()
        .flat_map(|algorithm| match device {
            DeviceKind::Host => host(algorithm, workers),
            DeviceKind::Cuda => cuda(algorithm),
        })
        .collect()
}

/// Returns numbers of workers, each with several piece sizes: smaller pieces stay in a cache until they are read.
fn host(algorithm: Algorithm, workers: usize) -> Vec<Choice> {
    // So small that all blocks are used for all but tiny messages.
    const BLOCK_BYTES: u64 = 4 << 10;
    const PIECE_BYTES: [u64; 4] = [256 << 10, 128 << 10, 512 << 10, 1 << 20];
    let blocks =
        std::iter::successors(Some(1), |blocks| Some(blocks * 2)).take_while(|&blocks| blocks < workers);
    let blocks = blocks.chain([workers]);
    let pair =
        |blocks: usize| PIECE_BYTES.map(|piece| Choice::host(algorithm, blocks as u32, BLOCK_BYTES, piece));
    blocks.flat_map(pair).collect()
}

fn cuda(algorithm: Algorithm) -> Vec<Choice> {
    const BLOCKS: [u32; 5] = [4, 8, 16, 36, 64];
    BLOCKS.map(|blocks| Choice::cuda(algorithm, blocks, 512)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_used_in_powers_of_two_and_all() {
        let blocks = |workers| {
            let mut blocks: Vec<_> = of(PlannedCall::AllReduce, DeviceKind::Host, workers)
                .iter()
                .map(|choice| choice.blocks)
                .collect();
            blocks.sort_unstable();
            blocks.dedup();
            blocks
        };
        assert_eq!((blocks(1), blocks(2), blocks(6)), (vec![1], vec![1, 2], vec![1, 2, 4, 6]));
    }

    #[test]
    fn other_calls_have_grids_alone() {
        for calls in [PlannedCall::AllGather, PlannedCall::Reduce, PlannedCall::Messages] {
            let choices = of(calls, DeviceKind::Host, 3);
            assert!(choices.iter().all(|choice| choice.algorithm == Algorithm::OneShotPull));
            assert_eq!(choices.len(), if calls == PlannedCall::Messages { 3 } else { 12 }, "{calls}");
        }
        assert_eq!(of(PlannedCall::Messages, DeviceKind::Host, 1), []);
        assert_eq!(of(PlannedCall::Reduce, DeviceKind::Cuda, 1), []);
    }
}
