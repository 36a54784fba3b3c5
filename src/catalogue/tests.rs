//! Tests of names, codes and refusals.

use super::*;

#[test]
fn names_of_types_are_parsed() {
    for dtype in DType::ALL {
        assert_eq!(dtype.to_string().parse(), Ok(dtype));
        assert_eq!(dtype.torch_name().parse(), Ok(dtype));
    }
    for (name, dtype) in [("half", DType::F16), ("double", DType::F64), ("fp8_e5m2", DType::F8E5M2)] {
        assert_eq!(name.parse(), Ok(dtype));
    }
    for name in ["", "F32", "f32 ", "complex64"] {
        let error = name.parse::<DType>().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
        assert!(DType::ALL.into_iter().all(|dtype| error.contains(dtype.name())), "{error}");
    }
}

#[test]
fn names_of_operations_are_parsed() {
    for op in ReduceOp::ALL.into_iter().chain([ReduceOp::PreMulSum((-0.1).into())]) {
        assert_eq!(op.to_string().parse(), Ok(op));
    }
    for name in ["", "Sum", " sum", "mean", "premul_sum", "premul_sum:", "premul_sum:half", "sum:2"] {
        let error = name.parse::<ReduceOp>().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
        assert!(ReduceOp::ALL.into_iter().all(|op| error.contains(op.name())), "{error}");
    }
}

#[test]
fn names_of_algorithms_are_parsed() {
    let all = || Algorithm::ALL.into_iter().chain(Algorithm::NVLS);
    for algorithm in all() {
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
    }
    let error = "none".parse::<Algorithm>().unwrap_err().to_string();
    assert!(all().all(|algorithm| error.contains(algorithm.name())), "{error}");
}

#[test]
fn codes_name_operations() {
    assert!(ReduceOp::ALL.into_iter().all(|op| ReduceOp::of_code(op.code()) == Some(op)));
    assert_eq!(ReduceOp::of_code(u32::MAX), None);
}

#[test]
fn an_undefined_operation_is_refused_with_a_list_of_the_defined_ones() {
    for dtype in DType::ALL {
        for op in ReduceOp::ALL.into_iter().filter(|op| !op.is_of(dtype)) {
            let error = op.check(dtype).unwrap_err().to_string();
            assert!(error.contains(dtype.name()) && error.contains(op.name()), "{error}");
            assert!(ReduceOp::ALL
                .into_iter()
                .filter(|op| op.is_of(dtype))
                .all(|op| error.contains(op.name())));
        }
    }
}
