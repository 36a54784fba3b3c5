//! Connections that do not belong to the world, or violate its protocol.

use super::*;

#[test]
fn intruders_get_a_reason_and_disturb_nobody() {
    let id = UniqueId::new().unwrap();
    let refused = |id: &UniqueId, rank, world_size, why: &str| {
        let error = Local::connect(id, rank, world_size, LIMIT).unwrap_err();
        assert!(matches!(&error, Error::Refused { reason } if reason.contains(why)), "{error}");
    };
    let foreign = UniqueId::encode(id.socket_name(), &Token::random().unwrap(), 0);
    refused(&foreign, 0, 2, "token");
    thread::scope(|scope| {
        let first = scope.spawn(|| Local::connect(&id, 0, 2, LIMIT).unwrap());
        thread::sleep(SHORT);
        refused(&foreign, 1, 2, "token");
        refused(&id, 1, 3, "a world of 3, but this one has 2 ranks");
        refused(&id, 0, 2, "rank 0 is taken");
        let second = Local::connect(&id, 1, 2, LIMIT).unwrap();
        let ranks = [first.join().unwrap(), second];
        refused(&id, 1, 2, "rank 1 is taken");
        refused(&id, 2, 3, "a world of 3, but this one has 2 ranks");
        on_all(&ranks, |local| gather_rounds(local, 5));
    });
}

#[test]
fn invalid_messages_are_refused_and_disturb_nobody() {
    let id = UniqueId::new().unwrap();
    let answer_to = |bytes: &[u8]| {
        let mut link = bare_link(&id);
        link.send(bytes.into());
        let reply = next_reply(&mut link);
        assert_eq!(next_reply(&mut link), None, "it is closed");
        reply
    };
    let nonsense = || {
        assert!(is_refused(answer_to(&[0xff; 100]), "at most 64"));
        assert!(is_refused(answer_to(&[1, 0, 0, 0, 99]), "kind 99"));
        assert!(is_refused(answer_to(&[5, 0, 0, 0, 1, 9, 0, 0, 0]), "version 9"));
        assert!(is_refused(answer_to(&[0; 4]), "truncated"));
        assert!(is_refused(answer_to(&Request::GiveUp { sequence: 0 }.frame()), "an unexpected message"));
        let gather = Request::Gather { sequence: 1, bytes: vec![1] };
        assert!(is_refused(answer_to(&gather.frame()), "an unexpected message"));
        assert!(is_refused(answer_to(&hello(&id, 5, 5)), "is invalid"));
        assert!(is_refused(answer_to(&hello(&id, 0, 0)), "is invalid"));
        assert!(is_refused(answer_to(&hello(&id, 0, u32::MAX as usize)), "is invalid"));
        let whole = hello(&id, 0, 2);
        for length in 0..whole.len() {
            bare_link(&id).send(whole[..length].into());
        }
    };
    nonsense();
    let mut silent: Vec<_> = (0..200).map(|_| bare_link(&id)).collect();
    let started = Instant::now();
    assert!(is_refused(next_reply(&mut silent[0]), "in time"), "the oldest of many is closed");
    assert!(started.elapsed() < Duration::from_secs(5), "it is closed at once");
    let ranks = world(&id, 3);
    nonsense();
    on_all(&ranks, |local| gather_rounds(local, 20));
    drop(silent);
    on_all(&ranks, |local| gather_rounds(local, 20));
}

#[test]
fn a_rank_that_violates_the_protocol_is_expelled() {
    let bad: [(Vec<u8>, &str); 5] = [
        (vec![0xff; 8], "at most"),
        (vec![1, 0, 0, 0, 0], "kind 0"),
        (Request::Gather { sequence: 7, bytes: vec![] }.frame(), "another all_gather"),
        ([1, 1].map(|sequence| Request::Gather { sequence, bytes: vec![] }.frame()).concat(), "twice"),
        (vec![3, 0, 0, 0, 3, 0x80, 0x80], "truncated"),
    ];
    for (bytes, why) in bad {
        let id = UniqueId::new().unwrap();
        let mut rogue = bare_link(&id);
        rogue.send(hello(&id, 1, 2).into());
        let local = Local::connect(&id, 0, 2, LIMIT).unwrap();
        rogue.send(bytes.into());
        let error = local.barrier(LIMIT).unwrap_err();
        assert!(matches!(&error, Error::PeerLost { rank: 1, reason } if reason.contains(why)), "{error}");
        assert_eq!(next_reply(&mut rogue), Some(Reply::Event(Event::Formed)));
        assert!(is_refused(next_reply(&mut rogue), why));
        assert_eq!(next_reply(&mut rogue), None);
    }
}

#[test]
fn a_rank_that_does_not_read_delays_nobody() {
    let id = UniqueId::new().unwrap();
    let mut slow = bare_link(&id);
    slow.send(hello(&id, 2, 3).into());
    let ranks: Vec<_> = thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let id = &id;
            scope.spawn(move || Local::connect(id, rank, 3, LIMIT).unwrap())
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    slow.send(Request::Gather { sequence: 1, bytes: vec![2] }.frame().into());
    let large = vec![1; MAX_CONTRIBUTION];
    let gathered = vec![large.clone(), large.clone(), vec![2]];
    for all in on_all(&ranks, |local| local.all_gather(&large, LIMIT).unwrap()) {
        assert!(all == gathered);
    }
    assert_eq!(next_reply(&mut slow), Some(Reply::Event(Event::Formed)));
    let event = Event::Gathered { sequence: 1, parts: gathered };
    assert!(next_reply(&mut slow) == Some(Reply::Event(event)));
}
