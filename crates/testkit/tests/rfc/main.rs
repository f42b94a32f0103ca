//! Conformance of the RFC mode: each MUST and SHOULD of R01 to R63 has a test with its number.
#![allow(missing_docs)]

mod commands;
mod control;
mod data;
mod device;
mod hostile;
mod notify;
mod world;
