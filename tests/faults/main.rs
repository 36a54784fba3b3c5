//! What goes wrong, on purpose: ranks that disagree, leave, die or fork. Nothing hangs, and nothing wrong is returned as right.

mod departures;
mod disagreements;
mod events;
mod forks;
mod recovery;
mod world;
