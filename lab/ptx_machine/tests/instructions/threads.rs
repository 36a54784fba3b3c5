//! Moves, and instructions of several threads: warps, barriers, shared memory, atomics.

use crate::run::{check, launch, Args};

#[test]
fn moves_of_parts_and_predicates() {
    check("mov.b64 {%r7, %r8}, %d4; mov.b64 %d7, {%r8, %r7};", |[a, ..]| a.rotate_left(32));
    check("mov.b32 {_, %h7}, %r4; cvt.u64.u16 %d7, %h7;", |[a, ..]| (a as u32 >> 16).into());
    check("@%p5 mov.u64 %d7, %d4; @!%p5 mov.u64 %d7, %d6;", |[a, b, c]| if b != 0 { a } else { c });
    check(
        "xor.pred %p1, %p4, %p5; selp.b64 %d7, %d6, 0, %p1;",
        |[a, b, c]| if (a != 0) != (b != 0) { c } else { 0 },
    );
    check(
        ".reg .b32 %x; ts: .branchtargets A, B, C; and.b32 %x, %r4, 1; brx.idx %x, ts;\nA: mov.u64 %d7, 5; \
        bra C;\nB: mov.u64 %d7, 6;\nC:",
        |[a, ..]| 5 + (a & 1),
    );
}

fn warp(body: &str) -> Vec<u64> {
    let args: Vec<Args> = (0..64).map(|i| [i * 3 + 1, i % 5, i]).collect();
    launch(body, &args, 64).unwrap_or_else(|error| panic!("{body}: {error}"))
}

/// The function is called twice, so that each call needs separate registers, labels and parameters.
#[test]
fn functions_that_wait() {
    let call = |value: &str, sum: &str| {
        format!(
            "{{ .param .b32 a; .param .b64 b; .param .b64 c; st.param.b32 [a], {value}; st.param.b64 [b], %d6;\n\
             call.uni (c), from_neighbour, (a, b); ld.param.b64 {sum}, [c]; }}\n"
        )
    };
    let body = call("%r4", "%d10") + &call("%r5", "%d11") + "add.s64 %d7, %d10, %d11;";
    let expected = |i: u64| {
        let neighbour = i ^ 1;
        neighbour * 3 + 1 + neighbour % 5 + 2 * (i + if i >= 40 { 1000 } else { 0 })
    };
    assert_eq!(warp(&body), (0..64).map(expected).collect::<Vec<_>>());
}

/// As the ISA says of constants, zero is false, and all other values are true. nvcc writes true as -1.
#[test]
fn constants_of_predicates() {
    for (constant, truth) in [("0", 0), ("1", 1), ("-1", 1), ("2", 1)] {
        let moved = format!("mov.pred %p1, {constant};");
        check(&format!("{moved} selp.u64 %d7, 1, 0, %p1;"), |_| truth);
        check(&format!("{moved} not.pred %p1, %p1; selp.u64 %d7, 1, 0, %p1;"), |_| 1 - truth);
        check(&format!("{moved} @!%p1 mov.u64 %d7, 1;"), |_| 1 - truth);
        check(&format!("{moved} xor.pred %p1, %p1, %p4; selp.u64 %d7, 1, 0, %p1;"), |[a, ..]| {
            u64::from((a != 0) != (truth != 0))
        });
    }
}

#[test]
fn warps() {
    let lanes = || 0..64u64;
    let all = |f: &dyn Fn(u64) -> u64| lanes().map(f).collect::<Vec<_>>();
    let ballot = (0..32).filter(|lane| lane % 5 != 0).fold(0u64, |ballot, lane| ballot | 1 << lane);
    assert_eq!(warp("vote.sync.ballot.b32 %r7, %p5, -1; cvt.u64.u32 %d7, %r7;")[3], ballot);
    assert_eq!(warp("vote.sync.all.pred %p1, %p4, -1; selp.u64 %d7, 1, 0, %p1;"), vec![1; 64]);
    let down =
        "shfl.sync.down.b32 %r7|%p1, %r4, 4, 31, -1; cvt.u64.u32 %d7, %r7; @!%p1 add.s64 %d7, %d7, 1000;";
    assert_eq!(warp(down), all(&|i| if i % 32 < 28 { (i + 4) * 3 + 1 } else { i * 3 + 1001 }));
    assert_eq!(
        warp("shfl.sync.bfly.b32 %r7, %r4, 1, 31, -1; cvt.u64.u32 %d7, %r7;"),
        all(&|i| (i ^ 1) * 3 + 1)
    );
    assert_eq!(
        warp("shfl.sync.idx.b32 %r7, %r4, 9, 31, -1; cvt.u64.u32 %d7, %r7;"),
        all(&|i| (i / 32 * 32 + 9) * 3 + 1)
    );
    let sum = |first: u64| (first..first + 32).map(|i| i * 3 + 1).sum::<u64>();
    assert_eq!(warp("redux.sync.add.u32 %r7, %r4, -1; cvt.u64.u32 %d7, %r7;"), all(&|i| sum(i / 32 * 32)));
    let same =
        |i: u64| (0..32).filter(|j| (i / 32 * 32 + j) % 5 == i % 5).fold(0u64, |mask, j| mask | 1 << j);
    assert_eq!(warp("match.any.sync.b32 %r7, %r5, -1; cvt.u64.u32 %d7, %r7;"), all(&same));
    assert_eq!(warp("elect.sync %r7|%p1, -1; selp.u64 %d7, 1, 0, %p1;"), all(&|i| u64::from(i % 32 == 0)));
    assert_eq!(warp("mov.u32 %r7, %lanemask_lt; cvt.u64.u32 %d7, %r7;"), all(&|i| (1 << (i % 32)) - 1));
    assert_eq!(warp("bar.red.popc.u32 %r7, 0, %p5; cvt.u64.u32 %d7, %r7;"), vec![51; 64]);
    assert_eq!(
        warp("barrier.sync 3, 64; bar.red.or.pred %p1, 1, %p5; selp.u64 %d7, 1, 0, %p1;"),
        vec![1; 64]
    );
}

#[test]
fn shared_memory_and_atomics() {
    let shared = ".shared .align 8 .b8 s[512]; mov.u32 %r7, s; shl.b32 %r8, %r0, 3; add.u32 %r8, %r7, %r8;";
    let turned = format!(
        "{shared} st.shared.u64 [%r8], %d4; bar.sync 0; sub.u32 %r8, 63, %r0; shl.b32 %r8, \
        %r8, 3; add.u32 %r8, %r7, %r8; ld.shared.u64 %d7, [%r8];"
    );
    assert_eq!(warp(&turned), (0..64).map(|i| (63 - i) * 3 + 1).collect::<Vec<u64>>());
    let generic = format!(
        "{shared} cvt.u64.u32 %d10, %r8; cvta.shared.u64 %d10, %d10; st.u64 [%d10], %d4; \
        isspacep.shared %p1, %d10; ld.u64 %d7, [%d10]; @!%p1 mov.u64 %d7, 0;"
    );
    assert_eq!(warp(&generic), (0..64).map(|i| i * 3 + 1).collect::<Vec<u64>>());
    let count = ".shared .align 4 .b32 n; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [n], 0; bar.sync 0; \
        atom.shared.add.u32 %r7, [n], 2; red.shared.max.u32 [n], 1; bar.sync 0; ld.shared.u32 %r7, [n]; \
        cvt.u64.u32 %d7, %r7;";
    assert_eq!(warp(count), vec![128; 64]);
    let wrap = ".shared .align 4 .b32 n; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [n], 0; bar.sync 0; \
        atom.shared.inc.u32 %r7, [n], 9; bar.sync 0; ld.shared.u32 %r7, [n]; cvt.u64.u32 %d7, %r7;";
    assert_eq!(warp(wrap), vec![4; 64]);
}
