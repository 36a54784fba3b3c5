//! Messages between pairs of ranks: batched into one launch, in which all go on side by side.

use std::marker::PhantomData;

use super::identity::{CallId, CallKind};
use super::operand::Operand;
use crate::abi::{FaTransfer, FaTransfers, FA_MAX_RANKS, FA_MAX_TRANSFERS};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};

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

/// Messages to send and to receive in one launch: see [`Communicator::group`](crate::Communicator::group).
#[derive(Debug, Default)]
pub struct Group<'a> {
    transfers: Vec<Transfer>,
    buffers: PhantomData<&'a mut ()>,
}

impl<'a> Group<'a> {
    /// Sends all of `data` to a rank.
    pub fn send<T: Element>(&mut self, data: &'a [T], to: usize, tag: u32) -> &mut Self {
        self.add(Direction::Send, data.as_ptr() as u64, data.len(), T::DTYPE, to, tag)
    }

    /// Receives as many elements as `data` has from a rank.
    pub fn recv<T: Element>(&mut self, data: &'a mut [T], from: usize, tag: u32) -> &mut Self {
        self.add(Direction::Recv, data.as_mut_ptr() as u64, data.len(), T::DTYPE, from, tag)
    }

    fn add(
        &mut self,
        direction: Direction,
        address: u64,
        count: usize,
        dtype: DType,
        peer: usize,
        tag: u32,
    ) -> &mut Self {
        self.transfers.push(Transfer { direction, peer, address, count, dtype, tag });
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

/// Refuses transfers that no kernel could do.
pub(crate) fn check_transfers(transfers: &[Transfer], world_size: usize) -> Result<()> {
    let mut operands: Vec<(Direction, Operand)> = Vec::with_capacity(transfers.len());
    for transfer in transfers {
        if transfer.peer >= world_size {
            return Err(Error::RankOutOfRange { rank: transfer.peer, world_size });
        }
        let which = match transfer.direction {
            Direction::Send => "send",
            Direction::Recv => "receive",
        };
        let operand = Operand::new(which, transfer.address, transfer.count, transfer.dtype)?;
        for (direction, other) in &operands {
            let both_read = (*direction, transfer.direction) == (Direction::Send, Direction::Send);
            if !both_read && operand.overlaps(other) {
                return Err(Error::Overlap {
                    input: other.address as usize,
                    output: operand.address as usize,
                    bytes: operand.bytes.min(other.bytes) as usize,
                });
            }
        }
        operands.push((transfer.direction, operand));
    }
    Ok(())
}

/// Transfers by channel, and the bytes that this rank sends. To and from one peer they go in the order of their tags, and of one
/// tag in that of the list, so that two ranks need not name theirs in the same order.
pub(crate) fn pack(transfers: &[Transfer], rank: usize, world_size: usize) -> Result<(FaTransfers, u64)> {
    const NONE: FaTransfer = FaTransfer { address: 0, bytes: 0, source: 0, tag: 0, reserved: 0 };
    let mut packed = FaTransfers {
        first: [0; 2 * FA_MAX_RANKS as usize + 2],
        transfer: [NONE; FA_MAX_TRANSFERS as usize],
    };
    let between = |peer: usize, direction: Direction| {
        let of_channel = |transfer: &&Transfer| transfer.peer == peer && transfer.direction == direction;
        let mut list: Vec<&Transfer> = transfers.iter().filter(of_channel).collect();
        list.sort_by_key(|transfer| transfer.tag);
        list
    };
    let bytes_of = |transfer: &Transfer| (transfer.count * transfer.dtype.size()) as u64;
    let (mut length, mut sent) = (0, 0);
    for peer in 0..world_size {
        let (sends, receives) = (between(peer, Direction::Send), between(peer, Direction::Recv));
        sent += sends.iter().map(|transfer| bytes_of(transfer)).sum::<u64>();
        let mut push = |transfer: &Transfer, source: u64| {
            let slot = packed.transfer.get_mut(length).ok_or_else(|| Error::InvalidSetting {
                name: "messages of a group",
                value: transfers.len().to_string(),
                expected: "at most 64, a message from a rank to itself counting once",
            })?;
            let (address, bytes, tag) = (transfer.address, bytes_of(transfer), transfer.tag);
            *slot = FaTransfer { address, bytes, source, tag, reserved: 0 };
            length += 1;
            Ok(length as u32)
        };
        let mut end = packed.first[2 * peer];
        if peer == rank {
            packed.first[2 * peer + 1] = end;
            for pair in matched(&sends, &receives, rank)? {
                let (source, target) = pair;
                // Gathered or scattered in place, it is there already.
                if source.address != target.address {
                    end = push(target, source.address)?;
                }
            }
        } else {
            for transfer in sends {
                end = push(transfer, 0)?;
            }
            packed.first[2 * peer + 1] = end;
            for transfer in receives {
                end = push(transfer, 0)?;
            }
        }
        packed.first[2 * peer + 2] = end;
    }
    Ok((packed, sent))
}

/// A rank's messages to itself, each with its receive.
fn matched<'a>(
    sends: &[&'a Transfer],
    receives: &[&'a Transfer],
    rank: usize,
) -> Result<Vec<(&'a Transfer, &'a Transfer)>> {
    let describe = |transfer: Option<&&Transfer>| match transfer {
        Some(Transfer { count, dtype, tag, .. }) => format!("{count} {dtype} with tag {tag}"),
        None => "no message".into(),
    };
    let bytes = |transfer: &Transfer| transfer.count * transfer.dtype.size();
    let pair = |index: usize| match (sends.get(index), receives.get(index)) {
        (Some(&send), Some(&receive)) if (send.tag, bytes(send)) == (receive.tag, bytes(receive)) => {
            Ok((send, receive))
        }
        (send, receive) => Err(Error::Disagreement {
            what: "the messages of a rank to itself",
            rank,
            theirs: format!("{} to send", describe(send)),
            own_rank: rank,
            ours: format!("{} to receive", describe(receive)),
        }),
    };
    (0..sends.len().max(receives.len())).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let (packed, sent) = pack(&list, 1, 3).unwrap();
        assert_eq!(packed.first[..7], [0, 0, 1, 1, 2, 5, 5]);
        let addresses: Vec<u64> = packed.transfer[..5].iter().map(|transfer| transfer.address).collect();
        assert_eq!(addresses, [0x20, 0x60, 0x30, 0x10, 0x50]);
        assert_eq!(packed.transfer[1].source, 0x40, "a copy");
        assert_eq!(sent, 4 * 8);
    }

    #[test]
    fn a_message_to_oneself_needs_its_receive() {
        let lonely = [transfer(Direction::Send, 0, 0x10, 1)];
        let error = pack(&lonely, 0, 2).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Disagreement { rank: 0, .. }), "{error}");
        let other_tag = [transfer(Direction::Send, 0, 0x10, 1), transfer(Direction::Recv, 0, 0x20, 2)];
        assert!(pack(&other_tag, 0, 2).is_err());
    }

    #[test]
    fn too_many_messages_are_refused() {
        let list: Vec<_> = (0..65).map(|at| transfer(Direction::Send, 1, 64 * at, 0)).collect();
        let error = pack(&list, 0, 2).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { name: "messages of a group", .. }), "{error}");
        assert!(pack(&list[..64], 0, 2).is_ok());
    }
}
