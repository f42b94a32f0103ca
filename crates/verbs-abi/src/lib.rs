//! The binary interface of libibverbs: structures and function pointer types, laid out as programs of
//! Debian 12, 13 and unstable expect them.
//!
//! Depends on libc alone; it must contain no behaviour. The newest layout serves all programs (structures only ever
//! grew). Names are taken from `infiniband/verbs.h`, which documents the fields; every size and the offsets that inline
//! functions of that header use are asserted below.
#![allow(missing_docs, non_camel_case_types)]

mod cm;
mod extended;
mod objects;
mod ops;
mod requests;

pub use cm::*;
pub use extended::*;
pub use objects::*;
pub use ops::*;
pub use requests::*;

/// `context.abi_compat` of a context that has extended operations.
pub const VERBS_ABI_IS_EXTENDED: *mut std::ffi::c_void = usize::MAX as *mut std::ffi::c_void;
