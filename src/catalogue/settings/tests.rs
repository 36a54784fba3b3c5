//! Tests of settings: values, environment variables and refusals.

use super::*;

fn set(name: &str, text: &str) -> Result<Values> {
    let mut values = Values::default();
    values.set(name, OsStr::new(text)).map(|()| values)
}

#[test]
fn every_setting_accepts_only_its_values() {
    for row in &ROWS {
        let values = set(row.name, row.other).unwrap_or_else(|error| panic!("{}: {error}", row.name));
        assert_eq!(values.get(row.name).as_deref(), Some(row.other), "{}", row.name);
        if row.refuses {
            let error = set(row.name, "?").unwrap_err();
            let Error::InvalidSetting { name, value, expected } = &error else { panic!("{error}") };
            assert!(*name == row.name && value == "?" && !expected.is_empty(), "{error}");
        }
    }
}

/// Runs the test again in a child process with these variables, and returns true in the child. The variables are not
/// set in this process, because its other tests may read them.
fn in_child_process(test: &str, variables: &[(&str, &str)]) -> bool {
    const IS_CHILD: &str = "SETTINGS_TEST_CHILD";
    if std::env::var_os(IS_CHILD).is_some() {
        return true;
    }
    let test = format!("catalogue::settings::tests::{test}");
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test])
        .env(IS_CHILD, "1")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    assert!(output.status.success(), "{variables:?}: {}", String::from_utf8_lossy(&output.stdout));
    false
}

#[test]
fn every_communicator_reads_its_variables() {
    let variables: Vec<_> = ROWS.iter().filter_map(|row| Some((row.variable?, row.other))).collect();
    assert!(variables.len() > 5);
    if in_child_process("every_communicator_reads_its_variables", &variables) {
        let values = Values::default().or_environment().unwrap();
        for row in &ROWS {
            assert_eq!(values.get(row.name).is_some(), row.is_read, "{}", row.name);
        }
        let program = set("timeout", "7").unwrap().or_environment().unwrap();
        assert_eq!(program.timeout, Some(Some(Duration::from_secs(7))));
    }
}

#[test]
fn an_empty_variable_is_not_set() {
    let variables: Vec<_> = ROWS.iter().filter_map(|row| Some((row.variable?, ""))).collect();
    if in_child_process("an_empty_variable_is_not_set", &variables) {
        let values = Values::default().or_environment().unwrap();
        assert!(ROWS.iter().all(|row| values.get(row.name).is_none()), "{values:?}");
    }
}

#[test]
fn a_variable_is_named_with_its_error() {
    let variables: Vec<_> = ROWS.iter().filter_map(|row| Some((row.variable?, "?"))).collect();
    if in_child_process("a_variable_is_named_with_its_error", &variables) {
        let mut values = Values::default();
        for row in ROWS.iter().filter(|row| row.is_read) {
            let error = values.clone().or_environment().unwrap_err();
            assert!(
                error.to_string().starts_with(&format!("{} = ? is not valid", row.variable.unwrap())),
                "{error}"
            );
            // A variable is ignored if the program sets the setting.
            values.set(row.name, OsStr::new(row.other)).unwrap();
        }
        values.or_environment().unwrap();
    }
}

#[test]
fn limits_are_seconds() {
    let limit = |text: &str| seconds("timeout", OsStr::new(text));
    assert_eq!(limit("0"), Ok(None));
    assert_eq!(limit("2.5"), Ok(Some(Duration::from_millis(2500))));
    assert_eq!(limit("1e-20"), Ok(Some(Duration::from_nanos(1))));
    assert_eq!([limit("0.00"), limit("-0"), limit("0e-9")], [Ok(None), Ok(None), Ok(None)]);
    for text in ["", "-1", "soon", "nan", "inf", "1e300", "5 s", "1e-400", "0.1E-999"] {
        let error = limit(text).unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { name: "timeout", .. }), "{error}");
    }
}

#[test]
fn numbers_have_their_ranges() {
    let max_bytes = |text: &str| set("max_bytes", text).map(|values| values.max_bytes.unwrap());
    assert_eq!([max_bytes("0"), max_bytes("64K"), max_bytes("3g")], [Ok(0), Ok(65536), Ok(3 << 30)]);
    for text in ["", "K", "-1", "1.5K", "99999999999G", "1T", "\u{e9}"] {
        assert!(max_bytes(text).is_err(), "{text}");
    }
    let workers = |text: &str| set("workers", text).map(|values| values.workers.unwrap());
    assert_eq!([workers("1"), workers("64")], [Ok(1), Ok(64)]);
    assert_eq!(workers("65").unwrap_err().to_string(), "workers = 65 is not valid: a number from 1 to 64");
    assert!(workers("0").is_err() && set("max_blocks", "0").is_err());
}

#[test]
fn ranks_compare_what_they_must_agree_on() {
    let values = set("order", "any").unwrap();
    let compared = values.compared();
    assert!(
        compared.contains(&("order", "any".into())) && compared.contains(&("max_bytes", "automatic".into()))
    );
    assert!(!compared.iter().any(|(name, _)| *name == "timeout"));
}

#[test]
fn devices_have_names() {
    for device in [DeviceId::Cpu, DeviceId::Cuda(0), DeviceId::Cuda(12)] {
        assert_eq!(device.to_string().parse(), Ok(device));
    }
    assert_eq!("cuda".parse(), Ok(DeviceId::Cuda(0)));
    for name in ["", "gpu", "cuda:", "cuda:-1", "cpu:0"] {
        assert!(name.parse::<DeviceId>().is_err(), "{name}");
    }
}
