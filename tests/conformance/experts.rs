//! Tests inputs that are computed from experts' rows on the host: exact results, and what is refused. `fused.rs` has
//! experts in one of three messages.

use fast_allreduce::{Communicator, DType, Error, Experts, Fused, Host, Norm, RawExperts, RawFused, Result};

use crate::host::Build;
use crate::suite::launch::threads;
use crate::suite::scenario::Setup;

const RMS: Norm = Norm::Rms { epsilon: 0.0, unit_offset: false };

/// A rank's experts, without what is empty.
#[derive(Clone, Copy)]
struct Table<'a> {
    table: &'a [i32],
    top_k: usize,
    weights: &'a [f32],
    shared: &'a [f32],
    routed_scale: f32,
}

fn table(table: &[i32], top_k: usize) -> Table<'_> {
    Table { table, top_k, weights: &[], shared: &[], routed_scale: 1.0 }
}

impl Table<'_> {
    fn experts(&self) -> Experts<'_, Host, f32> {
        let mut experts = Experts::on_host(self.table, self.top_k).routed_scale(self.routed_scale);
        if !self.weights.is_empty() {
            experts = experts.weights(self.weights);
        }
        match self.shared {
            [] => experts,
            shared => experts.shared(shared),
        }
    }
}

/// Makes a call without a weight, and returns the new residual, which was zero.
fn call(
    communicator: &Communicator<Host>,
    input: &[f32],
    (tokens, hidden): (usize, usize),
    table: Table<'_>,
) -> Result<Vec<f32>> {
    let (mut residual, mut rows) = (vec![0.0; tokens * hidden], vec![7.0; tokens * hidden]);
    let fused = Fused::on_host(&mut residual).norm(RMS, hidden).experts(table.experts()).rows(&mut rows);
    match communicator.all_reduce_fused(input, fused) {
        Ok(()) => Ok(residual),
        Err(error) => {
            assert!(
                rows.iter().all(|&x| x == 7.0) && residual.iter().all(|&x| x == 0.0),
                "memory of a refused call"
            );
            Err(error)
        }
    }
}

/// Tests rows that are gathered unchanged, rows without experts, and where weights, scale and shared expert apply.
#[test]
fn typed_calls() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let input = [1.0, 2.0, 10.0, 20.0, 100.0, 200.0].map(|x: f32| x * (1 + rank.rank()) as f32);
        let of = |tokens, table| call(&communicator, &input, (tokens, 2), table).unwrap();
        // Both ranks together have three times the rows of rank 0.
        assert_eq!(of(2, table(&[2, 0], 1)), [300.0, 600.0, 3.0, 6.0]);
        // Each rank has the experts of one row only, and more experts than tokens.
        let entries = if rank.rank() == 0 { [1, -1, -7, i32::MIN] } else { [-1, -1, 1, 2] };
        assert_eq!(of(2, table(&entries, 2)), [10.0, 20.0, 220.0, 440.0]);
        let (weights, shared) = ([0.5, 2.0, f32::NAN, f32::NAN], [1.0, 0.0, 0.0, 1.0]);
        let weighted = Table { weights: &weights, ..table(&[2, 1, -1, -1], 2) };
        // The weight of an entry that is negative is not used.
        assert_eq!(of(2, weighted), [210.0, 420.0, 0.0, 0.0]);
        let scaled = of(2, Table { routed_scale: 0.5, shared: &shared, ..weighted });
        assert_eq!(scaled, [107.0, 210.0, 0.0, 2.0]);
        // No experts on any rank.
        assert_eq!(call(&communicator, &[], (1, 4), table(&[-1; 3], 3)).unwrap(), [0.0; 4]);
        assert_eq!(call(&communicator, &input, (0, 2), table(&[], 3)).unwrap(), []);
    });
}

#[test]
fn nans_and_infinities() {
    threads(1, |rank| {
        let communicator = Setup::default().build(&rank);
        let input = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, 1.0, f32::MAX];
        let of = |entries: &[i32], weights: &[f32]| {
            let sum = call(&communicator, &input, (1, 1), Table { weights, ..table(entries, 2) }).unwrap()[0];
            // The bits of the NaN say that it is the canonical one.
            (sum, sum.to_bits() == 0x7FFF_FFFF)
        };
        assert_eq!(of(&[0, 4], &[1.0, 1.0]).0, f32::INFINITY);
        assert_eq!(of(&[5, 5], &[1.0, 1.0]).0, f32::INFINITY);
        assert!(of(&[5, 5], &[2.0, -2.0]).1, "infinities of both signs");
        for (entries, weights) in [([0, 1], [1.0, 1.0]), ([2, 3], [1.0, 1.0]), ([3, 4], [f32::INFINITY, 1.0])]
        {
            assert!(of(&entries, &weights).1, "{entries:?}");
        }
    });
}

/// Tests experts that do not exist, and other bad arguments: nothing is launched, memory is untouched, and the
/// communicator still works.
#[test]
fn bad_arguments_are_refused() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let refused = |input: &[f32], shape, experts, name: &str, has: &str| {
            let error = call(&communicator, input, shape, experts).unwrap_err();
            assert!(matches!(error, Error::InvalidSetting { name: is, .. } if is == name), "{error:?}");
            assert!(error.to_string().contains(has), "{error}");
        };
        let (input, weights) = ([1.0; 6], [1.0; 4]);
        let of = |entries| table(entries, 2);
        refused(&input, (2, 2), of(&[0, 2, 3, 9]), "expert_table", "entry 2 is 3, of 3 rows");
        refused(
            &input,
            (2, 2),
            of(&[0, i32::MAX, -1, 0]),
            "expert_table",
            "entry 1 is 2147483647, of 3 rows",
        );
        refused(&[], (2, 2), of(&[-1, -1, -1, 0]), "expert_table", "entry 3 is 0, of 0 rows");
        refused(&input, (2, 2), of(&[0; 5]), "expert_table", "5 for 4 elements");
        refused(
            &input,
            (2, 2),
            Table { weights: &weights[..3], ..of(&[0; 4]) },
            "expert_table",
            "3 for 4 elements",
        );
        refused(&input[..5], (2, 2), of(&[0; 4]), "experts' rows", "5 elements, in rows of 2");
        refused(
            &input,
            (2, 2),
            Table { routed_scale: f32::NAN, ..of(&[0; 4]) },
            "routed_scale",
            "a finite number",
        );
        refused(&input, (2, 2), table(&[], 0), "top_k", "1 to 64");
        refused(&input, (2, 2), table(&[0; 130], 65), "top_k", "1 to 64");
        let shared = Table { shared: &input[..3], ..of(&[0; 4]) };
        let error = call(&communicator, &input, (2, 2), shared).unwrap_err();
        assert!(matches!(error, Error::LengthMismatch { input: 4, output: 3 }), "{error:?}");
        let (mut data, mut residual) = (input, [0.0; 4]);
        let fused = Fused::on_host(&mut residual).norm(RMS, 2).experts(Experts::on_host(&[0; 4], 2));
        let error = communicator.all_reduce_fused_in_place(&mut data, fused).unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { name: "experts' rows", .. }), "{error:?}");
        let fused = Fused::on_host(&mut residual).experts(Experts::on_host(&[-1; 8], 2));
        let error = communicator.all_reduce_fused(&[0.0; 0], fused).unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { name: "norm", .. }), "{error:?}");
        addresses(&communicator);
        assert_eq!(call(&communicator, &input, (2, 2), of(&[0, -1, 2, 1])).unwrap(), [2.0, 2.0, 4.0, 4.0]);
    });
}

fn addresses(communicator: &Communicator<Host>) {
    let mut memory = [0.0_f32; 64];
    let base = memory.as_mut_ptr() as u64;
    let at = |element: u64| base + 4 * element;
    // 2 rows of 4 elements from 3 experts' rows: 12 elements of input, 2 entries.
    let call = |table, weights, shared, rows, weights_dtype| {
        let experts = RawExperts { table, rows: 3, weights, weights_dtype, shared, ..RawExperts::default() };
        let (residual, experts) = (at(12), Some(experts));
        let fused = RawFused {
            residual,
            residual_out: residual,
            norm: RMS,
            hidden: 4,
            rows,
            experts,
            ..RawFused::default()
        };
        // SAFETY: all addresses are within `memory`, or refused.
        unsafe { communicator.all_reduce_fused_raw(base as *const _, 8, DType::F32, &fused) }
    };
    let (table, weights, shared, rows) = (at(20), at(22), at(24), at(32));
    let problems = [
        (call(0, weights, shared, rows, DType::F32), "expert_table"),
        (call(table + 2, weights, shared, rows, DType::F32), "expert_table"),
        (call(at(19), weights, shared, rows, DType::F32), "expert_table"),
        (call(table, weights + 1, shared, rows, DType::F32), "expert_weights"),
        (call(table, at(32), shared, rows, DType::F32), "expert_weights"),
        (call(table, weights, at(33), rows, DType::F32), "shared_expert"),
        (call(table, weights, shared, base, DType::F32), "rows"),
        (call(table, weights, shared, at(11), DType::F32), "rows"),
    ];
    for (result, name) in problems {
        assert!(
            matches!(result, Err(Error::InvalidPointer { which, .. }) if which == name),
            "{result:?}: {name}"
        );
    }
    let error = call(table, weights, shared, rows, DType::F64).unwrap_err();
    assert!(matches!(error, Error::InvalidSetting { name: "type of experts' weights", .. }), "{error:?}");
    call(table, 0, 0, rows, DType::F64).unwrap();
}

/// Tests that the other rank names the rank that has refused its own table.
#[test]
fn a_table_that_one_rank_refuses() {
    threads(2, |rank| {
        let timeout = std::time::Duration::from_secs(60);
        let communicator = Setup { timeout, ..Setup::default() }.build(&rank);
        let entries = [if rank.rank() == 1 { 3 } else { 0 }];
        let error = call(&communicator, &[1.0; 6], (1, 2), table(&entries, 1));
        // Rank 1 leaves, so that rank 0 does not wait until its time limit.
        let text = match error {
            Err(error) => error.to_string(),
            Ok(_) => panic!("a result from a table that was refused"),
        };
        assert!(text.contains(["rank 1", "entry 0 is 3, of 3 rows"][rank.rank()]), "{text}");
    });
}

/// Tests ranks that differ in whether there are experts.
#[test]
fn ranks_that_differ() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let (mut residual, mut rows) = ([0.0_f32; 4], [0.0; 4]);
        let fused = Fused::on_host(&mut residual).norm(RMS, 2).rows(&mut rows);
        let result = match rank.rank() {
            0 => communicator.all_reduce_fused(&[1.0; 4], fused),
            _ => communicator.all_reduce_fused(&[1.0; 6], fused.experts(Experts::on_host(&[0, 2], 1))),
        };
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Disagreement { .. }), "{error:?}");
        assert!(error.to_string().contains("from experts' rows"), "{error}");
    });
}
