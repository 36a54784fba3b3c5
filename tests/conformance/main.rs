//! Tests every device, bootstrap and algorithm with one suite: results must equal those of an oracle, bit for bit.
//!
//! `suite` contains the tests for all devices. Here it runs on the host with three ways to start and connect ranks:
//! threads with `Threads`, threads with `Local`, and processes with `Local`. `tests/mpi` includes it for processes
//! started by `mpirun`, and `tests/cuda` for GPUs. The other files test only the host.

// `Part::placement` is read only by devices that need the same placement on all ranks.
#[macro_use]
#[allow(dead_code)]
mod suite;

mod arguments;
mod conversions;
mod errors;
mod experts;
mod fused;
mod host;
mod instruction_sets;
mod leaks;
mod mixed;
mod planted;
mod properties;
mod quantized;
mod quantized_rows;
mod raw;
mod registrations;
mod row_shares;
mod sharded;
mod symmetric;
mod typed;

/// The suite on the host. Threads run all cases. The other worlds use the same kernels, so they run only the first
/// sizes of each case, and one in three of its calls.
mod worlds {
    use crate::host::HostDevice;
    use crate::suite::world::Launched;

    mod threads {
        use crate::suite::launch::InThreads;
        conformance! { |test| super::Launched::tiered(test, InThreads, super::HostDevice::default()) }
    }

    #[test]
    fn every_order_of_sockets() {
        let test = "worlds::every_order_of_sockets";
        let world = Launched::tiered(test, crate::suite::launch::InThreads, HostDevice::default());
        crate::suite::cases::every_order_of_sockets(&world);
    }

    mod local_threads {
        use crate::suite::launch::LocalThreads;
        conformance! { |test| super::Launched::reduced(test, LocalThreads, super::HostDevice::default()) }
    }

    mod local_processes {
        use crate::suite::launch::LocalProcesses;
        conformance! { |test| super::Launched::reduced(test, LocalProcesses::new(test), super::HostDevice::default()) }
    }

    /// Direct reads from the sender's process for messages of all sizes; the next module has no direct reads.
    mod direct_reads {
        use crate::suite::launch::LocalProcesses;
        conformance! { |test| {
            let processes = LocalProcesses::new(test).with("FAST_ALLREDUCE_DIRECT_READS", "1");
            super::Launched::reduced(test, processes, super::HostDevice::default())
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
