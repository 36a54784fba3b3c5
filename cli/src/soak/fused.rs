//! Calls of `all_reduce_fused`, with a residual and an RMSNorm; and of other forms: norms, quantised rows, shares.

use std::time::Instant;

use fast_allreduce::{Error, Fused};

use super::check::{Defects, Label};
use super::draw::{Call, SHORT_ROW};
use super::memory::{Memories, Window};
use super::rank::{round_number, Member, Rank};
use crate::arguments::Form;
use crate::failure::Failure;
use crate::harness::check::count_changed;
use crate::harness::forms::{Buffers, By};
use crate::harness::fused::check::{fill_residual, fill_weight, inputs, judge, wrong_sums, Judged, Promise};
use crate::harness::norm::{Float, NORM};

/// Most elements of a form's message: the reference is scalar.
const MOST_OF_FORM: usize = 32 << 10;

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
                Err(Error::InvalidSetting { name: "hidden", .. }) if call.hidden > SHORT_ROW => return Ok(()),
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
                Err(Failure::Library(Error::InvalidSetting { name: "hidden", .. }))
                    if hidden * world_size > SHORT_ROW =>
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
