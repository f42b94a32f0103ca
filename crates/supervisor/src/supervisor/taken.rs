//! vRNICs that administration connections have taken without a name: one that nobody uses, or one that is made for the
//! connection and removed with it.

use unirdma_ipc::vrnic::AddVrnic;

use super::error::{Reply, RequestError};
use super::*;

/// First part of the names of vRNICs that are made for a connection. A number follows.
const NAME: &str = "run";
/// After this time a virtual layer that is to end with its last vRNIC ends if it has none.
const FIRST_VRNIC: Duration = Duration::from_secs(30);

impl Supervisor {
    /// Gives a connection a vRNIC of the default group: with `new` one that is made for it, else one that is there and
    /// that nothing uses, the first by name; if there is none, one that is made for it, with this name and in this
    /// group if they are given.
    pub(super) fn take(&self, id: u64, new: bool, name: Option<String>, group: Option<String>) -> Reply {
        let free = if new { None } else { self.take_free(id)? };
        let group = group.as_deref().unwrap_or(DEFAULT_GROUP);
        let name = match (free, name) {
            (Some(free), _) => free,
            (None, Some(name)) => self.make_for(id, &name, group).map(|()| name)?,
            (None, None) => self.take_new(id, group)?,
        };
        self.show(&name, false)
    }

    fn take_free(&self, id: u64) -> Result<Option<String>, RequestError> {
        let unused: BTreeSet<String> = self
            .list()
            .into_iter()
            .filter(|v| v.up && v.sessions == 0 && v.way.contexts == 0)
            .map(|v| v.name)
            .collect();
        let Some(group) = self.names().groups.get(DEFAULT_GROUP).cloned() else { return Ok(None) };
        let mut inner = group.lock();
        let Some((name, m)) = inner.members.iter_mut().find(|(n, m)| unused.contains(*n) && m.is_free()) else {
            return Ok(None);
        };
        m.taken = Some(Taken { by: id, temporary: false });
        let name = name.clone();
        self.keep_vrnic(&group, &inner, &name);
        self.names().held.entry(id).or_default().insert(group.name.clone());
        Ok(Some(name))
    }

    fn take_new(&self, id: u64, group: &str) -> Result<String, RequestError> {
        loop {
            let name = {
                let names = self.names();
                let all = (1..).map(|n: u32| format!("{NAME}-{n}"));
                all.into_iter().find(|n| !names.vrnics.contains_key(n)).unwrap_or_default()
            };
            match self.make_for(id, &name, group) {
                Err(RequestError::VrnicExists(_)) => {}
                made => return made.map(|()| name),
            }
        }
    }

    fn make_for(&self, id: u64, name: &str, group: &str) -> Result<(), RequestError> {
        if let Some(url) = self.url_of_centre() {
            return Err(RequestError::TakenOfCentre { url });
        }
        let add = AddVrnic { name: name.into(), group: Some(group.into()), ..AddVrnic::default() };
        // Held first, so that the end of the connection, which may come at once, releases it.
        self.names().held.entry(id).or_default().insert(group.into());
        self.add_vrnic_as(&add, None, true, Some(Taken { by: id, temporary: true })).map(drop)
    }

    /// Ends the virtual layer if it is to end with its last vRNIC and has none.
    pub(super) fn end_if_unused(&self) {
        let Some(unused) = &self.unused else { return };
        let names = self.names();
        if names.vrnics.is_empty() {
            // From now on no request is answered, so a connection that wants a vRNIC goes to the next virtual layer.
            self.stopping.store(true, Ordering::SeqCst);
            let _ = rustix::io::write(unused, &1u64.to_ne_bytes());
        }
    }

    /// Ends the virtual layer if it is to end with its last vRNIC and nobody makes one.
    pub(super) fn watch_unused(self: &Arc<Self>) {
        let Some(unused) = &self.unused else { return };
        self.watch(unused.as_fd(), UNUSED);
        self.apart("unused", |s| {
            std::thread::sleep(FIRST_VRNIC);
            s.end_if_unused();
        });
    }
}
