//! The device ABI: the bytes that a driver and the device share. Twin of `docs/spec/virtio-rdma.md`.
//!
//! Depends on the formats crate alone. It must never touch memory or make decisions: it says where each field lies. All
//! fields are little-endian and naturally aligned, except in [`rfc`], which has the layouts of the device's second
//! mode. The tests at the end of each module hold sizes and offsets to the specification.

mod cm;
mod command;
mod config;
pub mod container;
pub mod lease;
pub mod rfc;
mod ring;

pub use cm::*;
pub use command::*;
pub use config::*;
pub use ring::*;

#[cfg(target_endian = "big")]
compile_error!("the device ABI is little-endian; big-endian hosts need conversions");
