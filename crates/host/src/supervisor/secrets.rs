//! The secrets of groups: who says them, and who is told.
//!
//! This process has them as memory files that are not mapped, so that they are in no core dump, and reads one only to change it.

use super::group::SealNote;
use super::*;
use crate::admin::SecretChange;
use crate::network::SealedWith;
use crate::protocol::Call;
use crate::seal::{GroupSecrets, Secret, Secrets};

/// What an administrator wants of secrets.
pub(super) enum NewSecret {
    /// This one is sent with. Those before it are taken on.
    Rotate(Secret),
    /// Only the one that is sent with is taken any more.
    ForgetOld,
    /// There is none any more.
    None,
}

impl NewSecret {
    /// As an administrator says, who may have sent a file along.
    ///
    /// # Errors
    /// One line: the file has no secret.
    pub fn read(change: SecretChange, file: Option<OwnedFd>) -> Result<NewSecret, String> {
        Ok(match change {
            SecretChange::None => NewSecret::None,
            SecretChange::ForgetOld => NewSecret::ForgetOld,
            SecretChange::File => NewSecret::Rotate(Secret::read(file.ok_or("a secret needs a file")?.as_fd())?),
        })
    }

    /// What becomes of the secrets of `whose`.
    fn after(&self, had: Option<&Secrets>, whose: &str) -> Result<Option<Secrets>, String> {
        let mut secrets = had.cloned();
        match (self, &mut secrets) {
            (NewSecret::None, _) => return Ok(None),
            (NewSecret::ForgetOld, None) => return Err(format!("{whose} no secret")),
            (NewSecret::ForgetOld, Some(s)) => s.forget_others(),
            (NewSecret::Rotate(secret), None) => return Ok(Some(Secrets::one(secret.clone()))),
            (NewSecret::Rotate(secret), Some(s)) => s.rotate(secret.clone())?,
        }
        Ok(secrets)
    }
}

/// The secrets that a group has.
fn secrets_in(group: &Group, inner: &Inner) -> Result<GroupSecrets, String> {
    let had = inner.secrets.as_ref().map(GroupSecrets::of_file).transpose();
    had.map(Option::unwrap_or_default).map_err(|e| format!("the secrets of group {} cannot be read: {e}", group.name))
}

impl Supervisor {
    /// Gives a group secrets in the place of those that it has. Its worker, and whoever takes over from this process, have them when this
    /// returns.
    ///
    /// # Errors
    /// One line: there is no such group, or its worker does not take them.
    pub(super) fn set_secrets(&self, group: &Group, inner: &mut Inner, secrets: &GroupSecrets) -> Result<(), String> {
        if self.around.network.is_none() {
            return Err("a secret is for packets between hosts, and this one serves no others (`unirdma host --address IP --peers FILE`)".into());
        }
        let file = (!secrets.is_empty()).then(|| secrets.to_file());
        let file = file.transpose().map_err(|e| format!("no room for the secret: {e}"))?;
        let fds: Vec<BorrowedFd<'_>> = file.iter().map(AsFd::as_fd).collect();
        group.call(inner, &Call::Secrets { any: file.is_some() }, &fds)?;
        inner.secrets = file;
        self.keep_secrets(group, inner);
        self.note_secrets(group, inner);
        Ok(())
    }

    /// What else follows from a group's secrets.
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

    /// Changes the secrets of a group, or those of it and another one.
    ///
    /// # Errors
    /// One line.
    pub(super) fn change_secrets(&self, group: &Group, with: Option<&str>, new: &NewSecret) -> Result<(), String> {
        let mut inner = group.lock();
        if inner.removed {
            return Err(format!("group {} is gone", group.name));
        }
        let mut secrets = secrets_in(group, &inner)?;
        let whose = match with {
            Some(other) => format!("groups {} and {other} have", group.name),
            None => format!("group {} has", group.name),
        };
        let after = new.after(secrets.of(with), &whose)?;
        secrets.set(with, after)?;
        self.set_secrets(group, &mut inner, &secrets)
    }

    /// Changes the secrets of a group and another one, which may be here, too, and then has the same afterwards.
    ///
    /// # Errors
    /// One line.
    pub(super) fn change_pair(&self, group: &Group, other: &str, new: &NewSecret) -> Result<(), String> {
        crate::vrnic::check_name("group", other)?;
        if other == group.name {
            return Err(format!("--with names another group than {other}, whose own secret needs no --with"));
        }
        self.change_secrets(group, Some(other), new)?;
        let there = self.names().groups.get(other).cloned();
        there.map_or(Ok(()), |there| self.change_secrets(&there, Some(&group.name), new))
    }

    /// A group that has just been made has those secrets with other groups of this host that they have with it.
    ///
    /// # Errors
    /// One line.
    pub(super) fn share_pairs(&self, name: &str) -> Result<(), String> {
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
