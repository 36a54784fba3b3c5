//! Launches that give up, for each reason.

use catalogue::types::HOT_WORLDS;
use fast_allreduce_ptx_machine::{Program, Settings};

use crate::abi::*;
use crate::elements::{Element, BF16, F16, F32};
use crate::hot::ALGORITHMS;
use crate::world::{World, CHUNK, PACKETS, STRIPES};

tests! {
    crate::program => every_kernel_of_the_hot_set, every_kernel_of_any_world, messages_that_do_not_come,
        messages_that_its_process_ends, messages_that_are_posted_in_vain, messages_at_any_address;
    crate::observed => nothing_races_in_messages;
}

/// A kernel, with the state that its tests share.
struct Case<'a> {
    program: &'a Program,
    kernel: String,
    algorithm: FaAlgorithm,
    dtype: FaDtype,
    /// Bytes of an element.
    bytes: usize,
    ranks: usize,
    checked: bool,
}

const COUNT: usize = 256;

fn every_kernel_of_the_hot_set(program: &Program) {
    for (name, algorithm) in ALGORITHMS {
        for ty in [F16, BF16, F32] {
            for ranks in HOT_WORLDS.map(|ranks| ranks as usize) {
                let kernel = format!("{name}_{}_sum_w{ranks}", ty.name);
                if crate::is_left_out(program, &kernel) {
                    continue;
                }
                let case = Case {
                    program,
                    kernel,
                    algorithm,
                    dtype: ty.code,
                    bytes: ty.bytes,
                    ranks,
                    checked: false,
                };
                case.gives_up();
            }
        }
    }
}

/// Element types with kernels: name, code, and bytes of an element. If types share kernels, the narrowest
/// or the first.
const TYPES: [(&str, FaDtype, usize); 6] = [
    ("f16", FA_F16, 2),
    ("bf16", FA_BF16, 2),
    ("f32", FA_F32, 4),
    ("f64", FA_F64, 8),
    ("integers", FA_I8, 1),
    ("f8", FA_F8E4M3, 1),
];
/// Kernels that reduce, indexed by algorithm code, then those that do not.
const REDUCING: [&str; 8] = [
    "one_shot_pull",
    "two_shot_pull",
    "one_shot_push",
    "two_shot_push",
    "ring",
    "halving_doubling",
    "reduce_scatter",
    "reduce",
];
const OTHERS: [&str; 4] = ["all_gather", "broadcast", "scattered_broadcast", "barrier"];

fn every_kernel_of_any_world(program: &Program) {
    let reducing = REDUCING.iter().zip(0..).flat_map(|(name, algorithm)| {
        let of_type = move |&(ty, dtype, bytes)| (format!("{name}_{ty}"), algorithm, dtype, bytes);
        TYPES.iter().map(of_type)
    });
    let others = OTHERS.iter().zip(8..).map(|(&name, algorithm)| (name.to_owned(), algorithm, FA_F32, 4));
    let norming =
        ["one_shot_pull_norm", "two_shot_pull_norm", "push_norm", "push_norm", "reduce_scatter_norm"];
    let norming = norming.into_iter().zip(FA_ONE_SHOT_PULL_NORM..).flat_map(|(name, algorithm)| {
        let of_type = |ty: Element| (format!("{name}_{}", ty.name), algorithm, ty.code, ty.bytes);
        [F16, BF16, F32].map(of_type)
    });
    let gathered = [("all_gather_rows".to_owned(), FA_ALL_GATHER_ROWS, FA_U8, 1)];
    let quantized = [F16, BF16, F32]
        .map(|ty| ("two_shot_quantized".to_owned(), FA_TWO_SHOT_QUANTIZED, ty.code, ty.bytes));
    let nvls = crate::nvls::ALGORITHMS.into_iter().flat_map(|(name, algorithm)| {
        let of_type = move |ty: Element| (format!("{name}_{}", ty.name), algorithm, ty.code, ty.bytes);
        [F16, BF16, F32].map(of_type)
    });
    for (kernel, algorithm, dtype, bytes) in
        reducing.chain(others).chain(norming).chain(gathered).chain(quantized).chain(nvls)
    {
        if crate::is_left_out(program, &kernel) {
            continue;
        }
        for checked in [false, true] {
            let kernel = kernel.clone();
            let case = Case { program, kernel, algorithm, dtype, bytes, ranks: 3, checked };
            case.gives_up();
            if checked {
                case.a_rank_that_makes_another_call();
            }
        }
    }
}

/// A receiver without a sender; a sender whose receiver does not free slots or does not read a posted
/// message; and a receiver that is sent another message. Each as packets, in chunks, and posted; by one
/// block, and by one block per stripe.
fn messages_that_do_not_come(program: &Program) {
    const KERNEL: &str = "transfer";
    if crate::is_left_out(program, KERNEL) {
        return;
    }
    const REGISTERED: u64 = 1 << FA_SOURCE_ID_SHIFT;
    let sizes = [(PACKETS, 0), (8 * STRIPES * CHUNK, 0), (8 * STRIPES * CHUNK, REGISTERED)];
    let ways = sizes.into_iter().flat_map(|(bytes, source)| [1, 2].map(|blocks| (bytes, source, blocks)));
    for (bytes, source, blocks) in ways {
        for (tags, alone, failure) in [
            ([1, 1], None, FA_OK),
            ([1, 2], None, FA_OTHER_MESSAGE),
            ([1, 1], Some(0), FA_TIMED_OUT),
            ([1, 1], Some(1), FA_TIMED_OUT),
        ] {
            // Small messages do not wait for slots.
            if alone == Some(0) && bytes <= PACKETS {
                continue;
            }
            let mut world = World::new(2, bytes);
            world.inputs[0].fill(0x5A);
            let of_rank = |rank: usize| {
                let mut launch = world.launch_of(rank, FA_TRANSFER, FA_U8, 0);
                launch.timeout_ns = if failure == FA_OK { launch.timeout_ns } else { 200_000 };
                (launch, world.message(rank, tags[rank], bytes, 0, source))
            };
            let mut launches: Vec<_> = (0..2).map(of_rank).collect();
            if let Some(rank) = alone {
                launches = vec![launches.swap_remove(rank)];
            }
            let receiver = alone.unwrap_or(1);
            let result = world.transfer_together(program, KERNEL, &launches, blocks);
            result.unwrap_or_else(|error| panic!("{error}"));
            let case =
                format!("tags {tags:?}, alone: {alone:?}, {bytes} bytes, source {source:x}, {blocks} blocks");
            assert_eq!(world.failure_of(receiver), failure, "{case}");
            if failure == FA_OK {
                assert!(world.outputs[1].read()[..bytes].iter().all(|&byte| byte == 0x5A), "{case}");
            }
            // A rank that posted and gave up has revoked its message: what the receiver has read may not be
            // the message.
            let at = std::mem::offset_of!(FaRegionHead, revoked);
            let revoked = world.regions[1].read()[at] != 0;
            assert_eq!(revoked, failure != FA_OK && alone != Some(1) && source != 0, "{case}");
            // A later launch does nothing.
            let result =
                world.transfer_together(program, KERNEL, &launches[..usize::from(failure != FA_OK)], 1);
            result.unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

/// A receiver, a sender that waits for slots, and a sender that has posted are aborted by their process,
/// for each reason; one of them is aborted by another block.
fn messages_that_its_process_ends(program: &Program) {
    use std::mem::offset_of;
    const KERNEL: &str = "transfer";
    if crate::is_left_out(program, KERNEL) {
        return;
    }
    const LARGE: usize = 8 * STRIPES * CHUNK;
    let waits = [(1, PACKETS, 0), (1, LARGE, 0), (0, LARGE, 0), (0, LARGE, 1 << FA_SOURCE_ID_SHIFT)];
    for (rank, bytes, source) in waits {
        for (field, value, failure) in [
            (offset_of!(FaStatus, abort), 1, FA_ABORTED),
            (offset_of!(FaStatus, gone), 2 >> rank, FA_PEER_GONE),
            (offset_of!(FaStatus, failure), FA_TIMED_OUT, FA_TIMED_OUT),
        ] {
            let mut world = World::new(2, bytes);
            let at = offset_of!(FaRegionHead, status) + field;
            world.regions[rank].write(at, &value.to_le_bytes());
            let launch =
                (world.launch_of(rank, FA_TRANSFER, FA_U8, 0), world.message(rank, 1, bytes, 0, source));
            let result = world.transfer_together(program, KERNEL, &[launch], 2);
            result.unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(world.failure_of(rank), failure, "rank {rank}, {bytes} bytes, source {source:x}");
        }
    }
}

/// A withdrawn message is ignored, and a message in a buffer unknown to the receiver is not read.
fn messages_that_are_posted_in_vain(program: &Program) {
    const KERNEL: &str = "transfer";
    if crate::is_left_out(program, KERNEL) {
        return;
    }
    let bytes = 2 * STRIPES * CHUNK;
    for (source, withdrawn, failure) in [(1, true, FA_REVOKED), (2, false, FA_UNKNOWN_BUFFER)] {
        let mut world = World::new(2, bytes);
        if withdrawn {
            world.regions[1].write(std::mem::offset_of!(FaRegionHead, revoked), &1u32.to_le_bytes());
        }
        let of_rank = |rank: usize| {
            let mut launch = world.launch_of(rank, FA_TRANSFER, FA_U8, 0);
            (launch.timeout_ns, launch.buffer_count) = (200_000, 2);
            (launch, world.message(rank, 1, bytes, 0, source << FA_SOURCE_ID_SHIFT))
        };
        let launches: Vec<_> = (0..2).map(of_rank).collect();
        let result = world.transfer_together(program, KERNEL, &launches, 2);
        result.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(world.failure_of(1), failure);
        assert_eq!(world.failure_of(0), FA_TIMED_OUT);
    }
}

/// Runs messages in a program that detects races.
fn nothing_races_in_messages(program: &Program) {
    messages_at_any_address(program);
}

/// Messages with any offset on either side and any length: as packets, in chunks, and posted.
fn messages_at_any_address(program: &Program) {
    const KERNEL: &str = "transfer";
    if crate::is_left_out(program, KERNEL) {
        return;
    }
    for bytes in [0, 1, 15, 16, 17, PACKETS, PACKETS + 3, CHUNK + 1, 3 * CHUNK + 129, 5 * STRIPES * CHUNK + 7]
    {
        for (from, to) in [(0, 0), (1, 0), (2, 6), (8, 8)] {
            for posted in [false, true] {
                let mut world = World::new(2, bytes + 64);
                let input: Vec<u8> = (0..bytes + 64).map(|at| (at * 7 + at / 251) as u8).collect();
                world.inputs[0].write(0, &input);
                world.outputs[1].fill(0xA5);
                let source = if posted { (1 << FA_SOURCE_ID_SHIFT) + from as u64 } else { 0 };
                let launches = [0, 1].map(|rank| {
                    let skipped = if rank == 0 { from } else { to };
                    (
                        world.launch_of(rank, FA_TRANSFER, FA_U8, 0),
                        world.message(rank, 3, bytes, skipped, source),
                    )
                });
                let result = world.transfer_together(program, KERNEL, &launches, 1 + (bytes % 3) as u32);
                result.unwrap_or_else(|error| panic!("{error}"));
                let case = format!("{bytes} bytes from {from} to {to}, posted: {posted}");
                assert_eq!([0, 1].map(|rank| world.failure_of(rank)), [FA_OK; 2], "{case}");
                let output = world.outputs[1].read();
                assert!(output[to..to + bytes] == input[from..from + bytes], "{case}");
                let around = output[..to].iter().chain(&output[to + bytes..]);
                assert!(around.into_iter().all(|&byte| byte == 0xA5), "{case}: around it");
            }
        }
    }
}

impl Case<'_> {
    /// Gives up in each way that the algorithm has.
    fn gives_up(&self) {
        self.a_rank_that_does_not_come();
        self.a_launch_after_one_that_failed();
        self.what_its_process_says();
        match self.algorithm {
            FA_TWO_SHOT_PUSH | FA_TWO_SHOT_PUSH_NORM => self.ranks_that_leave_after_their_inputs(),
            FA_ONE_SHOT_PUSH
            | FA_ONE_SHOT_PUSH_NORM
            | FA_RING
            | FA_HALVING_DOUBLING
            | FA_BARRIER
            | FA_ALL_GATHER_ROWS
            | FA_TWO_SHOT_QUANTIZED
            | FA_ONE_SHOT_NVLS
            | FA_TWO_SHOT_NVLS => {}
            _ => {
                self.a_buffer_that_is_not_known();
                self.a_rank_that_leaves_before_the_second_barrier();
                self.a_buffer_that_was_revoked();
            }
        }
    }

    /// Returns a world with room for all ranks' shares.
    fn world(&self) -> World {
        World::new(self.ranks, self.ranks * COUNT * self.bytes)
    }

    fn launches(&self, world: &World, source: u64) -> Vec<FaLaunch> {
        let of_rank = |rank| {
            let mut launch = world.launch_of(rank, self.algorithm, self.dtype, COUNT as u64);
            launch.source = source;
            launch.checked = self.checked.into();
            launch
        };
        (0..self.ranks).map(of_rank).collect()
    }

    fn run(&self, world: &World, launches: &[FaLaunch]) {
        let result = world.run_together(self.program, &self.kernel, (1, 32), launches, Settings::default());
        result.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Runs launches with a short time limit.
    fn run_briefly(&self, world: &World, mut launches: Vec<FaLaunch>) {
        launches.iter_mut().for_each(|launch| launch.timeout_ns = 200_000);
        self.run(world, &launches);
    }

    fn check(&self, world: &World, rank: usize, failure: FaFailure, why: &str) {
        assert_eq!(world.failure_of(rank), failure, "{}: {why}", self.kernel);
    }

    /// First the last rank is missing, then the first: each test leaves other waits unmet.
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

    /// The other ranks send their inputs and give up before the first rank arrives: it waits for their
    /// results.
    fn ranks_that_leave_after_their_inputs(&self) {
        let world = self.world();
        let mut launches = self.launches(&world, 0);
        let first = launches.remove(0);
        self.run_briefly(&world, launches);
        self.run_briefly(&world, vec![first]);
        self.check(&world, 0, FA_TIMED_OUT, "ranks that leave");
        // The rank's own slice has been reduced.
        assert!(world.outputs[0].read().iter().any(|&byte| byte != 0xA5), "{}", self.kernel);
    }

    /// Another block has already given up: the launch ends long before its limit.
    fn what_its_process_says(&self) {
        use std::mem::offset_of;
        for (field, value, failure) in [
            (offset_of!(FaStatus, abort), 1, FA_ABORTED),
            (offset_of!(FaStatus, gone), 0xFE, FA_PEER_GONE),
            (offset_of!(FaStatus, failure), FA_TIMED_OUT, FA_TIMED_OUT),
            (offset_of!(FaStatus, failure), FA_UNKNOWN_BUFFER, FA_UNKNOWN_BUFFER),
        ] {
            let mut world = self.world();
            let at = offset_of!(FaRegionHead, status) + field;
            world.regions[0].write(at, &value.to_le_bytes());
            let launches = self.launches(&world, 0);
            self.run(&world, &launches[..1]);
            self.check(&world, 0, failure, "what its process says");
        }
    }

    fn a_rank_that_makes_another_call(&self) {
        let world = self.world();
        let mut launches = self.launches(&world, 0);
        launches[self.ranks - 1].call.count += 1;
        self.run_briefly(&world, launches);
        self.check(&world, 0, FA_MISMATCH, "another call");
    }

    fn a_launch_after_one_that_failed(&self) {
        let mut world = self.world();
        world.regions[0].write(std::mem::offset_of!(FaRegionHead, failed), &1u32.to_le_bytes());
        let launches = self.launches(&world, 0);
        self.run(&world, &launches[..1]);
        assert!(world.outputs[0].read().iter().all(|&byte| byte == 0), "{}", self.kernel);
        self.check(&world, 0, FA_OK, "after one that failed");
    }

    /// Buffer numbers beyond the table, and without an address in the table.
    fn a_buffer_that_is_not_known(&self) {
        for id in [2, 5] {
            let world = self.world();
            let mut launches = self.launches(&world, id << FA_SOURCE_ID_SHIFT);
            launches.iter_mut().for_each(|launch| launch.buffer_count = 2);
            self.run_briefly(&world, launches);
            self.check(&world, 0, FA_UNKNOWN_BUFFER, "a buffer that is not known");
        }
    }

    /// A rank signals the first barrier, and does not know the others' buffers.
    fn a_rank_that_leaves_before_the_second_barrier(&self) {
        let world = self.world();
        let mut launches = self.launches(&world, 1 << FA_SOURCE_ID_SHIFT);
        launches[self.ranks - 1].buffer_count = 0;
        self.run_briefly(&world, launches);
        self.check(&world, self.ranks - 1, FA_UNKNOWN_BUFFER, "leaves");
        self.check(&world, 0, FA_TIMED_OUT, "left by another");
        // It has revoked its input: what the others read may have changed.
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
