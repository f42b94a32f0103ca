//! The secrets of groups: who says them, and who is told.
//!
//! This process has them as memory files that are not mapped, so that they are in no core dump, and reads one only to change it.

use super::*;
use crate::admin::SecretChange;
use crate::protocol::Call;
use crate::seal::{Secret, Secrets};

impl Supervisor {
    /// Gives a group secrets in the place of those that it has; `None`: none. Its worker, and whoever takes over from this process, have them
    /// when this returns.
    ///
    /// # Errors
    /// One line: there is no such group, or its worker does not take them.
    pub(super) fn set_secrets(
        &self,
        group: &Group,
        inner: &mut Inner,
        secrets: Option<&Secrets>,
    ) -> Result<(), String> {
        if self.around.network.is_none() {
            return Err("a secret is for packets between hosts, and this one serves no others (`unirdma host --address IP --peers FILE`)".into());
        }
        let file = secrets.map(Secrets::to_file).transpose().map_err(|e| format!("no room for the secret: {e}"))?;
        let fds: Vec<BorrowedFd<'_>> = file.iter().map(AsFd::as_fd).collect();
        group.call(inner, &Call::Secrets { any: file.is_some() }, &fds)?;
        inner.secrets = file;
        self.keep_secrets(group, inner);
        self.note_secrets(group, inner);
        Ok(())
    }

    /// What else follows from a group's secrets.
    pub(super) fn note_secrets(&self, group: &Group, inner: &Inner) {
        let secrets = inner.secrets.as_ref().and_then(|file| Secrets::of_file(file).ok());
        group.set_secret_number(secrets.map(|s| s.sends_with()));
        if let Some(n) = &self.around.network {
            lock(n).set_sealed(&group.name, inner.secrets.is_some());
        }
    }

    /// Changes the secrets of a group as an administrator says, who may have sent a file along.
    ///
    /// # Errors
    /// One line.
    pub(super) fn change_secrets(
        &self,
        group: &Group,
        inner: &mut Inner,
        change: SecretChange,
        file: Option<OwnedFd>,
    ) -> Result<(), String> {
        let had = inner.secrets.as_ref().map(Secrets::of_file).transpose();
        let mut had = had.map_err(|e| format!("the secrets of group {} cannot be read: {e}", group.name))?;
        let after = match change {
            SecretChange::None => None,
            SecretChange::ForgetOld => {
                let secrets = had.as_mut().ok_or(format!("group {} has no secret", group.name))?;
                secrets.forget_others();
                had
            }
            SecretChange::File => {
                let secret = Secret::read(file.ok_or("a secret needs a file")?.as_fd())?;
                match had {
                    Some(mut secrets) => {
                        secrets.rotate(secret)?;
                        Some(secrets)
                    }
                    None => Some(Secrets::one(secret)),
                }
            }
        };
        self.set_secrets(group, inner, after.as_ref())
    }
}
