//! `cargo xtask bench`: figures beside a peer in the same run.

mod local;
mod memory;
mod wire;

use crate::Result;
use crate::lab;

pub(crate) use local::local;
pub(crate) use memory::memory;
pub(crate) use wire::{PARTS, tcp, wire};

/// Rows of numbers of a server and a client that both ended well.
fn rows(command: &str, (s, c): (lab::Output, lab::Output)) -> Result<Vec<Vec<f64>>> {
    let rows = lab::rows(&c.text);
    if rows.is_empty() || !s.ok() || !c.ok() {
        return Err(format!("{command} failed:\nserver: {}\nclient: {}", s.text, c.text));
    }
    Ok(rows)
}
