//! Tests machines and builds without CUDA: an error says what is missing, and nothing panics.

use fast_allreduce::bootstrap::Bootstrap as _;
use fast_allreduce::device::cuda::{CooperativeRanks, Sharing};
use fast_allreduce::{Algorithm, Cuda, DType, Error};

use crate::fixtures::fixture::Setup;
use crate::fixtures::gpu::{context, has_driver, stand_in_of_parent, LIMIT};
use crate::fixtures::processes::{part, ranks, this_test, Process};
use crate::fixtures::threads::threads;
use crate::runner::{Found, Missing};

tests! {
    no_installed_driver => no_driver;
    stand_in_of_parent => no_device, kernels_for_another_gpu, links_without_nvml, gpus_that_do_not_reach_each_other,
        peer_access_that_loses_data_is_found;
    build_without_kernels => no_kernels;
}

const DRIVER: &str = "libcuda.so";

/// Runs `body` in a process with these environment variables.
pub fn with(test: &str, name: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    match part() {
        Some(part) if part == name => body(),
        Some(_) => {}
        None => {
            let mut command = this_test(test, name);
            command.envs(settings.iter().copied());
            Process::start(&mut command).finish().unwrap_or_else(|report| panic!("{name}: {report}"));
        }
    }
}

fn open() -> Error {
    Cuda::open(0).expect_err("there is nothing to open")
}

/// Requires that no driver is installed system-wide: then a program whose `LD_LIBRARY_PATH` has no driver finds none.
fn no_installed_driver() -> Found<()> {
    let cache = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
    let named = cache.windows(DRIVER.len()).any(|name| name == DRIVER.as_bytes());
    let folders = ["/lib", "/usr/lib", "/lib64", "/usr/lib64"].map(std::path::Path::new);
    match named || folders.iter().any(|folder| folder.join(DRIVER).exists()) {
        true => Err(Missing::new("no-driver", "a driver is installed for all programs")),
        false => Ok(()),
    }
}

fn no_driver() {
    // A folder without a driver.
    with("faults::settings::no_driver", "no driver", &[("LD_LIBRARY_PATH", "/nonexistent")], || {
        let error = open();
        assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains("libcuda")), "{error}");
        let error = CooperativeRanks::new(0, 2, 4096, 0, LIMIT).err().expect("no driver");
        assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains("libcuda")), "{error}");
    });
}

fn kernels_for_another_gpu() {
    for (code, remedy) in [(209, "FAST_ALLREDUCE_ARCHS=sm_"), (222, "older than the kernels")] {
        let refusal = format!("cuModuleLoadData:1:{code}");
        let settings = [("STAND_IN_FAIL", refusal.as_str())];
        with("faults::settings::kernels_for_another_gpu", &format!("code {code}"), &settings, || {
            let error = open();
            assert!(
                matches!(&error, Error::Unavailable { reason, .. } if reason.contains(remedy)),
                "{error}"
            );
        });
    }
}

fn no_device() {
    with("faults::settings::no_device", "no device", &[("STAND_IN_NO_DEVICE", "1")], || {
        let error = open();
        assert!(matches!(&error, Error::Driver { message, .. } if message.contains("NO_DEVICE")), "{error}");
    });
    with("faults::settings::no_device", "no such device", &[("STAND_IN_DEVICES", "1")], || {
        assert!(Cuda::open(0).is_ok());
        let error = Cuda::open(1).expect_err("there is one device");
        assert!(matches!(error, Error::Driver { .. }), "{error}");
    });
}

/// Requires a driver, and a build without kernels. Returns why the build has none.
fn build_without_kernels() -> Found<String> {
    let [_, (_, cuda), _] = fast_allreduce::build_facts();
    match cuda.starts_with("none: ") {
        true if has_driver() => Ok(cuda),
        true => Err(Missing::new("no-kernels", "no CUDA driver")),
        false => Err(Missing::new("no-kernels", "this build has kernels")),
    }
}

fn no_kernels(cuda: String) {
    for error in [open(), CooperativeRanks::new(0, 2, 4096, 0, LIMIT).err().expect("no kernels")] {
        let error = error.to_string();
        assert!(error.contains("has no kernels") && error.contains(&cuda), "{error}");
    }
}

/// Tests that without NVML the driver's attribute for native atomics distinguishes NVLink from PCIe.
fn links_without_nvml() {
    const BYTES: usize = 64 << 20;
    for (name, setting, algorithm) in [
        ("nvlink", [("STAND_IN_PCIE", "0")], Algorithm::OneShotPull),
        ("pcie", [("STAND_IN_PCIE", "1")], Algorithm::OneShotPush),
    ] {
        with("faults::settings::links_without_nvml", name, &setting, || {
            threads(2, 2, |rank, context| {
                let communicator = Setup::default().try_build(context, rank).unwrap();
                assert_eq!(communicator.plan(BYTES / 4, DType::F32).algorithm, algorithm, "{name}");
                communicator.barrier().unwrap();
            });
        });
    }
}

/// Tests that on GPUs without peer access the error names the GPUs and a remedy, not only a driver code.
fn gpus_that_do_not_reach_each_other() {
    with(
        "faults::settings::gpus_that_do_not_reach_each_other",
        "apart",
        &[("STAND_IN_NO_PEER", "1")],
        || {
            for sharing in [Sharing::Pointers, Sharing::Descriptor].map(Some) {
                threads(2, 2, |rank, context| {
                    let error = Setup { sharing, ..Setup::default() }.try_build(context, rank).unwrap_err();
                    let Error::Unavailable { reason, .. } = &error else { panic!("{sharing:?}: {error}") };
                    for fact in [
                        "rank 0's GPU (0000:",
                        "rank 1's (0000:",
                        "nvidia-smi topo -p2p r",
                        "NCCL",
                        "CUDA_ERROR_",
                    ] {
                        assert!(reason.contains(fact), "{sharing:?}: {fact:?} is not in {error}");
                    }
                });
            }
            // Ranks on the same GPU need no peer access.
            threads(2, 1, |rank, context| drop(Setup::default().try_build(context, rank).unwrap()));
        },
    );
}

/// Tests that peer access that exists only in the driver's answers is found before the first call, although copies
/// between the GPUs work.
fn peer_access_that_loses_data_is_found() {
    let test = "faults::settings::peer_access_that_loses_data_is_found";
    let broken = [("STAND_IN_BROKEN_PEERS", "1")];
    let check = |error: &Error, reasons: &[&str]| {
        let text = error.to_string();
        let (Error::Unavailable { .. } | Error::PeerFailed { .. }) = error else { panic!("{error}") };
        for fact in reasons.iter().chain(&["does not carry data", "IOMMU", "ACS", "NCCL_P2P_DISABLE"]) {
            assert!(text.contains(fact), "{fact:?} is not in {text}");
        }
    };
    with(test, "threads", &broken, || {
        for sharing in [Sharing::Pointers, Sharing::Descriptor, Sharing::Ipc] {
            threads(3, 2, |rank, context| {
                let setup = Setup { sharing: Some(sharing), ..Setup::default() };
                check(&setup.try_build(context, rank).unwrap_err(), &[]);
            });
        }
        // Ranks on the same GPU need no peer access.
        threads(3, 1, |rank, context| drop(Setup::default().try_build(context, rank).unwrap()));
    });
    ranks(test, "processes", 2, &broken, |local| {
        let context = context(local.rank());
        check(&Setup::default().try_build(context, local).unwrap_err(), &["descriptor: ", "ipc: "]);
    });
}
