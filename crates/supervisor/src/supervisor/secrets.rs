//! The secrets of groups, and their distribution.
//!
//! This process has them as memory files that are not mapped, so that they are in no core dump. It reads one only to
//! change it.

use unirdma_ipc::message::Call;
use unirdma_ipc::secrets::{GroupSecrets, Secret, Secrets};

use super::error::RequestError;
use super::group::SealNote;
use super::*;
use crate::admin::SecretChange;
use crate::network::SealedWith;

/// An administrator's change of secrets.
pub(super) enum NewSecret {
    /// Send with this secret. Earlier ones are still accepted.
    Rotate(Secret),
    /// Only the secret to send with is still accepted.
    ForgetOld,
    /// There is no secret any more.
    None,
}

impl NewSecret {
    /// The change that an administrator requests, with the file sent along, if there is one.
    ///
    /// # Errors
    /// The file contains no secret.
    pub fn read(change: SecretChange, file: Option<OwnedFd>) -> Result<NewSecret, RequestError> {
        Ok(match change {
            SecretChange::None => NewSecret::None,
            SecretChange::ForgetOld => NewSecret::ForgetOld,
            SecretChange::File => {
                let file = file.ok_or(RequestError::Malformed("a secret needs a file"))?;
                NewSecret::Rotate(Secret::read(file.as_fd())?)
            }
        })
    }

    /// The secrets after the change. `whose` is for [`RequestError::NoSecret`].
    fn after(&self, had: Option<&Secrets>, whose: String) -> Result<Option<Secrets>, RequestError> {
        let mut secrets = had.cloned();
        match (self, &mut secrets) {
            (NewSecret::None, _) => return Ok(None),
            (NewSecret::ForgetOld, None) => return Err(RequestError::NoSecret { whose }),
            (NewSecret::ForgetOld, Some(s)) => s.forget_others(),
            (NewSecret::Rotate(secret), None) => return Ok(Some(Secrets::one(secret.clone()))),
            (NewSecret::Rotate(secret), Some(s)) => s.rotate(secret.clone())?,
        }
        Ok(secrets)
    }
}

/// The secrets of a group.
fn secrets_in(group: &Group, inner: &Inner) -> Result<GroupSecrets, RequestError> {
    let had = inner.secrets.as_ref().map(GroupSecrets::of_file).transpose();
    had.map(Option::unwrap_or_default)
        .map_err(|error| RequestError::UnreadableSecrets { group: group.name.clone(), error })
}

impl Supervisor {
    /// Replaces the secrets of a group. When this returns, its worker and the keeper have them.
    ///
    /// # Errors
    /// This host has no network, or the worker does not accept the secrets.
    pub(super) fn set_secrets(
        &self,
        group: &Group,
        inner: &mut Inner,
        secrets: &GroupSecrets,
    ) -> Result<(), RequestError> {
        if self.around.network.is_none() {
            return Err(RequestError::NoNetwork);
        }
        let file = (!secrets.is_empty()).then(|| secrets.to_file());
        let file = file.transpose().map_err(RequestError::NoRoom)?;
        let fds: Vec<BorrowedFd<'_>> = file.iter().map(AsFd::as_fd).collect();
        group.call(inner, &Call::Secrets { any: file.is_some() }, &fds)?;
        inner.secrets = file;
        self.keep_secrets(group, inner);
        self.note_secrets(group, inner);
        Ok(())
    }

    /// Updates the properties of a group's secrets, here and in the network.
    pub(super) fn note_secrets(&self, group: &Group, inner: &Inner) {
        let secrets = secrets_in(group, inner).unwrap_or_default();
        group.set_seal_note(SealNote {
            number: secrets.own.as_ref().map(Secrets::sends_with),
            any: !secrets.is_empty(),
        });
        if let Some(n) = &self.around.network {
            let sealed = SealedWith { own: secrets.own.is_some(), others: secrets.with.keys().cloned().collect() };
            lock(n).set_sealed(&group.name, sealed);
        }
    }

    /// Changes a group's own secret, or the secret that it shares with another group.
    ///
    /// # Errors
    /// See [`Supervisor::set_secrets`].
    pub(super) fn change_secrets(
        &self,
        group: &Group,
        with: Option<&str>,
        new: &NewSecret,
    ) -> Result<(), RequestError> {
        let mut inner = group.lock();
        if inner.removed {
            return Err(RequestError::GroupGone(group.name.clone()));
        }
        let mut secrets = secrets_in(group, &inner)?;
        let whose = match with {
            Some(other) => format!("groups {} and {other} have", group.name),
            None => format!("group {} has", group.name),
        };
        let after = new.after(secrets.of(with), whose)?;
        secrets.set(with, after)?;
        self.set_secrets(group, &mut inner, &secrets)
    }

    /// Changes the secret of a pair of groups, for `group` and for `other` if that is on this host, too.
    ///
    /// # Errors
    /// See [`Supervisor::set_secrets`].
    pub(super) fn change_pair(&self, group: &Group, other: &str, new: &NewSecret) -> Result<(), RequestError> {
        unirdma_ipc::vrnic::check_name("group", other)?;
        if other == group.name {
            return Err(RequestError::PairOfOne(other.into()));
        }
        self.change_secrets(group, Some(other), new)?;
        let there = self.names().groups.get(other).cloned();
        there.map_or(Ok(()), |there| self.change_secrets(&there, Some(&group.name), new))
    }

    /// Gives a new group the secrets that other groups of this host share with it.
    ///
    /// # Errors
    /// See [`Supervisor::set_secrets`].
    pub(super) fn share_pairs(&self, name: &str) -> Result<(), RequestError> {
        let Some(group) = self.names().groups.get(name).cloned() else { return Ok(()) };
        let mut secrets = GroupSecrets::default();
        for other in self.groups().iter().filter(|g| g.name != name && g.seal_note().any) {
            let of_other = secrets_in(other, &other.lock())?;
            secrets.set(Some(&other.name), of_other.of(Some(name)).cloned())?;
        }
        if secrets.is_empty() {
            return Ok(());
        }
        self.set_secrets(&group, &mut group.lock(), &secrets)
    }
}
