//! The rules of the clock, each tested by a kernel of a few instructions.

use fast_allreduce_ptx_machine::clock::{self, Cause, Chain, Machine, Timing};
use fast_allreduce_ptx_machine::{Fault, Launch, LaunchError, Memory, Program, Range, MOST_PARTS};

/// Words of memory of each rank.
const WORDS: usize = 1 << 14;

struct Reach(Vec<(Range, usize)>);

impl Memory for Reach {
    fn find(&self, address: u64) -> Option<Range> {
        let holds = |range: &Range| address >= range.low && address - range.low < range.bytes;
        self.0.iter().map(|(range, _)| *range).find(holds)
    }

    /// Resolves an address of all ranks' memory.
    fn multicast(&self, address: u64, _bytes: u32, parts: &mut [u64; MOST_PARTS]) -> usize {
        let Some(offset) = address.checked_sub(MULTICAST) else { return 0 };
        parts.iter_mut().zip(&self.0).for_each(|(part, (range, _))| *part = range.low + offset);
        self.0.len()
    }
}

/// A multicast address; processes have no memory there.
const MULTICAST: u64 = 1 << 60;

/// Aligned as cache lines.
#[repr(C, align(128))]
#[derive(Clone)]
struct Line([u32; 32]);

/// Runs a kernel on ranks: %d0 is the rank's own memory, %d1 the next rank's; %r0 is the rank, %r1 the
/// thread.
struct Ranks {
    memory: Vec<Vec<Line>>,
    blocks: u32,
    threads: u32,
    turns: usize,
    simulated: u32,
    gap_ns: f64,
    programmatic: bool,
    cluster: u32,
}

impl Ranks {
    fn new(ranks: usize) -> Self {
        let memory = vec![vec![Line([0; 32]); WORDS / 32]; ranks];
        Self {
            memory,
            blocks: 1,
            threads: 32,
            turns: 1,
            simulated: 0,
            gap_ns: 0.0,
            programmatic: true,
            cluster: 1,
        }
    }

    fn word(&self, rank: usize, at: usize) -> u32 {
        self.memory[rank][at / 32].0[at % 32]
    }

    fn run(&self, body: &str) -> Result<Timing, LaunchError> {
        self.run_on(&machine(), body)
    }

    fn run_on(&self, machine: &Machine, body: &str) -> Result<Timing, LaunchError> {
        let text = format!(
            ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 own, .param .u64 peer, \
             .param .u32 rank)\n{{\n.reg .pred %p<8>; .reg .b32 %r<64>; .reg .b64 %d<64>; .reg .f32 %f<8>;\n\
             ld.param.u64 %d0, [own]; ld.param.u64 %d1, [peer]; ld.param.u32 %r0, [rank]; mov.u32 %r1, %tid.x;\n\
             {body}\nret;\n}}\n"
        );
        let program = Program::load_timed(&text).unwrap_or_else(|error| panic!("{error}: {body}"));
        let address = |rank: usize| self.memory[rank % self.memory.len()].as_ptr() as u64;
        let range = |rank| Range { low: address(rank), bytes: WORDS as u64 * 4 };
        let reach = Reach((0..self.memory.len()).map(|rank| (range(rank), rank)).collect());
        let params = |rank: usize| -> Vec<u8> {
            let addresses = [address(rank), address(rank + 1)].map(u64::to_le_bytes).concat();
            [&addresses[..], &(rank as u32).to_le_bytes()].concat()
        };
        let params: Vec<Vec<u8>> = (0..self.memory.len()).map(params).collect();
        let launch = |params| Launch {
            kernel: "k",
            cluster: [self.cluster, 1, 1],
            dynamic_shared: 0,
            grid: [self.blocks, 1, 1],
            block: [self.threads, 1, 1],

            params,
            memory: &reach,
        };
        let calls: Vec<Launch> = params.iter().map(|params| launch(params)).collect();
        let chain = Chain {
            calls: &calls,
            homes: &reach.0,
            turns: self.turns,
            blocks: self.simulated,
            gap_ns: self.gap_ns,
            programmatic: self.programmatic,
            resident: true,
        };
        clock::time(&program, machine, &chain)
    }

    fn ns(&self, body: &str) -> f64 {
        self.run(body).unwrap_or_else(|error| panic!("{error}")).call_ns
    }
}

/// Without the term that depends on the number of ranks, which has a test of its own.
fn machine() -> Machine {
    Machine { rank_skew_ns: 0.0, ..Machine::named("h100").unwrap() }
}

#[test]
fn the_last_of_many_ranks_begins_later_than_of_two() {
    let skewed = Machine { rank_skew_ns: 100.0, ..machine() };
    let later = |count: usize| {
        let ranks = Ranks::new(count);
        let body = "st.global.u32 [%d0], 1;";
        ranks.run_on(&skewed, body).unwrap().call_ns - ranks.run(body).unwrap().call_ns
    };
    // The expected maximum of n normal variables, minus that of two.
    assert_eq!([1, 2, 4, 8].map(|count| later(count).round()), [0.0, 0.0, 47.0, 86.0]);
}

fn l2() -> f64 {
    machine().l2_cycles / machine().ghz
}

fn is_near(ns: f64, expected: f64, most: f64) {
    assert!(
        ns >= expected && ns <= expected + most,
        "{ns} ns, where {expected} to {} are right",
        expected + most
    );
}

/// Repeats a statement for 0..count: `#` becomes the number, and `@` the offset of a new cache line.
fn each(count: usize, statement: &str) -> String {
    (0..count)
        .map(|i| statement.replace('#', &(10 + i).to_string()).replace('@', &(i * 128).to_string()))
        .collect()
}

/// Uses the values loaded into %r10 and so on.
fn sum(count: usize) -> String {
    let adds = each(count, "add.u32 %r2, %r2, %r#;\n");
    format!("mov.u32 %r2, 0;\n{adds} st.global.u32 [%d0+8192], %r2;")
}

#[test]
fn independent_loads_overlap_and_a_chain_adds() {
    let ranks = Ranks::new(1);
    let one = ranks.ns(&(each(1, "ld.global.u32 %r#, [%d0+@];\n") + &sum(1)));
    let eight = ranks.ns(&(each(8, "ld.global.u32 %r#, [%d0+@];\n") + &sum(8)));
    // All memory is zero, so each address differs from the previous one only by the line.
    let step = "ld.volatile.global.u32 %r#, [%d0+@]; cvt.u64.u32 %d2, %r#; add.u64 %d0, %d0, %d2;\n";
    let chain = ranks.ns(&each(8, step));
    // The end of a kernel waits until its stores are acknowledged.
    is_near(one, 2.0 * l2(), 150.0);
    is_near(eight, one, 40.0);
    is_near(chain, 8.0 * l2() - l2(), 300.0);
}

#[test]
fn ptxas_loads_early_and_not_past_a_store() {
    let ranks = Ranks::new(2);
    let sums = each(4, "ld.global.u32 %r#, [%d1+@]; add.u32 %r2, %r2, %r#;\n");
    let reduce = ranks.run(&format!("mov.u32 %r2, 0;\n{sums} st.global.u32 [%d0], %r2;")).unwrap();
    let copies = each(4, "ld.global.u32 %r#, [%d1+@]; st.global.u32 [%d0+@], %r#;\n");
    let copy = ranks.run(&copies).unwrap();
    let early = each(4, "ld.global.u32 %r#, [%d1+@];\n") + &each(4, "st.global.u32 [%d0+@], %r#;\n");
    let batched = ranks.run(&early).unwrap();
    let trip = machine().remote_load_ns;
    is_near(reduce.call_ns, trip, 250.0);
    is_near(batched.call_ns, trip, 300.0);
    is_near(copy.call_ns, 4.0 * trip, 300.0);
    assert_eq!((copy.round_trips, batched.round_trips), (4, 1));
}

#[test]
fn what_comes_after_an_acquire_waits_for_it() {
    let ranks = Ranks::new(1);
    let after =
        |first: &str| format!("{first}.global.u32 %r10, [%d0]; ld.global.u32 %r11, [%d0+1024];\n{}", sum(2));
    let relaxed = ranks.ns(&after("ld.relaxed.sys"));
    let acquire = ranks.ns(&after("ld.acquire.sys"));
    is_near(relaxed, 2.0 * l2(), 160.0);
    is_near(acquire, 3.0 * l2(), 160.0);
}

#[test]
fn a_fence_waits_for_stores() {
    let machine = machine();
    let ranks = Ranks::new(2);
    let idle = ranks.ns("fence.acq_rel.sys;");
    let own = ranks.ns("st.global.u32 [%d0], 1; fence.acq_rel.sys;");
    let remote = ranks.run("st.global.u32 [%d1], 1; fence.acq_rel.sys;").unwrap();
    let block = ranks.ns("fence.acq_rel.cta;");
    is_near(idle, machine.fence_system_ns, 60.0);
    is_near(own, machine.fence_system_ns, 100.0);
    is_near(remote.call_ns, machine.remote_store_ns + machine.remote_load_ns / 2.0, 100.0);
    assert!(remote.causes[&Cause::Fence] > machine.remote_load_ns / 2.0);
    is_near(block, 0.0, 60.0);
    let release = ranks.ns("st.global.u32 [%d1+64], 1; st.release.sys.global.u32 [%d1], 1;");
    let two = machine.remote_store_ns + machine.remote_load_ns / 2.0;
    is_near(release, 2.0 * two, 100.0);
    let total = ranks.ns("fence.sc.sys;");
    is_near(total - idle, machine.fence_sc_system_ns - machine.fence_system_ns, 1.0);
}

#[test]
fn a_sync_takes_the_last_of_its_warps() {
    let mut ranks = Ranks::new(1);
    ranks.threads = 64;
    let chain =
        each(4, "ld.volatile.global.u32 %r#, [%d0+@]; cvt.u64.u32 %d2, %r#; add.u64 %d0, %d0, %d2;\n");
    let body = format!("setp.lt.u32 %p0, %r1, 32;\n@%p0 bra MEET;\n{chain}MEET:\nbar.sync 0;\n");
    let timing = ranks.run(&body).unwrap();
    is_near(timing.call_ns, 3.0 * l2(), 250.0);
    assert_eq!(timing.counts.syncs, 1.0);
    assert!(timing.causes[&Cause::Local] > 2.5 * l2(), "{:?}", timing.causes);
}

#[test]
fn a_poll_waits_for_a_store_and_its_flight() {
    let machine = machine();
    let ranks = Ranks::new(2);
    // Rank 0 reads its own memory three times, then signals rank 1. After its poll, rank 1 reads and stores for
    // about as long as rank 0, at its end, waits for the acknowledgement of its store.
    let on =
        each(4, "ld.volatile.global.u32 %r#, [%d0+1024]; cvt.u64.u32 %d2, %r#; add.u64 %d0, %d0, %d2;\n");
    let body = "setp.ne.u32 %p0, %r0, 0;\n@%p0 bra WAIT;\n\
        ld.volatile.global.u32 %r10, [%d0]; cvt.u64.u32 %d2, %r10; add.u64 %d0, %d0, %d2;\n\
        ld.volatile.global.u32 %r10, [%d0]; cvt.u64.u32 %d2, %r10; add.u64 %d0, %d0, %d2; add.u32 %r10, %r10, 7;\n\
        st.relaxed.sys.global.u32 [%d1+64], %r10;\nbra DONE;\n\
        WAIT:\nld.relaxed.sys.global.u32 %r11, [%d0+64];\nsetp.eq.u32 %p1, %r11, 0;\n@%p1 bra WAIT;\n\
        mov.u32 %r40, %r11; MORE st.global.u32 [%d0+128], %r40;\nDONE:\n";
    let timing = ranks.run(&body.replace("MORE", &on)).unwrap();
    assert_eq!(ranks.word(1, 32), 7, "what rank 1 has seen");
    // The loads, the store's flight, the poll's way back, at most one poll that came too early, and the
    // last store.
    let least = 7.0 * l2() + machine.remote_store_ns + l2() / 2.0;
    is_near(timing.call_ns, least, 2.0 * l2() + 100.0);
    assert_eq!(timing.flights, 1, "{:?}", timing.path);
    is_near(timing.causes[&Cause::Flight] + 0.5, machine.remote_store_ns, 1.0);
    assert!(timing.path.first().is_some_and(|step| step.rank == 0), "the path begins at rank 0");
    assert!(timing.path.last().is_some_and(|step| step.rank == 1), "and ends at rank 1");
    assert!(timing.counts.looks >= 2.0);
}

#[test]
fn a_load_does_not_see_what_is_on_its_way() {
    let ranks = Ranks::new(2);
    // Both ranks signal each other and poll at once.
    ranks
        .run("st.relaxed.sys.global.u32 [%d1], 5;\nld.relaxed.sys.global.u32 %r2, [%d0];\nadd.u32 %r2, %r2, 1;\n\
             st.global.u32 [%d0+64], %r2;\n")
        .unwrap();
    assert_eq!([ranks.word(0, 0), ranks.word(0, 16)], [5, 1]);
}

#[test]
fn large_messages_take_as_long_as_their_link() {
    let machine = machine();
    let mut ranks = Ranks::new(2);
    (ranks.blocks, ranks.threads) = (32, 512);
    // Every thread stores 16 bytes 64 times, to the same places repeatedly.
    let body = "mul.wide.u32 %d2, %r1, 16; add.u64 %d3, %d1, %d2; mov.u32 %r2, 64;\n\
        NEXT:\nst.global.v4.u32 [%d3], {%r0, %r0, %r0, %r0};\nsub.u32 %r2, %r2, 1;\nsetp.ne.u32 %p0, %r2, 0;\n\
        @%p0 bra NEXT;\n";
    let bytes = f64::from(32 * 512 * 64 * 16);
    let all = ranks.run(body).unwrap();
    let rate = bytes / all.call_ns;
    assert!(rate < machine.link_gbps && rate > 0.7 * machine.link_gbps, "{rate} GB/s");
    let stores = all.counts.stores[&1];
    assert_eq!((stores.bytes, stores.partial), (bytes, 0.0));
    assert!(all.causes.contains_key(&Cause::Drain) || all.causes.contains_key(&Cause::Bandwidth));
    // Two blocks stand for all blocks.
    ranks.simulated = 2;
    let some = ranks.run(body).unwrap();
    assert_eq!(some.counts.stores[&1].bytes, bytes);
    assert!((some.call_ns / all.call_ns - 1.0).abs() < 0.1, "{} and {} ns", some.call_ns, all.call_ns);
}

#[test]
fn half_sectors_and_single_blocks_cost_more() {
    let mut ranks = Ranks::new(2);
    (ranks.blocks, ranks.threads) = (1, 512);
    let body = |stride: u32| {
        format!(
            "mul.wide.u32 %d2, %r1, {stride}; add.u64 %d3, %d1, %d2;\nst.global.v4.u32 [%d3], {{%r0, %r0, \
            %r0, %r0}};\n"
        )
    };
    let whole = ranks.run(&body(16)).unwrap();
    let halves = ranks.run(&body(32)).unwrap();
    assert_eq!(whole.counts.stores[&1].partial, 0.0);
    assert_eq!(halves.counts.stores[&1].partial, 512.0);
    assert!(halves.call_ns > whole.call_ns + 200.0, "{} and {} ns", halves.call_ns, whole.call_ns);
}

#[test]
fn the_first_level_cache_is_used_until_an_acquire() {
    let ranks = Ranks::new(1);
    let twice = |between: &str| {
        format!(
            "ld.global.u32 %r10, [%d0]; cvt.u64.u32 %d2, %r10; add.u64 %d0, %d0, %d2;\n{between}\n\
             ld.global.u32 %r11, [%d0];\n{}",
            sum(2)
        )
    };
    let hit = ranks.ns(&twice(""));
    let miss = ranks.ns(&twice("ld.acquire.gpu.global.u32 %r12, [%d0+512];"));
    assert!(miss > hit + 1.5 * l2(), "{hit} and {miss} ns");
}

#[test]
fn warps_take_turns_at_issuing() {
    let mut ranks = Ranks::new(1);
    let adds = each(32, "add.u32 %r#, %r1, 1;\n").repeat(8);
    let one = ranks.ns(&adds);
    ranks.threads = 512;
    let sixteen = ranks.run(&adds).unwrap();
    // Four warps per scheduler.
    let cycles = |ns: f64| ns * machine().ghz;
    is_near(cycles(one), 256.0, 80.0);
    is_near(cycles(sixteen.call_ns), 1024.0, 100.0);
    assert_eq!(sixteen.counts.instructions / sixteen.counts.warps, 258.0);
}

#[test]
fn a_chain_of_calls_has_a_period() {
    let mut ranks = Ranks::new(1);
    let body = each(1, "ld.global.u32 %r#, [%d0+@];\n") + &sum(1);
    let once = ranks.ns(&body);
    ranks.turns = 5;
    let many = ranks.ns(&body);
    assert!((once - many).abs() < 1.0, "{once} and {many} ns");
}

#[test]
fn a_dependent_launch_overlaps_until_it_waits() {
    let mut ranks = Ranks::new(1);
    ranks.turns = 6;
    ranks.gap_ns = 1300.0;
    let chain =
        each(8, "ld.volatile.global.u32 %r#, [%d0+@]; cvt.u64.u32 %d2, %r#; add.u64 %d0, %d0, %d2;\n");
    let count =
        "ld.volatile.global.u32 %r50, [%d0+4096]; add.u32 %r50, %r50, 1; st.global.u32 [%d0+4096], %r50;\n";
    let plain = ranks.ns(&(chain.clone() + count));
    assert_eq!(ranks.word(0, 1024), 6);
    let early = format!("griddepcontrol.launch_dependents;\n{chain} griddepcontrol.wait;\n{count}");
    let overlapped = ranks.ns(&early);
    assert_eq!(ranks.word(0, 1024), 12, "each launch has seen what the one before has stored");
    let machine = machine();
    is_near(plain, 1300.0 + 9.0 * l2(), 400.0);
    is_near(overlapped, machine.dependent_ns + 2.0 * l2(), 100.0);
    ranks.programmatic = false;
    is_near(ranks.ns(&early), plain, 100.0);
}

/// A multicast store arrives later than a direct one, and is one packet on the sender's link.
#[test]
fn the_switch_stores_to_all() {
    let ranks = Ranks::new(4);
    let flag = |store: &str| {
        format!(
            "mov.u64 %d2, {MULTICAST}; setp.ne.u32 %p0, %r0, 0;\nmov.f32 %f0, 0f3F800000;\n@%p0 bra \
                POLL;\n{store}\nret;\n\
             POLL: ld.relaxed.sys.global.u32 %r3, [%d0+256];\nsetp.eq.u32 %p1, %r3, 0;\n@%p1 bra POLL;\n"
        )
    };
    let spread = ranks.ns(&flag("multimem.st.relaxed.sys.global.f32 [%d2+256], %f0;"));
    let ranks = Ranks::new(2);
    let straight = ranks.ns(&flag("st.relaxed.sys.global.f32 [%d1+256], %f0;"));
    is_near(spread, straight + machine().switch_ns - 40.0, 80.0);

    // Each rank's multicast store leaves once, and the stores of all ranks arrive on each link.
    let mut ranks = Ranks::new(4);
    (ranks.blocks, ranks.threads) = (16, 256);
    let Machine { link_gbps, switch_share, remote_store_ns, switch_ns, .. } = machine();
    for senders in [1, 4] {
        let large = ranks.ns(&format!(
            "setp.ge.u32 %p0, %r0, {senders};\n@%p0 ret;\n\
             mov.u64 %d2, {MULTICAST}; mov.u32 %r4, %ctaid.x; mad.lo.u32 %r5, %r4, 256, %r1; \
             mul.wide.u32 %d3, %r5, 16;\n\
             add.u64 %d2, %d2, %d3; mov.f32 %f0, 0f3F800000;\n\
             multimem.st.relaxed.sys.global.v4.f32 [%d2], {{%f0, %f0, %f0, %f0}};"
        ));
        assert_eq!(ranks.word(3, WORDS - 1), 1.0f32.to_bits());
        let link = (senders * WORDS * 4) as f64 / (link_gbps * switch_share);
        // The acknowledgements' way back, and a multiprocessor's own stores.
        is_near(large, link + remote_store_ns + switch_ns, 700.0);
    }
}

/// An in-switch reduction takes slightly longer than a load from a peer, and each device sends its part.
#[test]
fn the_switch_adds() {
    let ranks = Ranks::new(4);
    let sum = format!(
        "mov.u64 %d2, {MULTICAST}; multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%d2]; st.global.f32 \
            [%d0+8192], %f1;"
    );
    is_near(ranks.ns(&sum), machine().remote_load_ns + machine().switch_ns, 150.0);

    // All ranks load reductions of all parts: each link receives results and sends parts for everyone.
    let mut ranks = Ranks::new(4);
    (ranks.blocks, ranks.threads) = (16, 256);
    let large = ranks.ns(&format!(
        "mov.u64 %d2, {MULTICAST}; mov.u32 %r4, %ctaid.x; mad.lo.u32 %r5, %r4, 256, %r1; \
             mul.wide.u32 %d3, %r5, 16;\n\
         add.u64 %d2, %d2, %d3; add.u64 %d3, %d0, %d3;\n\
         multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {{%f0, %f1, %f2, %f3}}, [%d2]; st.global.f32 [%d3], %f1;"
    ));
    let Machine { link_gbps, switch_share, remote_load_ns, switch_ns, .. } = machine();
    let link = (4 * WORDS * 4) as f64 / (link_gbps * switch_share);
    is_near(large, link + remote_load_ns + switch_ns, 500.0);

    let none = Machine::named("a100").unwrap();
    let error = ranks.run_on(&none, &sum);
    assert!(error.is_err_and(|error| error.to_string().contains("no switch")));
}

#[test]
fn a_wait_without_an_end_is_an_error() {
    let ranks = Ranks::new(2);
    let poll = "WAIT:\nld.relaxed.sys.global.u32 %r11, [%d0];\nsetp.eq.u32 %p1, %r11, 0;\n@%p1 bra WAIT;\n";
    let error = ranks.run(poll).unwrap_err();
    assert_eq!(error.fault, Fault::Limit, "{error}");
    let sync = "setp.ne.u32 %p0, %r1, 0;\n@%p0 bra DONE;\nbar.sync 0;\nDONE:\n";
    let error = ranks.run(sync).unwrap_err();
    assert_eq!(error.fault, Fault::Sync, "{error}");
    let outside =
        ranks.run("mov.u64 %d5, 64;\nld.global.u32 %r10, [%d5];\nst.global.u32 [%d0], %r10;").unwrap_err();
    assert_eq!(outside.fault, Fault::IllegalAddress, "{outside}");
}

/// Blocks of a cluster exchange words, and the last arrival decides when all go on.
#[test]
fn a_cluster_meets_and_exchanges() {
    let machine = machine();
    let mut ranks = Ranks::new(1);
    (ranks.blocks, ranks.cluster) = (4, 2);
    let slow = each(4, "ld.volatile.global.u32 %r#, [%d0+@]; cvt.u64.u32 %d2, %r#; add.u64 %d0, %d0, %d2;\n");
    let sync = |how: &str| format!("barrier.cluster.arrive{how}; barrier.cluster.wait;");
    let body = |how: &str, rest: &str| {
        format!(
            ".shared .b32 word; mov.u32 %r40, %cluster_ctarank; mov.u32 %r41, %ctaid.x; setp.eq.u32 %p0, %r40, 0;\n\
             @%p0 bra MEET;\n{slow} MEET:\nst.shared.u32 [word], %r41;\n{} {rest}",
            sync(how)
        )
    };
    // The faster block waits for the slower one.
    let relaxed = ranks.ns(&body(".relaxed", ""));
    is_near(relaxed, 4.0 * l2() + machine.cluster_sync_cycles / machine.ghz, 120.0);
    let released = ranks.ns(&body("", ""));
    is_near(released, relaxed + machine.fence_gpu_ns, 20.0);
    let get = format!(
        "xor.b32 %r42, %r40, 1; mov.u32 %r43, word; mapa.shared::cluster.u32 %r43, %r43, %r42;\n\
         ld.shared::cluster.u32 %r44, [%r43]; mul.wide.u32 %d3, %r41, 4; add.u64 %d3, %d0, %d3;\n\
         st.global.u32 [%d3+4096], %r44;\n{}",
        sync(".relaxed")
    );
    let exchanged = ranks.run(&body("", &get)).unwrap();
    assert_eq!([0, 1, 2, 3].map(|block| ranks.word(0, 1024 + block)), [1, 0, 3, 2]);
    let more = (machine.cluster_cycles + machine.cluster_sync_cycles) / machine.ghz;
    is_near(exchanged.call_ns, released + more, l2() + 60.0);
    // A store is visible to the other block after the barrier, and is late without it.
    let put = "xor.b32 %r42, %r40, 1; mov.u32 %r43, word; mapa.shared::cluster.u32 %r43, %r43, %r42;\n\
        add.u32 %r41, %r41, 10; st.shared::cluster.u32 [%r43], %r41; SYNC ld.shared.u32 %r44, [word];\n\
        mov.u32 %r41, %ctaid.x; mul.wide.u32 %d3, %r41, 4; add.u64 %d3, %d0, %d3; st.global.u32 [%d3+4096], %r44;\n";
    for (between, seen) in [(sync(""), [11, 10, 13, 12]), (String::new(), [0, 1, 2, 3])] {
        ranks.run(&body("", &(put.replace("SYNC", &between) + &sync("")))).unwrap();
        assert_eq!([0, 1, 2, 3].map(|block| ranks.word(0, 1024 + block)), seen, "{between}");
    }
    let late = body("", "exit;").replace("exit;", "@%p0 exit;") + &slow + &get;
    assert_eq!(ranks.run(&late).unwrap_err().fault, Fault::EndedBlock);
}

/// Two of sixteen blocks stand for the others only if the last block works as the first.
#[test]
fn blocks_with_unequal_work_are_noticed() {
    let mut ranks = Ranks::new(2);
    (ranks.blocks, ranks.simulated) = (16, 2);
    let evenness = |most: u32| {
        let skip = format!("mov.u32 %r2, %ctaid.x; setp.gt.u32 %p0, %r2, {most};\n@%p0 bra DONE;\n");
        let body = skip + "st.global.u32 [%d1], 1;\nDONE:";
        ranks.run(&body).unwrap().evenness
    };
    assert_eq!((evenness(15), evenness(14)), (1.0, 0.0));
}

#[test]
fn a_program_for_the_clock_is_for_nothing_else() {
    let text = ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n{\nret;\n}\n";
    let (timed, plain) = (Program::load_timed(text).unwrap(), Program::load(text, false).unwrap());
    let reach = Reach(Vec::new());
    let call = Launch {
        kernel: "k",
        grid: [1; 3],
        block: [1; 3],
        cluster: [1; 3],
        dynamic_shared: 0,
        params: &[],
        memory: &reach,
    };
    assert_eq!(timed.launch(&[call], Default::default()).unwrap_err().fault, Fault::Launch);
    let chain = |calls| Chain {
        calls,
        homes: &[],
        turns: 1,
        blocks: 0,
        gap_ns: 0.0,
        programmatic: false,
        resident: true,
    };
    let calls = [call];
    assert_eq!(clock::time(&plain, &machine(), &chain(&calls)).unwrap_err().fault, Fault::Launch);
    assert_eq!(clock::time(&timed, &machine(), &chain(&[])).unwrap_err().fault, Fault::Launch);
    assert!(clock::time(&timed, &machine(), &chain(&calls)).is_ok());
}
