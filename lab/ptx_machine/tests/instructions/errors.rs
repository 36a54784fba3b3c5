//! Errors that a GPU would trap on, and unknown instructions.

use fast_allreduce_ptx_machine::{Fault, Launch, Program, Settings};

use crate::run::{kernel, launch, range_of, Anywhere, Args};

fn fault_of(body: &str) -> Fault {
    let args: Vec<Args> = (0..64).map(|i| [i, 0, 0]).collect();
    launch(body, &args, 64).expect_err(body).fault
}

#[test]
fn what_a_gpu_would_trap_on() {
    assert_eq!(fault_of("ld.global.v2.u64 {%d7, %d8}, [%d0+8];"), Fault::Misaligned);
    assert_eq!(fault_of("ld.global.u64 %d7, [%d0+-8];"), Fault::IllegalAddress);
    assert_eq!(fault_of("mov.u64 %d7, 16; st.u32 [%d7], %r4;"), Fault::IllegalAddress);
    assert_eq!(fault_of(".shared .b32 s[4]; ld.shared.u32 %r7, [s+4];"), Fault::UndefinedShared);
    assert_eq!(
        fault_of(".shared .b32 s[4]; mov.u32 %r7, 16; st.shared.u32 [%r7], %r4;"),
        Fault::IllegalAddress
    );
    assert_eq!(
        fault_of("setp.lt.u32 %p1, %r0, 7; @%p1 mov.u32 %r7, 1; cvt.u64.u32 %d7, %r7;"),
        Fault::UndefinedRegister
    );
    assert_eq!(fault_of("setp.lt.u32 %p1, %r0, 40; @%p1 bra A; bar.sync 0;\nA:"), Fault::Sync);
    assert_eq!(
        fault_of("setp.lt.u32 %p1, %r0, 7; @%p1 bra A; bar.sync 0; bra B;\nA: bar.sync 0;\nB:"),
        Fault::Sync
    );
    assert_eq!(fault_of("setp.eq.u32 %p1, %r0, 7; @%p1 exit; vote.sync.all.pred %p2, %p1, -1;"), Fault::Sync);
    assert_eq!(fault_of("trap;"), Fault::Trap);
    assert_eq!(fault_of("mov.u64 %d7, in; st.u32 [%d7], %r4;"), Fault::ReadOnly);
}

#[test]
fn a_kernel_that_never_ends() {
    let program = Program::load(&kernel("A: bra A;"), false).unwrap();
    let args = vec![[0u64; 3]; 32];
    let memory = Anywhere(vec![range_of(&args)]);
    let params: Vec<u8> = [args.as_ptr() as u64, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    let settings = Settings { limit: std::time::Duration::from_millis(50), ..Settings::default() };
    let launch = Launch {
        kernel: "k",
        grid: [1; 3],
        block: [32, 1, 1],
        cluster: [1; 3],
        dynamic_shared: 0,
        params: &params,
        memory: &memory,
    };
    let error = program.launch(&[launch], settings).unwrap_err();
    assert_eq!(error.fault, Fault::Limit, "{error}");
    assert!(error.what.contains("threads 0 to 31 run or poll"), "{error}");
}

#[test]
fn a_launch_that_asks_for_what_there_is_not() {
    let program = Program::load(&kernel(""), false).unwrap();
    let memory = Anywhere(Vec::new());
    let fault = |kernel: &str, grid: [u32; 3], block: [u32; 3], bytes: usize| {
        let params = vec![0; bytes];
        let launch = Launch {
            kernel,
            grid,
            block,
            cluster: [1; 3],
            dynamic_shared: 0,
            params: &params,
            memory: &memory,
        };
        program.launch(&[launch], Settings::default()).unwrap_err()
    };
    let one = [1; 3];
    for (kernel, grid, block, bytes, what) in [
        ("other", one, one, 16, "there is no kernel other"),
        ("k", one, [1025, 1, 1], 16, "1025"),
        ("k", one, [32, 33, 1], 16, "at most 1024"),
        ("k", one, [0, 1, 1], 16, "[0, 1, 1] threads"),
        ("k", [1 << 16, 1 << 16, 1], one, 16, "blocks of"),
        ("k", [5000, 1, 1], one, 16, "5000"),
        ("k", [0, 1, 1], one, 16, "[0, 1, 1] blocks"),
        ("k", one, one, 8, "8 bytes of parameters, not 16"),
        ("k", one, one, 24, "24 bytes of parameters, not 16"),
    ] {
        let error = fault(kernel, grid, block, bytes);
        assert_eq!(error.fault, Fault::Launch, "{error}");
        assert!(error.to_string().contains(what), "{what:?} is not in {error}");
    }
    for (body, what) in [
        (".shared .b8 s[50000];", "more shared memory than a block has"),
        (".shared .b8 s[30000]; .shared .b8 t[30000];", "more shared memory than a block has"),
        (".local .b8 s[600000];", "more local memory than a thread has"),
    ] {
        let error = Program::load(&kernel(body), false).err().unwrap_or_else(|| panic!("{body} was loaded"));
        assert!(error.what.contains(what), "{body}: {error}");
    }
}

#[test]
fn what_is_not_known_is_an_error_with_its_line() {
    for (body, what) in [
        ("frobnicate.u32 %r7, %r4;", "frobnicate"),
        ("add.rz.f32 %f7, %f4, %f5;", "rz"),
        ("add.s32.hot %r7, %r4, %r5;", "hot"),
        ("ld.global.relaxed.u32 %r7, [%d0];", "relaxed"),
        ("add.s32 %r7, %d4, %r5;", "%d4"),
        ("add.s32 %r7, %r99, %r5;", "%r99"),
        ("bra NOWHERE;", "NOWHERE"),
        ("wgmma.fence.sync.aligned;", "wgmma"),
        ("mapa.shared::cta.u32 %r7, %r4, 0;", "a type"),
        ("st.const.u32 [%d0], %r4;", "const"),
    ] {
        let text = kernel(&format!("\n{body}"));
        let error = Program::load(&text, false).err().unwrap_or_else(|| panic!("{body} was loaded"));
        assert!(error.what.contains(what), "{body}: {error}");
        assert!(text.lines().nth(error.line as usize - 1).unwrap().contains(body), "{body}: {error}");
    }
    let newer = kernel("").replace(".version 9.0", ".version 99.0");
    assert!(Program::load(&newer, false).err().unwrap().what.contains("newer"));
}
