//! Runs a kernel of one instruction on many operands.

use std::fmt::Write as _;

use fast_allreduce_ptx_machine::{Launch, LaunchError, Memory, Program, Range, Settings};

/// Three operands of a thread.
pub type Args = [u64; 3];

pub struct Anywhere(pub Vec<Range>);

impl Memory for Anywhere {
    fn find(&self, address: u64) -> Option<Range> {
        self.0.iter().copied().find(|range| address >= range.low && address - range.low < range.bytes)
    }
}

pub fn range_of<T>(items: &[T]) -> Range {
    Range { low: items.as_ptr() as u64, bytes: std::mem::size_of_val(items) as u64 }
}

/// A function that waits: returns the neighbouring lane's value plus more, or, if that is at least 40, plus
/// another thousand.
const FROM_NEIGHBOUR: &str = "
.func (.param .b64 sum) from_neighbour(.param .b32 value, .param .b64 more)
{
    .reg .b32 %r<3>; .reg .b64 %d<3>; .reg .pred %p<2>;
    ld.param.u32 %r1, [value];
    shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
    bar.sync 0;
    ld.param.u64 %d1, [more];
    cvt.u64.u32 %d2, %r2;
    add.s64 %d2, %d2, %d1;
    setp.ge.u64 %p1, %d1, 40;
    @%p1 bra large;
    st.param.b64 [sum], %d2;
    ret;
large:
    add.s64 %d2, %d2, 1000;
    st.param.b64 [sum], %d2;
    ret;
}
";

/// Returns a kernel in which a thread has its operands in %d4 to %d6, their halves in %r4 to %r6 and so on,
/// and stores %d7.
pub fn kernel(body: &str) -> String {
    let mut text = format!(".version 9.0\n.target sm_90\n.address_size 64\n{FROM_NEIGHBOUR}");
    text.push_str(
        ".visible .entry k(.param .u64 in, .param .u64 out)\n{\n\
         .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %d<16>; .reg .f64 %e<8>;\n\
         ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out];\nmov.u32 %r0, %tid.x;\n\
         mul.wide.u32 %d2, %r0, 24; add.s64 %d3, %d0, %d2;\n",
    );
    for i in 0..3 {
        let n = i + 4;
        writeln!(
            text,
            "ld.global.u64 %d{n}, [%d3+{}]; cvt.u32.u64 %r{n}, %d{n}; cvt.u16.u64 %h{n}, %d{n}; setp.ne.u64 \
                %p{n}, %d{n}, 0;\n\
             mov.b32 %f{n}, %r{n}; mov.b64 %e{n}, %d{n};",
            i * 8
        )
        .unwrap();
    }
    write!(text, "mov.u64 %d7, 0;\n{body}\n").unwrap();
    text += "mul.wide.u32 %d8, %r0, 8; add.s64 %d9, %d1, %d8; st.global.u64 [%d9], %d7; ret;\n}\n";
    text
}

pub fn launch(body: &str, args: &[Args], threads: u32) -> Result<Vec<u64>, LaunchError> {
    let program = Program::load(&kernel(body), false).unwrap_or_else(|error| panic!("{body}: {error}"));
    let mut results = vec![0u64; args.len()];
    let memory = Anywhere(vec![range_of(args), range_of(&results)]);
    for (first, part) in args.chunks(threads as usize).enumerate() {
        let at = [part.as_ptr() as u64, results[first * threads as usize..].as_mut_ptr() as u64];
        let params: Vec<u8> = at.iter().flat_map(|address| address.to_le_bytes()).collect();
        let block = [part.len() as u32, 1, 1];
        let settings = Settings { limit: std::time::Duration::from_secs(20), ..Settings::default() };
        program.launch(
            &[Launch {
                kernel: "k",
                grid: [1; 3],
                block,
                cluster: [1; 3],
                dynamic_shared: 0,
                params: &params,
                memory: &memory,
            }],
            settings,
        )?;
    }
    Ok(results)
}

/// Returns ends of ranges, powers of two, NaNs and other special values; and random numbers.
pub fn interesting() -> Vec<u64> {
    let mut values = vec![0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 255, 0x7F, 0x80, 0x7FFF, 0x8000, 0xFFFF];
    values.extend([
        0x7FFF_FFFF,
        0x8000_0000,
        0xFFFF_FFFF,
        i64::MAX as u64,
        i64::MIN as u64,
        u64::MAX,
        u64::MAX - 4,
    ]);
    values.extend([
        0x3F80_0000,
        0xBF80_0000,
        0x7F80_0000,
        0xFF80_0000,
        0x7FC0_0000,
        0x7F80_0001,
        0x0000_0001,
        0x0080_0000,
    ]);
    values.extend([1.0f64, -2.5, f64::INFINITY, f64::NAN, 1e-310, 65504.0, 65520.0].map(f64::to_bits));
    values.extend(
        [1.5f32, -2.5, 65504.0, 65520.0, 1e-8, 3.3e38, 0.1, 2147483648.0].map(|f| u64::from(f.to_bits())),
    );
    let mut random = 0x0123_4567_89AB_CDEF_u64;
    for _ in 0..40 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        values.push(random ^ random >> 29);
    }
    values
}

/// Returns all pairs, each with a different third operand.
pub fn operands() -> Vec<Args> {
    let values = interesting();
    let pairs = values.iter().flat_map(|&a| values.iter().map(move |&b| (a, b)));
    pairs.enumerate().map(|(i, (a, b))| [a, b, values[(i * 7 + i / 31) % values.len()]]).collect()
}

pub fn check(body: &str, expected: impl Fn(Args) -> u64) {
    let args = operands();
    let results = launch(body, &args, 1024).unwrap_or_else(|error| panic!("{body}: {error}"));
    for (args, result) in args.iter().zip(results) {
        assert_eq!(result, expected(*args), "{body} of {args:x?}: {result:x}, not {:x}", expected(*args));
    }
}

pub fn word(f: impl Fn(u32, u32, u32) -> u32) -> impl Fn(Args) -> u64 {
    move |[a, b, c]| f(a as u32, b as u32, c as u32).into()
}

pub fn check_word(instruction: &str, f: impl Fn(u32, u32, u32) -> u32) {
    check(&format!("{instruction}; cvt.u64.u32 %d7, %r7;"), word(f));
}
