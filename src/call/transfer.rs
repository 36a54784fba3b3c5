//! Messages between pairs of ranks: batched into one launch, in which all go on side by side.

use std::marker::PhantomData;

use super::identity::{CallId, CallKind};
use super::operand::Operand;
use crate::abi::{FaTransfer, FaTransfers, FA_MAX_RANKS, FA_MAX_TRANSFERS};
use crate::catalogue::DType;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::region::Stripes;

/// Which way a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// To the peer.
    Send,
    /// From the peer.
    Recv,
}

/// One message of a group, by its address: for [`Communicator::transfer_raw`](crate::Communicator::transfer_raw).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// Which way it goes.
    pub direction: Direction,
    /// The other rank; this one's messages to itself need a receive for each send.
    pub peer: usize,
    /// Of the first element, on the device.
    pub address: u64,
    /// Elements.
    pub count: usize,
    /// Of each element.
    pub dtype: DType,
    /// Equal on both sides.
    pub tag: u32,
}

impl Transfer {
    pub(crate) fn send<T: Element>(data: &[T], peer: usize, tag: u32) -> Self {
        let (address, count) = (data.as_ptr() as u64, data.len());
        Self { direction: Direction::Send, peer, address, count, dtype: T::DTYPE, tag }
    }

    pub(crate) fn recv<T: Element>(data: &mut [T], peer: usize, tag: u32) -> Self {
        let (address, count) = (data.as_mut_ptr() as u64, data.len());
        Self { direction: Direction::Recv, peer, address, count, dtype: T::DTYPE, tag }
    }

    /// Of one whose count has been checked.
    fn bytes(&self) -> u64 {
        (self.count * self.dtype.size()) as u64
    }
}

/// Messages to send and to receive in one launch: see [`Communicator::group`](crate::Communicator::group).
#[derive(Debug, Default)]
pub struct Group<'a> {
    transfers: Vec<Transfer>,
    buffers: PhantomData<&'a mut ()>,
}

impl<'a> Group<'a> {
    /// Sends all of `data` to a rank.
    pub fn send<T: Element>(&mut self, data: &'a [T], to: usize, tag: u32) -> &mut Self {
        self.transfers.push(Transfer::send(data, to, tag));
        self
    }

    /// Receives as many elements as `data` has from a rank.
    pub fn recv<T: Element>(&mut self, data: &'a mut [T], from: usize, tag: u32) -> &mut Self {
        self.transfers.push(Transfer::recv(data, from, tag));
        self
    }

    pub(crate) fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }
}

/// The call that a list of transfers is, for ranks that wonder what this one does.
pub(crate) fn transfers_id(kind: CallKind, transfers: &[Transfer]) -> CallId {
    let dtype = transfers.first().map_or(DType::U8, |transfer| transfer.dtype);
    let count = transfers.iter().fold(0_usize, |sum, transfer| sum.saturating_add(transfer.count));
    CallId { kind, dtype, op: None, algorithm: None, root: None, digest: 0, count }
}

/// The most transfers of a group: a message from a rank to itself is two.
const MOST: usize = 2 * FA_MAX_TRANSFERS as usize;

fn too_many(count: usize) -> Error {
    Error::InvalidSetting {
        name: "messages of a group",
        value: count.to_string(),
        expected: "at most 64, a message from a rank to itself counting once",
    }
}

/// Refuses transfers that no kernel could do.
#[inline]
pub(crate) fn check_transfers(transfers: &[Transfer], world_size: usize) -> Result<()> {
    // Before each is compared with each.
    if transfers.len() > MOST {
        return Err(too_many(transfers.len()));
    }
    for (index, transfer) in transfers.iter().enumerate() {
        if transfer.peer >= world_size {
            return Err(Error::RankOutOfRange { rank: transfer.peer, world_size });
        }
        let which = match transfer.direction {
            Direction::Send => "send",
            Direction::Recv => "receive",
        };
        let operand = Operand::new(which, transfer.address, transfer.count, transfer.dtype)?;
        for other in &transfers[..index] {
            let both_read = (other.direction, transfer.direction) == (Direction::Send, Direction::Send);
            // It has been checked.
            let other = Operand { address: other.address, bytes: other.bytes() };
            if !both_read && operand.overlaps(&other) {
                return Err(Error::Overlap {
                    input: other.address as usize,
                    output: operand.address as usize,
                    bytes: operand.bytes.min(other.bytes) as usize,
                });
            }
        }
    }
    Ok(())
}

/// What a launch of transfers moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moved {
    pub sent_bytes: u64,
    /// From this rank itself, too.
    pub received_bytes: u64,
}

/// No transfers, for [`pack`] to fill.
pub(crate) const NO_TRANSFERS: FaTransfers = FaTransfers {
    first: [0; 2 * FA_MAX_RANKS as usize + 2],
    stripes: [0; 2 * FA_MAX_RANKS as usize + 2],
    transfer: [FaTransfer { address: 0, bytes: 0, source: 0, tag: 0, part: 0 }; FA_MAX_TRANSFERS as usize],
};

/// Transfers by channel. To and from one peer they go in the order of their tags, and of one tag in that of the list, so that two
/// ranks need not name theirs in the same order. Allocates nothing; entries beyond the last transfer stay as they were.
pub(crate) fn pack(
    transfers: &[Transfer],
    rank: usize,
    world_size: usize,
    stripes: Stripes,
    packed: &mut FaTransfers,
) -> Result<Moved> {
    let too_many = || too_many(transfers.len());
    let channel_of = |index: u8| {
        let Transfer { peer, direction, .. } = transfers[usize::from(index)];
        2 * peer + usize::from(direction == Direction::Recv)
    };
    let mut order = [0_u8; MOST];
    let order = order.get_mut(..transfers.len()).ok_or_else(too_many)?;
    (0..).zip(&mut *order).for_each(|(index, slot)| *slot = index);
    order.sort_unstable_by_key(|&index| (channel_of(index), transfers[usize::from(index)].tag, index));

    let mut moved = Moved { sent_bytes: 0, received_bytes: 0 };
    let (mut length, mut next, mut used) = (0, 0, 0);
    for channel in 0..2 * world_size {
        packed.first[channel] = length as u32;
        packed.stripes[channel] = used;
        let end = next + order[next..].iter().take_while(|&&index| channel_of(index) == channel).count();
        let own = &order[next..end];
        next = end;
        let is_send = channel % 2 == 0;
        if channel == 2 * rank {
            // Copies, which are of the other channel.
            let receives = order[end..].iter().take_while(|&&index| channel_of(index) == channel + 1).count();
            check_pairs(transfers, own, &order[end..end + receives], rank)?;
            moved.sent_bytes += own.iter().map(|&index| transfers[usize::from(index)].bytes()).sum::<u64>();
            continue;
        }
        let sends = &order[..end - own.len()];
        let mut most_stripes = 0;
        for (at, &index) in own.iter().enumerate() {
            let transfer = &transfers[usize::from(index)];
            let (address, bytes, tag) = (transfer.address, transfer.bytes(), transfer.tag);
            let is_copy = channel / 2 == rank;
            let source = match is_copy {
                true => transfers[usize::from(sends[sends.len() - own.len() + at])].address,
                false => 0,
            };
            match is_send {
                true => moved.sent_bytes += bytes,
                false => moved.received_bytes += bytes,
            }
            // Gathered or scattered in place, it is there already.
            if is_copy && source == address {
                continue;
            }
            let slot = packed.transfer.get_mut(length).ok_or_else(too_many)?;
            let (part, stripes) = stripes.parts(bytes);
            *slot = FaTransfer { address, bytes, source, tag, part };
            most_stripes = most_stripes.max(stripes);
            length += 1;
        }
        used += most_stripes;
    }
    packed.first[2 * world_size] = length as u32;
    packed.stripes[2 * world_size] = used;
    Ok(moved)
}

/// Refuses messages of a rank to itself that are not received as they are sent, each by its index.
fn check_pairs(transfers: &[Transfer], sends: &[u8], receives: &[u8], rank: usize) -> Result<()> {
    let describe = |transfer: Option<&Transfer>| match transfer {
        Some(Transfer { count, dtype, tag, .. }) => format!("{count} {dtype} with tag {tag}"),
        None => "no message".into(),
    };
    let of = |list: &[u8], at: usize| list.get(at).map(|&index| &transfers[usize::from(index)]);
    for at in 0..sends.len().max(receives.len()) {
        let (send, receive) = (of(sends, at), of(receives, at));
        let what = |transfer: &Transfer| (transfer.tag, transfer.bytes());
        if send.map(what) != receive.map(what) {
            return Err(Error::Disagreement {
                what: "the messages of a rank to itself",
                rank,
                theirs: format!("{} to send", describe(send)),
                own_rank: rank,
                ours: format!("{} to receive", describe(receive)),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Stripes = Stripes { count: 1 };

    fn transfer(direction: Direction, peer: usize, address: u64, tag: u32) -> Transfer {
        Transfer { direction, peer, address, count: 2, dtype: DType::F32, tag }
    }

    #[test]
    fn messages_go_by_channel_and_tag() {
        use Direction::{Recv, Send};
        let list = [
            transfer(Send, 2, 0x10, 7),
            transfer(Recv, 0, 0x20, 0),
            transfer(Send, 2, 0x30, 3),
            transfer(Send, 1, 0x40, 5),
            transfer(Send, 2, 0x50, 7),
            transfer(Recv, 1, 0x60, 5),
        ];
        let mut packed = NO_TRANSFERS;
        let moved = pack(&list, 1, 3, ONE, &mut packed).unwrap();
        assert_eq!(packed.first[..7], [0, 0, 1, 1, 2, 5, 5]);
        assert_eq!(packed.stripes[..7], [0, 0, 1, 1, 2, 3, 3]);
        let addresses: Vec<u64> = packed.transfer[..5].iter().map(|transfer| transfer.address).collect();
        assert_eq!(addresses, [0x20, 0x60, 0x30, 0x10, 0x50]);
        assert_eq!(packed.transfer[1].source, 0x40, "a copy");
        assert_eq!(moved, Moved { sent_bytes: 4 * 8, received_bytes: 2 * 8 });
    }

    #[test]
    fn a_channel_has_the_stripes_of_its_longest_message() {
        use Direction::{Recv, Send};
        let long =
            |direction, peer, address, count| Transfer { count, ..transfer(direction, peer, address, 0) };
        let list = [
            long(Send, 1, 1 << 20, 1),
            long(Send, 1, 2 << 20, 5000),
            long(Recv, 1, 3 << 20, 1025),
            long(Recv, 0, 4 << 20, 2048),
            long(Send, 0, 5 << 20, 2048),
        ];
        let mut packed = NO_TRANSFERS;
        pack(&list, 0, 2, Stripes { count: 16 }, &mut packed).unwrap();
        // 8192 bytes to itself, 20000 and 4100 in parts of 4 KiB.
        assert_eq!(packed.first[..5], [0, 0, 1, 3, 4]);
        assert_eq!(packed.stripes[..5], [0, 0, 2, 7, 9]);
        assert!(packed.transfer[..4].iter().all(|message| message.part == 32));
    }

    #[test]
    fn a_message_to_oneself_needs_its_receive() {
        let lonely = [transfer(Direction::Send, 0, 0x10, 1)];
        let error = pack(&lonely, 0, 2, ONE, &mut { NO_TRANSFERS }).unwrap_err();
        assert!(matches!(error, Error::Disagreement { rank: 0, .. }), "{error}");
        let other_tag = [transfer(Direction::Send, 0, 0x10, 1), transfer(Direction::Recv, 0, 0x20, 2)];
        assert!(pack(&other_tag, 0, 2, ONE, &mut { NO_TRANSFERS }).is_err());
        let only_received = [transfer(Direction::Recv, 1, 0x10, 1)];
        assert!(pack(&only_received, 1, 2, ONE, &mut { NO_TRANSFERS }).is_err());
    }

    /// Of several, some in place, each is copied from its own.
    #[test]
    fn messages_to_oneself_are_copies() {
        use Direction::{Recv, Send};
        let list = [
            transfer(Recv, 1, 0x100, 2),
            transfer(Send, 1, 0x200, 1),
            transfer(Send, 1, 0x300, 2),
            transfer(Recv, 1, 0x200, 1),
            transfer(Send, 0, 0x400, 1),
        ];
        let mut packed = NO_TRANSFERS;
        let moved = pack(&list, 1, 3, ONE, &mut packed).unwrap();
        assert_eq!(packed.first[..7], [0, 1, 1, 1, 2, 2, 2]);
        assert_eq!((packed.transfer[1].address, packed.transfer[1].source), (0x100, 0x300));
        assert_eq!(moved, Moved { sent_bytes: 3 * 8, received_bytes: 2 * 8 });
    }

    #[test]
    fn too_many_messages_are_refused() {
        let list: Vec<_> = (0..65).map(|at| transfer(Direction::Send, 1, 64 * at, 0)).collect();
        let error = pack(&list, 0, 2, ONE, &mut { NO_TRANSFERS }).unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { name: "messages of a group", .. }), "{error}");
        assert!(pack(&list[..64], 0, 2, ONE, &mut { NO_TRANSFERS }).is_ok());
        let more: Vec<_> = (0..300).map(|at| transfer(Direction::Send, 1, 64 * at, 0)).collect();
        assert!(pack(&more, 0, 2, ONE, &mut { NO_TRANSFERS }).is_err());
        // Before each is compared with each, which would take minutes.
        let many = vec![transfer(Direction::Send, 1, 0x10, 0); 1_000_000];
        let started = std::time::Instant::now();
        let error = check_transfers(&many, 2).unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { name: "messages of a group", .. }), "{error}");
        assert!(started.elapsed() < std::time::Duration::from_secs(5));
    }
}
