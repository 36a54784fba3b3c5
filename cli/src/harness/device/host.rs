//! The CPU: buffers are slices, calls return when they have ended, and times are of the system's clock.

use std::hint::black_box;
use std::ops::{Deref, DerefMut};
use std::time::Instant;

use fast_allreduce::plan::Table;
#[cfg(feature = "mpi")]
use fast_allreduce::{bootstrap, hierarchical::MpiNodes, Hierarchical, InterNode as _};
use fast_allreduce::{Algorithm, Buffer, Builder, Communicator, DType, Fused, Host, Wait};

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
    world: World,
    /// The requested wait mode.
    wait: Wait,
    workers: usize,
}

/// What makes the calls.
enum World {
    OneNode(Box<Communicator<Host>>),
    #[cfg(feature = "mpi")]
    Nodes(Box<Hierarchical<Host, MpiNodes>>),
}

impl World {
    /// Makes the communicator, or on several nodes those of each node and the engine between them. Collective.
    fn new(
        session: &Session,
        device: Host,
        builder: Builder,
        timeout: std::time::Duration,
    ) -> Result<Self, Failure> {
        #[cfg(feature = "mpi")]
        if session.nodes() > 1 {
            let all = mpi::topology::SimpleCommunicator::world();
            let local = builder.build(device, bootstrap::Mpi::of_node(&all)?)?;
            let engine = MpiNodes::from_communicator(&all, local.rank())?.timeout(timeout);
            return Ok(Self::Nodes(Box::new(Hierarchical::new(local, engine)?)));
        }
        #[cfg(not(feature = "mpi"))]
        let _ = timeout;
        Ok(Self::OneNode(Box::new(session.build(device, builder)?)))
    }

    /// Reduces between all nodes; without an `input` in place.
    #[cfg(feature = "mpi")]
    fn all_reduce(
        world: &Hierarchical<Host, MpiNodes>,
        work: &Work,
        input: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), Failure> {
        let (count, dtype) = (work.elements(), work.dtype);
        let to = output[..work.bytes(count)].as_mut_ptr();
        let from = input.map_or(to.cast_const(), |input| input[..work.bytes(count)].as_ptr());
        // SAFETY: slices of this number of elements, borrowed for the call.
        Ok(unsafe { world.all_reduce_raw(from.cast(), to.cast(), count, dtype, work.op) }?)
    }
}

impl Cpu {
    /// Makes the communicator. Collective.
    pub fn new(session: &Session, options: &Bench, algorithm: Option<Algorithm>) -> Result<Self, Failure> {
        let settings = options.settings()?;
        let mut device = settings.host()?;
        if let Some(isa) = options.isa {
            device = device.isa(isa)?;
        }
        let builder = settings.builder()?.algorithm(algorithm);
        let world = World::new(session, device, builder, options.communicator.timeout)?;
        Ok(Self { world, wait: options.communicator.wait(), workers: options.communicator.workers() })
    }

    /// Makes a communicator with a plan to measure. Collective.
    pub fn planned(session: &Session, options: &Tune, plan: Table) -> Result<Self, Failure> {
        let settings = options.settings()?;
        let world =
            World::OneNode(Box::new(session.build(settings.host()?, settings.builder()?.table(plan))?));
        Ok(Self { world, wait: options.communicator.wait(), workers: options.communicator.workers() })
    }
}

impl MeasuredRank for Cpu {
    type Device = Host;
    type Memory = Memory;

    fn communicator(&self) -> &Communicator<Host> {
        match &self.world {
            World::OneNode(communicator) => communicator,
            #[cfg(feature = "mpi")]
            World::Nodes(world) => world.local(),
        }
    }

    #[cfg(feature = "mpi")]
    fn nodes(&self) -> usize {
        match &self.world {
            World::OneNode(_) => 1,
            World::Nodes(world) => world.engine().nodes(),
        }
    }

    fn on_host(&self) -> Option<&Communicator<Host>> {
        Some(self.communicator())
    }

    fn finish(&self) -> Result<(), Failure> {
        Ok(())
    }

    fn facts(&self) -> DeviceFacts {
        let device = self.communicator().device();
        DeviceFacts::Host {
            instruction_set: device.instruction_set().name(),
            cores: crate::facts::cores(),
            wait: self.wait.name(),
            wait_mode: device.wait_mode().name(),
            workers: self.workers,
            bind: device.binding().to_string(),
            region: self
                .communicator()
                .pages()
                .map_or_else(|error| error.to_string(), |pages| pages.to_string()),
        }
    }

    fn allocate(&self, dtype: DType, count: usize, registered: bool) -> Result<Memory, Failure> {
        let bytes = count * dtype.size();
        Ok(match registered {
            true => Memory::Registered(self.communicator().alloc(bytes)?),
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
        match &self.world {
            World::OneNode(communicator) => Ok(work.run(communicator, input, output)?),
            #[cfg(feature = "mpi")]
            World::Nodes(world) => World::all_reduce(world, work, Some(input), output),
        }
    }

    #[inline]
    fn start_in_place(&self, work: &Work, data: &mut Memory) -> Result<(), Failure> {
        match &self.world {
            World::OneNode(communicator) => Ok(work.run_in_place(communicator, data)?),
            #[cfg(feature = "mpi")]
            World::Nodes(world) => World::all_reduce(world, work, None, data),
        }
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
        Ok(self.communicator().all_reduce_fused(input, fused.weight(weight).rows(typed_mut(output)))?)
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
