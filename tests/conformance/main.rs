//! One suite for every device, bootstrap and algorithm: results against an oracle, bit for bit.
//!
//! `suite` is what every device must do. Here it runs on the host over each way in which ranks can meet: threads by `Threads`,
//! threads by `Local`, processes by `Local`, and processes that `mpirun` started; `tests/cuda` includes it for GPUs. The other files are of the host alone.

// The part of a rank is read by devices whose ranks cannot differ.
#[macro_use]
#[allow(dead_code)]
mod suite;

mod arguments;
mod errors;
mod host;
mod instruction_sets;
mod leaks;
mod mixed;
#[cfg(feature = "mpi")]
mod mpirun;
mod planted;
mod properties;
mod raw;
mod registrations;
mod symmetric;
mod typed;

/// All cases where ranks are threads; elsewhere, where the kernels are the same, the first two sizes of each, and of its calls
/// one in three.
mod worlds {
    use crate::host::HostDevice;
    use crate::suite::world::Launched;

    mod threads {
        use crate::suite::launch::InThreads;
        conformance! { |_| Some(super::Launched::new(InThreads, super::HostDevice::default())) }
    }

    mod local_threads {
        use crate::suite::launch::LocalThreads;
        conformance! { |_| Some(super::Launched::some(LocalThreads, super::HostDevice::default(), 2, 3)) }
    }

    #[cfg(feature = "mpi")]
    mod mpirun {
        use crate::mpirun::Mpirun;
        conformance! { |_| Some(super::Launched::new(Mpirun, super::HostDevice::default())) }
    }

    mod local_processes {
        use crate::suite::launch::LocalProcesses;
        conformance! { |test| Some(super::Launched::some(LocalProcesses::new(test), super::HostDevice::default(), 2, 3)) }
    }
}
