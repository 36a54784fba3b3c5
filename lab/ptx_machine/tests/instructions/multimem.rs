//! Accesses to a multicast address: their effect on three memories.

use fast_allreduce_ptx_machine::{Fault, Launch, LaunchError, Memory, Program, Range, Settings, MOST_PARTS};

use crate::run::{kernel, range_of};

/// An address without memory.
const MULTICAST: u64 = 1 << 40;

struct Switch {
    plain: Vec<Range>,
    parts: [u64; 3],
}

impl Memory for Switch {
    fn find(&self, address: u64) -> Option<Range> {
        self.plain.iter().copied().find(|range| address >= range.low && address - range.low < range.bytes)
    }

    fn multicast(&self, address: u64, bytes: u32, parts: &mut [u64; MOST_PARTS]) -> usize {
        let offset = address.wrapping_sub(MULTICAST);
        if offset + u64::from(bytes) > 16 {
            return 0;
        }
        parts.iter_mut().zip(self.parts).for_each(|(part, base)| *part = base + offset);
        self.parts.len()
    }
}

/// Runs one thread, and returns the resulting %d7 and the three memories.
fn run(body: &str, mut parts: [[u64; 2]; 3]) -> Result<(u64, [[u64; 2]; 3]), LaunchError> {
    let program = Program::load(&kernel(&format!("mov.u64 %d10, {MULTICAST}; {body}")), false)
        .unwrap_or_else(|error| panic!("{body}: {error}"));
    let (args, mut result) = ([5u64, 6, 7], [0u64]);
    let addresses = parts.each_mut().map(|part| part.as_mut_ptr() as u64);
    let memory = Switch { plain: vec![range_of(&args), range_of(&result)], parts: addresses };
    let params = [args.as_ptr() as u64, result.as_mut_ptr() as u64].map(u64::to_le_bytes).concat();
    let launch = Launch {
        kernel: "k",
        grid: [1; 3],
        block: [1; 3],
        cluster: [1; 3],
        dynamic_shared: 0,
        params: &params,
        memory: &memory,
    };
    program.launch(&[launch], Settings::default())?;
    Ok((std::hint::black_box(&result)[0], *std::hint::black_box(&parts)))
}

const PARTS: [[u64; 2]; 3] = [[1, 10], [2, 20], [4, 40]];

#[test]
fn sums_and_bits_of_all_memories() {
    let result = |body: &str| run(body, PARTS).unwrap().0;
    assert_eq!(result("multimem.ld_reduce.relaxed.sys.global.add.u64 %d7, [%d10+8];"), 70);
    assert_eq!(result("multimem.ld_reduce.weak.global.or.b64 %d7, [%d10];"), 7);
    let narrow = |op: &str| format!("multimem.ld_reduce.acquire.gpu.{op} %r7, [%d10]; cvt.u64.u32 %d7, %r7;");
    assert_eq!(result(&narrow("add.s32")), 7);
    assert_eq!(result(&narrow("xor.b32")), 7);
    assert_eq!(result(&narrow("and.b32")), 0);
    let floats = [1.5f32, 2.25, -8.0].map(|value| [u64::from(value.to_bits()), 0]);
    let sum = run(
        "multimem.ld_reduce.relaxed.sys.global.add.v2.f32 {%f7, _}, [%d10]; mov.b32 %r7, %f7; cvt.u64.u32 %d7, %r7;",
        floats,
    );
    assert_eq!(sum.unwrap().0, (-4.25f32).to_bits().into());
}

#[test]
fn stores_and_reductions_to_all_memories() {
    let parts = |body: &str| run(body, PARTS).unwrap().1;
    assert_eq!(parts("multimem.st.release.sys.global.b64 [%d10+8], %d6;"), [[1, 7], [2, 7], [4, 7]]);
    assert_eq!(parts("multimem.red.relaxed.sys.global.add.u64 [%d10], %d5;"), [[7, 10], [8, 20], [10, 40]]);
    assert_eq!(parts("multimem.red.release.gpu.or.b32 [%d10], %r4;"), [[5, 10], [7, 20], [5, 40]]);
}

#[test]
fn what_a_gpu_would_trap_on() {
    let fault = |body: &str| run(body, PARTS).expect_err(body).fault;
    assert_eq!(fault("ld.global.u64 %d7, [%d10];"), Fault::IllegalAddress);
    assert_eq!(fault("multimem.ld_reduce.weak.add.u64 %d7, [%d0];"), Fault::IllegalAddress);
    assert_eq!(fault("multimem.st.weak.u64 [%d10+16], %d4;"), Fault::IllegalAddress);
    assert_eq!(fault("multimem.st.weak.u64 [%d10+4], %d4;"), Fault::Misaligned);
}

#[test]
fn what_there_is_not_is_an_error() {
    for body in [
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f32 {%f4, %f5, %f6, %f7}, [%d10];",
        "multimem.ld_reduce.relaxed.global.add.u64 %d7, [%d10];",
        "multimem.red.weak.add.u64 [%d10], %d4;",
        "multimem.st.acquire.sys.u64 [%d10], %d4;",
        "multimem.ld_reduce.weak.xor.v2.f32 {%f4, %f5}, [%d10];",
        "fence.proxy.async;",
    ] {
        assert!(Program::load(&kernel(&format!("mov.u64 %d10, 0; {body}")), false).is_err(), "{body}");
    }
}
