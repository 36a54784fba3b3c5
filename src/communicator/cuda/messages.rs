//! Messages between two ranks of the CUDA device on cudarc's slices and views.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use super::slices::Addresses;
use crate::call::{check_transfers, CallKind, Direction, Transfer};
use crate::communicator::Communicator;
use crate::device::cuda::Cuda;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

impl Communicator<Cuda> {
    /// Sends `data` to another rank, which receives it with the same tag. Its kernel ends when `data` may be changed: the receiver
    /// may not have it yet. One of several MiB may wait until the other rank receives it. Messages between two ranks come in the
    /// order in which they are sent.
    ///
    /// Several messages in one launch, side by side, are a call of [`Communicator::transfer_raw`].
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`], [`Error::RankOutOfRange`]; [`Error::Disagreement`] for a message to this rank itself,
    /// which needs [`Communicator::transfer_raw`].
    pub fn send<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &impl DevicePtr<T>,
        to: usize,
        tag: u32,
    ) -> Result<()> {
        let nothing = None::<(&mut CudaSlice<T>, usize)>;
        self.exchange(CallKind::Send, stream, Some((data, to)), nothing, tag)
    }

    /// Receives as many elements as `data` has from another rank.
    ///
    /// # Errors
    ///
    /// As [`Communicator::send`]; [`Error::Disagreement`], later, if the message that comes has another tag or length.
    pub fn recv<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        from: usize,
        tag: u32,
    ) -> Result<()> {
        let nothing = None::<(&CudaSlice<T>, usize)>;
        self.exchange(CallKind::Recv, stream, nothing, Some((data, from)), tag)
    }

    /// Sends to one rank and receives from another, or the same, at once.
    ///
    /// # Errors
    ///
    /// As [`Communicator::recv`].
    pub fn send_recv<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        to: usize,
        output: &mut impl DevicePtrMut<T>,
        from: usize,
        tag: u32,
    ) -> Result<()> {
        self.exchange(CallKind::SendRecv, stream, Some((input, to)), Some((output, from)), tag)
    }

    /// One message each way, or in one of the two.
    fn exchange<T: Element, I: DevicePtr<T>, O: DevicePtrMut<T>>(
        &self,
        kind: CallKind,
        stream: &Arc<CudaStream>,
        send: Option<(&I, usize)>,
        receive: Option<(&mut O, usize)>,
        tag: u32,
    ) -> Result<()> {
        let dtype = T::DTYPE;
        let sent = send.map(|(data, to)| (data.len(), to));
        let received = receive.as_ref().map(|(data, from)| (data.len(), *from));
        let (input, output) = (send.map(|(data, _)| data), receive.map(|(data, _)| data));
        self.with_slices(stream, input, output, |Addresses { input, output, captured }| {
            let message =
                |direction, (count, peer), address| Transfer { direction, peer, address, count, dtype, tag };
            let transfers: Vec<_> = sent
                .map(|sent| message(Direction::Send, sent, input))
                .into_iter()
                .chain(received.map(|received| message(Direction::Recv, received, output)))
                .collect();
            check_transfers(&transfers, self.world_size())?;
            // SAFETY: the slices hold what is sent and received until the work on the stream is done, which cudarc orders frees
            // after; an exclusive borrow overlaps with no other. The stream is of this context and kept alive.
            unsafe { self.run_transfers(kind, &transfers, stream.cu_stream(), Some(stream), captured) }
        })
    }
}
