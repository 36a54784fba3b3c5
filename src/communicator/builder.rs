//! Makes communicators, after the ranks have agreed on their settings.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::Arc;
use std::time::Duration;

use super::enter::{compare, form, Forming, Role, Terms};
use super::place::{inherit, inherited, Returning};
use super::wait_limits::WaitLimits;
use super::Communicator;
use crate::abi::MAX_RANKS;
use crate::bootstrap::Bootstrap;
use crate::call::recording::Options;
use crate::catalogue::settings::{Flight, Values};
use crate::device::Device;
use crate::endpoint::{Connection, Endpoint};
use crate::error::{Error, Result};
use crate::plan::{
    self, Agreed, Algorithm, CpuMake, DeviceKind, Levels, Limits, Nvls, Order, Planner, Proposal, Table,
    Tuning,
};
use crate::region::Layout;

/// The limit on steps of a communicator whose calls have no limit.
const SETUP_TIMEOUT: Duration = Duration::from_secs(30);

/// The default limit on the first call with a rank, which may load weights for minutes before it.
const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(600);

/// The settings that a [`Communicator`] is made with. All ranks must use the same.
///
/// A setting that the program does not set comes from the environment (`FAST_ALLREDUCE_TIMEOUT`, `FAST_ALLREDUCE_ALGO`
/// and others: see the table in `docs/tuning.md`), or else has its default. [`Settings`](crate::Settings) sets them by
/// name.
///
/// ```
/// use fast_allreduce::{bootstrap::Threads, Algorithm, Communicator, DType, Flight, Host, Order};
/// use std::time::Duration;
///
/// # let [bootstrap] = Threads::world(1)?.try_into().ok().unwrap();
/// let communicator = Communicator::builder()
///     .max_bytes(256 << 10)
///     .timeout(Duration::from_secs(5))
///     .first_call_timeout(Duration::from_secs(600)) // Ranks load weights before it.
///     .check(true)
///     .order(Order::Fixed)
///     .algorithm(Algorithm::TwoShotPull)
///     .calibrate(false)
///     .direct_reads(false)
///     .flight(Flight::All)
///     .build(Host::new(), bootstrap)?;
/// assert_eq!(communicator.plan(1000, DType::F32).algorithm, Algorithm::TwoShotPull);
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Builder {
    values: Values,
    plans: Plans,
    last_epoch: u32,
    /// Calls that the rank has completed in the world that it comes from, or why that is not known.
    completed: Option<Result<u64>>,
}

/// The source of plans.
#[derive(Debug, Clone, Default)]
enum Plans {
    /// The environment's tuning file, else the machine's, else a built-in table.
    #[default]
    Automatic,
    /// The built-in table, without a measurement.
    BuiltIn,
    Table(Table),
    Tuning(Tuning),
}

impl Plans {
    /// Returns the plans that this rank proposes.
    fn proposal<D: Device>(&self, device: &D, calibrate: bool) -> Result<Proposal> {
        let table = match self {
            Self::Automatic => return Proposal::of_environment(D::KIND, || device.machine(), calibrate),
            Self::BuiltIn => {
                return Ok(Proposal::built_in(D::KIND, || device.machine(), "the program asks for it"))
            }
            Self::Table(table) => table,
            Self::Tuning(tuning) => {
                tuning.check(&device.machine()?)?;
                tuning.table()
            }
        };
        if table.device() != D::KIND {
            return Err(Error::InvalidSetting {
                name: "plan table",
                value: format!("one of the device {}", table.device().name()),
                expected: "a table of the communicator's device",
            });
        }
        Ok(Proposal::given(table.clone()))
    }
}

impl Builder {
    /// Creates a builder from settings that were set by name.
    pub(crate) fn of(values: Values) -> Result<Self> {
        let plans = match &values.tuning {
            None => Plans::Automatic,
            Some(word) if word.as_os_str() == plan::BUILT_IN => Plans::BuiltIn,
            Some(path) => Plans::Tuning(Tuning::load(path)?),
        };
        Ok(Self { values, plans, last_epoch: 0, completed: None })
    }

    /// Sets how many bytes of a message one launch moves at most (default: 1 MiB on the host, 8 MiB on a GPU).
    ///
    /// Larger messages are cut into pieces, with a launch for each. A rank's region takes at most four times
    /// `max_bytes` and 1 MiB; on a GPU another `max_bytes` for packets without tags; and for messages between pairs
    /// another two times `max_bytes`, but at most 2 MiB on the host and 16 MiB on a GPU.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.values.max_bytes = Some(max_bytes);
        self
    }

    /// Sets the longest wait for another rank without progress, in calls and steps (default: 30 s).
    ///
    /// `None` removes the limit on calls. A call of many pieces may take longer than the limit. Time in which this rank
    /// itself did not run does not count. Steps, such as making the communicator, are always bounded: by 30 s where
    /// calls have no limit.
    #[must_use]
    pub fn timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.values.timeout = Some(timeout.into());
        self
    }

    /// Sets the limit for a call that waits for a rank that no earlier call has waited for. `None` means no limit.
    ///
    /// That rank may load weights for minutes before its first call. The default is what [`Builder::timeout`] or the
    /// environment sets for all calls, or else 10 minutes. If the rank ends in the meantime, the call fails at once.
    #[must_use]
    pub fn first_call_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.values.first_call_timeout = Some(timeout.into());
        self
    }

    /// Sets whether ranks compare each call before they carry it out (default: in debug builds only).
    ///
    /// They compare operation, type, count and algorithm. If one differs, every rank returns [`Error::Disagreement`].
    /// It costs one more barrier per launch. Ranks of the host always compare, by a word that their barriers and
    /// packets carry; that finds every difference except between calls of different protocols. A call of no elements
    /// launches nothing: peers whose call has elements time out, with an error that says what that rank did. All
    /// ranks must set the same.
    #[must_use]
    pub fn check(mut self, check: impl Into<Option<bool>>) -> Self {
        self.values.check = check.into();
        self
    }

    /// Sets one algorithm for all allreduces, in place of the plan's choice for each.
    ///
    /// One of [`Algorithm::NVLS`] is used for the calls that it supports, even if [`Builder::order`] is
    /// [`Order::Fixed`].
    #[must_use]
    pub fn algorithm(mut self, algorithm: impl Into<Option<Algorithm>>) -> Self {
        self.values.algorithm = algorithm.into();
        self
    }

    /// Sets the order in which the ranks' elements are added up (default: [`Order::Fixed`]).
    ///
    /// [`Order::Any`] also permits ring, halving-doubling and in-switch reductions (NVLS), where they are expected to
    /// be faster. In-switch reductions are for sums of f16, bf16 and f32 on GPUs that have them, and take another two
    /// times `max_bytes` on each GPU: see [`Communicator::nvls`]. All ranks must set the same.
    #[must_use]
    pub fn order(mut self, order: impl Into<Option<Order>>) -> Self {
        self.values.order = order.into();
        self
    }

    /// Plans calls by this table instead of the device's own. It replaces [`Builder::tuning`].
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// use fast_allreduce::plan::{Choice, DeviceKind, Table};
    ///
    /// # ranks(1, |communicator| {
    /// let choice = Choice::host(Algorithm::OneShotPush, 1, 4 << 10, 64 << 10);
    /// let builder = Communicator::builder().table(Table::uniform(DeviceKind::Host, choice)?);
    /// # drop((communicator, builder));
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn table(mut self, table: Table) -> Self {
        self.plans = Plans::Table(table);
        self
    }

    /// Plans calls by measurements of this machine. It replaces [`Builder::table`].
    ///
    /// Where neither is set, a communicator uses the file that the environment variable `FAST_ALLREDUCE_TUNING` names,
    /// if that is for its device; else the one that [`Tuning::install`] stored for this machine; else a built-in table.
    /// If ranks have different tables, all use the same one: a table that was set or named takes precedence over an
    /// installed one, and an installed one over a built-in one; among equals the lowest rank's is used.
    /// [`Communicator::plan_source`] returns which it is. [`Builder::algorithm`] still sets the algorithm. The module
    /// [`plan`](crate::plan) has an example.
    #[must_use]
    pub fn tuning(mut self, tuning: Tuning) -> Self {
        self.plans = Plans::Tuning(tuning);
        self
    }

    /// Sets whether the host may measure the transfer of a cache line, to choose a built-in table (default: yes).
    ///
    /// It measures on CPUs for which there is no table, if no rank has another plan and each rank has its own core:
    /// once per process, for some milliseconds (at most 20). A measurement that other work disturbed is not used. All
    /// ranks must permit it.
    #[must_use]
    pub fn calibrate(mut self, calibrate: impl Into<Option<bool>>) -> Self {
        self.values.calibrate = calibrate.into();
        self
    }

    /// Sets the size in bytes from which on the host stores results of an allreduce out of place past the caches
    /// (default: by the make of CPU).
    ///
    /// `docs/tuning.md` says what that gains. `usize::MAX` never does it. Ranks may differ in this setting.
    #[must_use]
    pub fn stream_from(mut self, bytes: impl Into<Option<usize>>) -> Self {
        self.values.stream_from = bytes.into();
        self
    }

    /// Sets whether the host reads large messages in private memory directly from the sender's process, and shares of
    /// an all-gather in the same way.
    ///
    /// Then the operating system copies them (`process_vm_readv`), rather than both ranks through shared memory. By
    /// default the receiver uses the method that has been faster for messages of that size, and tries both now and
    /// then; shares are read in sizes that `docs/algorithms.md` names. With `true` it reads messages and shares of any
    /// size directly, wherever that works; with `false` none. Where the
    /// operating system does not permit it, messages go through shared memory: see [`Communicator::direct_reads`].
    /// Ranks may differ in this setting.
    #[must_use]
    pub fn direct_reads(mut self, direct_reads: impl Into<Option<bool>>) -> Self {
        self.values.direct_reads = direct_reads.into();
        self
    }

    /// Sets for which calls a rank records how long they took (default: [`Flight::Sampled`]).
    ///
    /// Its latest calls it always records: see `docs/reliability.md`. Ranks may differ in this setting.
    #[must_use]
    pub fn flight(mut self, flight: impl Into<Option<Flight>>) -> Self {
        self.values.flight = flight.into();
        self
    }

    /// Starts the numbers of launches after `epoch` instead of 0, so that a test can reach the wrap-around.
    #[doc(hidden)]
    #[must_use]
    pub fn first_epoch(mut self, epoch: u32) -> Self {
        self.last_epoch = epoch;
        self
    }

    /// Says how many calls the rank has completed in the world that it comes from. With an error no rank's
    /// [`Builder::build`] succeeds, and the others learn the reason.
    pub(super) fn completed(mut self, completed: Result<u64>) -> Self {
        self.completed = Some(completed);
        self
    }

    /// Makes this rank's communicator. Collective: every rank of the bootstrap calls it.
    ///
    /// With a bootstrap of [`Communicator::join_id`]'s id the rank takes the place of one that has gone
    /// ([`Communicator::join`], with an example) or moved ([`Communicator::resume`]), or comes in addition
    /// ([`Communicator::grow`]).
    ///
    /// # Errors
    ///
    /// * [`Error::WorldSize`] and [`Error::RankOutOfRange`], if the bootstrap has too many ranks.
    /// * [`Error::InvalidSetting`], if a setting is out of its range.
    /// * [`Error::Tuning`], if a tuning file cannot be read or is not for this machine.
    /// * [`Error::Disagreement`], if ranks have different settings, devices, or builds of this crate.
    /// * [`Error::Allocation`], if the region cannot be allocated.
    /// * [`Error::Unavailable`] or [`Error::Driver`], if an algorithm of [`Algorithm::NVLS`] is set and the GPUs, the
    ///   driver or the links do not support it, or ranks share a GPU; also if GPUs cannot share memory.
    /// * [`Error::System`], if a system call failed.
    /// * [`Error::PeerFailed`], [`Error::PeerLost`], [`Error::Timeout`] and other errors of the bootstrap, if another
    ///   rank failed, ended or did not come.
    pub fn build<D: Device>(
        self,
        mut device: D,
        bootstrap: impl Bootstrap + 'static,
    ) -> Result<Communicator<D>> {
        let settings = Self { completed: None, ..self.clone() };
        let (rank, world_size) = (bootstrap.rank(), bootstrap.world_size());
        if !(1..=MAX_RANKS).contains(&world_size) {
            return Err(Error::WorldSize { world_size });
        }
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        let mut values = self.values.or_environment()?;
        let given = values.timeout;
        let timeout = given.unwrap_or(Some(SETUP_TIMEOUT));
        let first_timeout = values.first_call_timeout.or(given).unwrap_or(Some(FIRST_CALL_TIMEOUT));
        let setup_timeout = timeout.unwrap_or(SETUP_TIMEOUT);
        let check = *values.check.get_or_insert(cfg!(debug_assertions));
        let calibrate = values.calibrate.unwrap_or(true);
        let max_bytes = *values.max_bytes.get_or_insert(D::DEFAULT_MAX_BYTES);
        let recording = Options::of_environment()?;
        let layout = Layout::new(max_bytes, world_size, &D::PACKING, &D::CHANNELS, D::MAX_BYTES)?;
        let forced = values.algorithm;
        let order = *values.order.get_or_insert(Order::default());
        let (completed, proposal) = match self.completed.transpose() {
            Ok(completed) => {
                let proposal = self.plans.proposal(&device, calibrate);
                (completed, proposal.and_then(|proposal| proposal.encode()))
            }
            Err(error) => (None, Err(error)),
        };
        let mut facts = values.compared();
        facts.extend([
            ("the crate's version", env!("CARGO_PKG_VERSION").to_owned()),
            // The layout of a region has no version except the code that defines it and the kernels that use it.
            ("the build (fingerprint of the kernels' sources)", env!("FAST_ALLREDUCE_SOURCES").to_owned()),
            ("the device", D::NAME.to_owned()),
            ("the device's settings", device.shared_facts()),
            ("the nodes of the ranks", format!("{:?}", bootstrap.nodes())),
        ]);
        let role = Role { completed, member: None };
        let roles = compare(&facts, &role, proposal, &bootstrap, setup_timeout)?;
        let mut plan = plan::agree(D::KIND, &roles.plans)?;

        device.join(&bootstrap, setup_timeout)?;
        let exports = device.exports();
        let connection = Connection::new(exports, Box::new(bootstrap), setup_timeout);
        // Declared after `connection`, so that it is dropped before it if an error ends this function.
        let device = device;
        let limits = Limits {
            device: D::KIND,
            packing: D::PACKING,
            world_size,
            mailbox_bytes: layout.mailbox_bytes,
            staging_bytes: layout.staging_bytes,
            levels: Levels::new(device.socket_ranks(world_size), order, forced),
            stream_from: values.stream_from.unwrap_or_else(|| match D::KIND {
                DeviceKind::Host => {
                    device.machine().map_or(usize::MAX, |machine| CpuMake::stream_from(&machine))
                }
                DeviceKind::Cuda => usize::MAX,
            }),
        };
        let mut terms = Terms {
            facts,
            layout,
            table: plan.table.clone(),
            direct_reads: values.direct_reads,
            shares_read: shares_read(&device, world_size, values.direct_reads),
            flight: values.flight.unwrap_or_default(),
            last_epoch: self.last_epoch,
            timeout: setup_timeout,
        };
        // A world with windows does not form again.
        let (forming, nvls) = match roles.first() {
            Some(_) => (Forming::Again, Nvls::Never),
            None => {
                let forming = Forming::New { may_calibrate: plan.may_calibrate };
                (forming, Nvls::wanted(forced, order, world_size))
            }
        };
        let formed = form(&device, &connection, &terms, forming, nvls)?;
        if plan.may_calibrate {
            plan.calibrate(formed.costs);
        }
        let Agreed { table, source: plan_source, .. } = plan;
        let most_blocks = device.most_blocks();
        let planner = Planner::new(&table, device.link(), order, forced, most_blocks, limits);
        let planner = planner.with_nvls(formed.nvls);
        terms.table = table;
        let kept = match roles.first() {
            Some(_) => inherit(&device, &connection, &formed.region, &roles)?,
            None => Vec::new(),
        };
        let (nvls_refused, direct_reads) = (formed.nvls_refused.clone(), formed.direct_reads.clone());
        tracing::info!(
            rank,
            world_size,
            device = D::NAME,
            settings = device.shared_facts(),
            max_bytes,
            algorithm = forced.map_or("automatic", Algorithm::name),
            order = order.name(),
            nvls = nvls_refused.as_ref().map_or_else(|| "yes".to_owned(), Error::to_string),
            plan = %plan_source,
            timeout = ?timeout,
            checked = check,
            direct_reads = direct_reads.as_ref().map(tracing::field::display),
            "communicator made"
        );
        let endpoint = Arc::new(Endpoint::new(device, formed.membership(connection)));
        let progress = roles.progress();
        let inherited = inherited(&endpoint, &roles, kept);
        let world_ranks = roles.first().map(|member| member.world_ranks.clone()).unwrap_or_default();
        let communicator = Communicator {
            endpoint,
            returning: Returning::new(progress, inherited),
            terms,
            aborts: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            checked: check,
            settings,
            rank,
            world_size,
            world_ranks,
            planner,
            plan_source,
            order,
            nvls_refused,
            wait_limits: WaitLimits::new(timeout, first_timeout),
            setup_timeout,
        };
        communicator.record_as_in_environment(recording.as_ref())?;
        Ok(communicator)
    }
}

/// Returns the sizes of shares of an all-gather that this rank wants to be read from their ranks, where the program
/// wants direct reads always, never, or where they are faster.
fn shares_read<D: Device>(device: &D, world_size: usize, wanted: Option<bool>) -> Range<u64> {
    // Several threads of a rank share copies, but not direct reads.
    let is_shared = device.most_blocks() > 1;
    match wanted {
        _ if !D::READS_DIRECTLY || is_shared => 0..0,
        Some(true) => 0..u64::MAX,
        Some(false) => 0..0,
        None => device.machine().map_or(0..0, |machine| CpuMake::shares_read(&machine, world_size)),
    }
}
