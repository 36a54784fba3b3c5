//! Exchanges of memory files: undisturbed, with intruders, and with ranks that fail.

use std::fs::File;
use std::io::Write;
use std::process::Stdio;
use std::sync::Mutex;
use std::thread;

use nix::fcntl::{fcntl, FcntlArg, FdFlag};
use nix::sys::memfd::{memfd_create, MFdFlags};
use proptest::{collection, prelude::*};

use super::super::testing::{assert_released, is_alone, process, resources, LIMIT};
use super::super::{Local, Threads, UniqueId};
use super::*;
use crate::testing::damaged::damaged;

const SHORT: Duration = Duration::from_millis(200);

/// A memory file with `contents`.
fn memory_file(contents: &str) -> File {
    let mut file = File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap());
    file.write_all(contents.as_bytes()).unwrap();
    file
}

fn contents(rank: usize, round: usize) -> String {
    format!("rank {rank} in round {round}")
}

/// Exchanges in several rounds, and checks the received files.
fn exchange_rounds(bootstrap: &dyn Bootstrap, rounds: usize) {
    for round in 0..rounds {
        let own = memory_file(&contents(bootstrap.rank(), round));
        let received = exchange_descriptors(bootstrap, own.as_fd(), LIMIT).unwrap();
        assert_eq!(received.len(), bootstrap.world_size());
        // The barrier separates receiving from reading.
        bootstrap.barrier(LIMIT).unwrap();
        for (rank, descriptor) in received.into_iter().enumerate() {
            assert_eq!(descriptor.is_none(), rank == bootstrap.rank());
            let Some(descriptor) = descriptor else { continue };
            let flags = fcntl(&descriptor, FcntlArg::F_GETFD).unwrap();
            assert_eq!(flags, FdFlag::FD_CLOEXEC.bits());
            let expected = contents(rank, round);
            let mut bytes = vec![0; expected.len() + 1];
            let length = std::os::unix::fs::FileExt::read_at(&File::from(descriptor), &mut bytes, 0).unwrap();
            assert_eq!(String::from_utf8_lossy(&bytes[..length]), expected);
        }
    }
}

fn on_all<B: Bootstrap, T: Send>(ranks: &[B], rank: impl Fn(&B) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|bootstrap| scope.spawn(|| rank(bootstrap))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn local_world(world_size: usize) -> Vec<Local> {
    let id = &UniqueId::new().unwrap();
    thread::scope(|scope| {
        let connect = |rank| scope.spawn(move || Local::connect(id, rank, world_size, LIMIT).unwrap());
        let threads: Vec<_> = (0..world_size).map(connect).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A bootstrap that runs a function on the gathered addresses.
struct Intercepted<B, F>(B, F);

impl<B: Bootstrap, F: Fn(&mut Vec<Vec<u8>>) + Send + Sync> Bootstrap for Intercepted<B, F> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut gathered = self.0.all_gather(bytes, timeout)?;
        self.1(&mut gathered);
        Ok(gathered)
    }
}

#[test]
fn threads_exchange() {
    for world_size in (1..=5).chain([crate::MAX_RANKS]) {
        on_all(&Threads::world(world_size).unwrap(), |rank| exchange_rounds(rank, 10));
    }
}

#[test]
fn local_ranks_exchange() {
    for world_size in 1..=5 {
        on_all(&local_world(world_size), |rank| exchange_rounds(rank, 10));
    }
}

#[test]
fn processes_exchange() {
    let id = UniqueId::new().unwrap();
    let children: Vec<_> = (0..4)
        .map(|rank| {
            let mut command = process(module_path!(), "rank_in_a_process");
            command.env("FAST_ALLREDUCE_UNIQUE_ID", id.to_string());
            command.env("FAST_ALLREDUCE_RANK", rank.to_string()).env("FAST_ALLREDUCE_WORLD_SIZE", "4");
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
    }
}

/// One rank of `processes_exchange`. Does nothing if the environment names no world.
#[test]
#[ignore = "a process of other tests"]
fn rank_in_a_process() {
    let Some(local) = Local::from_env().unwrap() else {
        return;
    };
    exchange_rounds(&local, 20);
}

/// Sends `bytes` and `descriptors` to an address, as an intruder.
fn intrude(name: &[u8], bytes: &[u8], descriptors: &[RawFd]) -> OwnedFd {
    let stream = SocketNamespace::Abstract.connect(KIND, name).unwrap();
    let control = [ControlMessage::ScmRights(descriptors)];
    let control = if descriptors.is_empty() { &[][..] } else { &control[..] };
    let flags = MsgFlags::MSG_NOSIGNAL;
    if !bytes.is_empty() {
        sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None).unwrap();
    }
    stream
}

/// Sends every kind of invalid offer to every address.
fn intrude_on_all(addresses: &[Vec<u8>], kept: &Mutex<Vec<OwnedFd>>) {
    let file = memory_file("intruder");
    let raw = file.as_raw_fd();
    for address in addresses {
        let Address { name, secret } = Address::decode(address).unwrap();
        let offer = |secret, rank| Offer { secret, rank }.encode();
        let wrong = Token::random().unwrap();
        intrude(&name, &offer(wrong, 0), &[raw]);
        intrude(&name, &offer(secret.clone(), 0), &[]);
        intrude(&name, &offer(secret.clone(), 0), &[raw, raw]);
        intrude(&name, &offer(secret.clone(), 0), &[raw; MAX_DESCRIPTORS]);
        intrude(&name, &offer(secret.clone(), 16), &[raw]);
        intrude(&name, &offer(secret.clone(), 255), &[raw]);
        intrude(&name, &offer(secret.clone(), 0)[1..], &[raw]);
        intrude(&name, &[&offer(secret, 0)[..], &[0]].concat(), &[raw]);
        intrude(&name, &[0xff; 5000], &[raw]);
        let silent = intrude(&name, &[], &[]);
        kept.lock().unwrap().push(silent);
    }
}

#[test]
fn intruders_are_ignored() {
    if !is_alone(module_path!(), "intruders_are_ignored") {
        return;
    }
    let before = resources();
    for _ in 0..20 {
        let kept = Mutex::new(Vec::new());
        let ranks = Threads::world(3).unwrap().into_iter();
        let ranks: Vec<_> = ranks
            .map(|rank| {
                let own = rank.rank();
                // Rank 0 starts the intruders while the other ranks wait a moment, so that they connect after them.
                let kept = &kept;
                Intercepted(rank, move |gathered: &mut Vec<Vec<u8>>| {
                    if own == 0 && !gathered[0].is_empty() {
                        intrude_on_all(gathered, kept);
                    } else if !gathered[0].is_empty() {
                        thread::sleep(Duration::from_millis(5));
                    }
                })
            })
            .collect();
        on_all(&ranks, |rank| exchange_rounds(rank, 1));
    }
    assert_released(before);
}

#[test]
fn silent_crowds_do_not_shut_ranks_out() {
    let kept = Mutex::new(Vec::new());
    let crowd = |own: usize, gathered: &[Vec<u8>]| {
        if own == 1 {
            // This rank starts when the queues are full and, for a while, nobody accepts.
            return thread::sleep(SHORT / 2);
        }
        for address in gathered {
            let name = Address::decode(address).unwrap().name;
            let connect = || SocketNamespace::Abstract.connect(KIND, &name).ok();
            kept.lock().unwrap().extend(std::iter::from_fn(connect).take(1000));
        }
        thread::sleep(SHORT);
    };
    let intercepted = |rank: Threads| {
        let own = rank.rank();
        Intercepted(rank, move |gathered: &mut Vec<Vec<u8>>| {
            // A barrier gathers nothing, unlike the exchange.
            if !gathered[0].is_empty() {
                crowd(own, gathered);
            }
        })
    };
    let ranks: Vec<_> = Threads::world(2).unwrap().into_iter().map(intercepted).collect();
    on_all(&ranks, |rank| exchange_rounds(rank, 2));
    assert!(kept.into_inner().unwrap().len() > 100);
}

#[test]
fn a_rank_that_only_gathers_is_named() {
    let ranks = Threads::world(3).unwrap();
    let file = memory_file("");
    // Rank 2 listens but neither connects nor accepts.
    let own = Address { name: socket::random_name().unwrap(), secret: Token::random().unwrap() };
    let _listener = SocketNamespace::Abstract.listen(KIND, &own.name).unwrap();
    let results = on_all(&ranks, |rank| match rank.rank() {
        2 => rank.all_gather(&own.encode(), LIMIT).map(drop),
        _ => exchange_descriptors(rank, file.as_fd(), SHORT).map(drop),
    });
    let missing = vec![2];
    let timeout = Error::Timeout {
        operation: "exchange_descriptors",
        epoch: 0,
        missing,
        waited: SHORT,
        last_seen: String::new(),
    };
    assert_eq!(results, [Err(timeout.clone()), Err(timeout), Ok(())]);
}

#[test]
fn a_rank_that_no_longer_listens_is_lost() {
    let ranks = Threads::world(2).unwrap();
    let file = memory_file("");
    let own = Address { name: socket::random_name().unwrap(), secret: Token::random().unwrap() };
    let results = on_all(&ranks, |rank| match rank.rank() {
        1 => rank.all_gather(&own.encode(), LIMIT).map(drop),
        _ => exchange_descriptors(rank, file.as_fd(), LIMIT).map(drop),
    });
    assert!(matches!(results[0], Err(Error::PeerLost { rank: 1, .. })), "{results:?}");
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let ranks = Threads::world(2).unwrap();
    let error = exchange_descriptors(&ranks[0], memory_file("").as_fd(), SHORT).unwrap_err();
    assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
}

#[test]
fn malformed_addresses_name_their_rank() {
    for address in [&[1][..], &[1; 15], &[1; 16], &[1; 16 + 108]] {
        let mut ranks = Threads::world(2).unwrap().into_iter();
        let change = |gathered: &mut Vec<Vec<u8>>| gathered[1] = address.to_vec();
        let (first, second) = (Intercepted(ranks.next().unwrap(), change), ranks.next().unwrap());
        let error = thread::scope(|scope| {
            scope.spawn(|| second.barrier(LIMIT).unwrap());
            exchange_descriptors(&first, memory_file("").as_fd(), LIMIT).unwrap_err()
        });
        assert!(matches!(error, Error::Malformed { rank: 1, .. }), "{error}");
    }
    let ranks = Threads::world(1).unwrap().into_iter();
    for rank in ranks {
        let shortened = Intercepted(rank, |gathered: &mut Vec<Vec<u8>>| gathered.clear());
        let error = exchange_descriptors(&shortened, memory_file("").as_fd(), LIMIT).unwrap_err();
        assert!(matches!(error, Error::Rendezvous { .. }), "{error}");
    }
}

#[test]
fn messages_are_decoded_with_bounds() {
    let offer = Offer { secret: Token::random().unwrap(), rank: 3 };
    let bytes = offer.encode();
    assert_eq!(Offer::decode(&bytes), Some(offer));
    for length in 0..bytes.len() {
        assert_eq!(Offer::decode(&bytes[..length]), None);
    }
    assert_eq!(Offer::decode(&[&bytes[..], &[0]].concat()), None);
}

proptest! {
    #[test]
    fn addresses_and_offers_decode(
        secret: [u8; 16],
        rank in 0..16_usize,
        name in collection::vec(any::<u8>(), 1..=107),
    ) {
        let offer = Offer { secret: Token::from_bytes(secret), rank };
        prop_assert_eq!(Offer::decode(&offer.encode()), Some(offer));
        let address = Address { name: name.clone(), secret: Token::from_bytes(secret) };
        let decoded = Address::decode(&address.encode()).unwrap();
        prop_assert_eq!((&decoded.name, decoded.secret), (&name, address.secret));
    }

    #[test]
    fn any_message_is_refused_or_understood(bytes in damaged(vec![vec![7; Offer::LENGTH], vec![7; 40], vec![7; 123]])) {
        match Offer::decode(&bytes) {
            Some(offer) => prop_assert_eq!(&offer.encode()[..], &bytes[..]),
            None => prop_assert_ne!(bytes.len(), Offer::LENGTH),
        }
        match Address::decode(&bytes) {
            Ok(address) => prop_assert_eq!(address.encode(), bytes),
            Err(_) => prop_assert!(!(17..=123).contains(&bytes.len())),
        }
    }
}

#[test]
fn nothing_leaks() {
    if !is_alone(module_path!(), "nothing_leaks") {
        return;
    }
    let before = resources();
    for cycle in 0..200 {
        match cycle % 3 {
            0 => drop(on_all(&Threads::world(3).unwrap(), |rank| exchange_rounds(rank, 1))),
            1 => drop(on_all(&local_world(2), |rank| exchange_rounds(rank, 1))),
            _ => {
                // One descriptor arrives and another does not: the one that arrived is closed.
                let ranks = Threads::world(3).unwrap();
                let file = memory_file("");
                let own = Address { name: socket::random_name().unwrap(), secret: Token::random().unwrap() };
                let _listener = SocketNamespace::Abstract.listen(KIND, &own.name).unwrap();
                on_all(&ranks, |rank| match rank.rank() {
                    // On a busy machine the others may give up before this rank comes.
                    2 => drop(rank.all_gather(&own.encode(), LIMIT)),
                    _ => {
                        let limit = Duration::from_millis(20);
                        exchange_descriptors(rank, file.as_fd(), limit).map(drop).unwrap_err();
                    }
                });
            }
        }
    }
    assert_released(before);
}
