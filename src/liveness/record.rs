//! Flight records as values: the latest calls of all ranks of a world, read from their pages.

use super::flight::{Times, CAPTURED};
use super::page::Page;
use super::recorder::now;
use super::status_page::{Cause, ExitRecord};
use super::totals::Totals;
use super::Liveness;
use crate::abi::{FaCall, MAX_RANKS};
use crate::call::{CallId, CallKind};
use crate::catalogue::Algorithm;
use crate::error::Error;

/// What the ranks of a world did last, as this rank or [`flight`](crate::flight) has read it.
///
/// Times are in nanoseconds of CLOCK_MONOTONIC, the same clock for all processes of a machine.
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(2, |communicator| {
/// communicator.barrier()?;
/// let record = communicator.flight_record();
/// for rank in &record.ranks {
///     let latest = rank.calls.last().map_or("nothing", |call| &call.call);
///     println!("rank {}: {} calls, {} behind, last {latest}", rank.rank, rank.begun, rank.behind);
/// }
/// println!("{}", record.to_json());
/// # communicator.barrier()?;
/// # Ok(()) });
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct FlightRecord {
    /// Identity of the world, in hexadecimal digits.
    pub world: String,
    /// Number of ranks of the world.
    pub world_size: usize,
    /// When the record was read.
    pub now_ns: u64,
    /// The ranks that could be read, in ascending order.
    pub ranks: Vec<RankRecord>,
    /// The other ranks, with the reasons.
    pub unread: Vec<UnreadRank>,
}

/// A rank whose flight record could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnreadRank {
    /// The rank.
    pub rank: usize,
    /// Why it could not be read.
    pub reason: String,
}

/// What a rank did last.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RankRecord {
    /// The rank.
    pub rank: usize,
    /// Its process id, in its own namespace.
    pub process: u32,
    /// Whether it is there.
    pub state: RankState,
    /// The text of its failure, if it has failed.
    pub reason: Option<String>,
    /// Number of calls that it has begun.
    pub begun: u64,
    /// Number of calls that have ended. On a GPU a call ends when it has been enqueued.
    pub ended: u64,
    /// Calls that it has begun fewer than the rank that has begun most.
    pub behind: u64,
    /// The rank that its call waits for; read about once a second. `None` if it does not wait, and on GPUs.
    pub waiting_for: Option<usize>,
    /// For how long, at least, it has begun no other call; `None` before its thread has looked, once a second.
    pub unchanged_ns: Option<u64>,
    /// By rank: number of waits that outlasted the first polls.
    pub waits: Vec<u64>,
    /// By rank: time in these waits after the first polls, in nanoseconds; 0 on GPUs.
    pub waited_ns: Vec<u64>,
    /// Totals by collective, of those that it has called. Empty if the setting `flight` is `off`. Not in the JSON text.
    pub totals: Vec<CallTotals>,
    /// Its latest calls, in order.
    pub calls: Vec<RecordedCall>,
}

/// Totals of a rank's calls of one collective.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CallTotals {
    /// Name of the collective, for example `all_reduce`.
    pub collective: &'static str,
    /// Number of calls by algorithm; `None`: calls that have none.
    pub algorithms: Vec<(Option<&'static str>, u64)>,
    /// Bytes of the rank's messages.
    pub bytes: u64,
    /// Number of timed calls.
    pub timed: u64,
    /// Numbers of timed calls up to 250 ns, 500 ns, 1 us and so on to 8.4 s, and of longer ones.
    pub durations: Vec<u64>,
    /// Sum of their durations, in nanoseconds.
    pub durations_ns: u64,
}

/// Whether a rank is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RankState {
    /// Its communicator is open.
    Open,
    /// It has closed its communicator.
    Closed,
    /// Its communicator has failed.
    Failed,
    /// Its process has ended.
    Ended,
}

/// A call of a flight record.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RecordedCall {
    /// Number of the call, from 1.
    pub number: u64,
    /// What it is, for example `all_reduce of 5 f32 (sum, one-shot-pull)`.
    pub call: String,
    /// Name of the collective, for example `all_reduce`.
    pub collective: &'static str,
    /// Name of the element type.
    pub dtype: &'static str,
    /// Number of elements.
    pub count: u64,
    /// Name of the algorithm, if the call has one.
    pub algorithm: Option<&'static str>,
    /// Whether it was captured into a graph, and not carried out.
    pub captured: bool,
    /// When it began; `None` if it was not timed.
    pub begin_ns: Option<u64>,
    /// When it ended; `None` if it was neither timed nor waited for long, or has not ended.
    pub end_ns: Option<u64>,
    /// Time in waits for `waited_for`, after their first polls.
    pub waited_ns: u64,
    /// The rank that it waited for longest.
    pub waited_for: Option<usize>,
}

impl FlightRecord {
    /// Completes a record: `behind` of each rank.
    pub(super) fn new(
        world: u64,
        world_size: usize,
        ranks: Vec<RankRecord>,
        unread: Vec<UnreadRank>,
    ) -> Self {
        let mut record = Self { world: format!("{world:016x}"), world_size, now_ns: now(), ranks, unread };
        let most = record.ranks.iter().map(|rank| rank.begun).max().unwrap_or(0);
        record.ranks.iter_mut().for_each(|rank| rank.behind = most - rank.begun);
        record.ranks.sort_by_key(|rank| rank.rank);
        record.unread.sort_by_key(|rank| rank.rank);
        record
    }

    /// Returns the record of no rank.
    pub(crate) fn none(world_size: usize, error: &Error) -> Self {
        let unread = (0..world_size).map(|rank| UnreadRank { rank, reason: error.to_string() });
        Self::new(0, world_size, Vec::new(), unread.collect())
    }

    /// Returns the record as JSON: an object with the fields of this type.
    #[must_use]
    pub fn to_json(&self) -> String {
        let Self { world, world_size, now_ns, ranks, unread } = self;
        let ranks = list(ranks.iter().map(RankRecord::to_json));
        let unread = unread
            .iter()
            .map(|UnreadRank { rank, reason }| format!("{{\"rank\":{rank},\"reason\":{}}}", text(reason)));
        format!(
            "{{\"world\":\"{world}\",\"world_size\":{world_size},\"now_ns\":{now_ns},\"ranks\":{ranks},\
             \"unread\":{}}}",
            list(unread)
        )
    }
}

impl Liveness {
    /// Returns the flight record of all ranks of this node; it does not wait.
    pub fn flight_record(&self, world: u64) -> FlightRecord {
        let (mut ranks, mut unread) = (Vec::new(), Vec::new());
        for rank in 0..self.world_size {
            match super::page::page(&self.pages, rank) {
                Some(page) => {
                    let mut read = RankRecord::of(page, None, rank, self.world_size);
                    if read.state == RankState::Open && !self.is_present(rank) {
                        read.state = RankState::Ended;
                    }
                    ranks.push(read);
                }
                None => unread.push(UnreadRank { rank, reason: "it is on another node".into() }),
            }
        }
        FlightRecord::new(world, self.world_size, ranks, unread)
    }
}

impl RankRecord {
    fn to_json(&self) -> String {
        let Self { rank, process, begun, ended, behind, .. } = self;
        let numbers = |numbers: &[u64]| list(numbers.iter().map(u64::to_string));
        let (state, reason) = (self.state.name(), number(self.reason.as_deref().map(text)));
        let [waiting_for, unchanged] = [number(self.waiting_for), number(self.unchanged_ns)];
        let (waits, waited) = (numbers(&self.waits), numbers(&self.waited_ns));
        let calls = list(self.calls.iter().map(RecordedCall::to_json));
        format!(
            "{{\"rank\":{rank},\"process\":{process},\"state\":\"{state}\",\"reason\":{reason},\"begun\":{begun},\
             \"ended\":{ended},\"behind\":{behind},\"waiting_for\":{waiting_for},\"unchanged_ns\":{unchanged},\
             \"waits\":{waits},\"waited_ns\":{waited},\"calls\":{calls}}}"
        )
    }

    /// Reads a rank's page; any bytes are valid. `later`: the page is a copy, and the owner had then begun and timed
    /// this many calls.
    pub(super) fn of(page: &Page, later: Option<[u64; 2]>, rank: usize, world_size: usize) -> Self {
        let Page { status, header, flight, .. } = page;
        let activity = flight.activity();
        let (waits, seen_at) = flight.waits();
        let (state, reason) = match status.exit_record() {
            None => (RankState::Open, None),
            Some(ExitRecord { cause: Cause::Closed, .. }) => (RankState::Closed, None),
            Some(ExitRecord { text, .. }) => (RankState::Failed, Some(text)),
        };
        let [calls, times] = later.unwrap_or_else(|| [flight.calls.count(), flight.times.count()]);
        // In a copy the entries are checked by the counts after it, elsewhere by those after each entry.
        let is_copy = later.is_some();
        let times = flight.times.copied(times).filter(|&(at, _)| is_copy || flight.times.get(at).is_some());
        let times: Vec<_> = times.map(|(_, words)| Times::of(words)).collect();
        let is_whole = |number| is_copy || flight.calls.get(number).is_some();
        let calls =
            flight.calls.copied(calls).filter(|&(number, _)| is_whole(number)).map(|(number, words)| {
                let times = times.iter().rev().find(|times| times.number == number);
                RecordedCall::of(number, words, times, world_size)
            });
        let totals = CallKind::ALL.iter().filter_map(|&kind| CallTotals::of(&flight.totals, kind));
        let in_world = |mask: u32| (0..world_size).find(|rank| mask >> rank & 1 == 1);
        Self {
            rank,
            process: header.process(),
            state,
            reason,
            begun: activity.begun,
            ended: activity.ended,
            behind: 0,
            waiting_for: in_world(activity.waiting),
            unchanged_ns: seen_at.map(|at| now().saturating_sub(at)),
            waits: waits.counts[..world_size.min(MAX_RANKS)].to_vec(),
            waited_ns: waits.ns[..world_size.min(MAX_RANKS)].to_vec(),
            totals: totals.collect(),
            calls: calls.collect(),
        }
    }
}

/// Returns a JSON list of values.
fn list(values: impl Iterator<Item = String>) -> String {
    format!("[{}]", values.collect::<Vec<_>>().join(","))
}

/// Returns a JSON number, or null.
fn number<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "null".into(), |value| value.to_string())
}

/// Returns a JSON string.
fn text(text: &str) -> String {
    let mut json = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => json.extend(['\\', letter]),
            letter if letter < ' ' => json += &format!("\\u{:04x}", u32::from(letter)),
            letter => json.push(letter),
        }
    }
    json + "\""
}

impl CallTotals {
    fn of(totals: &Totals, kind: CallKind) -> Option<Self> {
        let name = |code| {
            let known = Algorithm::ALL.into_iter().chain(Algorithm::NVLS).find(|&known| known as u8 == code);
            known.map(Algorithm::name)
        };
        let called = totals.calls(kind as u8).filter(|&(_, calls)| calls > 0);
        let algorithms: Vec<_> = called.map(|(code, calls)| (name(code), calls)).collect();
        let (bytes, durations, durations_ns) = totals.of(kind as u8);
        let timed = durations.iter().fold(0, |sum: u64, count| sum.saturating_add(*count));
        let durations = durations.to_vec();
        (!algorithms.is_empty()).then(|| Self {
            collective: kind.name(),
            algorithms,
            bytes,
            timed,
            durations,
            durations_ns,
        })
    }
}

impl RankState {
    /// Returns its name: `open`, `closed`, `failed` or `ended`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Failed => "failed",
            Self::Ended => "ended",
        }
    }
}

impl RecordedCall {
    fn to_json(&self) -> String {
        let Self { number: of, call, collective, dtype, count, algorithm, captured, waited_ns, .. } = self;
        let [call, collective, dtype] = [call, *collective, *dtype].map(text);
        let algorithm = algorithm.map(text);
        let [algorithm, begin, end, waited_for] =
            [number(algorithm), number(self.begin_ns), number(self.end_ns), number(self.waited_for)];
        format!(
            "{{\"number\":{of},\"call\":{call},\"collective\":{collective},\"dtype\":{dtype},\"count\":{count},\
             \"algorithm\":{algorithm},\"captured\":{captured},\"begin_ns\":{begin},\"end_ns\":{end},\
             \"waited_ns\":{waited_ns},\"waited_for\":{waited_for}}}"
        )
    }

    fn of(number: u64, words: [u64; 3], times: Option<&Times>, world_size: usize) -> Self {
        let [what, count, digest] = words;
        let call = FaCall { what: what & !CAPTURED, count, digest };
        let id = CallId::decode(call);
        let known = |time: u64| Some(time).filter(|&time| time != 0);
        let waited_for = times.filter(|times| times.waited != 0).map(|times| times.rank as usize);
        Self {
            number,
            call: CallId::describe(call),
            collective: id.map_or("", |id| id.kind.name()),
            dtype: id.map_or("", |id| id.dtype.name()),
            count: id.map_or(count, |id| id.count as u64),
            algorithm: id.and_then(|id| id.algorithm).map(|algorithm| algorithm.name()),
            captured: what & CAPTURED != 0,
            begin_ns: times.and_then(|times| known(times.begin)),
            end_ns: times.and_then(|times| known(times.end)),
            waited_ns: times.map_or(0, |times| times.waited),
            waited_for: waited_for.filter(|&rank| rank < world_size),
        }
    }
}

/// Returns a page of these bytes, repeated.
#[cfg(any(test, fuzzing))]
fn page(bytes: &[u8]) -> Box<Page> {
    // SAFETY: a page consists of atomics, for which any bits are valid.
    let mut page: Box<Page> = unsafe { Box::new(std::mem::zeroed()) };
    let to = std::ptr::from_mut(&mut *page).cast::<u8>();
    for (at, byte) in (0..size_of::<Page>()).zip(bytes.iter().cycle()) {
        // SAFETY: `at` is within the page, and any bits are valid for its atomics.
        unsafe { to.add(at).write(*byte) };
    }
    page
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_flight_page, |bytes| {
    let page = page(bytes);
    let later = [page.flight.calls.count(), page.flight.times.count()];
    let rank = RankRecord::of(&page, Some(later), 0, 16);
    (page.header.check(u64::MAX), FlightRecord::new(1, 16, vec![rank], Vec::new()).to_json())
});

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_page_is_a_record(bytes in proptest::collection::vec(any::<u8>(), 1..200), later: [u64; 2]) {
            let page = page(&bytes);
            let _ = page.header.check(size_of::<Page>() as u64);
            for (later, world_size) in [(None, 1), (Some(later), 16)] {
                let rank = RankRecord::of(&page, later, 0, world_size);
                prop_assert!(rank.calls.len() <= 256 && rank.waits.len() == world_size);
                let _ = FlightRecord::new(1, world_size, vec![rank], Vec::new()).to_json();
            }
        }
    }

    #[test]
    fn the_latest_calls_are_kept_in_order_with_their_times() {
        let page = page(&[0]);
        let flight = &page.flight;
        assert_eq!(RankRecord::of(&page, None, 0, 2).calls, []);
        for number in 1..=1000 {
            assert_eq!(flight.begin(FaCall { what: 1, count: number, digest: 0 }), number);
            assert_eq!(flight.end(), number);
            if number % 100 == 0 {
                flight.set_times(Times { number, begin: 5, end: 9, waited: 3, rank: 1 });
            }
        }
        flight.begin(FaCall { what: 1, count: 7, digest: 0 });
        flight.capture();
        let read = RankRecord::of(&page, None, 0, 2);
        let numbers: Vec<u64> = read.calls.iter().map(|call| call.number).collect();
        assert_eq!(numbers, (747..=1001).collect::<Vec<_>>());
        assert_eq!((read.begun, read.ended, read.calls[254].captured), (1001, 1000, true));
        let timed: Vec<_> = read.calls.iter().filter(|call| call.end_ns.is_some()).collect();
        assert_eq!(timed.iter().map(|call| call.number).collect::<Vec<_>>(), [800, 900, 1000]);
        assert_eq!((timed[0].begin_ns, timed[0].waited_ns, timed[0].waited_for), (Some(5), 3, Some(1)));
        // A copy that took as long as 100 calls.
        let read = RankRecord::of(&page, Some([1101, 10]), 0, 2);
        assert_eq!(read.calls[0].number, 847);
        assert_eq!(RankRecord::of(&page, Some([9999, 10]), 0, 2).calls, []);
    }
}
