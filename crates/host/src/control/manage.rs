//! What an administrator asks for: vRNICs, groups, attachment, status.

use std::collections::BTreeSet;

use super::*;
use crate::tunnel::Members;

impl Control {
    pub(super) fn answer(&mut self, id: u64, request: Request, fd: Option<OwnedFd>) -> Answer {
        match request {
            Request::VrnicAdd(add) => self.add_vrnic(&add),
            Request::VrnicList => Ok(Response::Vrnics(self.vrnics.keys().filter_map(|n| self.info(n)).collect())),
            Request::VrnicShow { name } => {
                let v = self.vrnics.get(&name).ok_or_else(|| self.unknown(&name))?;
                let mut info = self.info(&name).ok_or_else(|| self.unknown(&name))?;
                let rnic = self.engine.rnic.lock();
                (info.queue_pairs, info.listeners) = (rnic.queue_pairs(v.id), rnic.listeners(v.id));
                info.memory = rnic.mr_notes(v.id);
                drop(rnic);
                Ok(Response::Vrnic(Box::new(info)))
            }
            Request::VrnicRemove { name, force } => self.remove_vrnic(&name, force),
            Request::VrnicSet { name, share, allow_spoof, held } => self.set(&name, share, allow_spoof, held),
            Request::VrnicLink { name, up } => self.set_link(&name, up),
            Request::VrnicAddress { name, ip, add: true } => self.add_address(&name, ip),
            Request::VrnicAddress { name, ip, add: false } => self.remove_address(&name, ip),
            Request::GroupAdd { name } => {
                vrnic::check_name("group", &name)?;
                if self.groups.contains_key(&name) {
                    return Err(format!("group {name} exists already"));
                }
                self.groups.insert(name, self.next_group);
                self.next_group += 1;
                self.set_routes();
                Ok(Response::Done)
            }
            Request::GroupList => {
                let count = |g: &str| self.vrnics.values().filter(|v| v.group == g).count();
                let vni = |g: &str| self.wire.as_ref().and_then(|n| n.vni(g));
                let infos = self.groups.keys().map(|g| GroupInfo { name: g.clone(), vrnics: count(g), vni: vni(g) });
                Ok(Response::Groups(infos.collect()))
            }
            Request::GroupRemove { name } => self.remove_group(&name),
            Request::Attach { name } => self.attach(id, &name, fd),
            Request::Container { name } => {
                let unknown = self.unknown(&name);
                let fd = fd.ok_or("a container needs a descriptor of its first process")?;
                self.vrnics.get_mut(&name).ok_or(unknown)?.containers.insert(id, fd);
                Ok(Response::Done)
            }
            Request::Detach => {
                self.detach(id);
                Ok(Response::Done)
            }
            Request::Capture { vrnic, snap } => self.capture(id, vrnic.as_deref(), snap, fd),
            Request::CaptureStop => {
                let lost = self.engine.stop_capture(id).ok_or("no capture runs on this connection")?;
                Ok(Response::Captured { lost })
            }
            Request::Status => Ok(Response::Status(Box::new(StatusInfo {
                pid: std::process::id(),
                version: env!("CARGO_PKG_VERSION").into(),
                dir: self.dir.display().to_string(),
                vrnics: self.vrnics.len(),
                sessions: self.sessions.len(),
                rnic_held: self.engine.rnic.held(),
                wire: self.wire.as_ref().map(|n| {
                    let port = self.engine.port_counters().unwrap_or_default();
                    n.info(port, self.engine.rnic.lock().wire_drops(), self.switch.tunnel_drops())
                }),
            }))),
        }
    }

    fn unknown(&self, name: &str) -> String {
        format!("there is no vRNIC {name}; `unirdma vrnic ls` lists those that exist")
    }

    fn remove_group(&mut self, name: &str) -> Answer {
        if name == DEFAULT_GROUP {
            return Err("the group `default` always exists".into());
        }
        if let Some((v, _)) = self.vrnics.iter().find(|(_, v)| v.group == name) {
            return Err(format!("group {name} still has the vRNIC {v}; remove its vRNICs first"));
        }
        let id = self.groups.remove(name).ok_or(format!("there is no group {name}"))?;
        self.switch.set_plan(id, Members::default(), BTreeSet::new());
        self.set_routes();
        Ok(Response::Done)
    }

    fn add_vrnic(&mut self, add: &AddVrnic) -> Answer {
        vrnic::check_name("vRNIC", &add.name)?;
        if self.vrnics.contains_key(&add.name) {
            return Err(format!(
                "vRNIC {} exists already; choose another name or remove it with `unirdma vrnic rm {}`",
                add.name, add.name
            ));
        }
        let group = add.group.clone().unwrap_or(DEFAULT_GROUP.into());
        let Some(&group_id) = self.groups.get(&group) else {
            let known: Vec<&str> = self.groups.keys().map(String::as_str).collect();
            return Err(format!(
                "there is no group {group} (there are: {}); create it with `unirdma group add {group}`",
                known.join(", ")
            ));
        };
        let ips = self.choose_ips(add, &group)?;
        let mac = vrnic::mac_of(&ips, group_id);
        if let Some((n, _)) = self.vrnics.iter().find(|(_, v)| v.group == group && v.mac == mac) {
            return Err(format!("the virtual MAC {mac} of these addresses is that of vRNIC {n}; choose another --ip"));
        }
        let d = Limits::default();
        let limits = Limits {
            max_qp: add.max_qp.unwrap_or(d.max_qp),
            max_cq: add.max_cq.unwrap_or(d.max_cq),
            max_mr: add.max_mr.unwrap_or(d.max_mr),
            max_mr_bytes: add.max_mr_bytes.unwrap_or(d.max_mr_bytes),
            max_sessions: add.max_sessions.unwrap_or(d.max_sessions),
            ..d
        };
        let share = add.share.apply(Share::default())?;
        let config = VnicConfig { group: group_id, gids: vrnic::gid_table(&ips, mac), limits, share };
        let id = self.engine.rnic.lock().add_vnic(config).ok_or("too many vRNICs")?;
        let identity = Arc::new(Identity {
            vnic: id,
            config: vrnic::device_config(mac, &limits),
            name: add.name.clone(),
            active_mtu: self.wire.as_ref().map_or(vrnic::PORT_MTU, Network::mtu_code),
            log: unirdma_device::LogLimit::default(),
        });
        let listener = self.listen(&add.name).map_err(|e| {
            self.engine.rnic.lock().remove_vnic(id);
            format!("cannot serve vRNIC {}: {e}", add.name)
        })?;
        let v = Vrnic {
            id,
            group,
            guard: Arc::new(Guard::new(mac, &ips, add.allow_spoof)),
            ips,
            mac,
            identity,
            limits,
            listener,
            attached: None,
            containers: BTreeMap::new(),
            sessions: 0,
            full: false,
            ledger: self.ledger.for_vrnic(add.held.limits()),
        };
        self.vrnics.insert(add.name.clone(), v);
        // Somebody may have waited for an address.
        self.engine.after_command();
        self.info(&add.name).map(|i| Response::Vrnic(Box::new(i))).ok_or_else(|| self.unknown(&add.name))
    }

    fn choose_ips(&self, add: &AddVrnic, group: &str) -> Result<Vec<IpNet>, String> {
        if add.ips.is_empty() {
            let mut free = (0..0xfffe).map(vrnic::auto_ip).filter(|ip| self.holder(ip, group).is_none());
            return free.next().map(|ip| vec![ip]).ok_or("no automatic address is left; give one with --ip".into());
        }
        for (i, ip) in add.ips.iter().enumerate() {
            self.check_free(ip, group)?;
            let again =
                add.ips[..i].iter().any(|o| vrnic::same_address(o, ip) || o.addr.is_ipv4() && ip.addr.is_ipv4());
            if again {
                return Err(format!("{}: a vRNIC has at most one IPv4 address, and no address twice", ip.addr));
            }
        }
        Ok(add.ips.clone())
    }

    /// The vRNIC of `group` that has an address.
    fn holder(&self, ip: &IpNet, group: &str) -> Option<&str> {
        let mut members = self.vrnics.iter().filter(|(_, v)| v.group == group);
        members.find(|(_, v)| v.ips.iter().any(|o| vrnic::same_address(o, ip))).map(|(n, _)| n.as_str())
    }

    /// Says why a vRNIC of `group` cannot get an address.
    fn check_free(&self, ip: &IpNet, group: &str) -> Result<(), String> {
        if let Some(other) = self.holder(ip, group) {
            return Err(format!(
                "{} belongs to vRNIC {other} of group {group} already; choose another address or another group",
                ip.addr
            ));
        }
        match ip.addr {
            std::net::IpAddr::V6(v6) if vrnic::is_link_local(v6) => {
                Err(format!("{v6} is link-local; a vRNIC has one of those by itself"))
            }
            _ => Ok(()),
        }
    }

    fn set(&mut self, name: &str, set: SetShare, allow_spoof: Option<bool>, held: SetHeld) -> Answer {
        let v = self.vrnics.get(name).ok_or_else(|| self.unknown(name))?;
        if set == SetShare::default() && allow_spoof.is_none() && held == SetHeld::default() {
            return Err("nothing to set; give --weight, --rate, --ops, --burst, --allow-spoof, --max-descriptors, --max-mappings or --max-address-space".into());
        }
        {
            let mut rnic = self.engine.rnic.lock();
            let share = set.apply(rnic.share(v.id))?;
            rnic.set_share(v.id, share);
        }
        if let Some(on) = allow_spoof {
            v.guard.set_allow_spoof(on);
        }
        v.ledger.set_limits(held.limits());
        self.info(name).map(|i| Response::Vrnic(Box::new(i))).ok_or_else(|| self.unknown(name))
    }

    fn set_link(&mut self, name: &str, up: bool) -> Answer {
        let v = self.vrnics.get(name).ok_or_else(|| self.unknown(name))?;
        self.engine.rnic.lock().set_link(v.id, up);
        if let Some(id) = v.attached {
            self.switch.set_link(id, up);
        }
        self.engine.after_command();
        Ok(Response::Done)
    }

    fn add_address(&mut self, name: &str, ip: IpNet) -> Answer {
        let v = self.vrnics.get(name).ok_or_else(|| self.unknown(name))?;
        self.check_free(&ip, &v.group)?;
        let gid = Gid::from_ip(ip.addr);
        let mut gids = self.engine.rnic.lock().gids(v.id).to_vec();
        match gids.iter().position(|g| g.is_zero()) {
            Some(hole) => gids[hole] = gid,
            None if gids.len() < vrnic::MAX_GIDS => gids.push(gid),
            None => return Err(format!("vRNIC {name} has {} addresses already; take one away first", gids.len())),
        }
        self.change_addresses(name, gids, |ips| ips.push(ip))
    }

    fn remove_address(&mut self, name: &str, ip: IpNet) -> Answer {
        let v = self.vrnics.get(name).ok_or_else(|| self.unknown(name))?;
        if !v.ips.iter().any(|o| vrnic::same_address(o, &ip)) {
            return Err(format!(
                "vRNIC {name} does not have the address {}; `unirdma vrnic show {name}` lists its own",
                ip.addr
            ));
        }
        if v.ips.len() == 1 {
            return Err(format!(
                "{} is the only address of vRNIC {name}; add another one first, or remove the vRNIC",
                ip.addr
            ));
        }
        let gone = Gid::from_ip(ip.addr);
        let mut gids = self.engine.rnic.lock().gids(v.id).to_vec();
        gids.iter_mut().filter(|g| **g == gone).for_each(|g| *g = Gid::default());
        self.change_addresses(name, gids, |ips| ips.retain(|o| !vrnic::same_address(o, &ip)))
    }

    fn change_addresses(&mut self, name: &str, gids: Vec<Gid>, change: impl Fn(&mut Vec<IpNet>)) -> Answer {
        if let Some(v) = self.vrnics.get_mut(name) {
            change(&mut v.ips);
            v.guard.set_addresses(&v.ips);
            self.engine.rnic.lock().set_gids(v.id, gids);
        }
        self.engine.after_command();
        self.info(name).map(|i| Response::Vrnic(Box::new(i))).ok_or_else(|| self.unknown(name))
    }

    fn listen(&mut self, name: &str) -> io::Result<(u64, UnixListener)> {
        let dir = vrnic_dir(&self.dir, name);
        std::fs::create_dir(&dir)?;
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755))?;
        let path = dir.join(VHOST_SOCKET);
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        // Who may see the directory may connect: it is mounted into one container only.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666))?;
        let token = self.watch(listener.as_fd(), Source::Listener(name.into()), false)?;
        Ok((token, listener))
    }

    fn remove_vrnic(&mut self, name: &str, force: bool) -> Answer {
        let v = self.vrnics.get(name).ok_or_else(|| self.unknown(name))?;
        if !force && (v.sessions > 0 || v.attached.is_some()) {
            return Err(format!(
                "vRNIC {name} is in use ({} sessions); end its container first, or add --force",
                v.sessions
            ));
        }
        let ids: Vec<u64> = self.sessions.iter().filter(|(_, s)| s.vrnic == name).map(|(&id, _)| id).collect();
        for id in ids {
            self.close(id);
        }
        let ids: Vec<u64> = self.lookers.iter().filter(|(_, l)| l.vrnic == name).map(|(&id, _)| id).collect();
        for id in ids {
            self.end_look(id);
        }
        if let Some(v) = self.vrnics.remove(name) {
            let _ = epoll::delete(&self.epoll, &v.listener.1);
            self.sources.remove(&v.listener.0);
            if let Some(id) = v.attached {
                self.switch.remove(id);
            }
            self.engine.rnic.lock().remove_vnic(v.id);
            let _ = std::fs::remove_dir_all(vrnic_dir(&self.dir, name));
        }
        Ok(Response::Done)
    }

    fn attach(&mut self, id: u64, name: &str, fd: Option<OwnedFd>) -> Answer {
        let unknown = self.unknown(name);
        let v = self.vrnics.get_mut(name).ok_or(unknown)?;
        if v.attached.is_some() {
            return Err(format!(
                "vRNIC {name} has a container already; run the command in it with `unirdma exec --vrnic {name}`, end it, or \
                 make another vRNIC"
            ));
        }
        let group = *self.groups.get(&v.group).ok_or("the group is gone")?;
        let fd = fd.ok_or("attach needs a descriptor")?;
        let up = self.engine.rnic.lock().is_up(v.id);
        self.switch.add(id, fd, group, v.guard.clone(), up).map_err(|e| format!("cannot use that interface: {e}"))?;
        v.attached = Some(id);
        Ok(Response::Done)
    }

    /// Takes out the interface that came by this connection, if one did, and its container.
    pub(super) fn detach(&mut self, id: u64) {
        for v in self.vrnics.values_mut() {
            v.containers.remove(&id);
        }
        for v in self.vrnics.values_mut().filter(|v| v.attached == Some(id)) {
            v.attached = None;
            self.switch.remove(id);
        }
    }

    fn capture(&self, id: u64, vrnic: Option<&str>, snap: u32, fd: Option<OwnedFd>) -> Answer {
        let of = |name: &str| self.vrnics.get(name).map(|v| v.id).ok_or_else(|| self.unknown(name));
        let vnic = vrnic.map(of).transpose()?;
        let hosts = self.wire.as_ref().map_or_else(Vec::new, |w| w.addresses().to_vec());
        let fd = fd.ok_or("capture needs a descriptor")?;
        self.engine.start_capture(id, fd, vnic, snap, hosts).map(|()| Response::Done)
    }

    fn info(&self, name: &str) -> Option<VrnicInfo> {
        let v = self.vrnics.get(name)?;
        let rnic = self.engine.rnic.lock();
        let u = rnic.usage(v.id);
        Some(VrnicInfo {
            name: name.into(),
            group: v.group.clone(),
            ips: v.ips.clone(),
            gids: rnic.gids(v.id).iter().map(|g| g.to_string()).collect(),
            up: rnic.is_up(v.id),
            mac: v.mac.to_string(),
            guid: v.mac.guid().to_string(),
            mtu: self.wire.as_ref().map_or(vrnic::NET_MTU, Network::net_mtu),
            dir: vrnic_dir(&self.dir, name).display().to_string(),
            attached: v.attached.is_some(),
            allow_spoof: v.guard.allows_spoof(),
            frames_refused: v.guard.drops(),
            container: v.containers.values().rev().find_map(process_of),
            sessions: u.sessions,
            qps: u.qps,
            cqs: u.cqs,
            mrs_mapped: u.mrs_mapped,
            mrs_copied: u.mrs_copied,
            bytes_mapped: u.bytes_mapped,
            bytes_copied: u.bytes_copied,
            limits: v.limits,
            held: LedgerInfo::of(&v.ledger),
            share: rnic.share(v.id),
            busy_ns: rnic.busy_ns(v.id),
            counters: rnic.counters(v.id).unwrap_or_default(),
            listeners: Vec::new(),
            memory: Vec::new(),
            queue_pairs: Vec::new(),
        })
    }
}

/// The PID of a pidfd's process, if it still runs. (A child that has ended and was not waited for yet counts as running.)
fn process_of(pidfd: &OwnedFd) -> Option<i32> {
    use std::os::fd::AsRawFd;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let pid = info.lines().find_map(|l| l.strip_prefix("Pid:"))?.trim().parse().ok()?;
    (pid > 0).then_some(pid)
}
