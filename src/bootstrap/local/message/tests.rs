//! Messages that are complete, truncated, oversized, or random bytes.

use proptest::prelude::*;

use super::*;
use crate::testing::damaged::damaged;

fn requests() -> Vec<Request> {
    vec![
        Request::Hello { token: Token::from_bytes([7; 16]), rank: 3, world_size: 4 },
        Request::Gather { sequence: 1 << 40, bytes: b"bytes".to_vec() },
        Request::GiveUp { sequence: u64::MAX },
    ]
}

fn replies() -> Vec<Reply> {
    vec![
        Reply::Refused { reason: "rank 1 is taken".into() },
        Reply::Placed { rank: 2, world_size: 5 },
        Reply::Event(Event::Formed),
        Reply::Event(Event::Gathered { sequence: 9, parts: vec![vec![], vec![1, 2], vec![3; 300]] }),
        Reply::Event(Event::Failed(Failure::TimedOut {
            sequence: 0,
            by: 2,
            missing: vec![0, 15],
            refused: "another size".into(),
        })),
        Reply::Event(Event::Failed(Failure::Lost { rank: 5, reason: "größer".into() })),
    ]
}

fn body(frame: &[u8]) -> &[u8] {
    let body = first_body(frame, usize::MAX).unwrap().unwrap();
    assert_eq!(frame_length(body), frame.len());
    body
}

#[test]
fn messages_decode_to_what_was_encoded() {
    for request in requests() {
        assert_eq!(Request::decode(body(&request.frame())), Ok(request));
    }
    for reply in replies() {
        assert_eq!(Reply::decode(body(&reply.frame())), Ok(reply));
    }
}

#[test]
fn truncated_frames_are_awaited() {
    for frame in replies().iter().map(Reply::frame) {
        for length in 0..frame.len() {
            assert_eq!(first_body(&frame[..length], usize::MAX), Ok(None));
        }
    }
}

#[test]
fn truncated_bodies_never_decode_to_the_whole() {
    for request in requests() {
        let frame = request.frame();
        let body = body(&frame);
        for length in 0..body.len() {
            assert_ne!(Request::decode(&body[..length]), Ok(request.clone()));
        }
    }
    for reply in replies() {
        let frame = reply.frame();
        let body = body(&frame);
        for length in 0..body.len() {
            assert_ne!(Reply::decode(&body[..length]), Ok(reply.clone()));
        }
    }
    assert_eq!(Request::decode(&[]), Err(Malformed::Truncated));
    assert_eq!(Request::decode(&[HELLO, 1, 7]), Err(Malformed::Truncated));
    assert_eq!(Request::decode(&[GIVE_UP, 0x81, 0x82]), Err(Malformed::Truncated));
}

#[test]
fn bytes_after_the_end_are_refused() {
    let mut hello = requests()[0].frame();
    hello.push(0);
    assert_eq!(Request::decode(&hello[LENGTH_BYTES..]), Err(Malformed::TrailingBytes));
    assert_eq!(Reply::decode(&[FORMED, 0]), Err(Malformed::TrailingBytes));
}

#[test]
fn lengths_are_bounded_before_anything_is_stored() {
    let limit = HELLO_LIMIT;
    let length = ((limit + 1) as u32).to_le_bytes();
    assert_eq!(first_body(&length, limit), Err(Malformed::TooLong { length: limit + 1, limit }));
    let huge = frame(GATHERED, &(1_u64, MAX_WORLD + 1));
    assert_eq!(Reply::decode(body(&huge)), Err(Malformed::TooManyRanks(MAX_WORLD + 1)));
    let part = frame(GATHERED, &(1_u64, 1_u32, u32::MAX, *b"short"));
    assert_eq!(Reply::decode(body(&part)), Err(Malformed::Truncated));
    let ranks = frame(TIMED_OUT, &(1_u64, 0_u32, "", u32::MAX));
    assert_eq!(Reply::decode(body(&ranks)), Err(Malformed::TooManyRanks(u32::MAX as usize)));
}

#[test]
fn the_limits_hold_the_longest_messages() {
    let bytes = vec![0; MAX_CONTRIBUTION];
    let gather = Request::Gather { sequence: u64::MAX, bytes: bytes.clone() }.frame();
    assert!(first_body(&gather, REQUEST_LIMIT).unwrap().is_some());
    let hello = requests()[0].frame();
    assert!(first_body(&hello, HELLO_LIMIT).unwrap().is_some());
    for world_size in [1, 3] {
        let parts = vec![bytes.clone(); world_size];
        let gathered = Reply::Event(Event::Gathered { sequence: 1, parts }).frame();
        assert!(first_body(&gathered, reply_limit(world_size)).unwrap().is_some());
    }
}

#[test]
fn other_kinds_and_versions_are_refused() {
    assert_eq!(Request::decode(&[0]), Err(Malformed::UnknownKind(0)));
    assert_eq!(Request::decode(&[FORMED]), Err(Malformed::UnknownKind(FORMED)));
    assert_eq!(Reply::decode(&[HELLO]), Err(Malformed::UnknownKind(HELLO)));
    assert_eq!(Request::decode(&[HELLO, 2]), Err(Malformed::Version(2)));
    assert_eq!(Request::decode(&[HELLO, 0xff, 0xff, 0xff, 0xff, 0xff]), Err(Malformed::Number));
}

fn frames() -> Vec<Vec<u8>> {
    requests().iter().map(Request::frame).chain(replies().iter().map(Reply::frame)).collect()
}

proptest! {
    // A decoded message encodes to an equal message, possibly in different bytes: numbers may have leading zeros, and
    // text is made valid UTF-8.
    #[test]
    fn any_frame_is_refused_or_understood(frame in damaged(frames())) {
        let _ = first_body(&frame, HELLO_LIMIT);
        if let Ok(Some(body)) = first_body(&frame, REQUEST_LIMIT) {
            prop_assert_eq!(&frame[LENGTH_BYTES..frame_length(body)], body);
        }
        let Some(body) = frame.get(LENGTH_BYTES..) else { return Ok(()) };
        if let Ok(request) = Request::decode(body) {
            let again = request.frame();
            prop_assert_eq!(Request::decode(&again[LENGTH_BYTES..]), Ok(request));
        }
        if let Ok(reply) = Reply::decode(body) {
            let again = reply.frame();
            prop_assert_eq!(Reply::decode(&again[LENGTH_BYTES..]), Ok(reply));
        }
    }

    #[test]
    fn any_contribution_decodes(
        sequence: u64,
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        rank in 0..16_usize,
    ) {
        let gather = Request::Gather { sequence, bytes: bytes.clone() };
        prop_assert_eq!(Request::decode(body(&gather.frame())), Ok(gather));
        let gathered = Reply::Event(Event::Gathered { sequence, parts: vec![bytes; rank] });
        prop_assert_eq!(Reply::decode(body(&gathered.frame())), Ok(gathered));
    }
}
