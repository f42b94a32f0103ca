//! Functions that the tests of the built library share.

use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The built provider: cargo puts it beside the test.
pub fn provider() -> PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name("libunirdma_provider.so");
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// Runs the C compiler. Returns false if there is none, or if the headers of libibverbs are missing (package
/// libibverbs-dev).
pub fn compile(args: &[&str], source: &Path, out: &Path) -> bool {
    let probe = Path::new("/usr/include/infiniband/verbs.h").exists();
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-Wall", "-Wextra", "-O1", "-fPIC"]).args(args).arg("-o").arg(out).arg(source);
    match cc.output() {
        Ok(o) if probe => {
            assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
            true
        }
        _ => {
            println!("skipped: no C compiler, or no libibverbs-dev");
            false
        }
    }
}

/// Loads a library. Libraries that are loaded later can use its symbols.
///
/// # Errors
/// The loader's message.
pub fn load(path: &Path) -> Result<*mut c_void, String> {
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a name; what runs at the load is what the test is about.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if library.is_null() {
        // SAFETY: an error was just found, and its text is a string.
        return Err(unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned());
    }
    Ok(library)
}
