//! Tests of the agreement on plans, and of the limit on first calls.

use super::*;

#[test]
fn a_table_of_another_device_is_refused() {
    let [rank] = crate::bootstrap::Threads::world(1).unwrap().try_into().ok().unwrap();
    let table = Table::built_in(crate::plan::DeviceKind::Cuda);
    let error = Communicator::builder().table(table).build(crate::Host::new(), rank).unwrap_err();
    assert!(matches!(error, Error::InvalidSetting { name: "plan table", .. }), "{error}");
}

/// Rank 0 of two finds a socket of its peer that does not exist.
struct Misled(crate::bootstrap::Threads);

impl Bootstrap for Misled {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut all = self.0.all_gather(bytes, timeout)?;
        let name = b"fast-allreduce-";
        if self.rank() == 0 && all[1].windows(name.len()).any(|part| part == name) {
            all[1].iter_mut().last().into_iter().for_each(|last| *last ^= 1);
        }
        Ok(all)
    }
}

#[test]
fn ranks_whose_sockets_do_not_reach_each_other_are_told_the_remedy() {
    let ranks = crate::bootstrap::Threads::world(2).unwrap().into_iter().map(Misled).map(Arc::new);
    // No rank is dropped before both are done.
    let ranks: Vec<_> = ranks.collect();
    std::thread::scope(|scope| {
        for rank in &ranks {
            scope.spawn(|| {
                let error = Communicator::builder().build(crate::Host::new(), Arc::clone(rank)).unwrap_err();
                assert!(matches!(error, Error::Unavailable { .. }), "{error}");
                assert!(error.to_string().contains("FAST_ALLREDUCE_SOCKET_DIR"), "{error}");
            });
        }
    });
}

/// A rank whose bootstrap says these nodes.
struct On(crate::bootstrap::Threads, Vec<usize>);

impl Bootstrap for On {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.0.all_gather(bytes, timeout)
    }

    fn nodes(&self) -> Vec<usize> {
        self.1.clone()
    }
}

#[test]
fn ranks_compare_the_nodes_that_their_bootstraps_say() {
    let errors = |nodes: [Vec<usize>; 2]| {
        let ranks = crate::bootstrap::Threads::world(2).unwrap().into_iter().zip(nodes);
        // No rank is dropped before both are done.
        let ranks: Vec<_> = ranks.map(|(rank, nodes)| Arc::new(On(rank, nodes))).collect();
        std::thread::scope(|scope| {
            let build = |rank: &Arc<On>| Communicator::builder().build(crate::Host::new(), Arc::clone(rank));
            let made: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || build(rank))).collect();
            made.into_iter().map(|made| made.join().unwrap().map(drop).unwrap_err()).collect::<Vec<_>>()
        })
    };
    for error in errors([vec![0, 0], vec![0, 1]]) {
        assert!(matches!(error, Error::Disagreement { what: "the nodes of the ranks", .. }), "{error}");
    }
    for error in errors([vec![0], vec![0]]) {
        assert!(error.to_string().contains("1 nodes for 2 ranks"), "{error}");
    }
}

/// Builds two ranks. Returns the algorithm of each for 64 KiB, and the source of its plan.
fn planned(builders: [Builder; 2]) -> [(Algorithm, String); 2] {
    let ranks = crate::bootstrap::Threads::world(2).unwrap();
    let made = std::thread::scope(|scope| {
        let ranks = builders.into_iter().zip(ranks);
        let threads: Vec<_> = ranks
            .map(|(builder, rank)| {
                scope.spawn(|| {
                    let made = builder.build(crate::Host::new(), rank).unwrap();
                    let mut data = vec![1.0f32; 1000];
                    made.all_reduce_in_place(&mut data, crate::ReduceOp::Sum).unwrap();
                    assert_eq!(data, vec![2.0; 1000], "nothing is left of a measurement");
                    (made.plan(16 << 10, crate::DType::F32).algorithm, made.plan_source().to_string())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    made.try_into().unwrap()
}

#[test]
fn ranks_with_different_plans_use_the_lowest_ranks() {
    let uniform = |algorithm| {
        let choice = crate::plan::Choice::host(algorithm, 1, 4096, 65536);
        Table::uniform(crate::plan::DeviceKind::Host, choice).unwrap()
    };
    let builder = Communicator::builder;
    let [first, second] = planned([
        builder().table(uniform(Algorithm::TwoShotPush)),
        builder().table(uniform(Algorithm::OneShotPush)),
    ]);
    assert_eq!(first, second);
    let said = "given by the program, from rank 0; rank 1 proposed another";
    assert_eq!(first, (Algorithm::TwoShotPush, said.to_owned()));
    // A table that the program sets takes precedence over one that was found.
    let [first, second] = planned([builder(), builder().table(uniform(Algorithm::OneShotPush))]);
    assert_eq!(first, second);
    assert_eq!(first.0, Algorithm::OneShotPush);
}

#[test]
fn ranks_measure_if_all_may_and_the_cpu_is_unknown() {
    let is_unknown = plan::CpuMake::of(&plan::Machine::host()).is_none();
    let table = Table::built_in(crate::plan::DeviceKind::Host);
    for calibrate in [[true, true], [true, false], [false, false]] {
        let [first, second] = planned(calibrate.map(|may| Communicator::builder().calibrate(may)));
        assert_eq!(first, second, "whether it was measured or not");
        let is_measured = first.1.contains("a line takes");
        assert!(!is_measured || is_unknown && calibrate == [true, true], "{first:?}");
    }
    let [first, second] = planned([true, true].map(|_| Communicator::builder().table(table.clone())));
    assert_eq!((first.clone(), first.0), (second, Algorithm::TwoShotPull));
}

/// A limit that calls of ranks that are in time keep on a busy machine, and the delay of the late rank.
const SHORT: Duration = Duration::from_secs(2);
const LATE: Duration = Duration::from_secs(5);

/// Two ranks make three equal calls, and the second comes late to call number `late`. Returns the first rank's results.
fn waited_for(builder: Builder, late: usize) -> Vec<Result<()>> {
    let ranks = crate::bootstrap::Threads::world(2).unwrap();
    let all = std::thread::scope(|scope| {
        let threads = ranks.into_iter().enumerate().map(|(rank, bootstrap)| {
            let builder = builder.clone();
            scope.spawn(move || {
                let made = builder.build(crate::Host::new(), bootstrap).unwrap();
                // Neither of these waits for the other rank.
                made.all_reduce_in_place(&mut [0.0f32; 0], crate::ReduceOp::Sum).unwrap();
                made.send_recv(&[1u32], rank, &mut [0], rank, 0).unwrap();
                let call = |number| {
                    if (rank, number) == (1, late) {
                        std::thread::sleep(LATE);
                    }
                    made.all_reduce_in_place(&mut [1.0f32; 10], crate::ReduceOp::Sum)
                };
                (1..=3).map(call).collect::<Vec<_>>()
            })
        });
        threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    all.into_iter().next().unwrap()
}

#[test]
fn the_first_call_with_a_rank_has_its_own_limit() {
    let builder = || Communicator::builder().timeout(SHORT);
    let patient = || builder().first_call_timeout(Duration::from_secs(60));
    // Concurrently, because they sleep most of the time.
    std::thread::scope(|scope| {
        for builder in [patient(), builder().first_call_timeout(None)] {
            scope.spawn(|| assert_eq!(waited_for(builder, 1), vec![Ok(()); 3]));
        }
        // Without a separate limit, the first call has the limit of all calls.
        for (builder, late) in [(builder(), 1), (patient(), 2), (patient(), 3)] {
            scope.spawn(move || {
                let results = waited_for(builder, late);
                assert!(results[..late - 1].iter().all(Result::is_ok), "{late}: {results:?}");
                let Err(Error::Timeout { missing, waited, .. }) = &results[late - 1] else {
                    panic!("{late}: {results:?}")
                };
                assert_eq!((missing.as_slice(), *waited), (&[1][..], SHORT), "{late}");
            });
        }
    });
}
