//! The caller's code panics while a call is prepared: nothing has been sent, and the communicator remains usable.

use std::panic::{catch_unwind, AssertUnwindSafe};

use crate::fixtures::world::{builder, threads};

#[test]
fn a_panic_inside_a_group_sends_nothing() {
    threads(
        3,
        |_| builder(),
        |communicator| {
            let rank = communicator.rank();
            let [left, right] = [2, 1].map(|far| (rank + far) % 3);
            for round in 0..5u32 {
                let own = [100 * round + rank as u32; 2000];
                let mut received = [u32::MAX; 2000];
                // All ranks panic, or one of them, or none.
                let panics = round == 0 || round as usize == rank + 1;
                if panics {
                    let group = AssertUnwindSafe(|| {
                        communicator.group(|group| {
                            group.send(&own, right, 0).recv(&mut received, left, 0);
                            if panics {
                                std::panic::panic_any("the caller's own");
                            }
                            Ok(())
                        })
                    });
                    let payload = catch_unwind(group).unwrap_err();
                    assert_eq!(*payload.downcast_ref::<&str>().unwrap(), "the caller's own");
                    assert_eq!(received, [u32::MAX; 2000], "nothing must be received");
                }
                communicator
                    .group(|group| {
                        group.send(&own, right, 0).recv(&mut received, left, 0);
                        Ok(())
                    })
                    .unwrap();
                assert_eq!(received, [100 * round + left as u32; 2000]);
                let mut all = [0; 3];
                communicator.all_gather(&[rank as u32], &mut all).unwrap();
                assert_eq!(all, [0, 1, 2]);
            }
        },
    );
}
