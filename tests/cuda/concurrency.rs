//! One communicator, called from several threads on streams of their own: its calls come one after the other.

use fast_allreduce::{Algorithm, DType, ReduceOp};

use crate::gpu::gpu;
use crate::random::Random;
use crate::seat::{Kind, Message, Placement, Setup};
use crate::threads::seats;

tests! {
    gpu => calls_from_two_threads;
}

/// Two threads of each rank make equal calls, so that their order is free; a launch that overtook its ordering would run
/// beside another one of its rank, and mix the epochs.
fn calls_from_two_threads() {
    let random = Random::new("concurrency::calls_from_two_threads");
    for algorithm in Algorithm::DIRECT {
        seats(2, 1, Setup::with(algorithm), 4096, |seat| {
            let message = Message::new(&mut random.fork(0), (DType::U32, ReduceOp::Sum), 200, 2);
            let places = [Placement::of(Kind::Plain), Placement::of(Kind::Pool)];
            places.iter().for_each(|&placement| seat.prepare(&message, placement));
            seat.stream.synchronize().unwrap();
            let streams = places.map(|_| seat.communicator.device().context().new_stream().unwrap());
            seat.communicator.barrier().unwrap();
            std::thread::scope(|scope| {
                for (stream, &placement) in streams.iter().zip(&places) {
                    let message = &message;
                    scope.spawn(move || {
                        for _ in 0..60 {
                            seat.start(stream, message, placement).unwrap();
                        }
                        stream.synchronize().unwrap();
                    });
                }
            });
            places.iter().for_each(|&place| seat.report(&message, place, seat.compare(&message, place)));
        });
    }
}
