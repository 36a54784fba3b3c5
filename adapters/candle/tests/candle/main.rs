//! The ops and layers between ranks that are threads, beside what one rank computes with candle alone.

mod layers;
mod mistralrs;
mod ops;
mod shards;
mod world;
