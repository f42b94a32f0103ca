//! Secrets of groups as files: made by `unirdma secret`, and handed to the virtual layer, which alone reads them.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use unirdma_supervisor::admin::SecretChange;

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma secret blue.secret
  unirdma group set blue --secret blue.secret    on each host of the group, with a copy of this file

  unirdma group set blue --with red --secret pair.secret    on each host of one of two groups that a rule joins
  unirdma secret rotate blue                     with a control centre, which gives secrets to its hosts by itself

`head -c 32 /dev/urandom > blue.secret` makes one, too, under `umask 077`.";

/// Makes a secret in a new file.
///
/// # Errors
/// No file is named, there is such a file already, or it cannot be written.
pub(crate) fn make(path: Option<&Path>) -> io::Result<()> {
    let nameless =
        || io::Error::new(io::ErrorKind::InvalidInput, "name the file for the secret: `unirdma secret blue.secret`");
    let path = path.ok_or_else(nameless)?;
    let at = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path).map_err(at)?;
    let digits: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    writeln!(file, "{digits}").and_then(|()| file.sync_all()).map_err(at)
}

/// Opens the file of a secret.
///
/// # Errors
/// One line that names the file.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    File::open(path).map_err(|e| io::Error::new(e.kind(), format!("secret {}: {e}", path.display())))
}

/// The change that `--secret` and `--forget-old` ask for, and the file that goes with it.
///
/// # Errors
/// As [`open`].
pub(crate) fn change(secret: Option<&Path>, forget_old: bool) -> io::Result<(Option<SecretChange>, Option<File>)> {
    Ok(match secret {
        Some(none) if none == Path::new("none") => (Some(SecretChange::None), None),
        Some(path) => (Some(SecretChange::File), Some(open(path)?)),
        None => (forget_old.then_some(SecretChange::ForgetOld), None),
    })
}
