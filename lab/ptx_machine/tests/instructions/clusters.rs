//! Clusters of blocks: places, each other's shared memory, and the barrier with its orderings.

use fast_allreduce_ptx_machine::{Fault, Launch, LaunchError, Program, Settings};

use crate::run::{range_of, Anywhere};

const THREADS: u32 = 32;

/// A kernel in which %r1 is the thread, %r2 the block's rank in its cluster, %r3 the next block's; `own` is shared
/// memory; the thread stores %r9 to its place in the output.
fn text(directives: &str, body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_90\n.address_size 64\n.extern .shared .align 16 .b8 more[];\n\
         .visible .entry k(.param .u64 out) {directives}\n{{\n.reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %d<16>;\n\
         .shared .align 4 .b8 own[128];\n\
         mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r4, %cluster_nctarank;\n\
         add.u32 %r3, %r2, 1; rem.u32 %r3, %r3, %r4; mov.u32 %r9, 0;\n\
         shl.b32 %r5, %r1, 2; mov.u32 %r6, own; add.u32 %r6, %r6, %r5; mad.lo.u32 %r7, %r2, 100, %r1;\n\
         {body}\n\
         mov.u32 %r10, %ctaid.x; mov.u32 %r11, %ntid.x; mad.lo.u32 %r10, %r10, %r11, %r1;\n\
         ld.param.u64 %d0, [out]; mul.wide.u32 %d1, %r10, 4; add.u64 %d0, %d0, %d1;\n\
         st.global.u32 [%d0], %r9; ret;\n}}\n"
    )
}

/// Runs 4 blocks in clusters with race detection, in several orders, and returns the output.
fn run_text(text: &str, cluster: u32, dynamic_shared: u32) -> Result<Vec<u32>, LaunchError> {
    let program = Program::load(text, true).unwrap_or_else(|error| panic!("{error}: {text}"));
    let mut out = vec![0u32; 4 * THREADS as usize];
    for seed in 0..6 {
        let params = (out.as_mut_ptr() as u64).to_le_bytes();
        let memory = Anywhere(vec![range_of(&out)]);
        let launch = Launch {
            kernel: "k",
            grid: [4, 1, 1],
            block: [THREADS, 1, 1],
            cluster: [cluster, 1, 1],
            dynamic_shared,
            params: &params,
            memory: &memory,
        };
        program.launch(&[launch], Settings { seed, race: true, ..Settings::default() })?;
    }
    Ok(std::hint::black_box(out))
}

fn run(body: &str) -> Result<Vec<u32>, LaunchError> {
    run_text(&text("", body), 2, 0)
}

/// Returns what each thread of 4 blocks in clusters of 2 stores.
fn by_thread(value: impl Fn(u32, u32) -> u32) -> Vec<u32> {
    (0..4)
        .flat_map(|block| (0..THREADS).map(move |thread| (block, thread)))
        .map(|(b, t)| value(b, t))
        .collect()
}

const SYNC: &str = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";
/// Stores in the own block; reads the next block's generic address in %d5.
const PUT: &str = "st.shared.u32 [%r6], %r7;";
const GET: &str =
    "cvt.u64.u32 %d4, %r6; cvta.shared.u64 %d4, %d4; mapa.u64 %d5, %d4, %r3; ld.u32 %r9, [%d5];";

fn next(block: u32, thread: u32) -> u32 {
    ((block % 2) ^ 1) * 100 + thread
}

#[test]
fn blocks_read_the_shared_memory_of_others() {
    assert_eq!(run(&format!("{PUT} {SYNC} {GET} {SYNC}")).unwrap(), by_thread(next));
    let window = "mapa.shared::cluster.u32 %r8, %r6, %r3; ld.shared::cluster.u32 %r9, [%r8];";
    assert_eq!(run(&format!("{PUT} {SYNC} {window} {SYNC}")).unwrap(), by_thread(next));
    // The address in the own block is the plain one.
    let own = "mapa.shared::cluster.u32 %r8, %r6, %r2; ld.shared.u32 %r9, [%r8];";
    assert_eq!(run(&format!("{PUT} {own}")).unwrap(), by_thread(|block, thread| block % 2 * 100 + thread));
}

#[test]
fn blocks_write_and_update_the_shared_memory_of_others() {
    let put = "mapa.shared::cluster.u32 %r8, %r6, %r3; st.shared::cluster.u32 [%r8], %r7;";
    let get = "ld.shared.u32 %r9, [%r6];";
    assert_eq!(run(&format!("{put} {SYNC} {get}")).unwrap(), by_thread(next));
    let add = "st.shared.u32 [own], 0; mov.u32 %r8, own; mapa.shared::cluster.u32 %r8, %r8, %r3;\n";
    let add = format!(
        "setp.ne.u32 %p1, %r1, 0; @%p1 bra MEET; {add} MEET: {SYNC} mov.u32 %r8, own; \
         mapa.shared::cluster.u32 %r8, %r8, %r3; red.relaxed.cluster.shared::cluster.add.u32 [%r8], 2; {SYNC} \
         ld.shared.u32 %r9, [own];"
    );
    assert_eq!(run(&add).unwrap(), by_thread(|_, _| 2 * THREADS));
}

#[test]
fn a_missing_barrier_is_a_race() {
    // Each leaves out or weakens one of the barriers of a correct exchange.
    let early = format!("{PUT} {SYNC} {GET} {SYNC} {PUT}");
    assert!(run(&early).is_ok());
    let relaxed = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;";
    let block_only = "fence.acq_rel.cta; barrier.cluster.arrive.relaxed; barrier.cluster.wait;";
    let fenced = "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;";
    assert!(run(&format!("{PUT} {fenced} {GET} {SYNC}")).is_ok());
    for wrong in [
        format!("{PUT} {SYNC} {GET} {PUT} {SYNC}"),
        format!("{PUT} {relaxed} {GET} {SYNC}"),
        format!("{PUT} {block_only} {GET} {SYNC}"),
        // The barrier orders what comes before the arrival, not what comes before the wait.
        format!("barrier.cluster.arrive; {PUT} barrier.cluster.wait; {GET} {SYNC}"),
    ] {
        assert_eq!(run(&wrong).expect_err(&wrong).fault, Fault::Race, "{wrong}");
    }
    // Without any barrier the memory may not even have been written.
    let none = run(&format!("{PUT} {GET} {SYNC}")).unwrap_err().fault;
    assert!(matches!(none, Fault::Race | Fault::UndefinedShared), "{none}");
}

#[test]
fn a_block_that_has_ended_has_no_shared_memory() {
    let late = format!("{PUT} {SYNC} setp.eq.u32 %p1, %r2, 0; @%p1 exit; {GET}");
    let fault = run(&late).unwrap_err().fault;
    assert!(matches!(fault, Fault::EndedBlock), "{fault}");
}

#[test]
fn the_barrier_expects_only_threads_that_are_left() {
    let body = format!("setp.lt.u32 %p1, %r1, 8; @%p1 exit; {PUT} {SYNC} {GET} {SYNC}");
    let expected = by_thread(|block, thread| if thread < 8 { 0 } else { next(block, thread) });
    assert_eq!(run(&body).unwrap(), expected);
}

#[test]
fn a_wrong_use_of_the_barrier_is_an_error() {
    assert_eq!(run("barrier.cluster.wait;").unwrap_err().fault, Fault::Sync);
    assert_eq!(run("barrier.cluster.arrive; barrier.cluster.arrive;").unwrap_err().fault, Fault::Sync);
    // Only one block of each cluster arrives, and the other waits for a sync that never comes.
    let body = "setp.eq.u32 %p1, %r2, 0; @%p1 bra A; barrier.cluster.arrive; barrier.cluster.wait; bra B;\n\
        A: setp.eq.u32 %p2, %r1, 5; @%p2 bra B; bar.sync 0;\nB:";
    assert_eq!(run(body).unwrap_err().fault, Fault::Sync);
}

#[test]
fn places_in_clusters() {
    let body = "mov.u32 %r9, %clusterid.x; mov.u32 %r8, %nclusterid.x; mad.lo.u32 %r9, %r9, 10, %r8;\n\
        mov.u32 %r8, %cluster_ctaid.x; mad.lo.u32 %r9, %r9, 10, %r8; mov.u32 %r8, %cluster_nctaid.x;\n\
        mad.lo.u32 %r9, %r9, 10, %r8; mad.lo.u32 %r9, %r9, 10, %r4; mov.pred %p1, %is_explicit_cluster;\n\
        selp.u32 %r8, 1, 0, %p1; mad.lo.u32 %r9, %r9, 10, %r8;\n\
        cvt.u64.u32 %d4, %r6; cvta.shared.u64 %d4, %d4; mapa.u64 %d5, %d4, %r3; getctarank.u64 %r8, %d5;\n\
        mad.lo.u32 %r9, %r9, 10, %r8;";
    let places = |cluster: u32| {
        move |block: u32, _| {
            let (own, rank, clusters) = (block / cluster, block % cluster, 4 / cluster);
            let explicit = u32::from(cluster > 1);
            [clusters, rank, cluster, cluster, explicit, (rank + 1) % cluster]
                .iter()
                .fold(own, |all, n| all * 10 + n)
        }
    };
    for cluster in [1, 2, 4] {
        assert_eq!(run_text(&text("", body), cluster, 0).unwrap(), by_thread(places(cluster)), "{cluster}");
    }
    // The kernel's own size applies if the launch names none.
    let required = text(".explicitcluster .reqnctapercluster 2, 1, 1", body);
    assert_eq!(run_text(&required, 1, 0).unwrap(), by_thread(places(2)));
}

#[test]
fn launches_that_do_not_fit_their_clusters() {
    let fault = |directives: &str, cluster| run_text(&text(directives, ""), cluster, 0).unwrap_err();
    assert!(fault("", 3).what.contains("in clusters of [3, 1, 1]"));
    assert!(fault(".reqnctapercluster 2", 4).what.contains("not [2, 1, 1]"));
    assert!(fault(".explicitcluster", 1).what.contains("needs clusters"));
    assert!(fault(".maxclusterrank 2", 4).what.contains("at most 2"));
    assert!(run_text(&text("", ""), 2, 1 << 20).unwrap_err().what.contains("bytes of shared memory"));
}

#[test]
fn dynamic_shared_memory() {
    let body =
        "mov.u32 %r8, more; add.u32 %r8, %r8, %r5; st.shared.u32 [%r8], %r7; ld.shared.u32 %r9, [%r8];\n\
        mov.u32 %r8, %dynamic_smem_size; add.u32 %r9, %r9, %r8;";
    let sized = |block: u32, thread: u32| block % 2 * 100 + thread + 128;
    assert_eq!(run_text(&text("", body), 2, 128).unwrap(), by_thread(sized));
    assert_eq!(run_text(&text("", body), 2, 64).unwrap_err().fault, Fault::IllegalAddress);
}

#[test]
fn approximations_are_for_modules_of_others() {
    let body =
        "{ .reg .f32 %f<2>; mov.f32 %f0, 0f40800000; rsqrt.approx.ftz.f32 %f1, %f0; mov.b32 %r9, %f1; }";
    let text = text("", body);
    assert!(Program::load(&text, true).is_err());
    assert!(Program::load_foreign(&text, false, false).is_ok());
}
