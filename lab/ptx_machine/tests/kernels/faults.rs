//! Launches that a GPU would trap on.

use fast_allreduce_ptx_machine::{Fault, Program};

use crate::abi::*;
use crate::world::World;

tests! {
    crate::program => memory_that_is_not_there, a_misaligned_address, a_block_that_is_too_large;
}

const KERNEL: &str = "one_shot_push_f32_sum_w2";

fn memory_that_is_not_there(program: &Program) {
    if crate::is_left_out(program, KERNEL) {
        return;
    }
    let world = World::new(2, 4096);
    let input = world.inputs[0].address();
    world.memory.plain.lock().unwrap().retain(|range| range.low != input);
    let launch = world.launch_of(0, FA_ONE_SHOT_PUSH, FA_F32, 64);
    let error = world.run_one(program, KERNEL, (1, 32), &launch, 0).unwrap_err();
    assert_eq!(error.fault, Fault::IllegalAddress, "{error}");
    let text = error.to_string();
    for part in [
        "one_shot_push_f32_sum_w2",
        "PTX line ",
        "core/",
        "block [0, 0, 0]",
        "thread 0",
        &format!("{input:#x}"),
    ] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

fn a_misaligned_address(program: &Program) {
    if crate::is_left_out(program, KERNEL) {
        return;
    }
    let world = World::new(2, 4096);
    let mut launch = world.launch_of(0, FA_ONE_SHOT_PUSH, FA_F32, 64);
    launch.input += 4;
    let error = world.run_one(program, KERNEL, (1, 32), &launch, 0).unwrap_err();
    assert_eq!(error.fault, Fault::Misaligned, "{error}");
}

fn a_block_that_is_too_large(program: &Program) {
    if crate::is_left_out(program, KERNEL) {
        return;
    }
    let world = World::new(2, 4096);
    let launch = world.launch_of(0, FA_ONE_SHOT_PUSH, FA_F32, 64);
    let error = world.run_one(program, KERNEL, (1, 1024), &launch, 0).unwrap_err();
    assert_eq!(error.fault, Fault::Launch, "{error}");
}
