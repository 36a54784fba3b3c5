//! How communicators are made, and what ranks must agree on first.

#[cfg(test)]
mod tests;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::patience::Patience;
use super::Communicator;
use crate::abi::MAX_RANKS;
use crate::bootstrap::{agree_on, all_succeeded, Bootstrap, Family};
use crate::catalogue::settings::Values;
use crate::device::Device;
use crate::endpoint::{Connection, Endpoint, Region};
use crate::error::{Error, Result};
use crate::liveness::Arrivals;
use crate::plan::{self, Agreed, Algorithm, Limits, Nvls, Order, Planner, Proposal, Table, Tuning};
use crate::region::Layout;

/// Bounds the steps of making a communicator whose calls wait for ever.
const SETUP_TIMEOUT: Duration = Duration::from_secs(30);

/// Limits the first call where nothing else is said: a rank may load weights for minutes before it.
const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(600);

/// How a [`Communicator`] is made. All ranks must use the same settings.
///
/// What the program does not set, the environment may: `FAST_ALLREDUCE_TIMEOUT`, `FAST_ALLREDUCE_ALGO` and others, in the table of
/// settings in `docs/tuning.md`. [`Settings`](crate::Settings) sets all of them by name.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    values: Values,
    plans: Plans,
    last_epoch: u32,
}

/// What calls are planned by.
#[derive(Debug, Clone, Default)]
enum Plans {
    /// The environment's tuning file, or the machine's; without one, a built-in table.
    #[default]
    Unsaid,
    /// The built-in table, without a measurement.
    BuiltIn,
    Table(Table),
    Tuning(Tuning),
}

impl Plans {
    /// What this rank would plan by.
    fn proposal<D: Device>(&self, device: &D, calibrate: bool) -> Result<Proposal> {
        let table = match self {
            Self::Unsaid => return Proposal::of_environment(D::KIND, || device.machine(), calibrate),
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
    /// With settings by name.
    pub(crate) fn of(values: Values) -> Result<Self> {
        let plans = match &values.tuning {
            None => Plans::Unsaid,
            Some(word) if word.as_os_str() == plan::BUILT_IN => Plans::BuiltIn,
            Some(path) => Plans::Tuning(Tuning::load(path)?),
        };
        Ok(Self { values, plans, last_epoch: 0 })
    }

    /// Bytes that one launch can take through the region (default: 1 MiB on the host, 8 MiB on a GPU). Larger messages pass
    /// in pieces. A region takes at most 4 x max_bytes + 1 MiB on each rank; on a GPU max_bytes more for packets without tags; and
    /// for messages between pairs at most 2 MiB more on the host and 16 MiB on a GPU: 2 x max_bytes where that is less.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.values.max_bytes = Some(max_bytes);
        self
    }

    /// The longest wait for another rank without progress, in a call or in a step of making the communicator (default 30 s): a call of
    /// many pieces may take longer. Time in which this rank itself did not run does not count. `None`: for ever, in calls;
    /// making the communicator is always bounded.
    #[must_use]
    pub fn timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.values.timeout = Some(timeout.into());
        self
    }

    /// Limits calls up to the first that has waited for a rank, which may have done something long before, such as loading weights
    /// (default: what [`Builder::timeout`] or the environment sets for all calls, else 10 minutes). A rank that ends meanwhile is
    /// noticed at once, as ever. `None`: for ever.
    #[must_use]
    pub fn first_call_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.values.first_call_timeout = Some(timeout.into());
        self
    }

    /// Has ranks compare their calls (operation, type, count, algorithm) before each is carried out: one that differs is
    /// [`Error::Disagreement`] on every rank. It costs one more barrier for each launch. Ranks of the host do so without it, by
    /// what their barriers and packets carry, which tells all calls apart but those of different protocols. A call of no
    /// elements launches nothing: peers that have some time out, and are told what that rank did. By default it is on in debug builds
    /// alone. All ranks must say the same.
    #[must_use]
    pub fn check(mut self, check: impl Into<Option<bool>>) -> Self {
        self.values.check = check.into();
        self
    }

    /// Uses one algorithm for all calls, instead of the best for each; one of [`Algorithm::NVLS`] for those that it can do, whatever
    /// [`Builder::order`] says.
    #[must_use]
    pub fn algorithm(mut self, algorithm: impl Into<Option<Algorithm>>) -> Self {
        self.values.algorithm = algorithm.into();
        self
    }

    /// The order in which the ranks' elements are added up (default: [`Order::Fixed`]). [`Order::Any`] lets sums of f16, bf16 and
    /// f32 be added by the switch between the GPUs, where there is one that does (NVLS) and it is expected to be faster:
    /// [`Communicator::nvls`] tells. It takes 2 x max_bytes more on each GPU. All ranks must say the same.
    #[must_use]
    pub fn order(mut self, order: impl Into<Option<Order>>) -> Self {
        self.values.order = order.into();
        self
    }

    /// Plans calls by another table than the device's own. Takes the place of [`Builder::tuning`].
    #[must_use]
    pub fn table(mut self, table: Table) -> Self {
        self.plans = Plans::Table(table);
        self
    }

    /// Plans calls as was measured on this machine. Takes the place of [`Builder::table`]. [`Builder::algorithm`] still
    /// decides the algorithm.
    ///
    /// Where neither is set, communicators use the file that the environment variable `FAST_ALLREDUCE_TUNING` names, if it is of
    /// their device; else the one that [`Tuning::install`] left for this machine; else a built-in table. Ranks may have different
    /// ones: what is set or named goes before what is installed, that before a built-in table, and of equals the lowest rank's is
    /// used by all. [`Communicator::plan_source`] tells.
    #[must_use]
    pub fn tuning(mut self, tuning: Tuning) -> Self {
        self.plans = Plans::Tuning(tuning);
        self
    }

    /// Whether the host may measure what a line's transfer costs, to choose between its built-in tables (default: yes). It does for a
    /// CPU of a make that no table is for, where no rank has another plan and ranks have cores of their own: once in a process, for
    /// some milliseconds, at most 20. A measurement that other work has disturbed is not used. It is done if all ranks
    /// say yes.
    #[must_use]
    pub fn calibrate(mut self, calibrate: impl Into<Option<bool>>) -> Self {
        self.values.calibrate = calibrate.into();
        self
    }

    /// Whether large messages in private memory are read directly by a receiver in another process: the kernel copies them
    /// (`process_vm_readv`) instead of both ranks through shared memory. By default where that is faster, by what messages of the
    /// size have taken so far, both ways being tried now and then; `true`: messages of any size, wherever it works; `false`: never.
    /// Where the kernel does not permit it messages go as without it: [`Communicator::direct_reads`] tells. Ranks may differ.
    #[must_use]
    pub fn direct_reads(mut self, direct_reads: impl Into<Option<bool>>) -> Self {
        self.values.direct_reads = direct_reads.into();
        self
    }

    /// Numbers launches from after `epoch` instead of 0, so that a test can pass the wrap-around.
    #[doc(hidden)]
    #[must_use]
    pub fn first_epoch(mut self, epoch: u32) -> Self {
        self.last_epoch = epoch;
        self
    }

    /// Makes this rank's communicator. Collective: every rank of the bootstrap calls it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for settings out of range, [`Error::Tuning`] for a tuning file that does not read or is not for
    /// this machine, [`Error::Disagreement`] where ranks have different settings,
    /// [`Error::Allocation`] if the region cannot be allocated, [`Error::Unavailable`], or what the driver said, for an algorithm of
    /// [`Algorithm::NVLS`] where GPUs, driver or links have no such thing or ranks share a GPU, and the errors of the bootstrap.
    pub fn build<D: Device>(
        self,
        mut device: D,
        bootstrap: impl Bootstrap + 'static,
    ) -> Result<Communicator<D>> {
        let settings = self.clone();
        let (rank, world_size) = (bootstrap.rank(), bootstrap.world_size());
        if !(1..=MAX_RANKS).contains(&world_size) {
            return Err(Error::WorldSize { world_size });
        }
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        let mut values = self.values.or_environment()?;
        let said = values.timeout;
        let timeout = said.unwrap_or(Some(SETUP_TIMEOUT));
        let first_timeout = values.first_call_timeout.or(said).unwrap_or(Some(FIRST_CALL_TIMEOUT));
        let setup_timeout = timeout.unwrap_or(SETUP_TIMEOUT);
        let check = *values.check.get_or_insert(cfg!(debug_assertions));
        let calibrate = values.calibrate.unwrap_or(true);
        let max_bytes = *values.max_bytes.get_or_insert(D::DEFAULT_MAX_BYTES);
        let layout = Layout::new(max_bytes, world_size, &D::PACKING, &D::CHANNELS, D::MAX_BYTES)?;
        let forced = values.algorithm;
        let order = *values.order.get_or_insert(Order::default());
        let proposal = self.plans.proposal(&device, calibrate).and_then(|proposal| proposal.encode());
        let mut facts = values.compared();
        facts.extend([
            ("the crate's version", env!("CARGO_PKG_VERSION").to_owned()),
            // A region has no other version than the code that lays it out and the kernels that use it.
            ("the build (fingerprint of the kernels' sources)", env!("FAST_ALLREDUCE_SOURCES").to_owned()),
            ("the device", D::NAME.to_owned()),
            ("the device's settings", device.shared_facts()),
            ("the plan", in_words(&proposal)),
        ]);
        let agreed = agree_on(&bootstrap, &facts, setup_timeout);
        // A rank that has no plan has told the others why.
        let proposal = proposal?;
        agreed?;
        let proposals = bootstrap.all_gather(proposal.as_bytes(), setup_timeout)?;
        let mut plan = plan::agree(D::KIND, &proposals)?;

        device.join(&bootstrap, setup_timeout)?;
        let exports = device.exports();
        let connection = Arc::new(Connection::new(exports, Box::new(bootstrap), setup_timeout));
        // After `connection`, to go before it where an error ends this.
        let device = device;
        let bootstrap = &*connection.bootstrap;
        let limits = Limits {
            device: D::KIND,
            packing: D::PACKING,
            world_size,
            mailbox_bytes: layout.mailbox_bytes,
            staging_bytes: layout.staging_bytes,
        };
        let family = Family::found(bootstrap, setup_timeout)?;
        let arrivals = Arrivals::exchange(bootstrap, setup_timeout)?;
        connection.tell_by(arrivals.closings());
        let memory = device.share(layout.total_bytes, bootstrap, setup_timeout)?;
        if plan.may_calibrate {
            let (offset, bytes) = (layout.staging_offset, layout.staging_bytes);
            let costs = device.costs(&memory, offset, bytes, bootstrap, setup_timeout)?;
            plan.calibrate(costs);
        }
        let Agreed { table, source: plan_source, .. } = plan;
        let nvls = Nvls::wanted(forced, order, world_size);
        let windows = windows(&device, nvls, 2 * layout.staging_bytes, bootstrap, setup_timeout)?;
        let nvls = if windows.is_ok() { nvls } else { Nvls::Never };
        let (windows, nvls_refused) = match windows {
            Ok(windows) => (Some(windows), None),
            Err(reason) => (None, Some(reason)),
        };
        let most_blocks = device.most_blocks();
        let planner = Planner::new(&table, device.link(), order, forced, most_blocks, limits).with_nvls(nvls);
        let made = Region::new(&device, layout, self.last_epoch, memory, windows, rank).and_then(|region| {
            let endpoint = Arc::new(Endpoint::new(device, region, Arc::clone(&connection)));
            let watched = Arc::clone(&endpoint);
            let liveness = arrivals.watch(move |rank| watched.region.set_gone(rank))?;
            Ok((liveness, endpoint))
        });
        // No rank launches before all have set their epochs, and where one could not, none has a communicator.
        let (liveness, endpoint) = all_succeeded(made, bootstrap, setup_timeout)?;
        let direct_reads = match D::READS_DIRECTLY {
            true => Some(liveness.direct_reads(values.direct_reads, bootstrap, setup_timeout)?),
            false => None,
        };
        tracing::info!(
            rank,
            world_size,
            device = D::NAME,
            settings = endpoint.device.shared_facts(),
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
        Ok(Communicator {
            liveness,
            direct_reads,
            endpoint,
            failed: OnceLock::new(),
            bytes: AtomicU64::new(0),
            checked: check,
            family,
            settings,
            rank,
            world_size,
            world_ranks: Vec::new(),
            planner,
            plan_source,
            order,
            nvls_refused,
            patience: Patience::new(timeout, first_timeout),
            setup_timeout,
            connection,
        })
    }
}

/// Windows of so many bytes, or why there are none: an error where they must be. Collective.
fn windows<D: Device>(
    device: &D,
    nvls: Nvls,
    bytes: usize,
    bootstrap: &dyn Bootstrap,
    timeout: Duration,
) -> Result<Result<D::Windows>> {
    if matches!(nvls, Nvls::Never) {
        return Ok(Err(Error::Unavailable {
            what: "NVLS (in-switch reduction)".into(),
            reason: "nothing asked for it, or nothing is gained by it: see Order::Any".into(),
        }));
    }
    match device.share_windows(bytes, bootstrap, timeout) {
        // The ranks have lost each other.
        Err(error @ (Error::Timeout { .. } | Error::PeerLost { .. } | Error::Rendezvous { .. })) => {
            Err(error)
        }
        // All ranks have heard of any other.
        Err(error) if matches!(nvls, Nvls::Always(_)) => Err(error),
        windows => Ok(windows),
    }
}

/// Whether a rank has a plan, as the others hear of it.
fn in_words(proposal: &Result<String>) -> String {
    match proposal {
        Ok(_) => "one".to_owned(),
        Err(error) => format!("none ({error})"),
    }
}
