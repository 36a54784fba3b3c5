//! Tests one communicator that several threads call on their own streams: its calls run one at a time.

use fast_allreduce::{Algorithm, DType, ReduceOp};

use crate::fixtures::fixture::{MemoryKind, Message, Placement, Setup};
use crate::fixtures::gpu::gpu;
use crate::fixtures::threads::fixtures;
use crate::random::Random;

tests! {
    gpu => calls_from_two_threads;
}

/// Two threads of each rank make equal calls, so their order does not matter. A launch that was not ordered after the
/// previous one would run concurrently with it, and corrupt the epochs.
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
            // The stream of the last call has to outlive the communicator.
            fixture.start(&fixture.stream, &message, places[0]).unwrap();
        });
    }
}
