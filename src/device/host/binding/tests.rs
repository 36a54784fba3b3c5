use std::sync::OnceLock;

use proptest::prelude::*;

use super::*;
use crate::bootstrap::Threads;
use crate::testing::damaged::damaged;
use crate::testing::machines;

const LIMIT: Duration = Duration::from_secs(10);

fn two_nodes() -> &'static Cpus {
    static CPUS: OnceLock<Cpus> = OnceLock::new();
    CPUS.get_or_init(|| Cpus::read(machines::SMALL.write().path(), None))
}

fn placed(bind: Bind, given: &[&[usize]], threads: usize) -> String {
    let given: Vec<_> = given.iter().map(|set| set.to_vec()).collect();
    place(bind, &given, threads, usize::MAX, two_nodes()).to_string()
}

const ALL: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7];

#[test]
fn each_thread_has_a_separate_core() {
    assert_eq!(placed(Bind::Core, &[ALL; 2], 1), "core (0, 1)");
    assert_eq!(placed(Bind::Core, &[ALL; 2], 3), "core (0-2, 4-6)");
    assert_eq!(placed(Bind::Core, &[ALL; 8], 1), "core (0, 1, 2, 3, 4, 5, 6, 7)");
    // The mask of a container or of taskset is respected.
    assert_eq!(placed(Bind::Core, &[&[1, 5, 6][..]; 2], 1), "core (1, 5)");
}

#[test]
fn each_rank_has_a_node() {
    assert_eq!(placed(Bind::Numa, &[ALL; 2], 4), "numa (0-3, 4-7)");
    assert_eq!(placed(Bind::Numa, &[ALL; 4], 2), "numa (0-3, 0-3, 4-7, 4-7)");
    assert_eq!(placed(Bind::Numa, &[&[2, 3, 5, 7][..]; 2], 1), "numa (2-3, [5,7])");
    assert_eq!(
        placed(Bind::Numa, &[&[2, 4, 5, 6][..]; 2], 2),
        "none (a NUMA node has fewer cores than its ranks have threads)"
    );
    assert_eq!(placed(Bind::Numa, &[&[1, 2, 3][..]; 3], 1), "numa (1-3, 1-3, 1-3)");
}

#[test]
fn a_launcher_has_bound_them_already() {
    assert_eq!(placed(Bind::Core, &[&[3], &[0]], 1), "launcher (3, 0)");
    assert_eq!(placed(Bind::Numa, &[&[0, 1], &[2, 3]], 4), "launcher (0-1, 2-3)");
    // The launcher gave each half of the machine to two ranks: they are placed within it.
    let (left, right): (&[usize], &[usize]) = (&[0, 1, 2, 3], &[4, 5, 6, 7]);
    assert_eq!(placed(Bind::Core, &[left, right, left, right], 1), "core (0, 4, 1, 5)");
    assert_eq!(not_requested(vec![vec![1], vec![0]]).to_string(), "launcher (1, 0)");
}

#[test]
fn ranks_that_outnumber_cores_share_them_evenly() {
    assert_eq!(placed(Bind::Core, &[&[0, 1][..]; 4], 1), "core (0, 0, 1, 1)");
    assert_eq!(placed(Bind::Core, &[&[2, 5][..]; 3], 1), "core (2, 2, 5)");
    assert_eq!(placed(Bind::Core, &[&[0][..]; 2], 1), "core (0, 0)");
    assert_eq!(placed(Bind::Core, &[ALL; 3], 3), "core (0-1, 2-4, 5-7)");
}

#[test]
fn ranks_that_do_not_fit_are_not_bound() {
    assert_eq!(
        placed(Bind::Core, &[&[0, 1], &[1, 2]], 1),
        "none (ranks may use different cores, of which some are the same)"
    );
    assert_eq!(
        placed(Bind::Core, &[&[], &[]], 1),
        "none (the system does not say which cores a rank may use)"
    );
    assert_eq!(placed(Bind::Core, &[ALL], 1), "none (one rank waits for no other)");
    let given = [ALL.to_vec(), ALL.to_vec()];
    let quota = place(Bind::Core, &given, 1, 1, two_nodes());
    assert_eq!(quota.to_string(), "none (2 threads, and a quota of 1 cores)");
    assert_eq!(not_requested(given.to_vec()).to_string(), "none (not asked for)");
}

/// Ranks that are threads bind only themselves. A second communicator gets the cores and the quota from before the
/// first binding.
#[test]
fn ranks_bind_where_they_agree() {
    let before = cores::listed(&cores::of_this_thread());
    let mut worlds = [Threads::world(2).unwrap(), Threads::world(2).unwrap()].map(Vec::into_iter);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let worlds: Vec<_> = worlds.iter_mut().map(|world| world.next().unwrap()).collect();
            let before = before.clone();
            scope.spawn(move || {
                let had = (cores::of_this_thread(), 1000);
                BOUND.with(|bound| bound.replace(Some((had.0.clone(), had.clone()))));
                for bootstrap in &worlds {
                    let given = bootstrap.all_gather(&given(), LIMIT).unwrap();
                    let mut binding = agree(Bind::Core, &given, 1, bootstrap, LIMIT).unwrap();
                    binding.bind_all(None, bootstrap, LIMIT).unwrap();
                    let now = cores::listed(&cores::of_this_thread());
                    match binding {
                        Binding::Bound { cores, .. } => assert_eq!(now, cores[rank]),
                        _ => assert_eq!(now, before, "{binding}"),
                    }
                    assert_eq!(given_with_quota(), had);
                }
            });
        }
    });
    assert_eq!(cores::listed(&cores::of_this_thread()), before);
}

/// The masks of all ranks decide, not the number of ranks and cores. Threads that are bound to a core each share it
/// only with others that are.
#[test]
fn ranks_know_who_shares_cores() {
    let sharing = |binding: Binding, masks: [u8; 3], threads| {
        let given = masks.map(|mask| vec![mask]);
        binding.sharing(&given, threads)
    };
    let unbound = Binding::default;
    assert_eq!(sharing(unbound(), [0b1111, 0b1111, 0b1111], 1), [false; 3]);
    assert_eq!(sharing(unbound(), [0b0001, 0b0010, 0b0010], 1), [false, true, true]);
    assert_eq!(sharing(unbound(), [0b1111, 0b1111, 0b1111], 2), [true; 3]);
    // Rank 2 has four cores for its two threads, the others two cores for four.
    assert_eq!(sharing(unbound(), [0b0011, 0b0011, 0b111100], 2), [true, true, false]);
    let bound =
        |to, cores: [&[usize]; 3]| Binding::Bound { to, cores: cores.map(<[usize]>::to_vec).to_vec() };
    assert_eq!(sharing(bound(Bind::Core, [&[0], &[0], &[1]]), [0b11; 3], 1), [true, true, false]);
    // Of rank 1's two threads one shares core 1.
    assert_eq!(sharing(bound(Bind::Core, [&[0, 1], &[1, 2], &[3, 4]]), [0; 3], 2), [true, true, false]);
    assert_eq!(sharing(bound(Bind::Numa, [&[0, 1], &[0, 1], &[2, 3]]), [0; 3], 2), [true, true, false]);
    let launcher = Binding::Launcher { cores: vec![vec![0, 1], vec![2], vec![3, 4]] };
    assert_eq!(sharing(launcher, [0; 3], 2), [false, true, false]);
}

/// Two of three ranks share a core and yield it; the third one spins if there is another core.
#[test]
fn only_ranks_that_share_a_core_yield_it() {
    use crate::device::sealed::Device as _;
    use crate::device::Host;
    use crate::Wait;
    let own = cores::listed(&cores::of_this_thread());
    let (first, last) = (own[0], own[own.len() - 1]);
    std::thread::scope(|scope| {
        let join = |(rank, bootstrap): (usize, Threads)| {
            scope.spawn(move || {
                cores::bind_this_thread(&[if rank == 0 { first } else { last }]).unwrap();
                let mut device = Host::new();
                device.join(&bootstrap, LIMIT).unwrap();
                (device.wait_mode(), device.shares_core, device.any_shares_core)
            })
        };
        let ranks: Vec<_> = Threads::world(3).unwrap().into_iter().enumerate().map(join).collect();
        let found: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        let of_first = if first == last { (Wait::Yield, true, true) } else { (Wait::Spin, false, true) };
        assert_eq!(found, [of_first, (Wait::Yield, true, true), (Wait::Yield, true, true)]);
    });
}

/// A core that does not exist simulates a refusal by the system: no rank is bound, and all report why.
#[test]
fn ranks_that_cannot_be_bound_say_so() {
    let [here, there] = Threads::world(2).unwrap().try_into().ok().unwrap();
    let own = cores::listed(&cores::of_this_thread());
    let unbound = |bootstrap: Threads| {
        let before = cores::listed(&cores::of_this_thread());
        let mut binding = Binding::Bound { to: Bind::Core, cores: vec![own[..1].to_vec(), vec![1023]] };
        binding.bind_all(None, &bootstrap, LIMIT).unwrap();
        assert_eq!(cores::listed(&cores::of_this_thread()), before);
        binding.to_string()
    };
    std::thread::scope(|scope| {
        let ranks = [scope.spawn(|| unbound(here)), scope.spawn(|| unbound(there))];
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), "none (refused on rank 1: Invalid argument)");
        }
    });
}

/// The plans of ranks that stay are made: a new rank takes their number of ranks of a socket, wherever it runs.
#[test]
fn a_new_rank_has_the_sockets_of_the_others() {
    use crate::device::sealed::Device as _;
    use crate::device::Host;
    let [here, there]: [Threads; 2] = Threads::world(2).unwrap().try_into().ok().unwrap();
    std::thread::scope(|scope| {
        let stays = scope.spawn(move || {
            let mut device = Host::new();
            device.socket_ranks[1] = Some(4);
            device.join_again(&there, LIMIT).unwrap();
        });
        let mut device = Host::new();
        device.join(&here, LIMIT).unwrap();
        assert_eq!(device.socket_ranks[1], Some(4));
        stays.join().unwrap();
    });
}

fn any_binding() -> impl Strategy<Value = Binding> {
    let cores = prop::collection::vec(prop::collection::vec(0..2000usize, 2), 3);
    prop_oneof![
        "[a-z ;,0-9]{0,30}".prop_map(|reason| Binding::Unbound { reason }),
        cores.clone().prop_map(|cores| Binding::Launcher { cores }),
        cores.clone().prop_map(|cores| Binding::Bound { to: Bind::Numa, cores }),
        cores.prop_map(|cores| Binding::Bound { to: Bind::Core, cores }),
    ]
}

proptest! {
    #[test]
    fn any_binding_round_trips(binding in any_binding()) {
        prop_assert_eq!(decode(encode(&binding).as_bytes(), 3, 2), Some(binding));
    }

    #[test]
    fn decoded_bindings_have_cores_for_all_ranks(
        bytes in damaged(vec![b"core;0,1;2,3;4,5".to_vec(), b"numa;0;1;2".to_vec()]),
    ) {
        match decode(&bytes, 3, 2) {
            Some(Binding::Bound { to: Bind::Core, cores }) => {
                prop_assert!(cores.len() == 3 && cores.iter().all(|own| own.len() == 2));
            }
            Some(Binding::Bound { cores, .. } | Binding::Launcher { cores }) => {
                prop_assert!(cores.len() == 3 && cores.iter().all(|own| !own.is_empty()));
            }
            _ => {}
        }
    }

    /// Every thread is on a core that its rank may use, and no core has two threads more than another.
    #[test]
    fn threads_are_distributed_evenly(
        set in prop::collection::btree_set(0..8usize, 1..=8), ranks in 2..5usize, threads in 1..4usize,
    ) {
        let set: Vec<_> = set.into_iter().collect();
        let binding = place(Bind::Core, &vec![set.clone(); ranks], threads, usize::MAX, two_nodes());
        let cores = binding.cores().unwrap();
        prop_assert!(cores.iter().all(|own| own.len() == threads));
        prop_assert!(cores.iter().flatten().all(|core| set.contains(core)));
        let all = ranks * threads;
        for core in &set {
            let here = cores.iter().flatten().filter(|other| *other == core).count();
            prop_assert!((all / set.len()..=all.div_ceil(set.len())).contains(&here));
        }
    }
}
