//! The collectives of the CUDA device on cudarc's slices and views.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use super::slices::Addresses;
use crate::call::{same_length, Call, Collective, QuantizedTransport, Transport};
use crate::catalogue::ReduceOp;
use crate::communicator::typed::{example, typed_collectives};
use crate::communicator::Communicator;
use crate::device::cuda::Cuda;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

typed_collectives!(cuda, Cuda, impl DevicePtr<T>, impl DevicePtrMut<T>, stream: &Arc<CudaStream>);

impl Communicator<Cuda> {
    /// Reduces the ranks' `input`s element by element into every rank's `output`, in the order of `stream`.
    ///
    /// `input` and `output` have the same length. The call returns when the kernels have been launched. It takes any
    /// slice or view of this device, including memory of stream-ordered pools and views at odd offsets, also while the
    /// stream is being captured into a graph. The following holds for all calls on slices:
    ///
    /// * **Order.** A call on another stream than the communicator's last call waits for that call. The per-thread
    ///   default streams are one stream per thread. With cudarc's event tracking a call also waits for the slices' last
    ///   uses on other streams; without it the caller orders these.
    /// * **Capture.** Event tracking applies only to uses of the slices within the same capture. cudarc does not track
    ///   launches of a graph: the program orders them and other uses of the slices. It also orders them and the
    ///   communicator's other calls, unless graph and calls are on the stream that was captured. The first captured
    ///   call on another stream than the last call's must follow a synchronisation with that stream.
    /// * **Lifetime.** Launches of a graph use the communicator's kernels and memory. These stay until the communicator
    ///   and all of its buffers have been dropped: keep one of them until the last launch has ended.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn example(communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>)
    /// #     -> Result<(), Box<dyn std::error::Error>> {
    /// let input = stream.clone_htod(&vec![1.0_f32; 4096])?;
    /// let mut output = stream.alloc_zeros::<f32>(4096)?;
    /// communicator.all_reduce(stream, &input, &mut output, ReduceOp::Sum)?;
    /// communicator.synchronize(stream)?; // Now the result is there.
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`]; [`Error::InvalidSetting`] for an operation that the type does not have;
    /// [`Error::InvalidStream`] for a stream of another context; [`Error::InvalidPointer`] for a slice of another
    /// device; [`Error::Unavailable`] for an order that a capture does not permit. None of these changes anything.
    /// [Errors of every call](Communicator#errors-of-every-call).
    pub fn all_reduce<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        self.between(stream, Collective::AllReduce(op), input.len(), input, output)
    }

    /// Reduces the ranks' `data` element by element, in place, in the order of `stream`.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn example(communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, mut data: CudaSlice<f32>)
    /// #     -> Result<()> {
    /// communicator.all_reduce_in_place(stream, &mut data, ReduceOp::Avg)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce`], except [`Error::LengthMismatch`].
    pub fn all_reduce_in_place<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        self.in_place(stream, Collective::AllReduce(op), data)
    }

    /// Carries out a collective from one slice to another. A slice that this rank does not use, because it is not the
    /// root, is ignored.
    fn between<T: Element, I: DevicePtr<T>, O: DevicePtrMut<T>>(
        &self,
        stream: &Arc<CudaStream>,
        collective: Collective<'_>,
        count: usize,
        input: &I,
        output: &mut O,
    ) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let call = Call { collective, input: 0, output: 0, count, dtype: T::DTYPE };
        call.check_arguments(rank, world_size)?;
        let input = collective.uses_input(rank).then_some(input);
        let output = collective.uses_output(rank).then_some(output);
        let (has, has_room) = (input.map_or(0, I::len), output.as_ref().map_or(0, |output| output.len()));
        same_length(collective.input_len(count, rank, world_size), has)?;
        same_length(collective.output_len(count, rank, world_size), has_room)?;
        self.with_slices(stream, input, output, |Addresses { input, output, captured }| {
            let call = Call { input, output, ..call };
            // SAFETY: both slices have the lengths that the collective reads and writes. They live until the work on
            // the stream is done, since cudarc orders frees after it. An exclusive borrow overlaps with no other. The
            // stream is of this context and kept alive.
            unsafe { self.run(call, stream.cu_stream(), Some(stream), captured) }
        })
    }

    /// Carries out a collective in place, on the whole of one slice.
    fn in_place<T: Element, O: DevicePtrMut<T>>(
        &self,
        stream: &Arc<CudaStream>,
        collective: Collective<'_>,
        data: &mut O,
    ) -> Result<()> {
        let call = Call { collective, input: 0, output: 0, count: data.len(), dtype: T::DTYPE };
        call.check_arguments(self.rank(), self.world_size())?;
        let nothing = None::<&CudaSlice<T>>;
        self.with_slices(stream, nothing, Some(data), |Addresses { output, captured, .. }| {
            let call = Call { input: output, output, ..call };
            // SAFETY: as in `between`; in place is input == output.
            unsafe { self.run(call, stream.cu_stream(), Some(stream), captured) }
        })
    }
}
