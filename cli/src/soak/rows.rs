//! Calls with a residual and an RMSNorm: made, and looked at as the others.

use std::time::Instant;

use fast_allreduce::{Error, Fused};
use fast_allreduce_oracle::number::Number;

use super::draw::{Call, View, SHORT_ROW};
use super::find::{Found, Made};
use super::memory::Window;
use super::rank::{halves, round_number, Rank, World};
use crate::failure::Failure;
use crate::harness::check::count_changed;
use crate::harness::norm::{Float, NORM};
use crate::harness::rms_norm::check::{
    fill_residual, fill_weight, inputs, judge, wrong_sums, Judged, Promise,
};

impl Rank {
    pub(super) fn rows<T: Float>(&mut self, world: &mut World, call: &Call) -> Result<(), Failure> {
        let placement = call.placement(self.range.seed, self.bootstrap.rank());
        let communicator = &world.communicator;
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        let made = Made { kind: call.kind, algorithm: None };
        for time in 0..call.times {
            let round = round_number(call.number, time, world.color);
            let (own, all) =
                (inputs(self.own_seed, round, world_size), inputs(self.range.seed, round, world_size));
            let [first, second] = &mut self.private;
            let (mut registered_input, mut registered_output) = halves(&mut world.buffer);
            let place =
                |view: View, registered: &mut Option<_>| registered.take().filter(|_| view.is_registered);
            let input = place(placement.input, &mut registered_input).unwrap_or(first);
            let view = placement.output.unwrap_or(View { is_registered: false, offset: 0 });
            let output = place(view, &mut registered_output).unwrap_or(second);
            let [residual, weight, sum] = &mut self.kept;

            let input = Window::<T>::new(input, placement.input.offset, call.count);
            let output = Window::<T>::new(output, view.offset, call.count);
            let residual = Window::<T>::new(residual, view.offset, call.count);
            let weight = Window::<T>::new(weight, placement.input.offset, call.hidden);
            let sum = Window::<T>::new(sum, placement.input.offset, call.count);
            own.fill(rank, input.elements);
            fill_residual(&all, residual.elements);
            fill_weight(&all, weight.elements);
            let mut fused =
                Fused::on_host(residual.elements).norm(NORM, call.hidden).weight(&*weight.elements);
            if call.plain_sum {
                fused = fused.sum(sum.elements);
            }
            let start = Instant::now();
            let returned = match placement.output {
                Some(_) => communicator.all_reduce_fused(input.elements, fused.rows(output.elements)),
                None => communicator.all_reduce_fused_in_place(input.elements, fused),
            };
            match returned {
                // The same on all ranks.
                Err(Error::InvalidSetting { name: "hidden", .. }) if call.hidden > SHORT_ROW => return Ok(()),
                returned => returned?,
            }
            self.tally.time(start.elapsed(), call, &made);
            let (result, mut changed) = match placement.output {
                Some(_) => (&*output.elements, count_changed(&own, rank, input.elements)),
                None => (&*input.elements, 0),
            };
            changed += count_changed(&all, world_size + 1, weight.elements) + weight.overwritten();
            let Judged { verdict, first } =
                judge(&all, weight.elements, residual.elements, result, Promise::SameBits);
            let overwritten =
                [&input, &output, &residual, &sum].iter().map(|window| window.overwritten()).sum();
            let (mut wrong, mut first) = (verdict.wrong, first);
            if call.plain_sum {
                let sums = wrong_sums(&all, sum.elements);
                wrong += sums.verdict.wrong;
                first = first.or(sums.first);
            }
            let found = Found::new(wrong, first, call.count, overwritten, changed);
            let bytes = (call.count * size_of::<T>()) as u64;
            world.calls += 1;
            world.bytes += bytes;
            self.tally.count(&made, <T as Number>::DTYPE, bytes);
            if let Some(found) = found {
                let told = format!(
                    "seed {}, {call}, of rank {rank} of {world_size} {placement}: {found}",
                    self.range.seed
                );
                self.tally.wrong.get_or_insert(told);
            }
        }
        Ok(())
    }
}
