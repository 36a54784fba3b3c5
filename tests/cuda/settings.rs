//! Machines and builds that have no CUDA: an error that says what is missing, and no panic.

use fast_allreduce::device::cuda::CudaWorld;
use fast_allreduce::{Cuda, Error};

use crate::gpu::{stand_in, LIMIT};
use crate::processes::{part, this_test, Process};

/// Runs `body` in a process with the settings.
fn with(test: &str, name: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    match part() {
        Some(part) if part == name => body(),
        Some(_) => {}
        None => {
            let mut command = this_test(test, name);
            command.env_remove("FAST_ALLREDUCE_REQUIRE").envs(settings.iter().copied());
            Process::start(&mut command).finish().unwrap_or_else(|report| panic!("{name}: {report}"));
        }
    }
}

fn open() -> Error {
    Cuda::open(0).expect_err("there is nothing to open")
}

#[test]
fn no_driver() {
    // A folder without a driver; where one is installed for all programs, it is still found.
    with("settings::no_driver", "no driver", &[("LD_LIBRARY_PATH", "/nonexistent")], || {
        // SAFETY: loads the driver's library, if any.
        if unsafe { cudarc::driver::sys::is_culib_present() } {
            return println!("skipped: the driver is installed for all programs");
        }
        let error = open();
        assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains("libcuda")), "{error}");
        let error = CudaWorld::new(0, 2, 4096, 0, LIMIT).err().expect("no driver");
        assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains("libcuda")), "{error}");
    });
}

#[test]
fn no_device() {
    if part().is_none() && stand_in().is_none() {
        return;
    }
    with("settings::no_device", "no device", &[("STAND_IN_NO_DEVICE", "1")], || {
        let error = open();
        assert!(matches!(&error, Error::Driver { message, .. } if message.contains("NO_DEVICE")), "{error}");
    });
    with("settings::no_device", "no such device", &[("STAND_IN_DEVICES", "1")], || {
        assert!(Cuda::open(0).is_ok());
        let error = Cuda::open(1).expect_err("there is one device");
        assert!(matches!(error, Error::Driver { .. }), "{error}");
    });
}

/// Says so in a build that has none; elsewhere there is nothing to see.
#[test]
fn no_kernels() {
    let [_, (_, cuda), _] = fast_allreduce::build_facts();
    // SAFETY: loads the driver's library, if any.
    if !cuda.starts_with("none: ") || !unsafe { cudarc::driver::sys::is_culib_present() } {
        return println!("skipped: this build has kernels, or there is no driver: {cuda}");
    }
    let error = open().to_string();
    assert!(error.contains("has no kernels") && error.contains(&cuda), "{error}");
}
