//! Calls are recorded, and recorded calls are made again.

use std::fmt;

use super::Communicator;
#[cfg(doc)]
use crate::call::recording::Recording;
use crate::call::recording::{Entry, Header, Options};
use crate::call::{Recorder, Span, UsedMemory};
use crate::device::{Device, Host};
use crate::endpoint::State;
use crate::error::{Error, Result};
use crate::plan::{DeviceKind, Proposal};

/// Settings that decide how a call is planned, besides the table and the number of workers.
const SETTINGS: [&str; 3] = ["max_bytes", "algorithm", "order"];

/// A result of a repeated call that differs from the recorded one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The memory: `output`, or a result of a fused call.
    pub name: &'static str,
    /// Index of the first element that differs.
    pub element: usize,
    /// Its bytes now, and in the recording.
    pub bytes: [Vec<u8>; 2],
    /// How many elements differ, and how many there are.
    pub elements: [usize; 2],
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The lowest byte comes first in memory.
        let number = |bytes: &[u8]| bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>();
        let Self { name, element, bytes: [now, before], elements: [differing, all] } = self;
        let (now, before) = (number(now), number(before));
        write!(f, "element {element} of {name} is 0x{now}, was 0x{before}; {differing} of {all} differ")
    }
}

impl Communicator<Host> {
    /// Records the following collectives: what they read, and their results. Messages between pairs are not recorded.
    ///
    /// All ranks begin between the same calls, and name directories that may be the same: the file is
    /// `WORLD-RANK.record`. The recording ends with `None`, with a call that fails or does not fit, and when the
    /// communicator leaves its world. `fast-allreduce replay` makes the calls again. `FAST_ALLREDUCE_RECORD_DIR`
    /// records without a call of this function, also in the world of a [`Communicator::join`] or
    /// [`Communicator::resume`].
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// use fast_allreduce::record::{Options, Recording};
    ///
    /// # ranks(2, |communicator| {
    /// # let folder = std::env::temp_dir().join(format!("record-{}", std::process::id()));
    /// # std::fs::create_dir(&folder).ok();
    /// # communicator.barrier()?;
    /// communicator.record(Some(&Options::new(&folder).bytes(1 << 20)))?;
    /// communicator.all_reduce_in_place(&mut [1.0_f32; 8], ReduceOp::Sum)?;
    /// communicator.record(None)?;
    ///
    /// # communicator.barrier()?;
    /// let file = format!("{}-{}.record", communicator.flight_record().world, communicator.rank());
    /// let mut recording = Recording::open(&folder.join(file))?;
    /// let call = recording.next_call()?.unwrap();
    /// assert!(call.to_string().starts_with("call 1, all_reduce of 8 f32"));
    /// assert_eq!(communicator.replay(&call)?, None); // The same bits.
    /// # communicator.barrier()?;
    /// # std::fs::remove_dir_all(&folder).ok();
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], if the file exists or cannot be written, if this world has been recorded in it before,
    /// and if the communicator is suspended or within another call.
    pub fn record(&self, options: Option<&Options>) -> Result<()> {
        let recorder = options.map(|options| Recorder::create(options, self.header()?)).transpose()?;
        self.set_recorder(recorder)
    }

    /// Makes a recorded call of this rank again, with the inputs of then. Returns the first difference of its results.
    /// Collective: all ranks repeat the same call of one recording.
    ///
    /// [`Communicator::record`] has an example. [`Recording::builder`] makes a communicator that plans calls as the
    /// recorded one did.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] for a call that failed when it was recorded, or of which only hashes were;
    /// [`Error::Allocation`]; errors of the call.
    pub fn replay(&self, entry: &Entry) -> Result<Option<Difference>> {
        if entry.failure().is_some() || !entry.has_data() {
            let reason = entry.failure().unwrap_or("the recording has hashes alone");
            return Err(Error::Unavailable { what: entry.to_string(), reason: reason.into() });
        }
        /// What memory has that is only written.
        const POISON: u8 = 0xA5;
        const ALIGNMENT: usize = 64;
        let (mut memory, mut before) = (Vec::with_capacity(entry.spans.len()), &entry.before[..]);
        for span in &entry.spans {
            let bytes = span.bytes as usize;
            let mut copy = Vec::new();
            copy.try_reserve_exact(bytes + ALIGNMENT)
                .map_err(|error| Error::Allocation { bytes, reason: error.to_string() })?;
            // At the same place in a cache line.
            let skipped = (span.address as usize).wrapping_sub(copy.as_ptr() as usize) % ALIGNMENT;
            copy.resize(skipped, POISON);
            if span.is_read {
                let (own, rest) = before.split_at(bytes);
                copy.extend_from_slice(own);
                before = rest;
            }
            copy.resize(skipped + bytes, POISON);
            memory.push((span, skipped, copy));
        }
        let starts: Vec<_> = memory
            .iter_mut()
            .map(|(span, skipped, copy)| (**span, copy[*skipped..].as_mut_ptr() as u64))
            .collect();
        let mut saved = entry.saved.clone();
        saved.relocate(|address| {
            let is_here = |(span, _): &&(Span, u64)| span.contains(address);
            starts.iter().find(is_here).map_or(address, |(span, start)| start + (address - span.address))
        });
        let Some(call) = saved.call() else { return Ok(None) };
        call.check(self.rank, self.world_size)?;
        self.check_row(&call)?;
        // SAFETY: the spans have all memory that the call reads or writes, each is a copy of its own, and addresses
        // in it have been moved there by the same distance.
        unsafe { self.run(call) }?;
        let mut after = &entry.after[..];
        for (span, skipped, copy) in memory.iter().filter(|(span, ..)| span.is_written) {
            let (recorded, rest) = after.split_at(span.bytes as usize);
            after = rest;
            let written = entry.memory.iter().filter(|one| one.is_written && one.operand.bytes > 0);
            for one in written.filter(|one| span.contains(one.operand.address)) {
                let first = (one.operand.address - span.address) as usize;
                let part = first..first + one.operand.bytes as usize;
                if let Some(found) = difference(one, &copy[*skipped..][part.clone()], &recorded[part]) {
                    return Ok(Some(found));
                }
            }
        }
        Ok(None)
    }
}

impl<D: Device> Communicator<D> {
    /// Begins the recording that the environment asks for, if any.
    pub(super) fn record_as_in_environment(&self, options: Option<&Options>) -> Result<()> {
        match (options, D::KIND) {
            (Some(_), DeviceKind::Cuda) => tracing::warn!("calls of GPUs are not recorded"),
            (Some(options), _) => self.set_recorder(Some(Recorder::create(options, self.header()?)?))?,
            _ => {}
        }
        Ok(())
    }

    /// Begins another recording in a new world, if the environment asks for one.
    pub(super) fn record_again(&self, state: &mut State<D>) -> Result<()> {
        let options = Options::of_environment()?.filter(|_| D::KIND == DeviceKind::Host);
        let recorder = options.map(|options| Recorder::create(&options, self.header()?)).transpose()?;
        state.calls.recorder = recorder.map(Box::new);
        Ok(())
    }

    fn set_recorder(&self, recorder: Option<Recorder>) -> Result<()> {
        self.can_lock()?;
        let mut state = self.endpoint.enter()?;
        let (_, calls, _) = state.parts()?;
        // A call that repeats the last one does not ask for a recorder.
        calls.last = None;
        calls.recorder = recorder.map(Box::new);
        Ok(())
    }

    fn header(&self) -> Result<Header> {
        let is_meant = |(name, value): &&(&str, String)| SETTINGS.contains(name) && value != "automatic";
        let facts = self.terms.facts.iter().filter(is_meant);
        let workers = ("workers".to_owned(), self.endpoint.device.most_blocks().to_string());
        Ok(Header {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            world: self.endpoint.with_membership(|membership| membership.lineage.id())?,
            rank: self.rank,
            world_size: self.world_size,
            has_data: true,
            settings: facts.map(|(name, value)| (name.to_string(), value.clone())).chain([workers]).collect(),
            table: Proposal::given(self.terms.table.clone()).encode()?,
        })
    }
}

fn difference(memory: &UsedMemory, now: &[u8], before: &[u8]) -> Option<Difference> {
    if now == before {
        return None;
    }
    // Results may be large: nothing of them is copied but this element.
    let elements = || now.chunks(memory.element).zip(before.chunks(memory.element));
    let (element, (own, recorded)) = elements().enumerate().find(|(_, (now, before))| now != before)?;
    let differing = elements().filter(|(now, before)| now != before).count();
    let bytes = [own.to_vec(), recorded.to_vec()];
    Some(Difference { name: memory.name, element, bytes, elements: [differing, elements().len()] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::Threads;
    use crate::call::recording::Recording;
    use crate::catalogue::ReduceOp;
    use crate::testing::temporary::Folder;

    #[test]
    fn a_changed_bit_is_found_at_its_element() {
        let folder = Folder::new();
        let of_rank = |bootstrap: Threads| -> Result<()> {
            let communicator = Communicator::builder().build(Host::new(), bootstrap)?;
            let rank = communicator.rank();
            communicator.record(Some(&Options::new(folder.path())))?;
            let mut data = [rank as f32 + 0.5; 70];
            communicator.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
            communicator.all_gather(&data[..3], &mut [0.0; 6])?;
            communicator.record(None)?;
            let file = format!("{:016x}-{rank}.record", communicator.header()?.world);
            let mut recording = Recording::open(&folder.path().join(file))?;
            let (mut sum, gather) = (recording.next_call()?.unwrap(), recording.next_call()?.unwrap());
            assert_eq!((communicator.replay(&gather)?, communicator.replay(&sum)?), (None, None));
            sum.after[4 * 69 + 3] ^= 1;
            let found = communicator.replay(&sum)?.unwrap().to_string();
            assert_eq!(found, "element 69 of output is 0x40000000, was 0x41000000; 1 of 70 differ");
            assert!(recording.next_call()?.is_none());
            Ok(())
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> =
                Threads::world(2).unwrap().into_iter().map(|one| scope.spawn(|| of_rank(one))).collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
        });
    }
}
