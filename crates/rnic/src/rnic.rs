//! The whole RNIC: the core, and connection management beside it.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::Gid;
use unirdma_policy::Rule;

use crate::cm::{Cm, Manager};
use crate::core::Core;
use crate::executor::Executor;
use crate::objects::{SessionId, VrnicConfig, VrnicId};
use crate::path::{Arrival, Route};
use crate::random::Seed;
use crate::software::Software;

/// The software RNIC of one host. The crate's documentation says in which order its methods are called.
///
/// Derefs to [`Core`], which has all methods but those for connection management.
pub struct Rnic {
    pub(crate) core: Core,
    pub(crate) cm: Cm,
}

impl Deref for Rnic {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Rnic {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Rnic {
    /// An RNIC whose random numbers `seed` determines. `wakes` is the number of wake channels that drivers may use
    /// (`DoorbellPage::wakes`).
    pub fn new(seed: impl Into<Seed>, wakes: u32) -> Self {
        Self::with_executor(seed, wakes, Box::new(Software))
    }

    /// As [`Rnic::new`]; QPs work by `executor`.
    pub(crate) fn with_executor(seed: impl Into<Seed>, wakes: u32, executor: Box<dyn Executor<Core>>) -> Self {
        Rnic { core: Core::new(&seed.into(), wakes, executor), cm: Cm::default() }
    }

    /// Sets the time, nanoseconds, before commands.
    pub fn at(&mut self, now: u64) -> &mut Self {
        self.core.now = self.core.now.max(now);
        self
    }

    pub(crate) fn manager(&mut self) -> Manager<'_> {
        Manager { cm: &mut self.cm, core: &mut self.core }
    }

    /// Adds a vRNIC; `None` if there are too many.
    pub fn add_vrnic(&mut self, c: VrnicConfig) -> Option<VrnicId> {
        let id = self.core.add_vrnic(c)?;
        self.manager().addresses_changed();
        Some(id)
    }

    /// Removes a vRNIC and all its sessions, and frees their dead objects.
    pub fn remove_vrnic(&mut self, id: VrnicId) {
        for s in self.core.sessions_of(id) {
            self.remove_session(s);
        }
        self.manager().forget_vrnic(id);
        self.core.remove_vrnic(id);
    }

    /// Ends up to `most` of the objects of a session that do something by themselves, first its connections; true if
    /// others are left. A caller that is about to end the session calls this with pauses, so that others have the RNIC
    /// in between.
    pub fn quiesce_session(&mut self, id: SessionId, most: usize) -> bool {
        self.manager().forget_ids(id, most) || self.core.quiesce_objects(id, most)
    }

    /// Ends everything that a session has. Peers of its QPs get no answers any more. [`Core::tear_down`] frees its
    /// objects.
    pub fn remove_session(&mut self, id: SessionId) {
        self.manager().forget_session(id);
        self.core.remove_session(id);
    }

    /// NEW_SESSION: as [`Rnic::remove_session`], but the session remains, without objects. Jobs may still reach its
    /// memory: see [`Core::delay_command`].
    pub fn renew_session(&mut self, id: SessionId) {
        self.manager().forget_session(id);
        self.core.clear_session(id);
    }

    /// Replaces the GID table of a vRNIC; a zero GID is a hole. Its programs get an event if the table has changed
    /// (`GID_CHANGE`).
    pub fn set_gids(&mut self, id: VrnicId, gids: Vec<Gid>) {
        if self.core.set_gids(id, gids) {
            self.manager().addresses_changed();
        }
    }

    /// Sets the routes to GIDs of other hosts, by group. QPs keep the route that they were connected with.
    pub fn set_routes(&mut self, routes: HashMap<(u32, Gid), Route>) {
        self.core.set_routes(routes);
        self.manager().addresses_changed();
    }

    /// Sets the rules that concern a group of vRNICs. Rules name groups by their numbers between hosts; `vni` is the
    /// number of this group. [`Rnic::recheck`] ends connections that they do not allow any more.
    pub fn set_rules<'a>(&mut self, group: u32, vni: u32, rules: impl IntoIterator<Item = &'a Rule<u32, Gid>>) {
        if self.core.set_rules(group, vni, rules) {
            self.manager().doubt_all();
            self.manager().addresses_changed();
        }
    }

    /// Checks up to `most` connections and address handles that are in doubt since the rules have changed, and ends
    /// those that the rules forbid. True if others are left.
    pub fn recheck(&mut self, most: usize) -> bool {
        self.core.recheck_objects(most) || self.manager().recheck(most)
    }

    /// As [`Rnic::set_routes`], for some GIDs of a group; `None` removes a route. If a group's own number between hosts
    /// changes, all routes must be set.
    pub fn change_routes(&mut self, group: u32, changes: impl IntoIterator<Item = (Gid, Option<Route>)>) {
        changes.into_iter().for_each(|(gid, route)| self.core.change_route(group, gid, route));
        self.manager().addresses_changed();
    }

    /// A packet came in. `bytes` are all bytes from the BTH up to the ICRC, which the port has checked. For a packet
    /// that came inside VXLAN they begin with its IP header and end with its ICRC, which is checked here.
    pub fn handle_packet(&mut self, now: u64, a: &Arrival, bytes: &[u8]) {
        self.at(now);
        if let Some(mad) = self.core.receive(a, bytes) {
            self.manager().handle_mad(a, bytes, &mad);
        }
    }

    /// When [`Rnic::poll`] must be called again even if nothing rings; `None` for never.
    pub fn next_timeout(&self) -> Option<u64> {
        let timeouts = [self.core.next_turn(), self.cm.next_timeout(), self.core.vf_peers.next_timeout()];
        timeouts.into_iter().flatten().min()
    }

    /// Polls doorbells and timers, and gives turns for a bounded time; true if there was anything to do. `clock`
    /// returns the time, nanoseconds, which is `began` at the moment; it measures the turns.
    pub fn poll_by(&mut self, began: u64, clock: impl Fn() -> u64) -> bool {
        self.core.now = began;
        let found = self.manager().poll() | self.core.ask_again();
        let worked = self.core.round(began, clock);
        if !self.core.mads.is_empty() {
            self.manager().deliver_local_mads();
        }
        worked | found
    }

    /// As [`Rnic::poll_by`], with a clock that stands still.
    pub fn poll(&mut self, now: u64) -> bool {
        self.poll_by(now, || now)
    }

    /// The listening identifiers of a vRNIC: port space, address and port.
    pub fn listeners(&self, vrnic: VrnicId) -> Vec<String> {
        self.cm.listeners(vrnic)
    }

    /// The number of timers of connection management, including stopped ones that were not removed yet.
    pub fn pending_timers(&self) -> usize {
        self.cm.pending_timers()
    }

    /// CM. Returns the identifier and the address that it is bound to.
    ///
    /// # Errors
    /// `BadState` if the identifier's state does not allow it, `BadValue`, `AddressInUse`, `NoDevice` for an address
    /// that is not the vRNIC's, `Unreachable`, `Exhausted`.
    pub fn cm(&mut self, s: SessionId, r: &abi::CmReq) -> Result<abi::CmResp, Status> {
        self.manager().command(s, r)
    }

    /// CM_EVENT: the next event on a completion event queue.
    ///
    /// # Errors
    /// `BadHandle` if there is none.
    pub fn cm_event(&mut self, s: SessionId, queue: u32) -> Result<abi::CmEvent, Status> {
        self.cm.next_event(s, queue)
    }

    /// CM_QP_ATTR: the attributes that a QP needs to go to `state` for a connection, and their mask.
    ///
    /// # Errors
    /// `BadState` if the connection is not that far.
    pub fn cm_qp_attr(&mut self, s: SessionId, id: u32, state: u32) -> Result<(u32, abi::QpAttr), Status> {
        self.manager().qp_attr(s, id, state)
    }
}
