//! The typed collectives, for every device: what they are called, what they take and what they promise.

/// The typed collectives of a device but for the allreduce. `stream` is what calls are ordered by, if the device has that; the
/// types are those of a call's buffers of elements `T`. The device has `between` and `in_place`, which carry out a
/// [`Collective`](crate::Collective) on them.
macro_rules! typed_collectives {
    ($device:ty, $input:ty, $output:ty $(, $stream:ident: $stream_type:ty)?) => {
        impl Communicator<$device> {
            /// Sums the ranks' `input`s into every rank's `output`, moving about a byte for each element: for links that are slow,
            /// as PCIe is, and callers who can do with less accuracy.
            ///
            /// Each input is quantised once and the sum once, in groups of 32 elements of the message. No element is further from
            /// the exact sum than `tolerance` times the sum over the ranks of the largest magnitude in its group; a tolerance that
            /// the transport cannot keep is refused with what it can ([`Transport::error_bound`]). The result is the same, bit for
            /// bit, on all ranks and devices, and does not depend on the algorithm, the plan or the region. A group that holds a
            /// NaN or an infinity on any rank, or whose sum is beyond f32, becomes NaN. `docs/quantized.md` has the format. In a
            /// world of one nothing is moved, and nothing quantised.
            ///
            /// # Errors
            ///
            /// As [`Communicator::all_reduce`]; [`Error::InvalidSetting`] for a type other than f16, bf16 and f32, and a tolerance
            /// below the transport's bound; [`Error::Disagreement`] where ranks do not agree on transport and tolerance.
            pub fn all_reduce_quantized<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                transport: Transport,
                tolerance: f32,
            ) -> Result<()> {
                let collective = Collective::AllReduceQuantized(QuantizedTransport { transport, tolerance });
                self.between($($stream,)? collective, input.len(), input, output)
            }

            /// The same in place.
            ///
            /// # Errors
            ///
            /// As [`Communicator::all_reduce_quantized`].
            pub fn all_reduce_quantized_in_place<T: Element>(
                &self,
                $($stream: $stream_type,)?
                data: &mut $output,
                transport: Transport,
                tolerance: f32,
            ) -> Result<()> {
                let collective = Collective::AllReduceQuantized(QuantizedTransport { transport, tolerance });
                self.in_place($($stream,)? collective, data)
            }

            /// Brings the ranks' `input`s, in the order of the ranks, into every rank's `output`, which has room for all.
            ///
            /// # Errors
            ///
            /// As [`Communicator::all_reduce`].
            pub fn all_gather<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
            ) -> Result<()> {
                self.between($($stream,)? Collective::AllGather, input.len(), input, output)
            }

            /// The same with `counts[r]` elements from rank r.
            ///
            /// # Errors
            ///
            /// As [`Communicator::all_reduce`], and [`Error::InvalidSetting`] unless there is a count for each rank.
            pub fn all_gather_v<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                counts: &[usize],
            ) -> Result<()> {
                self.between($($stream,)? Collective::AllGatherV(counts), 0, input, output)
            }

            /// Reduces the ranks' `input`s, of which rank r gets share r: as many elements as `output` has, after those of the
            /// ranks before. The bits are those of an allreduce by a direct algorithm.
            ///
            /// # Errors
            ///
            /// As [`Communicator::all_reduce`].
            pub fn reduce_scatter<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                op: ReduceOp,
            ) -> Result<()> {
                self.between($($stream,)? Collective::ReduceScatter(op), output.len(), input, output)
            }

            /// The same with `counts[r]` elements for rank r.
            ///
            /// # Errors
            ///
            /// As [`Communicator::all_gather_v`].
            pub fn reduce_scatter_v<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                counts: &[usize],
                op: ReduceOp,
            ) -> Result<()> {
                self.between($($stream,)? Collective::ReduceScatterV(op, counts), 0, input, output)
            }

            /// Copies the root's `data` to all ranks.
            ///
            /// # Errors
            ///
            /// As [`Communicator::all_reduce`], and [`Error::RankOutOfRange`] for the root.
            pub fn broadcast<T: Element>(
                &self,
                $($stream: $stream_type,)?
                data: &mut $output,
                root: usize,
            ) -> Result<()> {
                self.in_place($($stream,)? Collective::Broadcast { root }, data)
            }

            /// Reduces the ranks' `input`s into the root's `output`. That of other ranks is not looked at, and may have any length.
            /// The bits are those of an allreduce by a direct algorithm.
            ///
            /// # Errors
            ///
            /// As [`Communicator::broadcast`].
            pub fn reduce<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                op: ReduceOp,
                root: usize,
            ) -> Result<()> {
                self.between($($stream,)? Collective::Reduce { op, root }, input.len(), input, output)
            }

            /// Brings the ranks' `input`s, in the order of the ranks, into the root's `output`. That of other ranks is not looked
            /// at, and may have any length.
            ///
            /// # Errors
            ///
            /// As [`Communicator::broadcast`].
            pub fn gather<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                root: usize,
            ) -> Result<()> {
                self.between($($stream,)? Collective::Gather { root }, input.len(), input, output)
            }

            /// Brings share r of the root's `input` to rank r: as many elements as `output` has. The input of other ranks is not
            /// looked at, and may have any length.
            ///
            /// # Errors
            ///
            /// As [`Communicator::broadcast`].
            pub fn scatter<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                root: usize,
            ) -> Result<()> {
                self.between($($stream,)? Collective::Scatter { root }, output.len(), input, output)
            }

            /// Brings share r of every rank's `input` to rank r, in the order of the ranks. Shares are equal.
            ///
            /// # Errors
            ///
            /// As [`Communicator::all_reduce`].
            pub fn all_to_all<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
            ) -> Result<()> {
                self.between($($stream,)? Collective::AllToAll, input.len() / self.world_size(), input, output)
            }

            /// The same with `send_counts[r]` elements for rank r, and `receive_counts[r]` from it.
            ///
            /// # Errors
            ///
            /// As [`Communicator::all_gather_v`], and [`Error::Disagreement`] if a rank sends another number than is to be
            /// received.
            pub fn all_to_all_v<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                send_counts: &[usize],
                output: &mut $output,
                receive_counts: &[usize],
            ) -> Result<()> {
                let collective = Collective::AllToAllV { send: send_counts, receive: receive_counts };
                self.between($($stream,)? collective, 0, input, output)
            }
        }
    };
}
pub(super) use typed_collectives;
