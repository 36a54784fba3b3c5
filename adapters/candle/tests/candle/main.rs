//! Ops and layers between ranks that are threads, compared with candle on one rank.

mod layers;
mod ops;
mod shards;
mod world;
