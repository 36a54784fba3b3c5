//! Whole worlds over the loopback interface: secrets, intruders, missing ranks, and the hand-over to `Local`. Several
//! machines are in lab/network/tests.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::thread;
use std::time::Instant;

use proptest::prelude::*;

use super::super::local::link::Layer as _;
use super::super::testing::{assert_released, contribution, is_alone, resources, LIMIT};
use super::seal::VERSION_BYTE;
use super::*;
use crate::testing::damaged::damaged;

const SHORT: Duration = Duration::from_millis(300);

/// Connects the ranks of a new world at `host`.
fn world(host: &str, world_size: usize) -> Vec<Tcp> {
    let id = UniqueId::over_tcp(&format!("{host}:0")).unwrap();
    thread::scope(|scope| {
        let join = |rank| scope.spawn(move || Tcp::join(&id, rank, world_size, LIMIT).unwrap());
        let threads: Vec<_> = (0..world_size).map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `rank` on all ranks concurrently.
fn on_all<T: Send>(ranks: &[Tcp], rank: impl Fn(&Tcp) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|tcp| scope.spawn(|| rank(tcp))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns an address of this machine with a port that is free now.
fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn secret() -> Secret {
    Secret::random().unwrap()
}

#[test]
fn gathers_over_both_families() {
    for host in ["127.0.0.1", "[::1]", "localhost"] {
        let ranks = world(host, 3);
        on_all(&ranks, |tcp| {
            for round in 0..50 {
                let all = tcp.all_gather(&contribution(tcp.rank(), round), LIMIT).unwrap();
                let expected: Vec<_> = (0..3).map(|rank| contribution(rank, round)).collect();
                assert_eq!(all, expected, "round {round}");
            }
            // Several packets. (Without optimisation, encryption is slow.)
            let all = tcp.all_gather(&vec![tcp.rank() as u8; 200_000], LIMIT).unwrap();
            assert!(all.iter().enumerate().all(|(rank, bytes)| *bytes == vec![rank as u8; 200_000]));
            tcp.all_gather(&vec![0; (1 << 20) + 1], LIMIT).unwrap_err();
        });
    }
}

#[test]
fn more_ranks_than_a_machine_may_have() {
    let ranks = world("127.0.0.1", 17);
    on_all(&ranks, |tcp| {
        assert_eq!(tcp.all_gather(&[tcp.rank() as u8], LIMIT).unwrap()[16], [16]);
        assert_eq!(tcp.of_node(LIMIT).unwrap_err(), Error::WorldSize { world_size: 17 });
        tcp.barrier(LIMIT).unwrap();
    });
}

#[test]
fn ranks_of_one_machine_get_a_local_world() {
    let ranks = world("127.0.0.1", 3);
    assert_eq!(ranks[1].nodes(), [0, 0, 0]);
    on_all(&ranks, |tcp| {
        // Collective, and may be repeated.
        for round in 0..2 {
            let local = tcp.of_node(LIMIT).unwrap();
            assert_eq!((local.rank(), local.world_size(), tcp.local_rank()), (tcp.rank(), 3, tcp.rank()));
            let all = local.all_gather(&[round, tcp.rank() as u8], LIMIT).unwrap();
            assert_eq!(all, [[round, 0], [round, 1], [round, 2]]);
        }
    });
}

#[test]
fn rank_0_serves_an_address_and_may_be_late() {
    let (address, secret) = (free().to_string(), secret());
    let connect = |rank| Tcp::connect(&address, &secret, rank, 2, LIMIT).unwrap();
    thread::scope(|scope| {
        let second = scope.spawn(|| connect(1).rank());
        thread::sleep(SHORT);
        connect(0);
        assert_eq!(second.join().unwrap(), 1);
    });
}

#[test]
fn missing_ranks_are_named() {
    let address = free().to_string();
    let missing = |rank, world_size| match Tcp::connect(&address, &secret(), rank, world_size, SHORT) {
        Err(Error::Timeout { missing, last_seen, .. }) => (missing, last_seen),
        other => panic!("{other:?}"),
    };
    assert_eq!(missing(0, 3).0, [1, 2]);
    let (ranks, seen) = missing(1, 3);
    assert_eq!((ranks, seen), (vec![0], format!("nobody listens at {address}")));
    let error = Tcp::connect("no-such-host.invalid:1", &secret(), 1, 2, SHORT).unwrap_err().to_string();
    assert!(error.contains("rank 0") && error.contains("no-such-host.invalid does not resolve"), "{error}");
    let ranks = world("127.0.0.1", 3);
    let errors = on_all(&ranks, |tcp| match tcp.rank() {
        2 => None,
        _ => Some(tcp.all_gather(&[], SHORT).unwrap_err()),
    });
    for error in errors.into_iter().flatten() {
        assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [2]), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    let mut ranks = world("127.0.0.1", 3);
    drop(ranks.remove(1));
    for error in on_all(&ranks, |tcp| tcp.all_gather(&[], LIMIT).unwrap_err()) {
        assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    }
}

#[test]
fn an_interrupted_gather_ends() {
    let ranks = world("127.0.0.1", 2);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| ranks[0].all_gather(&[], LIMIT).unwrap_err());
        thread::sleep(SHORT);
        ranks[0].interrupt();
        let started = Instant::now();
        waiting.join().unwrap();
        assert!(started.elapsed() < LIMIT / 4);
    });
}

#[test]
fn a_port_has_one_job() {
    let (address, own) = (free().to_string(), secret());
    let refused = |secret: &Secret, rank, world_size, why: &str| {
        let error = Tcp::connect(&address, secret, rank, world_size, LIMIT).unwrap_err();
        assert!(matches!(&error, Error::Refused { reason } if reason.contains(why)), "{error}");
    };
    thread::scope(|scope| {
        let first = scope.spawn(|| Tcp::connect(&address, &own, 0, 2, LIMIT).unwrap());
        // Only the secret decides, so that the other job's ranks fail at once.
        refused(&secret(), 1, 2, "is not the rendezvous of this job: it has another secret");
        refused(&own, 1, 3, "a world of 3, but this one has 2 ranks");
        let error = Tcp::connect(&address, &secret(), 0, 2, LIMIT).unwrap_err();
        assert!(matches!(&error, Error::Rendezvous { reason } if reason.contains("is in use")), "{error}");
        let second = Tcp::connect(&address, &own, 1, 2, LIMIT).unwrap();
        let ranks = [first.join().unwrap(), second];
        refused(&own, 1, 2, "rank 1 is taken");
        on_all(&ranks, |tcp| tcp.barrier(LIMIT).unwrap());
    });
}

#[test]
fn arguments_are_checked() {
    let connect =
        |address: &str, rank, size| Tcp::connect(address, &secret(), rank, size, SHORT).unwrap_err();
    for world_size in [0, Tcp::MAX_RANKS + 1] {
        assert_eq!(connect("localhost:1", 0, world_size), Error::WorldSize { world_size });
    }
    assert_eq!(connect("localhost:1", 2, 2), Error::RankOutOfRange { rank: 2, world_size: 2 });
    for address in ["", "localhost", ":1", "a:", "a:+1", "a:65536", "::1:1", "[::1]", "[::1:1", "http://a:x"]
    {
        assert!(matches!(connect(address, 0, 2), Error::InvalidSetting { name: "address", .. }), "{address}");
    }
    let error = connect("192.0.2.1:1", 0, 2).to_string();
    assert!(error.contains("192.0.2.1:1 is no address of this machine"), "{error}");
    let local = UniqueId::new().unwrap();
    let error = Tcp::join(&local, 0, 1, SHORT).unwrap_err().to_string();
    assert!(error.contains("for ranks of one machine"), "{error}");
    let long = format!("{}:0", "0".repeat(70) + "1");
    assert!(matches!(
        UniqueId::over_tcp(&long),
        Err(Error::InvalidSetting { .. } | Error::Rendezvous { .. })
    ));
    let id = UniqueId::over_tcp("localhost:0").unwrap();
    let error = Local::connect(&id, 0, 1, SHORT).unwrap_err().to_string();
    assert!(error.contains("join it by bootstrap::Tcp"), "{error}");
    Tcp::join(&id, 0, 1, LIMIT).unwrap();
    for text in ["", "00", &"0".repeat(31), &"0".repeat(34), &"x".repeat(32)] {
        assert!(text.parse::<Secret>().is_err(), "{text}");
    }
}

/// Everything that this crate's programs do not send.
#[test]
fn intruders_disturb_nobody() {
    let secret = secret();
    let address = free();
    let text = address.to_string();
    let attack = || {
        let send = |bytes: &[u8]| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            // The other end may have closed the connection before all was sent.
            let _ = stream.write_all(bytes);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            answer
        };
        assert_eq!(send(b"GET / HTTP/1.1\r\n\r\n"), b"");
        assert_eq!(send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"), b"", "TLS");
        assert_eq!(send(&[0; 1000]), b"");
        let greeting = [&b"fastall"[..], &[VERSION_BYTE]].concat();
        assert_eq!(send(b"fastall\x09"), greeting, "another version learns this one");
        let with = |rest: &[u8]| [&greeting, rest].concat();
        // The end of the connection may be a reset, which may overtake the greeting.
        assert!(greeting.starts_with(&send(&with(&[0xff; 70_000]))), "a first message that is too long");
        assert_eq!(send(&with(&[&[0, 48][..], &[7; 48]].concat())), [&greeting[..], &[0, 0]].concat());
        // Half-open connections and scans.
        drop((0..20).map(|_| TcpStream::connect(address).unwrap()).collect::<Vec<_>>());
    };
    thread::scope(|scope| {
        let connect = |rank| Tcp::connect(&text, &secret, rank, 3, LIMIT).unwrap();
        let first = scope.spawn(move || connect(0));
        while TcpStream::connect(address).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
        attack();
        let second = scope.spawn(move || connect(1));
        let mut silent: Vec<_> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
        let mut end = [0];
        silent[0].set_read_timeout(Some(LIMIT)).unwrap();
        // The oldest of many is closed, by a reset or an end.
        assert_ne!(silent[0].read(&mut end).ok(), Some(1));
        let third = connect(2);
        attack();
        let ranks = [first.join().unwrap(), second.join().unwrap(), third];
        on_all(&ranks, |tcp| tcp.barrier(LIMIT).unwrap());
    });
}

/// Passes bytes between a rank and the rendezvous, and changes one of those that the rank sends at `at`.
#[test]
fn changed_bytes_end_the_connection() {
    for at in [60, 80, 130] {
        let id = UniqueId::over_tcp("127.0.0.1:0").unwrap();
        let server = String::from_utf8(id.socket_name().to_vec()).unwrap();
        let relay = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = relay.local_addr().unwrap();
        let relayed = UniqueId::encode(port.to_string().as_bytes(), &id.token(), INTERNET);
        thread::scope(|scope| {
            scope.spawn(move || {
                let (mut rank, _) = relay.accept().unwrap();
                let mut hub = TcpStream::connect(server).unwrap();
                let (mut back, mut forth) = (hub.try_clone().unwrap(), rank.try_clone().unwrap());
                let backward = thread::spawn(move || {
                    // Ends with an error or without one, when either end has closed.
                    let _ = std::io::copy(&mut back, &mut forth);
                    let _ = forth.shutdown(std::net::Shutdown::Both);
                });
                let mut position = 0;
                let mut byte = [0];
                while rank.read(&mut byte).is_ok_and(|length| length == 1) {
                    position += 1;
                    byte[0] ^= u8::from(position == at);
                    if hub.write_all(&byte).is_err() {
                        break;
                    }
                }
                // The other direction ends with the connection.
                let _ = (hub.shutdown(std::net::Shutdown::Both), rank.shutdown(std::net::Shutdown::Both));
                backward.join().unwrap();
            });
            let joined = Tcp::join(&relayed, 0, 1, LIMIT);
            let error = joined.and_then(|tcp| tcp.all_gather(b"contribution", LIMIT)).unwrap_err();
            assert!(matches!(error, Error::Refused { .. } | Error::Rendezvous { .. }), "{at}: {error}");
        });
    }
}

#[test]
fn nothing_is_left_of_worlds() {
    if !is_alone(module_path!(), "nothing_is_left_of_worlds") {
        return;
    }
    let before = resources();
    for _ in 0..3 {
        let ranks = world("127.0.0.1", 3);
        on_all(&ranks, |tcp| drop(tcp.of_node(LIMIT).unwrap()));
        Tcp::connect(&free().to_string(), &secret(), 1, 2, SHORT).unwrap_err();
    }
    // A rendezvous waits a little longer than its rank for ranks that never come.
    Tcp::connect(&free().to_string(), &secret(), 0, 2, SHORT).unwrap_err();
    assert_released(before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The rendezvous reads what a rank sends, damaged: it ends the connection, or waits for more.
    #[test]
    fn damaged_bytes_never_open_a_connection(bytes in damaged(vec![first_bytes().to_vec()])) {
        let mut seal = Seal::new(&TOKEN, false).unwrap();
        let (mut received, mut outgoing) = (Vec::new(), Vec::new());
        let arrived = bytes.chunks(7).try_for_each(|chunk| seal.arrived(chunk, &mut received, &mut outgoing));
        prop_assert!(received.is_empty());
        // What follows the handshake may be the beginning of anything.
        prop_assert!(arrived.is_err() || !seal.is_ready() || bytes.starts_with(first_bytes()));
        prop_assert!(outgoing.len() <= 8 + 2 + 48);
    }
}

const TOKEN: Token = Token::from_bytes([1; 16]);

/// Returns what a rank has sent first.
fn first_bytes() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| Seal::new(&TOKEN, true).unwrap().first_bytes().unwrap())
}
