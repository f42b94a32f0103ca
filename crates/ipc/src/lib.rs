//! What the supervisor and its workers say to each other: framed messages over a socket with descriptors beside them,
//! and the types in these messages: vRNICs, the network, secrets, counters and configuration.
//!
//! It may depend on the layers below, whose counters and limits it carries, and knows neither the supervisor nor the
//! workers. It must never act on what a message says: each side checks and does that by itself.

pub mod config;
pub mod connection;
pub mod counters;
pub mod fdpass;
pub mod message;
pub mod network;
pub mod secrets;
pub mod timer;
pub mod vrnic;
