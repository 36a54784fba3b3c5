//! Tests worlds whose ranks use different instruction sets: the results have the same bits as in any other world, also
//! for NaNs, zeros of both signs and subnormals.

use std::collections::BTreeSet;

use fast_allreduce::device::host::Isa;
use fast_allreduce::{CallKind, Collective, ReduceOp};

use crate::host::HostDevice;
use crate::suite::cases;
use crate::suite::launch::InThreads;
use crate::suite::message::Collective as Case;
use crate::suite::random::Random;
use crate::suite::world::{Launched, World};

/// Runs a case of the suite in one world for each instruction set, in which rank 0 uses that one.
fn in_mixed_worlds(case: fn(&dyn World), thin: usize) {
    let mut isas = Vec::from_iter(Isa::supported());
    println!("ranks use {isas:?} in turn");
    for _ in 0..isas.len() {
        case(&Launched::some(InThreads, HostDevice(isas.clone()), 4, thin));
        isas.rotate_left(1);
    }
}

#[test]
fn every_type_operation_and_direct_algorithm() {
    in_mixed_worlds(cases::every_type_operation_and_algorithm, 1);
}

#[test]
fn every_type_and_operation_in_the_order_of_other_algorithms() {
    in_mixed_worlds(cases::every_order, 1);
}

/// Fails if a collective of the library's table has no case here.
#[test]
fn the_suite_has_every_collective() {
    let mut random = Random::fixed(1);
    let own = (0..Case::OTHERS).map(|number| Case::other(number, &mut random, ReduceOp::Sum, 1, 1));
    let own: BTreeSet<_> =
        own.filter_map(|case| Some(case.call(0)?.kind())).chain([CallKind::AllReduce]).collect();
    let of = |kind: &&CallKind| Collective::of(**kind, ReduceOp::Sum, 0, &[1], [&[1], &[1]]).is_some();
    assert_eq!(own, CallKind::ALL.iter().filter(of).copied().collect());
}

#[test]
fn every_collective() {
    in_mixed_worlds(cases::every_collective, 1);
}
