//! Manual pages of the program, in `target/package/man`.

use std::path::PathBuf;
use std::process::Command;

use crate::{Output, Result, build, root, unirdma};

/// Builds the program, and lets it write its pages. Returns their directory, which has nothing else.
///
/// # Errors
/// The step that failed.
pub fn pages() -> Result<PathBuf> {
    build()?;
    let dir = root().join("target/package/man");
    if dir.exists() {
        std::fs::remove_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    }
    let o = Output::of(Command::new(unirdma()).arg("man").arg(&dir));
    if o.ok() { Ok(dir) } else { Err(o.text) }
}
