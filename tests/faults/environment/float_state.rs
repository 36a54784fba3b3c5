//! Callers whose threads change rounding, flushing or trapping of floating-point operations: results have the same bits
//! as in the default state, and the caller's state is preserved.

use fast_allreduce::device::host::Isa;
use fast_allreduce::{Algorithm, Communicator, DType, Element, Fused, Host, Norm, ReduceOp, Transport};
use half::{bf16, f16};

use crate::fixtures::world::{builder, threads_on};
use crate::random::Random;

#[cfg(target_arch = "x86_64")]
mod state {
    use std::arch::asm;

    /// Flush-to-zero with denormals-are-zero, each rounding mode, and a trap on division by zero.
    pub const OTHERS: [u64; 5] = [0x9FC0, 0x3F80, 0x5F80, 0x7F80, 0x1D80];
    /// A trap on inexact results, and all traps.
    pub const TRAPPING: [u64; 2] = [0x0F80, 0x0000];

    pub fn get() -> u64 {
        let mut state = 0_u32;
        // SAFETY: stores MXCSR at a valid address.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut state) };
        // Without the flags of raised exceptions.
        u64::from(state) & !0x3F
    }

    pub fn set(state: u64) {
        let state = state as u32;
        // SAFETY: loads MXCSR with bits that all processors have. Only a call, which sets its own state, computes
        // before the test restores it.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &state) };
    }
}

#[cfg(target_arch = "aarch64")]
mod state {
    use std::arch::asm;

    /// Flush-to-zero, and each rounding mode.
    pub const OTHERS: [u64; 4] = [1 << 24, 1 << 22, 2 << 22, 3 << 22];
    /// Empty, because not all processors support traps.
    pub const TRAPPING: [u64; 0] = [];

    pub fn get() -> u64 {
        let state: u64;
        // SAFETY: only reads FPCR.
        unsafe { asm!("mrs {}, fpcr", out(reg) state) };
        state
    }

    pub fn set(state: u64) {
        // SAFETY: writes FPCR. Only a call, which sets its own state, computes before the test restores it.
        unsafe { asm!("msr fpcr, {}", in(reg) state) };
    }
}

/// Runs one allreduce in place on a thread in this state, and checks that the call preserves it.
fn reduce<T: Element>(communicator: &Communicator<Host>, data: &mut [T], op: ReduceOp, state: u64) {
    let before = state::get();
    state::set(state);
    let result = communicator.all_reduce_in_place(data, op);
    let after = state::get();
    state::set(before);
    result.unwrap();
    assert_eq!(after, state, "the caller's state must be preserved");
}

/// Returns the states of the three ranks for each call. In the first call all have the default.
fn states() -> Vec<[u64; 3]> {
    let default = state::get();
    let [first, second, ..] = state::OTHERS;
    let one = state::OTHERS.map(|other| [default, other, default]);
    [[default; 3]].into_iter().chain(one).chain([[first, second, default]]).collect()
}

/// Compares results between states. Sums of the inputs are rounded, and many inputs are subnormal; ranks' inputs differ
/// by a factor only.
fn same_bits<T: Element + PartialEq>(of: fn(f64) -> T, smallest: f64, bits: fn(T) -> u64, isa: Isa) {
    const COUNT: usize = 500;
    const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max];
    let algorithms =
        [Algorithm::OneShotPull, Algorithm::TwoShotPull, Algorithm::OneShotPush, Algorithm::Ring];
    for algorithm in algorithms {
        // The results of all calls, by rank.
        let results = threads_on(
            || Host::new().isa(isa).unwrap(),
            3,
            |_| builder().algorithm(algorithm),
            |communicator| {
                let rank = communicator.rank();
                let call = |op: ReduceOp, state: u64| {
                    let mut random = Random::fixed(rank as u64);
                    let mut data: Vec<T> = (0..COUNT)
                        .map(|_| of(random.below(4000) as f64 * smallest / 3.0 * (rank + 1) as f64))
                        .collect();
                    reduce(&communicator, &mut data, op, state);
                    data.into_iter().map(bits).collect::<Vec<u64>>()
                };
                OPS.map(|op| states().into_iter().map(|states| call(op, states[rank])).collect::<Vec<_>>())
            },
        );
        assert!(results.iter().all(|result| *result == results[0]), "{algorithm}");
        for (op, of_calls) in OPS.into_iter().zip(&results[0]) {
            let expected = &of_calls[0];
            assert!(expected.iter().any(|bits| *bits != expected[0]));
            for (states, result) in states().into_iter().zip(of_calls) {
                assert_eq!(result, expected, "{algorithm} {op} {states:x?}");
            }
        }
    }
}

#[test]
fn the_same_bits_whatever_the_state_of_the_callers() {
    for isa in Isa::supported() {
        same_bits::<f32>(
            |value| value as f32,
            f64::from(f32::from_bits(1)),
            |value| value.to_bits().into(),
            isa,
        );
        same_bits::<f64>(|value| value, f64::from_bits(1), f64::to_bits, isa);
        same_bits::<f16>(f16::from_f64, f16::from_bits(1).to_f64(), |value| value.to_bits().into(), isa);
        same_bits::<bf16>(bf16::from_f64, bf16::from_bits(1).to_f64(), |value| value.to_bits().into(), isa);
    }
}

/// Sums with quantised transport and with a norm. Each state accepts the smallest tolerance.
#[test]
fn quantized_and_fused_calls_whatever_the_state() {
    const COUNT: usize = 512;
    let states = || [state::get()].into_iter().chain(state::OTHERS).chain(state::TRAPPING);
    let tolerance = Transport::Int8.error_bound(DType::F32).unwrap();
    let results = threads_on(
        Host::new,
        2,
        |_| builder(),
        |communicator| {
            let rank = communicator.rank();
            let call = |others: u64| {
                let mut random = Random::fixed(rank as u64);
                let mut quantized: Vec<f32> = (0..COUNT).map(|_| random.below(4000) as f32 / 3.0).collect();
                let (mut normed, mut residual) = (quantized.clone(), vec![0.1_f32; COUNT]);
                let norm = Norm::Rms { epsilon: 1e-5, unit_offset: false };
                let before = state::get();
                let own = if rank == 0 { others } else { before };
                state::set(own);
                let first =
                    communicator.all_reduce_quantized_in_place(&mut quantized, Transport::Int8, tolerance);
                let second = communicator.all_reduce_fused_in_place(
                    &mut normed,
                    Fused::on_host(&mut residual).norm(norm, COUNT / 4),
                );
                let after = state::get();
                state::set(before);
                first.and(second).unwrap();
                assert_eq!(after, own, "the caller's state must be preserved");
                [quantized, normed, residual].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            states().map(call).collect::<Vec<_>>()
        },
    );
    assert_eq!(results[0], results[1]);
    for (state, result) in states().zip(&results[0]) {
        assert!(*result == results[0][0], "{state:x}");
    }
}

/// Numbers in errors are formatted in the caller's state.
#[test]
fn errors_do_not_trap() {
    const COUNT: usize = 8;
    for state in state::TRAPPING {
        let errors = threads_on(
            Host::new,
            2,
            |_| builder(),
            |communicator| {
                let subnormal = f32::from_bits(1000 + communicator.rank() as u32);
                let (mut data, mut residual) = ([1.0_f32; COUNT], [1.0_f32; COUNT]);
                let norm = Norm::Rms { epsilon: subnormal, unit_offset: false };
                let fused = Fused::on_host(&mut residual).norm(norm, COUNT);
                let before = state::get();
                state::set(state);
                let refused = [f32::NAN, subnormal].map(|tolerance| {
                    communicator.all_reduce_quantized_in_place(&mut data, Transport::Int8, tolerance)
                });
                let differ = communicator.all_reduce_fused_in_place(&mut data, fused);
                state::set(before);
                let [first, second] = refused.map(|result| result.unwrap_err().to_string());
                [first, second, differ.unwrap_err().to_string()]
            },
        );
        for [nan, subnormal, differ] in errors {
            assert!(nan.contains("NaN") && subnormal.contains("1.4"), "{nan}; {subnormal}");
            assert!(differ.contains("epsilon 1.401e-42"), "{differ}");
        }
    }
}
