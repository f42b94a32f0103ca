//! How supervisor and workers talk: framed messages over a socket, with descriptors beside them.

pub(crate) mod connection;
pub mod fdpass;
pub(crate) mod message;
