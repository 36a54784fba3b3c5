//! The CPU: buffers are slices, calls return when they have ended, and times are of the system's clock.

use std::hint::black_box;
use std::ops::{Deref, DerefMut};
use std::time::Instant;

use fast_allreduce::plan::Table;
use fast_allreduce::{Algorithm, Buffer, Communicator, DType, Fused, Host, Wait};

use super::{Batch, Call, MeasuredRank, RowBuffers};
use crate::arguments::{Bench, Tune};
use crate::failure::Failure;
use crate::harness::memory::{typed, typed_mut, Lines};
use crate::harness::norm::{add_and_norm, instructions, Float, NORM};
use crate::harness::row::DeviceFacts;
use crate::harness::session::Session;
use crate::harness::work::Work;

/// A rank on the CPU.
pub struct Cpu {
    communicator: Communicator<Host>,
    /// The requested wait mode.
    wait: Wait,
    workers: usize,
}

impl Cpu {
    /// Makes the communicator. Collective.
    pub fn new(session: &Session, options: &Bench, algorithm: Option<Algorithm>) -> Result<Self, Failure> {
        let settings = options.settings()?;
        let mut device = settings.host()?;
        if let Some(isa) = options.isa {
            device = device.isa(isa)?;
        }
        let communicator = session.build(device, settings.builder()?.algorithm(algorithm))?;
        Ok(Self { communicator, wait: options.communicator.wait(), workers: options.communicator.workers() })
    }

    /// Makes a communicator with a plan to measure. Collective.
    pub fn planned(session: &Session, options: &Tune, plan: Table) -> Result<Self, Failure> {
        let settings = options.settings()?;
        let communicator = session.build(settings.host()?, settings.builder()?.table(plan))?;
        Ok(Self { communicator, wait: options.communicator.wait(), workers: options.communicator.workers() })
    }
}

impl MeasuredRank for Cpu {
    type Device = Host;
    type Memory = Memory;

    fn communicator(&self) -> &Communicator<Host> {
        &self.communicator
    }

    fn on_host(&self) -> Option<&Communicator<Host>> {
        Some(&self.communicator)
    }

    fn facts(&self) -> DeviceFacts {
        let device = self.communicator.device();
        DeviceFacts::Host {
            instruction_set: device.instruction_set().name(),
            cores: crate::facts::cores(),
            wait: self.wait.name(),
            wait_mode: device.wait_mode().name(),
            workers: self.workers,
            bind: device.binding().to_string(),
            region: self
                .communicator
                .pages()
                .map_or_else(|error| error.to_string(), |pages| pages.to_string()),
        }
    }

    fn allocate(&self, dtype: DType, count: usize, registered: bool) -> Result<Memory, Failure> {
        let bytes = count * dtype.size();
        Ok(match registered {
            true => Memory::Registered(self.communicator.alloc(bytes)?),
            false => Memory::Private(Lines::new(bytes)?),
        })
    }

    fn write(&self, memory: &mut Memory, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), Failure> {
        fill(memory);
        Ok(())
    }

    fn read(&self, memory: &Memory, look: &mut dyn FnMut(&[u8])) -> Result<(), Failure> {
        look(memory);
        Ok(())
    }

    #[inline]
    fn start(&self, work: &Work, input: &Memory, output: &mut Memory) -> Result<(), Failure> {
        Ok(work.run(&self.communicator, input, output)?)
    }

    #[inline]
    fn start_in_place(&self, work: &Work, data: &mut Memory) -> Result<(), Failure> {
        Ok(work.run_in_place(&self.communicator, data)?)
    }

    fn copy(&self, from: &Memory, to: &mut Memory) -> Result<(), Failure> {
        black_box(&mut **to).copy_from_slice(black_box(from));
        Ok(())
    }

    fn ready_norm(&self) -> Result<String, Failure> {
        Ok(format!("in vectorised Rust ({})", instructions()))
    }

    #[inline]
    fn start_fused<T: Float>(&self, buffers: &mut RowBuffers<Memory>) -> Result<(), Failure> {
        let RowBuffers { input, residual, output, weight, .. } = buffers;
        let (input, weight) = (typed::<T>(input), typed::<T>(weight));
        let fused = Fused::on_host(typed_mut(residual)).norm(NORM, weight.len());
        Ok(self.communicator.all_reduce_fused(input, fused.weight(weight).rows(typed_mut(output)))?)
    }

    #[inline]
    fn start_norm<T: Float>(&self, buffers: &mut RowBuffers<Memory>) -> Result<(), Failure> {
        let RowBuffers { sum, residual, output, weight, .. } = buffers;
        let output = black_box(typed_mut::<T>(output));
        add_and_norm(typed(sum), typed_mut(residual), output, typed(weight));
        Ok(())
    }

    fn batch<'a>(&'a self, call: Call<'a>) -> Result<Batch<'a>, Failure> {
        Ok(Batch::new(1, move |batches| {
            let start = Instant::now();
            for _ in 0..batches {
                call()?;
            }
            Ok(start.elapsed().as_secs_f64())
        }))
    }
}

/// Private or registered memory, with the same alignment on every rank.
pub enum Memory {
    Private(Lines),
    Registered(Buffer<u8>),
}

impl Deref for Memory {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            Self::Private(lines) => lines,
            Self::Registered(buffer) => buffer,
        }
    }
}

impl DerefMut for Memory {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Private(lines) => lines,
            Self::Registered(buffer) => buffer,
        }
    }
}
