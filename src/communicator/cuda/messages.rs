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
    /// Sends `data` to rank `to`, which receives it with the same tag, in the order of `stream`.
    ///
    /// The kernel ends when `data` may be changed; the receiver may not have it yet. The kernel of a message of several
    /// MiB may wait until the receiver takes it. Messages between two ranks arrive in the order in which they are sent.
    ///
    /// [`Communicator::transfer_raw`] moves several messages in one launch.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn example(communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, mut data: CudaSlice<f32>)
    /// #     -> Result<()> {
    /// match communicator.rank() {
    ///     0 => communicator.send(stream, &data, 1, 5)?, // To rank 1, with the tag 5.
    ///     _ => communicator.recv(stream, &mut data, 0, 5)?,
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`]; [`Error::InvalidStream`] and [`Error::InvalidPointer`] for another context or device;
    /// [`Error::Disagreement`] for a message to this rank itself, which needs [`Communicator::transfer_raw`];
    /// [errors of every call](Communicator#errors-of-every-call).
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

    /// Receives a message from rank `from`, with as many elements as `data` has, in the order of `stream`.
    ///
    /// [`Communicator::send`] has an example.
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::send`]; later [`Error::Disagreement`], if the message that arrives has another tag or
    /// length.
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

    /// Sends `input` to rank `to` and at the same time receives `output` from rank `from`, which may be the same rank.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn example(communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, input: CudaSlice<f32>,
    /// #     mut output: CudaSlice<f32>) -> Result<()> {
    /// let peer = 1 - communicator.rank();
    /// communicator.send_recv(stream, &input, peer, &mut output, peer, 0)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::send`]; later [`Error::Disagreement`], if the message that arrives has another tag or
    /// length.
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

    /// Sends a message, receives one, or both.
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
            // SAFETY: both slices have the lengths of the messages. They live until the work on the stream is done,
            // since cudarc orders frees after it. An exclusive borrow overlaps with no other. The stream is of this
            // context and kept alive.
            unsafe { self.run_transfers(kind, &transfers, stream.cu_stream(), Some(stream), captured) }
        })
    }
}
