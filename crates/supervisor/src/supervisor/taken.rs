//! vRNICs that administration connections have taken without a name: one that nobody uses, or one that is made for the
//! connection and removed with it.

use unirdma_ipc::vrnic::AddVrnic;

use super::error::{Reply, RequestError};
use super::*;
use crate::admin::TakeVrnic;

/// First part of the names of vRNICs that are made for a connection. A number follows.
const NAME: &str = "run";
/// After this time a virtual layer that is to end with its last vRNIC ends if it has none.
const FIRST_VRNIC: Duration = Duration::from_secs(30);

impl Supervisor {
    /// Gives a connection a vRNIC: the first by name that is free, or one that is made for it.
    pub(super) fn take(&self, id: u64, take: TakeVrnic) -> Reply {
        let free = if take.new { None } else { self.take_free(id)? };
        let group = take.group.unwrap_or_else(|| DEFAULT_GROUP.into());
        let mut new = AddVrnic { group: Some(group), ips: take.ips, ..AddVrnic::default() };
        match (free, take.name) {
            (Some(free), _) => new.name = free,
            (None, Some(name)) => {
                new.name = name;
                self.make_for(id, &new)?;
            }
            (None, None) => self.make_with_a_name(id, &mut new)?,
        }
        self.show(&new.name, false)
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

    fn make_with_a_name(&self, id: u64, new: &mut AddVrnic) -> Result<(), RequestError> {
        loop {
            new.name = {
                let names = self.names();
                let all = (1..).map(|n: u32| format!("{NAME}-{n}"));
                all.into_iter().find(|n| !names.vrnics.contains_key(n)).unwrap_or_default()
            };
            match self.make_for(id, new) {
                Err(RequestError::VrnicExists(_)) => {}
                made => return made,
            }
        }
    }

    fn make_for(&self, id: u64, new: &AddVrnic) -> Result<(), RequestError> {
        if let Some(url) = self.url_of_centre() {
            return Err(RequestError::TakenOfCentre { url });
        }
        // Held first, so that the end of the connection, which may come at once, releases it.
        let group = new.group.clone().unwrap_or_else(|| DEFAULT_GROUP.into());
        self.names().held.entry(id).or_default().insert(group);
        self.add_vrnic_as(new, None, true, Some(Taken { by: id, temporary: true })).map(drop)
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
