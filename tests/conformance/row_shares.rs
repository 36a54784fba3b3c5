//! Tests fused reduce-scatters and gathers of rows on the host: typed calls, refused arguments, and ranks that differ
//! or do not come. Every shape is tested in `fused.rs`, where some calls are of this kind.

use std::time::Duration;

use fast_allreduce::{
    Collective, Communicator, DType, Error, Fused, GatheredRows, Host, Norm, RawFused, RawGatheredRows,
    RawQuantizedRows, Result, Scaling,
};

use crate::host::Build;
use crate::suite::launch::threads;
use crate::suite::scenario::Setup;

const RMS: Norm = Norm::Rms { epsilon: 0.0, unit_offset: false };

fn refused(result: Result<()>, name: &str) {
    assert!(
        matches!(&result, Err(Error::InvalidSetting { name: is, .. }) if *is == name),
        "{name}: {result:?}"
    );
}

/// Makes a call with this many elements for each rank, in rows of `hidden`, all of them 1.
fn ones(communicator: &Communicator<Host>, counts: &[usize], hidden: usize) -> Result<Vec<f32>> {
    let own = counts[communicator.rank()];
    let (mut residual, mut rows) = (vec![1.0_f32; own], vec![f32::NAN; own]);
    let fused = Fused::on_host(&mut residual).norm(RMS, hidden).rows(&mut rows);
    communicator.reduce_scatter_fused_v(&vec![1.0; counts.iter().sum()], fused, counts)?;
    assert_eq!(residual, vec![1.0 + communicator.world_size() as f32; own]);
    Ok(rows)
}

/// Tests each rank's own residual, which other ranks do not have, and scales placed as in a message of the own rows.
#[test]
fn typed_calls() {
    threads(3, |rank| {
        let communicator = Setup::default().build(&rank);
        let own = communicator.rank();
        // Rank 1 has no row.
        let counts = [32, 0, 64];
        let input: Vec<f32> = (0..96).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        let mut residual: Vec<f32> = (0..counts[own]).map(|i| if i % 2 == 0 { 4.0 } else { -5.0 }).collect();
        let mut scales = vec![9.0_f32; counts[own] / 32];
        let mut numbers = vec![9_i8; counts[own]];
        let fused = Fused::on_host(&mut residual).norm(RMS, 32);
        let fused = fused.quantized(Scaling::PerRow, &mut numbers, &mut scales);
        communicator.reduce_scatter_fused_v(&input, fused, &counts).unwrap();
        assert_eq!(residual, [7.0, -8.0].repeat(counts[own] / 2));
        let largest = 8.0 * (1.0 / 56.5_f32.sqrt());
        assert_eq!(scales, vec![largest / 127.0; counts[own] / 32]);
        assert_eq!(numbers, [111, -127].repeat(counts[own] / 2));
        // Without a norm, shares are any number of elements.
        let (counts, mut residual) = ([1, 3, 0], vec![own as f32; [1, 3, 0][own]]);
        communicator.reduce_scatter_fused_v(&[0.5_f32; 4], Fused::on_host(&mut residual), &counts).unwrap();
        assert_eq!(residual, vec![1.5 + own as f32; counts[own]]);
        // Equal shares, and rows that replace the own share of the input.
        let (mut data, mut residual) = ([2.0_f32; 12], [own as f32; 4]);
        let address = residual.as_mut_ptr() as u64;
        let rows = data[4 * own..].as_mut_ptr() as u64;
        let fused = RawFused {
            residual: address,
            residual_out: address,
            norm: RMS,
            hidden: 4,
            rows,
            ..RawFused::default()
        };
        let (of, at) = (Collective::ReduceScatterFused(&fused), data.as_mut_ptr());
        // SAFETY: all addresses are within arrays that only this thread has.
        unsafe { communicator.collective_raw(of, at.cast(), std::ptr::null_mut(), 4, DType::F32) }.unwrap();
        assert_eq!(residual, [6.0 + own as f32; 4]);
        let expected: Vec<f32> = (0..12).map(|i| if i / 4 == own { 1.0 } else { 2.0 }).collect();
        assert_eq!(data[..], expected);
    });
}

/// Tests that a rank without rows may pass null for all its memory, as an empty tensor has, and that the error says so
/// where that changes the call.
#[test]
fn a_rank_without_rows_has_no_memory() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let own = communicator.rank();
        let counts = [32, 0];
        let (mut residual, mut rows, mut numbers, mut scales) =
            ([1.0_f32; 32], [0.0; 32], [0_i8; 32], [0.0_f32]);
        let there = |address: u64| if own == 0 { address } else { 0 };
        let residual = there(residual.as_mut_ptr() as u64);
        let rows = there(rows.as_mut_ptr() as u64);
        let quantized = RawQuantizedRows {
            scaling: Scaling::PerRow,
            dtype: DType::I8,
            numbers: there(numbers.as_mut_ptr() as u64),
            scales: there(scales.as_mut_ptr() as u64),
            global: 0,
        };
        let call = |rows, quantized| {
            let fused = RawFused {
                residual,
                residual_out: residual,
                norm: RMS,
                hidden: 32,
                rows,
                quantized,
                ..RawFused::default()
            };
            let of = Collective::ReduceScatterFusedV(&fused, &counts);
            let input = [1.0_f32; 32];
            // SAFETY: all addresses are those of arrays that only this thread has; there are none for no rows.
            unsafe {
                communicator.collective_raw(of, input.as_ptr().cast(), std::ptr::null_mut(), 32, DType::F32)
            }
        };
        call(rows, None).unwrap();
        call(0, Some(quantized)).unwrap();
        let error = call(rows, Some(quantized)).unwrap_err().to_string();
        assert!(error.contains("per_row scales and in the type"), "{error}");
    });
}

/// Tests rows of 4 bits with scales in tiles: those of a rank begin at its own first row, and end in the middle of a
/// tile of all rows, or fill one.
#[test]
fn gathered_rows() {
    threads(3, |rank| {
        let communicator = Setup::default().build(&rank);
        let own = communicator.rank();
        for of_ranks in [[130, 0, 3], [128, 0, 5]] {
            let hidden = 80;
            let tiled = |row: usize, group: usize| {
                row / 128 * 1024 + group / 4 * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4
            };
            let value = |rank: usize, row: usize, group: usize| (rank * 100 + row * 5 + group) as u8;
            let mut scales = vec![0xEE_u8; Scaling::Nvfp4Tiled.scales(of_ranks[own], hidden)];
            for row in 0..of_ranks[own] {
                (0..5).for_each(|group| scales[tiled(row, group)] = value(own, row, group));
            }
            let numbers = vec![own as u8 + 1; of_ranks[own] * 40];
            let (mut all, mut all_scales) = (vec![9_u8; 133 * 40], vec![0xA5_u8; 2048]);
            let rows = GatheredRows::on_host(
                Scaling::Nvfp4Tiled,
                hidden,
                (&numbers, &scales),
                (&mut all, &mut all_scales),
            );
            communicator.all_gather_rows_v(rows, &of_ranks.map(|rows| rows * 40)).unwrap();
            assert_eq!(all, [vec![1; of_ranks[0] * 40], vec![3; of_ranks[2] * 40]].concat());
            let mut expected = vec![0xA5_u8; 2048];
            let owned = [0, 2].into_iter().flat_map(|rank| (0..of_ranks[rank]).map(move |row| (rank, row)));
            for (row, (rank, own)) in owned.enumerate() {
                (0..5).for_each(|group| expected[tiled(row, group)] = value(rank, own, group));
            }
            // Padding of tiles is not written.
            assert_eq!(all_scales, expected);
        }
    });
}

/// Tests gathers that are refused before the launch, and ranks that differ.
#[test]
fn gathers_that_are_refused() {
    threads(2, |rank| {
        let communicator = Setup { max_bytes: 16 << 10, ..Setup::default() }.build(&rank);
        let gather = |scaling, hidden: usize, own: usize, scales: usize| {
            let (numbers, floats) = (vec![1_i8; own], vec![1.0_f32; scales]);
            let (mut all, mut all_scales) = (vec![0_i8; 2 * own], vec![0.0; 2 * scales]);
            let (own, all) = ((&numbers[..], &floats[..]), (&mut all[..], &mut all_scales[..]));
            communicator.all_gather_rows(GatheredRows::on_host(scaling, hidden, own, all))
        };
        refused(gather(Scaling::Given, 4, 8, 2), "scaling");
        refused(gather(Scaling::Nvfp4, 16, 32, 2), "quantized type");
        refused(gather(Scaling::PerRow, 3, 8, 2), "hidden");
        refused(gather(Scaling::PerRow, 0, 8, 2), "hidden");
        refused(gather(Scaling::PerRow, 4, 8, 3), "scales");
        refused(gather(Scaling::PerRow, 16384, 16384, 1), "hidden");
        let (numbers, scales, mut all, mut wrong) = ([1_i8; 4], [1_u8], [0_i8; 8], [0_u8; 2]);
        let rows = GatheredRows::on_host(Scaling::PerRow, 4, (&numbers, &scales), (&mut all, &mut wrong));
        refused(communicator.all_gather_rows(rows), "scales");
        // The scales may not overlap with the numbers.
        let at = all.as_mut_ptr();
        let rows = RawGatheredRows {
            scaling: Scaling::PerGroup,
            hidden: 4,
            scales: numbers.as_ptr() as u64,
            all_scales: at as u64,
        };
        let (of, from) = (Collective::AllGatherRows(&rows), numbers.as_ptr());
        // SAFETY: a refused call reads and writes nothing.
        let result = unsafe { communicator.collective_raw(of, from.cast(), at.cast(), 4, DType::I8) };
        assert!(matches!(result, Err(Error::InvalidPointer { .. })), "{result:?}");
        gather(Scaling::PerRow, 4, 8, 2).unwrap();
        let hidden = [4, 8][communicator.rank()];
        let error = gather(Scaling::PerRow, hidden, 8, 8 / hidden).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Disagreement { .. }), "{text}");
        for fact in
            ["all_gather_rows of 8 i8", "rows of 4 with per_row scales", "rows of 8 with per_row scales"]
        {
            assert!(text.contains(fact), "{text}");
        }
    });
}

/// Tests arguments that are refused before the launch; the communicator still works.
#[test]
fn bad_arguments_are_refused() {
    threads(2, |rank| {
        let communicator = Setup { max_bytes: 16 << 10, ..Setup::default() }.build(&rank);
        let own = communicator.rank();
        refused(ones(&communicator, &[4, 6], 4).map(drop), "hidden");
        refused(ones(&communicator, &[4, 4, 0], 4).map(drop), "counts");
        refused(ones(&communicator, &[2049, 2049], 2049).map(drop), "hidden");
        assert_eq!(ones(&communicator, &[2048, 2048], 2048).unwrap(), [1.0; 2048]);
        let (mut residual, mut rows, mut sum) = ([0.0_f32; 4], [0.0; 4], [0.0; 4]);
        let fused = Fused::on_host(&mut residual).norm(RMS, 4).rows(&mut rows).sum(&mut sum);
        refused(communicator.reduce_scatter_fused(&[1.0; 8], fused), "sum");
        let short = communicator.reduce_scatter_fused(&[1.0; 7], Fused::on_host(&mut residual));
        assert!(matches!(short, Err(Error::LengthMismatch { input: 8, output: 7 })), "{short:?}");
        let fused = Fused::on_host(&mut residual).norm(RMS, 4).rows(&mut rows);
        let other = communicator.reduce_scatter_fused_v(&[1.0; 8], fused, &[8 * own, 8 - 8 * own]);
        assert!(matches!(other, Err(Error::LengthMismatch { .. })), "{other:?}");
        // Rows may not replace the share of another rank.
        let (mut data, address) = ([1.0_f32; 8], residual.as_mut_ptr() as u64);
        let rows = data[4 * (1 - own)..].as_mut_ptr() as u64;
        let fused = RawFused {
            residual: address,
            residual_out: address,
            norm: RMS,
            hidden: 4,
            rows,
            ..RawFused::default()
        };
        let (of, at) = (Collective::ReduceScatterFused(&fused), data.as_mut_ptr());
        // SAFETY: a refused call reads and writes nothing.
        let result =
            unsafe { communicator.collective_raw(of, at.cast(), std::ptr::null_mut(), 4, DType::F32) };
        assert!(matches!(result, Err(Error::InvalidPointer { which: "rows", .. })), "{result:?}");
        assert_eq!(ones(&communicator, &[0, 8], 4).unwrap(), vec![1.0; 8 * own]);
    });
}

/// Tests ranks whose calls differ: in the row length, and in counts with equal sums.
#[test]
fn ranks_that_differ() {
    for difference in 0..3 {
        threads(2, |rank| {
            let communicator = Setup::default().build(&rank);
            let is_second = communicator.rank() == 1;
            let own: &[usize] = if difference == 1 && is_second { &[12, 4] } else { &[4, 12] };
            let hidden = if difference == 0 && is_second { 2 } else { 4 };
            let error = match (difference, is_second) {
                (2, true) => communicator.barrier(),
                _ => ones(&communicator, own, hidden).map(drop),
            };
            let error = error.unwrap_err();
            assert!(matches!(error, Error::Disagreement { .. }), "{difference}: {error:?}");
            let text = error.to_string();
            let facts = [
                ["rms norm, rows of 4", "rms norm, rows of 2"],
                ["reduce_scatter_fused_v of 16 f32", "counts by rank with the digest"],
                ["reduce_scatter_fused_v", "barrier"],
            ];
            assert!(facts[difference].iter().all(|fact| text.contains(fact)), "{text}");
        });
    }
}

/// Tests that a rank that does not call is named, also by ranks without rows.
#[test]
fn a_rank_that_does_not_come() {
    threads(3, |rank| {
        let timeout = Duration::from_millis(300);
        let communicator = Setup { timeout, ..Setup::default() }.build(&rank);
        let counts = [128, 64, 0];
        let call = || ones(&communicator, &counts, 64);
        assert_eq!(call().unwrap(), vec![1.0; counts[communicator.rank()]]);
        if communicator.rank() == 1 {
            // Later than the others' timeout. What this rank reads may already be staged.
            std::thread::sleep(3 * timeout);
            assert!(call().map_or(true, |rows| rows == [1.0; 64]));
            return;
        }
        let error = call().unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
        assert_eq!(call().unwrap_err(), error);
    });
}
