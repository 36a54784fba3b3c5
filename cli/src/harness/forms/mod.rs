//! Forms of fused calls on the host, next to the separate steps that they replace: norms, formats of quantised rows,
//! reduce-scatters, gathers of rows, experts' rows, and rows that are divided among ranks.
//!
//! A form is measured in turns: this crate's call; the separate steps, which are calls of this crate and loops in
//! vectorised Rust ([`steps`]); and the plain call alone.

mod buffers;
mod check;
mod quantise;
mod steps;

use std::cell::RefCell;

pub use self::buffers::Buffers;
pub use self::steps::By;
use super::device::MeasuredRank;
use super::measure::{Measure, Timings};
use super::norm::Float;
use crate::arguments::{Call, Form, FusedCase};
use crate::failure::Failure;

impl Measure<'_> {
    /// Times a form by everyone, in turns, and checks this crate's results. Collective.
    pub fn form<T: Float, E: MeasuredRank>(
        &mut self,
        form: &Form,
        measured: &E,
        rounds: u64,
        case: &FusedCase,
    ) -> Result<Timings, Failure> {
        let only = "forms are options of the host";
        let communicator = measured.on_host().expect(only);
        let (rank, world_size) = (self.session.rank(), self.session.world_size());
        let rows = form.rows(case.rows, world_size);
        self.round += 1;
        let seed = (self.seed, self.round);
        let mut buffers = Buffers::<T>::new(form, (rows, case.hidden), (rank, world_size), seed)?;
        let shared = RefCell::new(&mut buffers);
        let who = By::ALL.map(|by| (by, measured));
        let bytes = rows * case.hidden * size_of::<T>();
        let timings = self.time(
            &who,
            |(_, measured), call| measured.batch(call),
            rounds,
            bytes,
            1.0,
            |&(by, _)| shared.borrow_mut().run(communicator, by),
        )?;
        let timings = self.checked(&who, timings, &mut |measure: &mut Self, &(by, _)| {
            // Separate gathers have the same bits.
            let is_checked = by == By::Ours || by == By::Steps && form.call == Call::Gathered;
            if !is_checked || measure.effort.checks == 0 {
                return Ok(None);
            }
            let mut wrong = 0;
            for _ in 0..measure.effort.checks {
                measure.round += 1;
                let seed = (measure.seed, measure.round);
                let mut buffers = Buffers::<T>::new(form, (rows, case.hidden), (rank, world_size), seed)?;
                measure.session.fence()?;
                buffers.run(communicator, by)?;
                wrong += measure.session.total(buffers.wrong(measure.seed))?;
            }
            Ok(Some(super::check::Verdict { wrong, error: 0.0 }))
        })?;
        Ok(timings.into_iter().map(Some).collect())
    }
}
