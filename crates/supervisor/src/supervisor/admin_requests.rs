//! Requests of administrators: vRNICs, groups, attachment, status.

use unirdma_confine::MAX_GROUP_WEIGHT;
use unirdma_formats::Guid;
use unirdma_ipc::message::{Answer, Call, NewVrnic, WorkerStatus};
use unirdma_ipc::vrnic::{self, AddVrnic, SetHeld, SetShare, VrnicInfo, Way};
use unirdma_rnic::{Share, VfUse};

use super::error::{AddressError, Reply, RequestError};
use super::secrets::NewSecret;
use super::*;
use crate::admin::{GroupInfo, Names, Request, SecretChange, StatusInfo, WorkerInfo};
use group::{Capturing, Worker};
use std::time::Duration;

/// Age up to which a notice of a stuck thread is current. The worker repeats it once a second.
const STUCK_NOW: Duration = Duration::from_secs(3);

/// The largest VLAN (IEEE 802.1Q).
const MAX_VLAN: u16 = 4094;

impl Supervisor {
    pub(super) fn answer(self: &Arc<Self>, id: u64, request: Request, fd: Option<OwnedFd>) -> Reply {
        if let Some(answer) = self.answer_of_fleet(&request) {
            return answer;
        }
        match request {
            Request::VrnicAdd(add) => self.add_vrnic_as(&add, None, true, None),
            Request::VrnicTake(take) => self.take(id, take),
            Request::VrnicList => Ok(Response::Vrnics(self.list())),
            Request::Names => {
                let all = self.names();
                let (vrnics, groups) = (all.vrnics.keys().cloned().collect(), all.groups.keys().cloned().collect());
                Ok(Response::Names(Names { vrnics, groups }))
            }
            Request::VrnicShow { name } => self.show(&name, true),
            Request::VrnicFigures { name } => self.show(&name, false),
            Request::VrnicRemove { name, force } => self.remove_vrnic(&name, force),
            Request::VrnicSet { name, share, allow_spoof, held } => self.set(&name, share, allow_spoof, held),
            Request::VrnicLink { name, up } => self.set_link(&name, up).map(|()| Response::Done),
            Request::VrnicAddress { name, ip, add: true } => self.add_address(&name, ip),
            Request::VrnicAddress { name, ip, add: false } => self.remove_address(&name, ip),
            Request::GroupAdd { name, weight, secret, vlan } => {
                vlan.map_or(Ok(()), |v| self.check_vlan(&name, v))?;
                let made = self.make_group(&name, weight.unwrap_or(USUAL_GROUP_WEIGHT), secret.then_some(fd));
                made.and_then(|done| vlan.map_or(Ok(done), |v| self.set_vlan(&name, v)))
            }
            Request::GroupSet { name, vlan: Some(vlan), weight: None, with: None, secret: None } => {
                self.set_vlan(&name, vlan)
            }
            Request::GroupSet { name, weight, with, secret, vlan } => {
                vlan.map_or(Ok(()), |v| self.check_vlan(&name, v))?;
                let done = self.set_group(&name, weight, with.as_deref(), secret, fd);
                done.and_then(|done| vlan.map_or(Ok(done), |v| self.set_vlan(&name, v)))
            }
            Request::RuleList => {
                let rules = self.around.network.as_ref().map(|n| lock(n).rules());
                Ok(Response::Rules(rules.unwrap_or_default()))
            }
            Request::GroupList => {
                // Locked before the names: see the order of locks.
                let network = self.around.network.as_ref().map(|n| lock(n));
                let vni = |g: &str| network.as_ref().and_then(|n| n.vni(g));
                let names = self.names();
                let count = |g: &str| names.vrnics.values().filter(|v| v.group == g).count();
                let weight_lacks = self.around.why_no_weights();
                let infos = names.groups.iter().map(|(g, group)| GroupInfo {
                    name: g.clone(),
                    vrnics: count(g),
                    vni: vni(g),
                    weight: group.weight(),
                    weight_lacks: weight_lacks.clone(),
                    secret: group.seal_note().number,
                    vlan: group.vlan(),
                });
                Ok(Response::Groups(infos.collect()))
            }
            Request::GroupRemove { name } => self.remove_group(&name),
            Request::Attach { name } => self.attach(id, &name, fd),
            Request::Container { name } => {
                let fd = fd.ok_or(RequestError::Malformed("a container needs a descriptor of its first process"))?;
                self.change(&name, |group, inner| {
                    member(inner, &name)?.containers.insert(id, fd);
                    self.names().held.entry(id).or_default().insert(group.name.clone());
                    Ok(())
                })?;
                Ok(Response::Done)
            }
            Request::Detach => {
                self.detach(id);
                Ok(Response::Done)
            }
            Request::Capture { vrnic, snap } => self.capture(id, vrnic, snap, fd),
            Request::CaptureStop => {
                let lost = self.stop_capture(id).ok_or(RequestError::NoCapture)?;
                Ok(Response::Captured { lost })
            }
            Request::VfList => Ok(Response::Vfs(self.vfs.as_ref().ok_or(RequestError::NoPool)?.info())),
            Request::VfDrain { part, on } => {
                self.vfs.as_ref().ok_or(RequestError::NoPool)?.drain(&part, on)?;
                Ok(Response::Done)
            }
            Request::Status => Ok(Response::Status(Box::new(self.status()))),
        }
    }

    /// Releases everything that an administration connection holds. The connection is closed, or its container has
    /// ended.
    pub(super) fn closed(&self, id: u64) {
        if self.stopping.load(Ordering::SeqCst) {
            // All vRNICs end, and the directory may soon be the next virtual layer's.
            return;
        }
        self.detach(id);
        self.stop_capture(id);
    }

    /// The group of a vRNIC.
    pub(super) fn group_with(&self, name: &str) -> Result<Arc<Group>, RequestError> {
        let names = self.names();
        names.vrnics.get(name).and_then(|v| names.groups.get(&v.group)).cloned().ok_or_else(|| unknown(name))
    }

    /// Changes a vRNIC by `f`, and stores the new state in the keeper.
    fn change(
        &self,
        name: &str,
        f: impl FnOnce(&Group, &mut Inner) -> Result<(), RequestError>,
    ) -> Result<Arc<Group>, RequestError> {
        let group = self.group_with(name)?;
        let mut inner = group.lock();
        f(&group, &mut inner)?;
        self.keep_vrnic(&group, &inner, name);
        drop(inner);
        Ok(group)
    }

    /// Makes a group. `secret` is `Some` if it has a secret, which is read from the file.
    pub(super) fn make_group(self: &Arc<Self>, name: &str, weight: u32, secret: Option<Option<OwnedFd>>) -> Reply {
        vrnic::check_name("group", name)?;
        check_weight(weight)?;
        let id = {
            let mut names = self.names();
            if names.groups.contains_key(name) || !names.busy.insert(name.into()) {
                return Err(RequestError::GroupExists(name.into()));
            }
            names.next_group += 1;
            names.next_group - 1
        };
        let added = self.add_group(name, id, weight);
        self.names().busy.remove(name);
        added?;
        let own = |file| self.set_group(name, None, None, Some(SecretChange::File), file).map(drop);
        if let Err(e) = self.share_pairs(name).and_then(|()| secret.map_or(Ok(()), own)) {
            self.remove_group(name)?;
            return Err(e);
        }
        self.offer(GROUP_CLASSES, name);
        Ok(Response::Done)
    }

    pub(super) fn set_group(
        &self,
        name: &str,
        weight: Option<u32>,
        with: Option<&str>,
        secret: Option<SecretChange>,
        file: Option<OwnedFd>,
    ) -> Reply {
        if weight.is_none() && secret.is_none() {
            return Err(RequestError::Malformed("nothing to set; give --weight, --vlan, --secret or --forget-old"));
        }
        weight.map_or(Ok(()), check_weight)?;
        let group = self.names().groups.get(name).cloned().ok_or_else(|| no_group(name))?;
        let is_sealed = matches!(secret, Some(SecretChange::File)) && with.is_none();
        if is_sealed && self.around.lender.lends_to_group(name) {
            return Err(RequestError::GroupOnVfs(name.into()));
        }
        match (secret, with) {
            (Some(change), None) => self.change_secrets(&group, None, &NewSecret::read(change, file)?)?,
            (Some(change), Some(other)) => self.change_pair(&group, other, &NewSecret::read(change, file)?)?,
            (None, Some(_)) => {
                let text = "--with says whose secret it is; give --secret or --forget-old, too";
                return Err(RequestError::Malformed(text));
            }
            (None, None) => {}
        }
        if let Some(weight) = weight {
            let inner = group.lock();
            if inner.removed {
                return Err(RequestError::GroupGone(name.into()));
            }
            group.set_weight(weight)?;
            self.keep_group(&group, &inner);
        }
        Ok(Response::Done)
    }

    /// Refuses a VLAN that a group cannot have.
    fn check_vlan(&self, name: &str, vlan: u16) -> Result<(), RequestError> {
        if vlan > MAX_VLAN {
            return Err(RequestError::Vlan(vlan));
        }
        let names = self.names();
        let mut others = names.groups.iter().filter(|(g, group)| *g != name && vlan > 0 && group.vlan() == vlan);
        others.next().map_or(Ok(()), |(g, _)| Err(RequestError::VlanTaken { vlan, group: g.clone() }))
    }

    /// Sets the VLAN that a group has on real RNICs; 0: none. Leases that its vRNICs have keep theirs.
    pub(super) fn set_vlan(&self, name: &str, vlan: u16) -> Reply {
        let group = self.names().groups.get(name).cloned().ok_or_else(|| no_group(name))?;
        let inner = group.lock();
        if inner.removed {
            return Err(RequestError::GroupGone(name.into()));
        }
        self.check_vlan(name, vlan)?;
        group.set_vlan(vlan);
        self.keep_group(&group, &inner);
        Ok(Response::Done)
    }

    pub(super) fn remove_group(&self, name: &str) -> Reply {
        if name == DEFAULT_GROUP {
            return Err(RequestError::DefaultGroup);
        }
        let group = {
            let mut names = self.names();
            if let Some((v, _)) = names.vrnics.iter().find(|(_, v)| v.group == name) {
                return Err(RequestError::GroupNotEmpty { group: name.into(), vrnic: v.clone() });
            }
            let group = names.groups.remove(name).ok_or_else(|| no_group(name))?;
            names.busy.insert(name.into());
            group
        };
        self.withdraw(GROUP_CLASSES, name);
        self.end_group(&group);
        self.forget_group(name);
        self.names().busy.remove(name);
        Ok(Response::Done)
    }

    pub(super) fn set_link(&self, name: &str, up: bool) -> Result<(), RequestError> {
        self.change(name, |group, inner| {
            group.call(inner, &Call::Link { name: name.into(), up }, &[])?;
            member(inner, name)?.new.up = up;
            Ok(())
        })?;
        Ok(())
    }

    /// Makes a vRNIC. If `hardware` is `None`, its MAC and GUID are derived from its group and addresses.
    /// `taken`: the connection that it is made for.
    pub(super) fn add_vrnic_as(
        &self,
        add: &AddVrnic,
        hardware: Option<Hardware>,
        up: bool,
        taken: Option<Taken>,
    ) -> Reply {
        vrnic::check_name("vRNIC", &add.name)?;
        let share = add.share.apply(Share::default())?;
        add.instance.as_deref().map_or(Ok(()), |i| vrnic::check_name("instance", i))?;
        let (group, ips, hardware) = self.reserve(add, hardware)?;
        let new = NewVrnic {
            name: add.name.clone(),
            ips,
            hardware,
            limits: add.limits(),
            share,
            held: add.held,
            allow_spoof: add.allow_spoof,
            up,
            way: add.way,
            instance: add.instance.clone(),
            vf_use: VfUse { asks: add.way.asks(), vf: None },
        };
        let made = self.make_vrnic(&group, new, taken);
        if made.is_err() {
            self.names().vrnics.remove(&add.name);
        }
        made?;
        self.set_owners();
        // One that is for a connection is not for others.
        if taken.is_none() {
            self.offer(VRNIC_CLASSES, &add.name);
        }
        self.show(&add.name, false)
    }

    /// Reserves the name and the addresses of a new vRNIC.
    fn reserve(
        &self,
        add: &AddVrnic,
        hardware: Option<Hardware>,
    ) -> Result<(Arc<Group>, Vec<IpNet>, Hardware), RequestError> {
        let mut names = self.names();
        if names.vrnics.contains_key(&add.name) {
            return Err(RequestError::VrnicExists(add.name.clone()));
        }
        let group = add.group.as_deref().unwrap_or(DEFAULT_GROUP);
        let Some(group) = names.groups.get(group).cloned() else {
            let known = names.groups.keys().cloned().collect();
            return Err(RequestError::NoGroup { group: group.into(), known });
        };
        let ips = names.choose_ips(add, &group.name)?;
        let hardware = hardware.unwrap_or_else(|| Hardware::derived(&group.name, &ips));
        let mac = hardware.mac;
        if let Some((n, _)) = names.vrnics.iter().find(|(_, v)| v.hardware.mac == mac) {
            return Err(AddressError::MacTaken { mac, holder: n.clone() }.into());
        }
        names.vrnics.insert(add.name.clone(), VrnicEntry { group: group.name.clone(), hardware, ips: ips.clone() });
        Ok((group, ips, hardware))
    }

    fn make_vrnic(&self, group: &Group, new: NewVrnic, taken: Option<Taken>) -> Result<(), RequestError> {
        let name = new.name.clone();
        let mut inner = group.lock();
        if inner.removed {
            return Err(RequestError::GroupGone(group.name.clone()));
        }
        if new.way == Way::Vf {
            self.around
                .lender
                .check(&name, &group.borrower(&new))
                .map_err(|why| RequestError::NoVf(name.clone(), why))?;
        }
        let serve = |error| RequestError::Serve { vrnic: name.clone(), error };
        let listeners = listen(&self.dir, &name).map_err(serve)?;
        let lease_listener = new.way.asks().then(|| listen_for_leases(&self.dir, &name)).transpose();
        let lease_listener = lease_listener.map_err(|e| {
            let _ = std::fs::remove_dir_all(vrnic_dir(&self.dir, &name));
            serve(e)
        })?;
        let added = group.call(&mut inner, &Call::Add(new.clone()), &listeners.each_ref().map(AsFd::as_fd));
        if let Err(e) = added {
            let _ = std::fs::remove_dir_all(vrnic_dir(&self.dir, &name));
            return Err(e.into());
        }
        let member = Member { new, listeners, lease_listener, attached: None, containers: BTreeMap::new(), taken };
        group.lend_to(&member);
        inner.members.insert(name.clone(), member);
        self.keep_vrnic(group, &inner, &name);
        Ok(())
    }

    pub(super) fn remove_vrnic(&self, name: &str, force: bool) -> Reply {
        let group = self.group_with(name)?;
        let mut inner = group.lock();
        let sessions = match group.call(&mut inner, &Call::Show { name: name.into(), whole: false }, &[]) {
            Ok(Answer::Vrnic(v)) => v.sessions,
            // Without a worker, no program uses the vRNIC.
            _ => 0,
        };
        let sessions = sessions.max(self.around.lender.way(name).contexts as usize);
        if !force && (sessions > 0 || member(&mut inner, name)?.attached.is_some()) {
            return Err(RequestError::InUse { vrnic: name.into(), sessions });
        }
        inner.members.remove(name).ok_or_else(|| unknown(name))?;
        self.around.lender.remove(name);
        // A worker that does not answer is killed, and the next one will not get this vRNIC.
        let _ = group.call(&mut inner, &Call::Remove { name: name.into() }, &[]);
        self.keep_vrnic(&group, &inner, name);
        let _ = std::fs::remove_dir_all(vrnic_dir(&self.dir, name));
        drop(inner);
        self.names().vrnics.remove(name);
        self.withdraw(VRNIC_CLASSES, name);
        self.set_owners();
        Ok(Response::Done)
    }

    fn set(&self, name: &str, set: SetShare, allow_spoof: Option<bool>, held: SetHeld) -> Reply {
        self.group_with(name)?;
        if set == SetShare::default() && allow_spoof.is_none() && held == SetHeld::default() {
            return Err(RequestError::Malformed(
                "nothing to set; give --weight, --rate, --ops, --burst, --allow-spoof, --max-descriptors, --max-mappings, --max-address-space, --max-pieces or --max-filled",
            ));
        }
        let (before, mut whole, spoof) = {
            let group = self.group_with(name)?;
            let mut inner = group.lock();
            let new = &member(&mut inner, name)?.new;
            (new.share, new.held, new.allow_spoof)
        };
        whole.merge(&held);
        self.set_whole(name, set.apply(before)?, allow_spoof.unwrap_or(spoof), whole)?;
        self.show(name, false)
    }

    /// Sets a vRNIC's whole share, its permission and its limits.
    pub(super) fn set_whole(&self, name: &str, share: Share, spoof: bool, held: SetHeld) -> Result<(), RequestError> {
        self.change(name, |group, inner| {
            group.call(inner, &Call::Share { name: name.into(), share }, &[])?;
            group.call(inner, &Call::Held { name: name.into(), held }, &[])?;
            group.call(inner, &Call::AllowSpoof { name: name.into(), on: spoof }, &[])?;
            let new = &mut member(inner, name)?.new;
            (new.share, new.held, new.allow_spoof) = (share, held, spoof);
            self.around.lender.set_share(name, share);
            Ok(())
        })?;
        Ok(())
    }

    pub(super) fn add_address(&self, name: &str, ip: IpNet) -> Reply {
        {
            let mut names = self.names();
            let group = names.vrnics.get(name).ok_or_else(|| unknown(name))?.group.clone();
            names.check_free(&ip, &group)?;
            check_together(names.vrnics.get(name).map_or(&[], |v| &v.ips), &ip)?;
            names.vrnics.get_mut(name).into_iter().for_each(|v| v.ips.push(ip));
        }
        let changed = self.change_address(name, ip, true);
        if changed.is_err() {
            self.forget_address(name, ip);
        }
        changed?;
        self.set_owners();
        self.show(name, false)
    }

    pub(super) fn remove_address(&self, name: &str, ip: IpNet) -> Reply {
        {
            let names = self.names();
            let v = names.vrnics.get(name).ok_or_else(|| unknown(name))?;
            if !v.ips.iter().any(|o| vrnic::same_address(o, &ip)) {
                return Err(AddressError::NotIts { ip: ip.addr, vrnic: name.into() }.into());
            }
            if v.ips.len() == 1 {
                return Err(AddressError::Only { ip: ip.addr, vrnic: name.into() }.into());
            }
        }
        self.change_address(name, ip, false)?;
        self.forget_address(name, ip);
        self.set_owners();
        self.show(name, false)
    }

    fn change_address(&self, name: &str, ip: IpNet, add: bool) -> Result<(), RequestError> {
        self.change(name, |group, inner| {
            group.call(inner, &Call::Address { name: name.into(), ip, add }, &[])?;
            let ips = &mut member(inner, name)?.new.ips;
            if add {
                ips.push(ip);
            } else {
                ips.retain(|o| !vrnic::same_address(o, &ip));
            }
            Ok(())
        })?;
        Ok(())
    }

    fn forget_address(&self, name: &str, ip: IpNet) {
        if let Some(v) = self.names().vrnics.get_mut(name) {
            v.ips.retain(|o| !vrnic::same_address(o, &ip));
        }
    }

    fn attach(&self, id: u64, name: &str, fd: Option<OwnedFd>) -> Reply {
        self.change(name, |group, inner| {
            if member(inner, name)?.attached.is_some() {
                return Err(RequestError::Attached(name.into()));
            }
            let fd = fd.ok_or(RequestError::Malformed("attach needs a descriptor"))?;
            group.call(inner, &Call::Attach { name: name.into(), id }, &[fd.as_fd()])?;
            member(inner, name)?.attached = Some((id, fd));
            self.names().held.entry(id).or_default().insert(group.name.clone());
            Ok(())
        })?;
        Ok(Response::Done)
    }

    /// Detaches the interface and the container that were attached by this connection, and gives back the vRNICs that
    /// it has taken.
    fn detach(&self, id: u64) {
        let groups: Vec<Arc<Group>> = {
            let mut names = self.names();
            let held = names.held.remove(&id).unwrap_or_default();
            held.iter().filter_map(|g| names.groups.get(g).cloned()).collect()
        };
        let mut temporary = Vec::new();
        for group in groups {
            let mut inner = group.lock();
            let mut changed = Vec::new();
            for (name, m) in &mut inner.members {
                // One that is to be removed stays taken, so that nobody gets it meanwhile.
                let is_temporary = m.taken.is_some_and(|t| t.by == id && t.temporary);
                temporary.extend(is_temporary.then(|| name.clone()));
                let had = m.containers.remove(&id).is_some()
                    | m.attached.take_if(|a| a.0 == id).is_some()
                    | m.taken.take_if(|t| t.by == id && !t.temporary).is_some();
                changed.extend(had.then(|| name.clone()));
            }
            let _ = group.call(&mut inner, &Call::Detach { id }, &[]);
            changed.iter().for_each(|name| self.keep_vrnic(&group, &inner, name));
        }
        for name in &temporary {
            // It is gone already if an administrator has removed it.
            let _ = self.remove_vrnic(name, true);
        }
        self.end_if_unused();
    }

    /// Lets the worker of a vRNIC, or all workers, send packets to the descriptor.
    fn capture(&self, id: u64, vrnic: Option<String>, snap: u32, fd: Option<OwnedFd>) -> Reply {
        let groups = match &vrnic {
            Some(name) => vec![self.group_with(name)?],
            None => self.groups(),
        };
        let fd = fd.ok_or(RequestError::Malformed("capture needs a descriptor"))?;
        {
            let mut capturing = lock(&self.capturing);
            if capturing.is_some() {
                return Err(RequestError::OtherCapture);
            }
            *capturing = Some(id);
        }
        for group in groups {
            let mut inner = group.lock();
            let call = Call::Capture { id, vrnic: vrnic.clone(), snap };
            let begun = group.call(&mut inner, &call, &[fd.as_fd()]).map_err(RequestError::from);
            match begun.and_then(|_| Ok(fd.try_clone()?)) {
                Ok(to) => _ = inner.captures.insert(id, Capturing { vrnic: vrnic.clone(), snap, to }),
                Err(e) => {
                    drop(inner);
                    self.stop_capture(id);
                    return Err(e);
                }
            }
        }
        Ok(Response::Done)
    }

    /// Ends the capture of a connection, if it has one. Returns the number of lost packets.
    fn stop_capture(&self, id: u64) -> Option<u64> {
        lock(&self.capturing).take_if(|c| *c == id)?;
        let mut lost = 0;
        for group in self.groups() {
            let mut inner = group.lock();
            if inner.captures.remove(&id).is_some()
                && let Ok(Answer::Captured { lost: here }) = group.call(&mut inner, &Call::CaptureStop { id }, &[])
            {
                lost += here;
            }
        }
        Some(lost)
    }

    /// All vRNICs. If a worker does not answer, only the supervisor's part is filled in.
    pub(super) fn list(&self) -> Vec<VrnicInfo> {
        let mut all = BTreeMap::new();
        for group in self.groups() {
            let mut inner = group.lock();
            let told = match group.call(&mut inner, &Call::List, &[]) {
                Ok(Answer::Vrnics(told)) => told,
                _ => Vec::new(),
            };
            let mut told: BTreeMap<String, VrnicInfo> = told.into_iter().map(|v| (v.name.clone(), v)).collect();
            for (name, m) in &inner.members {
                all.insert(name.clone(), self.complete(told.remove(name).unwrap_or_default(), &group, m));
            }
        }
        all.into_values().collect()
    }

    pub(super) fn show(&self, name: &str, whole: bool) -> Reply {
        let group = self.group_with(name)?;
        let mut inner = group.lock();
        let answer = group.call(&mut inner, &Call::Show { name: name.into(), whole }, &[])?;
        let Answer::Vrnic(info) = answer else { return Err(group::nonsense().into()) };
        let m = inner.members.get(name).ok_or_else(|| unknown(name))?;
        let mut v = self.complete(*info, &group, m);
        if let Some(n) = self.around.network.as_ref().filter(|_| whole) {
            v.rules = lock(n).rule_texts(&group.name);
        }
        Ok(Response::Vrnic(Box::new(v)))
    }

    /// Adds the supervisor's part to a worker's description of a vRNIC.
    fn complete(&self, told: VrnicInfo, group: &Group, m: &Member) -> VrnicInfo {
        let Hardware { mac, guid } = m.new.hardware;
        VrnicInfo {
            name: m.new.name.clone(),
            group: group.name.clone(),
            ips: m.new.ips.clone(),
            mac: mac.to_string(),
            guid: Guid(guid).to_string(),
            mtu: self.around.network.as_ref().map_or(vrnic::NET_MTU, |n| lock(n).net_mtu(group.seal_note().any)),
            dir: vrnic_dir(&self.dir, &m.new.name).display().to_string(),
            attached: m.attached.is_some(),
            container: m.containers.values().rev().find_map(process_of),
            temporary: m.taken.is_some_and(|t| t.temporary),
            limits: m.new.limits,
            way: self.around.lender.way(&m.new.name),
            ..told
        }
    }

    fn status(&self) -> StatusInfo {
        let mut workers = Vec::new();
        let mut all = WorkerStatus::default();
        for group in self.groups() {
            let mut inner = group.lock();
            let told = match group.call(&mut inner, &Call::Status, &[]) {
                Ok(Answer::Status(told)) => *told,
                _ => WorkerStatus::default(),
            };
            workers.push(WorkerInfo {
                group: group.name.clone(),
                pid: inner.worker.as_ref().map(Worker::pid),
                vrnics: inner.members.len(),
                sessions: told.sessions,
                restarts: inner.restarts,
                stuck: stuck(&inner),
                memory: inner.worker.as_ref().map_or(0, |w| memory_of(w.pid())),
                rnic_held: told.rnic_held,
                confinement: inner.worker.as_ref().map(|w| w.in_force().clone()).unwrap_or_default(),
                seal: told.seal.clone(),
            });
            all.add(&told);
        }
        // Each lock is released before the next one is taken.
        let vrnics = self.names().vrnics.len();
        let wire = self.around.network.as_ref().map(|n| lock(n).info(all.port, all.drops, all.tunnel));
        StatusInfo {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            dir: self.dir.display().to_string(),
            vrnics,
            sessions: all.sessions,
            rnic_held: all.rnic_held,
            workers,
            confinement: self.in_force.clone(),
            wire,
            centre: self.fleet.info(),
        }
    }
}

impl Registry {
    fn choose_ips(&self, add: &AddVrnic, group: &str) -> Result<Vec<IpNet>, AddressError> {
        if add.ips.is_empty() {
            let mut free = (0..0xfffe).map(vrnic::auto_ip).filter(|ip| self.holder(ip, group).is_none());
            return free.next().map(|ip| vec![ip]).ok_or(AddressError::NoneLeft);
        }
        for (i, ip) in add.ips.iter().enumerate() {
            self.check_free(ip, group)?;
            check_together(&add.ips[..i], ip)?;
        }
        Ok(add.ips.clone())
    }

    /// The vRNIC of `group` that has an address.
    fn holder(&self, ip: &IpNet, group: &str) -> Option<&str> {
        let mut members = self.vrnics.iter().filter(|(_, v)| v.group == group);
        members.find(|(_, v)| v.ips.iter().any(|o| vrnic::same_address(o, ip))).map(|(n, _)| n.as_str())
    }

    /// Refuses an address that a vRNIC of `group` cannot get.
    fn check_free(&self, ip: &IpNet, group: &str) -> Result<(), AddressError> {
        if let Some(holder) = self.holder(ip, group) {
            return Err(AddressError::Taken { ip: ip.addr, holder: holder.into(), group: group.into() });
        }
        match ip.addr {
            IpAddr::V6(v6) if vrnic::is_link_local(v6) => Err(AddressError::LinkLocal(v6)),
            _ => Ok(()),
        }
    }
}

fn member<'a>(inner: &'a mut Inner, name: &str) -> Result<&'a mut Member, RequestError> {
    inner.members.get_mut(name).ok_or_else(|| unknown(name))
}

fn unknown(name: &str) -> RequestError {
    RequestError::NoVrnic(name.into())
}

fn no_group(name: &str) -> RequestError {
    RequestError::Missing { what: "group", name: name.into() }
}

/// The thread of a group's worker that is stuck at present, and for how long.
pub(super) fn stuck(inner: &Inner) -> Option<String> {
    inner.stuck.as_ref().filter(|s| s.1.elapsed() < STUCK_NOW).map(|s| s.0.clone())
}

/// Anonymous memory of a process, bytes. Neither the program's file, which all workers share, nor the tenants' memory
/// files count.
pub(super) fn memory_of(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = status.lines().find_map(|l| l.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// The PID of a pidfd's process, if it still runs. A zombie counts as running.
fn process_of(pidfd: &OwnedFd) -> Option<i32> {
    use std::os::fd::AsRawFd;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let pid = info.lines().find_map(|l| l.strip_prefix("Pid:"))?.trim().parse().ok()?;
    (pid > 0).then_some(pid)
}

/// Refuses an address that a vRNIC with the addresses `have` cannot get in addition.
fn check_together(have: &[IpNet], ip: &IpNet) -> Result<(), AddressError> {
    if have.iter().any(|o| vrnic::same_address(o, ip) || o.addr.is_ipv4() && ip.addr.is_ipv4()) {
        return Err(AddressError::SecondIpv4(ip.addr));
    }
    Ok(())
}

fn check_weight(weight: u32) -> Result<(), RequestError> {
    let known = (1..=MAX_GROUP_WEIGHT).contains(&weight);
    if known { Ok(()) } else { Err(RequestError::GroupWeight(weight)) }
}
