//! Calls of `all_reduce_fused`, with a residual and an RMSNorm; and of other forms: norms, quantised rows, shares.

use std::time::Instant;

use fast_allreduce::{Error, Fused};

use super::check::{Defects, Label};
use super::draw::Call;
use super::memory::{Memories, Window};
use super::rank::{round_number, Member, Rank};
use crate::arguments::{self, Form};
use crate::failure::Failure;
use crate::harness::check::count_changed;
use crate::harness::forms::{Buffers, By};
use crate::harness::fused::check::{fill_residual, fill_weight, inputs, judge, wrong_sums, Judged, Promise};
use crate::harness::norm::{Float, NORM};

/// Most elements of a form's message: the reference is scalar.
const MOST_OF_FORM: usize = 32 << 10;

/// Returns whether an error refuses rows that are too long for the region: they take `bytes` of it.
fn is_too_long(error: &Error, bytes: usize, max_bytes: usize) -> bool {
    /// More than packets of whole cache lines, and an aligned beginning of the scales, leave unused.
    const MOST_UNUSED: usize = 256;
    let refuses = |expected: &str| expected == "rows that fit the communicator's max_bytes";
    matches!(error, Error::InvalidSetting { name: "hidden", expected, .. } if refuses(expected))
        && bytes + MOST_UNUSED > max_bytes
}

/// Returns the most bytes of the region that a row of a form takes.
fn staged<T>(form: &Form, hidden: usize, world_size: usize) -> usize {
    let bytes = hidden * size_of::<T>();
    match form.call {
        arguments::Call::Rows | arguments::Call::Experts => bytes,
        // A row for each rank, in whole cache lines.
        arguments::Call::Scattered => bytes.next_multiple_of(64) * world_size,
        // Numbers of at most a byte, and scales of at most a byte for each 32 of them, in whole words.
        arguments::Call::Gathered => hidden + (hidden.div_ceil(32)).next_multiple_of(4),
        // Sums of squares alone: no row is too long.
        arguments::Call::Sharded => 0,
    }
}

impl Rank<'_> {
    pub(super) fn call_fused<T: Float>(&mut self, member: &mut Member, call: &Call) -> Result<(), Failure> {
        let layout = call.layout(self.parameters.seed, self.bootstrap.rank());
        let (rank, world_size) = (member.communicator.rank(), member.communicator.world_size());
        let label = Label { kind: call.kind, algorithm: None };
        for time in 0..call.times {
            let round = round_number(call.number, time, member.color);
            let own = inputs(self.own_seed, round, world_size);
            let all = inputs(self.parameters.seed, round, world_size);
            let view = layout.output.unwrap_or_default();
            let memories = Memories::new(&mut self.private, &mut member.buffer);
            let (input, output) = memories.choose(layout.input, view);
            let [residual, weight, sum] = &mut self.kept;

            let input = Window::<T>::new(input, layout.input.offset, call.count);
            let output = Window::<T>::new(output, view.offset, call.count);
            let residual = Window::<T>::new(residual, view.offset, call.count);
            let weight = Window::<T>::new(weight, layout.input.offset, call.hidden);
            let sum = Window::<T>::new(sum, layout.input.offset, call.count);
            own.fill(rank, input.elements);
            fill_residual(&all, residual.elements);
            fill_weight(&all, weight.elements);
            let mut fused =
                Fused::on_host(residual.elements).norm(NORM, call.hidden).weight(&*weight.elements);
            if call.plain_sum {
                fused = fused.sum(sum.elements);
            }
            let communicator = &member.communicator;
            let start = Instant::now();
            let returned = match layout.output {
                Some(_) => communicator.all_reduce_fused(input.elements, fused.rows(output.elements)),
                None => communicator.all_reduce_fused_in_place(input.elements, fused),
            };
            match returned {
                // All ranks get this error.
                Err(error) if is_too_long(&error, call.hidden * size_of::<T>(), member.max_bytes) => {
                    return Ok(())
                }
                returned => returned?,
            }
            self.tally.time(start.elapsed(), call, &label);
            let (result, mut changed) = match layout.output {
                Some(_) => (&*output.elements, count_changed(&own, rank, input.elements)),
                None => (&*input.elements, 0),
            };
            changed += count_changed(&all, world_size + 1, weight.elements);
            let Judged { verdict, mut first } =
                judge(&all, weight.elements, residual.elements, result, Promise::SameBits);
            let windows = [&input, &output, &residual, &weight, &sum];
            let overwritten = windows.iter().map(|window| window.overwritten()).sum();
            let mut wrong = verdict.wrong;
            if call.plain_sum {
                let sums = wrong_sums(&all, sum.elements);
                wrong += sums.verdict.wrong;
                first = first.or(sums.first);
            }
            let defects = Defects::new(wrong, first, call.count, overwritten, changed);
            let bytes = (call.count * size_of::<T>()) as u64;
            self.count(member, call, &label, (&layout, bytes), defects);
        }
        Ok(())
    }

    /// Makes calls of a form, in private memory of their own.
    pub(super) fn call_form<T: Float>(
        &mut self,
        member: &mut Member,
        call: &Call,
        form: &Form,
    ) -> Result<(), Failure> {
        let (rank, world_size) = (member.communicator.rank(), member.communicator.world_size());
        let hidden = form.fitting(call.hidden, world_size);
        let rows = form.rows((call.count.min(MOST_OF_FORM) / hidden).max(1), world_size);
        let label = Label { kind: form.kind(), algorithm: None };
        for time in 0..call.times {
            let seed = (self.own_seed, round_number(call.number, time, member.color));
            let mut buffers = Buffers::<T>::new(form, (rows, hidden), (rank, world_size), seed)?;
            let before = member.communicator.counters().bytes;
            let start = Instant::now();
            match buffers.run(&member.communicator, By::Ours) {
                // All ranks get this error.
                Err(Failure::Library(error))
                    if is_too_long(&error, staged::<T>(form, hidden, world_size), member.max_bytes) =>
                {
                    return Ok(())
                }
                returned => returned?,
            }
            self.tally.time(start.elapsed(), call, &label);
            let defects = Defects::new(buffers.wrong(self.parameters.seed), None, rows * hidden, 0, 0);
            // Forms differ in what is their input; the calls alone are compared.
            let bytes = member.communicator.counters().bytes - before;
            let layout = call.layout(self.parameters.seed, self.bootstrap.rank());
            self.count(member, call, &label, (&layout, bytes), defects);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_that_do_not_fit_may_be_refused() {
        let refusal = |name, expected| Error::InvalidSetting { name, value: String::new(), expected };
        let too_long = refusal("hidden", "rows that fit the communicator's max_bytes");
        assert!(is_too_long(&too_long, 4097, 4096) && is_too_long(&too_long, 4000, 4096));
        assert!(!is_too_long(&too_long, 2048, 4096) && !is_too_long(&too_long, 0, 4096));
        assert!(!is_too_long(&refusal("hidden", "whole rows"), 1 << 20, 4096));
        assert!(!is_too_long(
            &refusal("epsilon", "rows that fit the communicator's max_bytes"),
            1 << 20,
            4096
        ));
        for form in Form::all() {
            let bytes = staged::<f32>(form, 1024, 3);
            assert!(bytes <= 3 * 4096, "{form}: {bytes}");
            assert_eq!(bytes == 0, form.call == arguments::Call::Sharded, "{form}");
        }
    }
}
