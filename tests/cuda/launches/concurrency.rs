//! One communicator, called from several threads on streams of their own: its calls come one after the other.

use fast_allreduce::{Algorithm, DType, ReduceOp};

use crate::fixtures::fixture::{MemoryKind, Message, Placement, Setup};
use crate::fixtures::gpu::gpu;
use crate::fixtures::threads::fixtures;
use crate::random::Random;

tests! {
    gpu => calls_from_two_threads;
}

/// Two threads of each rank make equal calls, so that their order is free; a launch that overtook its ordering would
/// run beside another one of its rank, and mix the epochs.
fn calls_from_two_threads() {
    let random = Random::new("launches::concurrency::calls_from_two_threads");
    for algorithm in Algorithm::DIRECT {
        fixtures(2, 1, Setup::with(algorithm), 4096, |fixture| {
            let message = Message::new(&mut random.fork(0), (DType::U32, ReduceOp::Sum), 200, 2);
            let places = [Placement::of(MemoryKind::Plain), Placement::of(MemoryKind::Pool)];
            places.iter().for_each(|&placement| fixture.prepare(&message, placement));
            fixture.stream.synchronize().unwrap();
            let streams = places.map(|_| fixture.communicator.device().context().new_stream().unwrap());
            fixture.communicator.barrier().unwrap();
            std::thread::scope(|scope| {
                for (stream, &placement) in streams.iter().zip(&places) {
                    let message = &message;
                    scope.spawn(move || {
                        for _ in 0..60 {
                            fixture.start(stream, message, placement).unwrap();
                        }
                        stream.synchronize().unwrap();
                    });
                }
            });
            places
                .iter()
                .for_each(|&place| fixture.report(&message, place, fixture.compare(&message, place)));
        });
    }
}
