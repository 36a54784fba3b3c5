//! One suite for every device, bootstrap and algorithm: results against an oracle, bit for bit.
//!
//! `suite` is what every device must do. Here it runs on the host over ways in which ranks can meet: threads by
//! `Threads`, threads by `Local` and processes by `Local`. `tests/mpi` includes it for processes that `mpirun`
//! started, `tests/cuda` for GPUs. The other files are of the host alone.

// The part of a rank is read by devices whose ranks cannot differ.
#[macro_use]
#[allow(dead_code)]
mod suite;

mod arguments;
mod conversions;
mod errors;
mod fused;
mod host;
mod instruction_sets;
mod leaks;
mod mixed;
mod planted;
mod properties;
mod quantized;
mod raw;
mod registrations;
mod symmetric;
mod typed;

/// All cases where ranks are threads; elsewhere, where the kernels are the same, the first sizes of each, and of its
/// calls one in three.
mod worlds {
    use crate::host::HostDevice;
    use crate::suite::world::Launched;

    mod threads {
        use crate::suite::launch::InThreads;
        conformance! { |test| super::Launched::tiered(test, InThreads, super::HostDevice::default()) }
    }

    mod local_threads {
        use crate::suite::launch::LocalThreads;
        conformance! { |test| super::Launched::beside(test, LocalThreads, super::HostDevice::default()) }
    }

    mod local_processes {
        use crate::suite::launch::LocalProcesses;
        conformance! { |test| super::Launched::beside(test, LocalProcesses::new(test), super::HostDevice::default()) }
    }

    /// Messages are read in the sender's process, whatever their size; and never.
    mod direct_reads {
        use crate::suite::launch::LocalProcesses;
        conformance! { |test| {
            let processes = LocalProcesses::new(test).with("FAST_ALLREDUCE_DIRECT_READS", "1");
            super::Launched::beside(test, processes, super::HostDevice::default())
        }; every_collective every_small_count_of_collectives every_boundary_of_collectives
            every_placement_of_collectives all_collectives_at_random }
    }

    mod no_direct_reads {
        use crate::suite::launch::LocalProcesses;
        conformance! { |test| {
            let processes = LocalProcesses::new(test).with("FAST_ALLREDUCE_DIRECT_READS", "0");
            super::Launched::some(processes, super::HostDevice::default(), 1, 3)
        }; every_collective every_boundary_of_collectives all_collectives_at_random }
    }
}
