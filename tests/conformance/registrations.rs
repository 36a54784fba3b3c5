//! Tests registered buffers that are created and dropped in any order, up to the maximum number.

use fast_allreduce::{Buffer, Communicator, Error, Host, ReduceOp, SymmetricMemory};

use crate::host::Build as _;
use crate::suite::launch::threads;
use crate::suite::random::Random;
use crate::suite::scenario::Setup;

/// Half of the table's rows; the other half is for inputs of captured calls.
const MOST: usize = 2048;

fn sums(communicator: &Communicator<Host>, buffer: &mut Buffer<u32>, salt: usize) {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let value = |rank: usize, at: usize| (rank * 31 + at * 7 + salt) as u32;
    buffer.iter_mut().enumerate().for_each(|(at, element)| *element = value(rank, at));
    let mut output = vec![u32::MAX; buffer.len()];
    communicator.all_reduce(buffer, &mut output, ReduceOp::Sum).unwrap();
    for (at, element) in output.into_iter().enumerate() {
        assert_eq!(element, (0..world).map(|rank| value(rank, at)).sum::<u32>(), "element {at}, {salt}");
    }
}

#[test]
fn the_rows_of_the_table_run_out_and_are_used_again() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let mut buffers: Vec<_> = (0..MOST).map(|_| communicator.alloc::<u32>(3).unwrap()).collect();
        for _ in 0..2 {
            let Err(error) = communicator.alloc::<u32>(3) else { panic!("there was room for one more") };
            let Error::Unavailable { what, reason } = &error else { panic!("{error}") };
            assert_eq!(what, "another registered buffer");
            assert!(reason.contains(&MOST.to_string()), "{error}");
        }
        // The communicator and all registered buffers still work.
        for at in [0, 1, MOST / 2, MOST - 1] {
            sums(&communicator, &mut buffers[at], at);
        }
        // Memory that is not registered takes no row.
        communicator.symmetric_memory::<u32>(3).unwrap().free().unwrap();
        for at in [MOST / 3, 0, MOST - 1] {
            drop(buffers.swap_remove(at.min(buffers.len() - 1)));
            let mut buffer = communicator.alloc::<u32>(5).unwrap();
            sums(&communicator, &mut buffer, at);
            buffers.push(buffer);
        }
        assert!(communicator.alloc::<u32>(3).is_err());
        buffers.clear();
        sums(&communicator, &mut communicator.alloc::<u32>(5).unwrap(), 1);
    });
}

/// Memory in one of its states.
enum Memory {
    Registered(Buffer<u32>),
    Symmetric(SymmetricMemory<u32>),
}

/// All ranks make the same steps in the same order, but each rank drops memory at a different time.
#[test]
fn registered_used_and_freed_in_any_order() {
    let random = Random::new("registered, used and freed in any order");
    for world in [2, 3] {
        threads(world, |rank| {
            let mut communicator = Setup::default().build(&rank);
            let (mut steps, mut own) = (random.fork(world), random.fork(100 + rank.rank()));
            let mut kept: Vec<Memory> = Vec::new();
            // Memory that all ranks are to drop, and that this rank has not dropped yet.
            let mut given_up: Vec<Memory> = Vec::new();
            for step in 0..400 {
                while !given_up.is_empty() && own.one_in(3) {
                    drop(given_up.swap_remove(own.below(given_up.len())));
                }
                let at = steps.below(kept.len().max(1));
                match steps.below(10) {
                    _ if kept.is_empty() || (kept.len() < 12 && steps.one_in(4)) => {
                        let count = 1 + steps.below(5000);
                        kept.push(match steps.one_in(2) {
                            true => Memory::Registered(communicator.alloc(count).unwrap()),
                            false => Memory::Symmetric(communicator.symmetric_memory(count).unwrap()),
                        });
                    }
                    0 | 1 => given_up.push(kept.swap_remove(at)),
                    2 | 3 => {
                        let other = match kept.swap_remove(at) {
                            Memory::Registered(buffer) => Memory::Symmetric(buffer.deregister().unwrap()),
                            Memory::Symmetric(memory) => Memory::Registered(memory.register().unwrap()),
                        };
                        kept.push(other);
                    }
                    4 if matches!(kept[at], Memory::Symmetric(_)) => {
                        let Memory::Symmetric(memory) = kept.swap_remove(at) else { unreachable!() };
                        memory.free().unwrap();
                    }
                    5 if steps.one_in(6) => {
                        // Remaining memory of the old communicator is dropped before or after it, at once or later.
                        let next = Setup::default().build(&rank);
                        let old = std::mem::replace(&mut communicator, next);
                        given_up.append(&mut kept);
                        if own.one_in(2) {
                            given_up.clear();
                        }
                        drop(old);
                    }
                    _ => {
                        if let Memory::Registered(buffer) = &mut kept[at] {
                            sums(&communicator, buffer, step);
                        }
                    }
                }
            }
        });
    }
}
