//! Launches of the hot set that give up, each for its reason.

use fast_allreduce_ptx_machine::{Program, Settings};

use crate::abi::*;
use crate::elements::{Element, BF16, F16, F32};
use crate::hot::ALGORITHMS;
use crate::world::World;

tests! {
    crate::program => every_kernel_gives_up;
}

/// One kernel, and what its tests share.
struct Case<'a> {
    program: &'a Program,
    kernel: String,
    algorithm: FaAlgorithm,
    ty: Element,
    ranks: usize,
}

const COUNT: usize = 256;

fn every_kernel_gives_up(program: &Program) {
    for (name, algorithm) in ALGORITHMS {
        for ty in [F16, BF16, F32] {
            for ranks in 2..=8 {
                let case = Case {
                    program,
                    kernel: format!("{name}_{}_sum_w{ranks}", ty.name),
                    algorithm,
                    ty,
                    ranks,
                };
                if crate::is_left_out(program, &case.kernel) {
                    continue;
                }
                case.a_rank_that_does_not_come();
                case.a_launch_after_one_that_failed();
                if algorithm == FA_TWO_SHOT_PUSH {
                    case.ranks_that_leave_after_their_inputs();
                }
                if name.ends_with("pull") {
                    case.a_buffer_that_is_not_known();
                    case.a_rank_that_leaves_before_the_second_barrier();
                    case.a_buffer_that_was_revoked();
                }
            }
        }
    }
}

impl Case<'_> {
    fn world(&self) -> World {
        World::new(self.ranks, COUNT * self.ty.bytes)
    }

    fn launches(&self, world: &World, source: u64) -> Vec<FaLaunch> {
        let of_rank = |rank| {
            let mut launch = world.launch_of(rank, self.algorithm, self.ty.code, COUNT as u64);
            launch.source = source;
            launch
        };
        (0..self.ranks).map(of_rank).collect()
    }

    fn run(&self, world: &World, launches: &[FaLaunch]) {
        let result = world.run_together(self.program, &self.kernel, (1, 32), launches, Settings::default());
        result.unwrap_or_else(|error| panic!("{error}"));
    }

    /// With a limit that is soon over.
    fn run_briefly(&self, world: &World, mut launches: Vec<FaLaunch>) {
        launches.iter_mut().for_each(|launch| launch.timeout_ns = 200_000);
        self.run(world, &launches);
    }

    fn check(&self, world: &World, rank: usize, failure: FaFailure, why: &str) {
        assert_eq!(world.failure_of(rank), failure, "{}: {why}", self.kernel);
    }

    /// All but the last, then all but the first: each misses other ones first.
    fn a_rank_that_does_not_come(&self) {
        for missing in [self.ranks - 1, 0] {
            let world = self.world();
            let mut launches = self.launches(&world, 0);
            launches.remove(missing);
            let first = launches[0].rank as usize;
            self.run_briefly(&world, launches);
            self.check(&world, first, FA_TIMED_OUT, "a rank that does not come");
        }
    }

    /// The others have sent their inputs, and given up, before the first comes: it waits for their results.
    fn ranks_that_leave_after_their_inputs(&self) {
        let world = self.world();
        let mut launches = self.launches(&world, 0);
        let first = launches.remove(0);
        self.run_briefly(&world, launches);
        self.run_briefly(&world, vec![first]);
        self.check(&world, 0, FA_TIMED_OUT, "ranks that leave");
        // Its own slice is reduced by then.
        assert!(world.outputs[0].read().iter().any(|&byte| byte != 0xA5), "{}", self.kernel);
    }

    fn a_launch_after_one_that_failed(&self) {
        let mut world = self.world();
        world.regions[0].write(std::mem::offset_of!(FaRegionHead, failed), &1u32.to_le_bytes());
        let launches = self.launches(&world, 0);
        self.run(&world, &launches[..1]);
        assert!(world.outputs[0].read().iter().all(|&byte| byte == 0), "{}", self.kernel);
        self.check(&world, 0, FA_OK, "after one that failed");
    }

    /// Beyond the table, and where the table has no address.
    fn a_buffer_that_is_not_known(&self) {
        for id in [2, 5] {
            let world = self.world();
            let mut launches = self.launches(&world, id << FA_SOURCE_ID_SHIFT);
            launches.iter_mut().for_each(|launch| launch.buffer_count = 2);
            self.run_briefly(&world, launches);
            self.check(&world, 0, FA_UNKNOWN_BUFFER, "a buffer that is not known");
        }
    }

    /// It has told the others that it has come, and does not know their buffers.
    fn a_rank_that_leaves_before_the_second_barrier(&self) {
        let world = self.world();
        let mut launches = self.launches(&world, 1 << FA_SOURCE_ID_SHIFT);
        launches[self.ranks - 1].buffer_count = 0;
        self.run_briefly(&world, launches);
        self.check(&world, self.ranks - 1, FA_UNKNOWN_BUFFER, "leaves");
        self.check(&world, 0, FA_TIMED_OUT, "left by another");
        // It has told the others that what they read may have changed.
        let at = std::mem::offset_of!(FaRegionHead, revoked);
        assert_eq!(world.regions[1].read()[at..at + 4], 1u32.to_le_bytes(), "{}", self.kernel);
    }

    fn a_buffer_that_was_revoked(&self) {
        let mut world = self.world();
        let at = std::mem::offset_of!(FaRegionHead, revoked) + 4;
        world.regions[0].write(at, &1u32.to_le_bytes());
        let launches = self.launches(&world, 1 << FA_SOURCE_ID_SHIFT);
        self.run_briefly(&world, launches);
        self.check(&world, 0, FA_REVOKED, "revoked");
    }
}
