//! Tests of the results of calls: collectives, typed and raw calls, fused and quantised rows, several nodes.

pub mod collectives;
pub mod conformance;
pub mod experts;
pub mod fused;
pub mod hierarchical;
pub mod hot;
pub mod in_order;
pub mod mixed;
pub mod nvls;
pub mod pointers;
pub mod quantized;
pub mod raw;
pub mod sharded;
pub mod typed;
pub mod world;

pub fn tests() -> Vec<crate::runner::Trial> {
    [
        collectives::tests(),
        conformance::tests(),
        experts::tests(),
        fused::tests(),
        hierarchical::tests(),
        hot::tests(),
        in_order::tests(),
        mixed::tests(),
        nvls::tests(),
        pointers::tests(),
        quantized::tests(),
        raw::tests(),
        sharded::tests(),
        typed::tests(),
        world::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
