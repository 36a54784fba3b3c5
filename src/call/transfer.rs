//! Messages between pairs of ranks, batched into one launch that moves all of them concurrently.

use std::marker::PhantomData;

use super::identity::{CallId, CallKind};
use super::operand::Operand;
use crate::abi::{FaTransfer, FaTransfers, FA_MAX_RANKS, FA_MAX_TRANSFERS};
use crate::catalogue::DType;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::region::Stripes;

/// Direction of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From this rank to the peer.
    Send,
    /// From the peer to this rank.
    Recv,
}

/// Message of a group, by address, for [`Communicator::transfer_raw`](crate::Communicator::transfer_raw).
///
/// ```
/// use fast_allreduce::{DType, Direction, Transfer};
///
/// let data = [1.0_f32; 8];
/// let transfer = Transfer {
///     direction: Direction::Send,
///     peer: 1,
///     address: data.as_ptr() as u64,
///     count: data.len(),
///     dtype: DType::F32,
///     tag: 0,
/// };
/// # assert_eq!(transfer.count, 8);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// Direction.
    pub direction: Direction,
    /// Other rank. It may be this rank: then the group needs a receive for each send.
    pub peer: usize,
    /// Address of the first element on the device.
    pub address: u64,
    /// Number of elements.
    pub count: usize,
    /// Element type.
    pub dtype: DType,
    /// Tag; sender and receiver must use the same.
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

    /// Returns the length in bytes. The count has been checked, so that the product does not overflow.
    fn bytes(&self) -> u64 {
        (self.count * self.dtype.size()) as u64
    }
}

/// Messages that are sent and received in one launch. [`Communicator::group`](crate::Communicator::group) has an
/// example.
#[derive(Debug, Default)]
pub struct Group<'a> {
    transfers: Vec<Transfer>,
    buffers: PhantomData<&'a mut ()>,
}

impl<'a> Group<'a> {
    /// Adds a message with all of `data` to the rank `to`.
    pub fn send<T: Element>(&mut self, data: &'a [T], to: usize, tag: u32) -> &mut Self {
        self.transfers.push(Transfer::send(data, to, tag));
        self
    }

    /// Adds a message from the rank `from` that fills `data`.
    pub fn recv<T: Element>(&mut self, data: &'a mut [T], from: usize, tag: u32) -> &mut Self {
        self.transfers.push(Transfer::recv(data, from, tag));
        self
    }

    pub(crate) fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }
}

/// Returns the identity of a list of transfers, which peers report in their errors.
pub(crate) fn transfers_id(kind: CallKind, transfers: &[Transfer]) -> CallId {
    let dtype = transfers.first().map_or(DType::U8, |transfer| transfer.dtype);
    let count = transfers.iter().fold(0_usize, |sum, transfer| sum.saturating_add(transfer.count));
    CallId { kind, dtype, op: None, algorithm: None, root: None, digest: 0, count, counts: 0 }
}

/// Largest number of transfers of a group. A message from a rank to itself is two transfers, but one entry for the
/// kernel.
const MAX_TRANSFERS: usize = 2 * FA_MAX_TRANSFERS as usize;

fn too_many(count: usize) -> Error {
    Error::InvalidSetting {
        name: "messages of a group",
        value: count.to_string(),
        expected: "at most 64, a message from a rank to itself counting once",
    }
}

/// Checks the peers and the memory of transfers.
#[inline]
pub(crate) fn check_transfers(transfers: &[Transfer], world_size: usize) -> Result<()> {
    // Checked first, because the overlap check below is quadratic.
    if transfers.len() > MAX_TRANSFERS {
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
            // `other` was checked in an earlier iteration.
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

/// Bytes that a launch of transfers moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moved {
    pub sent_bytes: u64,
    /// Includes messages from this rank to itself.
    pub received_bytes: u64,
}

/// Empty list of transfers, for [`pack`] to fill.
pub(crate) const NO_TRANSFERS: FaTransfers = FaTransfers {
    first: [0; 2 * FA_MAX_RANKS as usize + 2],
    stripes: [0; 2 * FA_MAX_RANKS as usize + 2],
    transfer: [FaTransfer { address: 0, bytes: 0, source: 0, tag: 0, part: 0 }; FA_MAX_TRANSFERS as usize],
};

/// Sorts transfers by channel into the kernel's list. It allocates nothing. Entries after the last transfer are
/// unchanged.
///
/// The messages of a channel are in the order of their tags, and those of one tag in the order of the list. So two
/// ranks need not list their messages in the same order.
///
/// # Errors
///
/// * [`Error::InvalidSetting`] for more messages than a group can have.
/// * [`Error::Disagreement`] if the rank's sends to itself do not match its receives from itself.
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
    let mut order = [0_u8; MAX_TRANSFERS];
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
            // Messages to itself are copies. They are entries of the receiving channel, which is the next one.
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
            // In a gather or scatter in place, the rank's own share is already where it belongs.
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

/// Checks that a rank's sends to itself match its receives from itself. `sends` and `receives` are indices of
/// transfers.
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
    fn messages_are_sorted_by_channel_and_tag() {
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
        // 8192 bytes to itself, 20000 bytes and 4100 bytes, in parts of 4 KiB.
        assert_eq!(packed.first[..5], [0, 0, 1, 3, 4]);
        assert_eq!(packed.stripes[..5], [0, 0, 2, 7, 9]);
        assert!(packed.transfer[..4].iter().all(|message| message.part == 32));
    }

    #[test]
    fn a_message_to_itself_needs_its_receive() {
        let lonely = [transfer(Direction::Send, 0, 0x10, 1)];
        let error = pack(&lonely, 0, 2, ONE, &mut { NO_TRANSFERS }).unwrap_err();
        assert!(matches!(error, Error::Disagreement { rank: 0, .. }), "{error}");
        let other_tag = [transfer(Direction::Send, 0, 0x10, 1), transfer(Direction::Recv, 0, 0x20, 2)];
        assert!(pack(&other_tag, 0, 2, ONE, &mut { NO_TRANSFERS }).is_err());
        let only_received = [transfer(Direction::Recv, 1, 0x10, 1)];
        assert!(pack(&only_received, 1, 2, ONE, &mut { NO_TRANSFERS }).is_err());
    }

    /// Each receive copies from the send with the same tag; messages in place are not copied.
    #[test]
    fn messages_to_itself_are_copies() {
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
        // Refused before the quadratic overlap check, which would take minutes.
        let many = vec![transfer(Direction::Send, 1, 0x10, 0); 1_000_000];
        let started = std::time::Instant::now();
        let error = check_transfers(&many, 2).unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { name: "messages of a group", .. }), "{error}");
        assert!(started.elapsed() < std::time::Duration::from_secs(5));
    }
}
