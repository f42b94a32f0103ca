//! Conformance of the RFC mode: every MUST and SHOULD of R01 to R63, each in a test that has its number.
#![allow(missing_docs)]

mod commands;
mod control;
mod data;
mod device;
mod hostile;
mod notify;
mod world;
