//! The state that outlives a supervisor: how it is stored in the keeper, and how the next supervisor takes it over.

use unirdma_ipc::network::Enrolment;

use super::*;
use crate::peer_source::{self, CentrePeers};
use crate::process::Child;

/// First words of the keeper's keys. The group follows, and for a vRNIC its name.
pub(super) const GROUP: &str = "group";
const SOCKETS: &str = "sockets";
const VRNIC: &str = "vrnic";
const SECRETS: &str = "secrets";

/// The state that a dead supervisor has left.
pub(super) struct Takeover {
    keeper: Keeper,
    groups: Vec<(KeptGroup, Vec<OwnedFd>)>,
    sockets: Vec<(Enrolment, Vec<OwnedFd>)>,
    members: BTreeMap<String, BTreeMap<String, Member>>,
    secrets: BTreeMap<String, OwnedFd>,
}

impl Takeover {
    /// Reads the state from a dead supervisor's keeper, if there is one.
    ///
    /// # Errors
    /// The keeper is of another version: one line.
    pub fn find(dir: &Path) -> io::Result<Option<Takeover>> {
        let mut keeper = match Keeper::find(dir) {
            Ok(keeper) => keeper,
            Err(e) if e.kind() == io::ErrorKind::Unsupported => return Err(e),
            Err(_) => return Ok(None),
        };
        let all = keeper.all()?;
        let mut h = Takeover {
            keeper,
            groups: Vec::new(),
            sockets: Vec::new(),
            members: BTreeMap::new(),
            secrets: BTreeMap::new(),
        };
        for (kept, fds) in all {
            let mut words = kept.key.splitn(3, ' ');
            match (words.next(), words.next()) {
                (Some(GROUP), _) => h.groups.push((serde_json::from_str(&kept.what)?, fds)),
                (Some(SOCKETS), _) => h.sockets.push((serde_json::from_str(&kept.what)?, fds)),
                (Some(SECRETS), Some(group)) => {
                    h.secrets.extend(fds.into_iter().next().map(|file| (group.to_string(), file)));
                }
                (Some(VRNIC), Some(group)) => {
                    if let Some(m) = Member::of_kept(serde_json::from_str(&kept.what)?, fds) {
                        h.members.entry(group.into()).or_default().insert(m.new.name.clone(), m);
                    }
                }
                _ => {}
            }
        }
        Ok(Some(h))
    }

    /// Ends the workers and the keeper of the dead supervisor.
    pub fn end(self) {
        for (kept, fds) in self.groups {
            if let Some(pidfd) = fds.into_iter().nth(1) {
                let mut child = Child::of_pidfd(kept.pid, pidfd);
                child.kill();
                child.wait();
            }
        }
        self.keeper.end();
    }

    /// Takes over the network, if there was one that fits the configuration. If it does not fit, all former workers and
    /// the keeper are ended, and the returned `Takeover` is `None`.
    ///
    /// # Errors
    /// Errors of [`Network::open`].
    pub fn network(
        mut takeover: Option<Takeover>,
        config: Option<&WireConfig>,
        dir: &Path,
        bulletin: &CentrePeers,
    ) -> io::Result<(Option<Takeover>, Option<Network>)> {
        let had = takeover.as_ref().is_some_and(|h| !h.sockets.is_empty());
        let sockets = takeover.as_mut().map(|h| std::mem::take(&mut h.sockets)).unwrap_or_default();
        let open = |c| peer_source::of(c, bulletin).and_then(|s| Network::open(c, dir, s));
        let adopted = match config {
            None if !had => return Ok((takeover, None)),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "there was a network, and there is none any more")),
            Some(c) if takeover.is_some() => {
                peer_source::of(c, bulletin).and_then(|s| Network::adopt(c, dir, s, sockets)).map(Some)
            }
            Some(c) => open(c).map(Some),
        };
        match (adopted, takeover) {
            (Ok(network), takeover) => Ok((takeover, network)),
            (Err(e), Some(h)) if e.kind() == io::ErrorKind::InvalidData => {
                tracing::warn!(error = %e, "the workers of another supervisor cannot be taken over; they end");
                h.end();
                Ok((None, config.map(open).transpose()?))
            }
            (Err(e), _) => Err(e),
        }
    }
}

impl Supervisor {
    /// Takes over the groups of a dead supervisor.
    pub(super) fn take_over(self: &Arc<Self>, takeover: Takeover) {
        let Takeover { keeper, groups, mut members, mut secrets, .. } = takeover;
        *lock(&self.keeper) = Some(keeper);
        for (kept, fds) in groups {
            let name = kept.begin.group.clone();
            let members = members.remove(&name).unwrap_or_default();
            let secrets = secrets.remove(&name);
            match Group::adopt(kept, fds, members, secrets, self.around.clone()) {
                Some(group) => self.take_over_group(group),
                None => tracing::error!(group = name, "what the keeper has of it is not whole; it is lost"),
            }
        }
        self.set_owners();
        self.tell_workers();
    }

    /// Registers a group of a dead supervisor, and starts its worker if that has died.
    fn take_over_group(self: &Arc<Self>, group: Group) {
        let group = Arc::new(group);
        {
            let inner = group.lock();
            let mut names = self.names();
            names.next_group = names.next_group.max(group.id + 1);
            for (name, m) in &inner.members {
                let named = VrnicEntry { group: group.name.clone(), hardware: m.new.hardware, ips: m.new.ips.clone() };
                names.vrnics.insert(name.clone(), named);
                for (&id, first) in &m.containers {
                    names.held.entry(id).or_default().insert(group.name.clone());
                    self.next_connection.fetch_max(id + 1, Ordering::Relaxed);
                    self.watch_once(first.as_fd(), CONTAINER + id);
                }
            }
            for id in group.orphans(&inner) {
                names.held.entry(id).or_default().insert(group.name.clone());
                self.next_connection.fetch_max(id + 1, Ordering::Relaxed);
                self.apart("orphan", move |s| s.closed(id));
            }
            names.groups.insert(group.name.clone(), group.clone());
            drop(names);
            self.note_secrets(&group, &inner);
            tracing::info!(group = group.name, vrnics = inner.members.len(), "taken over");
            if inner.worker.is_some() {
                self.watch_worker(&group, &inner);
                return;
            }
        }
        self.revive(group);
    }

    /// Removes the directories of unknown vRNICs and the sockets of unknown workers.
    pub(super) fn remove_unserved(&self) -> io::Result<()> {
        let names = self.names();
        let entries = |d: PathBuf| std::fs::read_dir(d)?.map(|e| Ok(e?.path())).collect::<io::Result<Vec<PathBuf>>>();
        let stem = |p: &Path| p.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        for path in entries(self.dir.join("vrnics"))? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !names.vrnics.contains_key(&name) {
                let _ = std::fs::remove_dir_all(path);
            }
        }
        for path in entries(self.around.doors.clone())?.iter().filter(|p| !names.groups.contains_key(&stem(p))) {
            // A worker without a keeper is ended: no process has its vRNICs' sockets any more.
            group::end_stranger(path);
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }

    pub(super) fn watch_keeper(&self) {
        if let Some(k) = &*lock(&self.keeper) {
            self.watch_once(k.pidfd(), KEEPER);
        }
    }

    /// Calls the keeper. After an error it will be replaced by a new one that gets everything, so the error is ignored.
    pub(super) fn with_keeper(&self, f: impl FnOnce(&mut Keeper) -> io::Result<()>) {
        let mut keeper = lock(&self.keeper);
        if let Some(Err(e)) = keeper.as_mut().map(f) {
            tracing::error!(error = %e, "the keeper does not answer");
        }
    }

    /// Stores a group in the keeper.
    pub(super) fn keep_group(&self, group: &Group, inner: &Inner) {
        if let Some((kept, fds)) = group.to_keep(inner) {
            let key = format!("{GROUP} {}", group.name);
            self.with_keeper(|k| k.keep(&key, serde_json::to_string(&kept)?, &fds));
        }
    }

    /// Stores a group's network sockets in the keeper.
    pub(super) fn keep_sockets(&self, group: &str) {
        let Some(n) = &self.around.network else { return };
        let kept = lock(n).to_keep(group);
        let key = format!("{SOCKETS} {group}");
        self.with_keeper(|k| {
            let (enrolment, sockets) = kept?;
            let sockets: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
            k.keep(&key, serde_json::to_string(&enrolment)?, &sockets)
        });
    }

    /// Stores a group's present secrets in the keeper, or removes them if there are none.
    pub(super) fn keep_secrets(&self, group: &Group, inner: &Inner) {
        let key = format!("{SECRETS} {}", group.name);
        self.with_keeper(|k| match &inner.secrets {
            Some(file) => k.keep(&key, String::new(), &[file.as_fd()]),
            None => k.forget(&key),
        });
    }

    /// Removes a group from the keeper.
    pub(super) fn forget_group(&self, group: &str) {
        for kind in [GROUP, SOCKETS, SECRETS] {
            self.with_keeper(|k| k.forget(&format!("{kind} {group}")));
        }
    }

    /// Stores a vRNIC's present state in the keeper, or removes it if the vRNIC is gone.
    pub(super) fn keep_vrnic(&self, group: &Group, inner: &Inner, name: &str) {
        let key = format!("{VRNIC} {} {name}", group.name);
        self.with_keeper(|k| match inner.members.get(name) {
            Some(m) => {
                let (kept, fds) = m.to_keep();
                k.keep(&key, serde_json::to_string(&kept)?, &fds)
            }
            None => k.forget(&key),
        });
    }

    /// Starts a new keeper after the former one has died, and stores everything in it.
    pub(super) fn replace_keeper(&self) {
        tracing::error!("the keeper has ended; there is another one");
        match Keeper::start(&self.dir) {
            Ok(k) => *lock(&self.keeper) = Some(k),
            Err(e) => {
                *lock(&self.keeper) = None;
                tracing::error!(error = %e, "there is no keeper: if the supervisor dies, the workers end with its successor");
            }
        }
        self.watch_keeper();
        for group in self.groups() {
            let inner = group.lock();
            self.keep_group(&group, &inner);
            self.keep_sockets(&group.name);
            self.keep_secrets(&group, &inner);
            inner.members.keys().for_each(|name| self.keep_vrnic(&group, &inner, name));
        }
    }
}
