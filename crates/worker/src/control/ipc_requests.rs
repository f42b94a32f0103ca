//! Requests of the supervisor: vRNICs, interfaces, captures, statistics.

use unirdma_ipc::secrets::GroupSecrets;
use unirdma_rnic::MAX_TORN_DOWN;
use unirdma_rnic::Rnic;

use super::*;
use crate::capture::CaptureError;

/// Most connections and address handles that are checked under one lock of the RNIC after rules have changed.
const MAX_RECHECKED: usize = 64;

/// Why a request of the supervisor fails.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error("this is the worker of group {0} already")]
    Begun(String),
    #[error("there is no vRNIC {0}; `unirdma vrnic ls` lists those that exist")]
    NoVrnic(String),
    #[error("vRNIC {0} exists already")]
    Exists(String),
    #[error("too many vRNICs")]
    TooManyVrnics,
    #[error("vRNIC {name} has {count} addresses already; take one away first")]
    TooManyAddresses { name: String, count: usize },
    #[error("a vRNIC needs the sockets that its programs and virtual machines connect to")]
    NoSockets,
    #[error("{0} needs a descriptor")]
    NoDescriptor(&'static str),
    #[error("cannot serve vRNIC {name}: {error}")]
    Serve { name: String, error: io::Error },
    #[error("a virtual machine has the network interface of vRNIC {0}")]
    MachineAttached(String),
    #[error("cannot use that interface: {0}")]
    Interface(io::Error),
    #[error("this host has no network to other hosts")]
    NoNetwork,
    #[error(transparent)]
    Secrets(io::Error),
    #[error(transparent)]
    Capture(#[from] CaptureError),
}

type Done = Result<Answer, RequestError>;

impl Worker {
    /// Takes a newly connected supervisor in place of the one before.
    pub(super) fn attach_supervisor(&mut self, line: Connection, notices: Option<OwnedFd>) -> io::Result<()> {
        self.detach_supervisor();
        let token = self.watch(line.as_fd(), Source::Supervisor, false)?;
        self.above = Some(SupervisorLink { line, token });
        *lock(&self.notices.0) = notices;
        // Repeats notices that the supervisor before may not have received. Its captures end.
        self.capture.end();
        self.notices.send(&Event::Groups(self.wanted.clone()));
        self.asked_for_qpns = false;
        self.ask_for_qpns();
        Ok(())
    }

    fn detach_supervisor(&mut self) {
        if let Some(above) = self.above.take() {
            let _ = epoll::delete(&self.epoll, above.line.as_fd());
            self.sources.remove(&above.token);
        }
        *lock(&self.notices.0) = None;
    }

    /// Accepts a supervisor, whose first message must give this version.
    pub(super) fn on_door(&mut self) {
        let Ok((socket, _)) = self.door.accept() else { return };
        let come = || -> io::Result<(Connection, Option<OwnedFd>)> {
            let line = Connection::new(socket.into())?;
            let (call, notices) = line.receive(PATIENCE)?;
            line.send(&Answer::Hello(hello(Some(&self.group))), &[], PATIENCE)?;
            match call {
                Call::Hello { version: VERSION } => Ok((line, notices.into_iter().next())),
                _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it is of another version")),
            }
        };
        if let Err(e) = come().and_then(|(line, notices)| self.attach_supervisor(line, notices)) {
            tracing::warn!(group = self.group, error = %e, "a supervisor came and is not taken");
        }
    }

    /// Handles a request of the supervisor, or the end of its connection.
    pub(super) fn on_supervisor(&mut self, alone: Alone) {
        let Some(above) = &self.above else { return };
        let (call, fds) = match above.line.receive(PATIENCE) {
            Ok(got) => got,
            Err(e) => {
                tracing::debug!(group = self.group, error = %e, "the supervisor is gone");
                self.detach_supervisor();
                self.ended |= alone == Alone::Ends;
                return;
            }
        };
        let answer = self.answer(call, fds).unwrap_or_else(|e| Answer::Error(e.to_string()));
        let Some(above) = &self.above else { return };
        if let Err(e) = above.line.send(&answer, &[], PATIENCE) {
            tracing::warn!(group = self.group, error = %e, "the supervisor takes no answer");
            self.detach_supervisor();
        }
    }

    fn answer(&mut self, call: Call, fds: Vec<OwnedFd>) -> Done {
        let mut fds = fds.into_iter();
        match call {
            Call::Hello { .. } => Ok(Answer::Hello(hello(Some(&self.group)))),
            Call::Begin(_) => Err(RequestError::Begun(self.group.clone())),
            Call::Add(new) => {
                let listeners = [fds.next(), fds.next(), fds.next()];
                self.add(new, listeners)
            }
            Call::Remove { name } => self.remove(&name),
            Call::Show { name, whole } => {
                self.recount(&name);
                let mut info = self.info(&name).ok_or_else(|| unknown(&name))?;
                if let Some(v) = self.vrnics.get(&name).filter(|_| whole) {
                    let rnic = self.engine.rnic.lock();
                    (info.queue_pairs, info.listeners) = (rnic.queue_pairs(v.id), rnic.listeners(v.id));
                    info.memory = rnic.mr_notes(v.id);
                }
                Ok(Answer::Vrnic(Box::new(info)))
            }
            Call::Names => Ok(Answer::Names(self.vrnics.keys().cloned().collect())),
            Call::List => Ok(Answer::Vrnics(self.vrnics.keys().filter_map(|n| self.info(n)).collect())),
            Call::Share { name, share } => {
                self.engine.rnic.lock().set_share(self.vrnic(&name)?.id, share);
                Ok(Answer::Done)
            }
            Call::AllowSpoof { name, on } => {
                self.vrnic(&name)?.guard.set_allow_spoof(on);
                Ok(Answer::Done)
            }
            Call::Held { name, held } => {
                self.vrnic(&name)?.ledger.set_limits(held.limits());
                Ok(Answer::Done)
            }
            Call::VfUse { name, vf_use } => {
                self.engine.rnic.lock().set_vf_use(self.vrnic(&name)?.id, vf_use);
                Ok(Answer::Done)
            }
            Call::Link { name, up } => self.set_link(&name, up),
            Call::Address { name, ip, add } => self.change_address(&name, ip, add),
            Call::Attach { name, id } => self.attach(&name, id, fds.next()),
            Call::Detach { id } => {
                for v in self.vrnics.values_mut().filter(|v| v.attached == Some(id)) {
                    v.attached = None;
                    self.switch.remove(id);
                }
                Ok(Answer::Done)
            }
            Call::Capture { id, vrnic, snap } => {
                let vrnic = vrnic.map(|name| self.vrnic(&name).map(|v| v.id)).transpose()?;
                let fd = fds.next().ok_or(RequestError::NoDescriptor("a capture"))?;
                let hosts = self.network.as_ref().map_or_else(Vec::new, |e| e.addresses.clone());
                self.capture.start(id, fd, vrnic, snap, hosts)?;
                Ok(Answer::Done)
            }
            Call::CaptureStop { id } => Ok(Answer::Captured { lost: self.capture.stop(id)? }),
            Call::Status => Ok(Answer::Status(Box::new(self.status()))),
            Call::Figures { most } => Ok(Answer::Figures(Box::new(self.figures(most)))),
            Call::Plan(plan) => {
                let (group, vni) = (self.group_id, plan.members.vni);
                let (routes, rules) = (plan.routes(group), plan.gid_rules());
                self.put_in_force(
                    |switch| switch.set_plan(group, plan),
                    |rnic| {
                        rnic.set_routes(routes);
                        rnic.set_rules(group, vni, &rules);
                    },
                )
            }
            Call::Secrets { any } => self.set_secrets(fds.next().filter(|_| any)),
            Call::Changes(changes) => {
                let (group, rules) = (self.group_id, changes.gid_rules());
                self.put_in_force(
                    |switch| switch.change_plan(group, &changes),
                    |rnic| {
                        rnic.change_routes(group, changes.routes());
                        if let Some(rules) = &rules {
                            rnic.set_rules(group, changes.vni, rules);
                        }
                    },
                )
            }
            Call::Hear { groups } => {
                self.engine.join(groups.into_iter().zip(fds).collect());
                Ok(Answer::Done)
            }
            Call::Qpns(ranges) => {
                self.engine.rnic.lock().set_qpns(&ranges);
                self.asked_for_qpns = false;
                Ok(Answer::Done)
            }
            Call::End => {
                self.ended = true;
                Ok(Answer::Done)
            }
        }
    }

    /// Applies a change of peers and rules to the switch and to the RNIC.
    fn put_in_force(&mut self, switch: impl FnOnce(&Switch), rnic: impl FnOnce(&mut Rnic)) -> Done {
        // Until they have ended, connections to a group that is no longer joined must not send anything unsealed.
        let mut sealed = self.switch.sealed();
        switch(&self.switch);
        let sealed_now = self.switch.sealed();
        sealed.all = sealed_now.all;
        sealed.across.extend(&sealed_now.across);
        {
            let now = self.engine.now();
            let mut locked = self.engine.rnic.lock();
            let at_now = locked.at(now);
            // Before there is any new destination.
            at_now.tx().set_sealed(sealed);
            rnic(at_now);
        }
        // Pollers get the RNIC between the steps.
        while self.engine.rnic.lock().recheck(MAX_RECHECKED) {}
        self.engine.rnic.lock().tx().set_sealed(sealed_now);
        // Requests may have waited for an address.
        self.engine.after_command();
        Ok(Answer::Done)
    }

    /// Replaces the group's secrets with the ones in this file, or with none.
    fn set_secrets(&mut self, file: Option<OwnedFd>) -> Done {
        let secrets = file.map(GroupSecrets::of_file).transpose().map_err(RequestError::Secrets)?;
        if !self.switch.set_secrets(secrets.unwrap_or_default()) {
            return Err(RequestError::NoNetwork);
        }
        let sealed = self.switch.sealed();
        self.engine.rnic.lock().tx().set_sealed(sealed);
        Ok(Answer::Done)
    }

    /// Asks the supervisor for more QPNs before they are used up.
    pub(super) fn ask_for_qpns(&mut self) {
        if self.network.is_some() && !self.asked_for_qpns && self.engine.rnic.lock().qpns_left() < FEW_QPNS {
            self.asked_for_qpns = true;
            self.notices.send(&Event::Qpns);
        }
    }

    fn vrnic(&self, name: &str) -> Result<&Vrnic, RequestError> {
        self.vrnics.get(name).ok_or_else(|| unknown(name))
    }

    fn add(&mut self, new: NewVrnic, listeners: [Option<OwnedFd>; 3]) -> Done {
        let [Some(listener), Some(net_listener), Some(rfc_listener)] = listeners else {
            return Err(RequestError::NoSockets);
        };
        if self.vrnics.contains_key(&new.name) {
            return Err(RequestError::Exists(new.name));
        }
        let mac = new.hardware.mac;
        let gids = vrnic::gid_table(&new.ips, mac);
        let config = VrnicConfig { group: self.group_id, gids, limits: new.limits, share: new.share };
        let mut watch = |listener: &OwnedFd, source: Source| {
            let watched = self.watch(listener.as_fd(), source, false);
            watched.map_err(|error| RequestError::Serve { name: new.name.clone(), error })
        };
        let token = watch(&listener, Source::Listener(new.name.clone(), Mode::Native))?;
        let net_token = watch(&net_listener, Source::MachineListener(new.name.clone()))?;
        let rfc_token = watch(&rfc_listener, Source::Listener(new.name.clone(), Mode::Rfc))?;
        let Some(id) = self.engine.rnic.lock().add_vrnic(config) else {
            for token in [token, net_token, rfc_token] {
                self.sources.remove(&token);
            }
            return Err(RequestError::TooManyVrnics);
        };
        let ledger = self.ledger.for_vrnic(new.held.limits());
        let account: Arc<dyn Account> = Arc::new(KeptByRnic(ledger.clone()));
        self.engine.rnic.lock().set_account(id, &account);
        if !new.up {
            self.engine.rnic.lock().set_link(id, false);
        }
        self.engine.rnic.lock().set_vf_use(id, new.vf_use);
        let identity = Identity {
            vrnic: id,
            config: device_config::of(new.hardware, &new.limits),
            origin: self.origin,
            name: new.name.clone(),
            active_mtu: self.network.as_ref().map_or(vrnic::PORT_MTU, |e| e.mtu_code),
            log: Arc::default(),
        };
        let v = Vrnic {
            id,
            guard: Arc::new(Guard::new(mac, &new.ips, new.allow_spoof)),
            ips: new.ips,
            identity: Arc::new(identity),
            limits: new.limits,
            listener: (token, listener),
            net_listener: (net_token, net_listener),
            rfc_listener: (rfc_token, rfc_listener),
            attached: None,
            sessions: 0,
            full: false,
            ledger,
            allowance: Rc::default(),
        };
        self.vrnics.insert(new.name, v);
        // Requests may have waited for an address.
        self.engine.after_command();
        Ok(Answer::Done)
    }

    fn remove(&mut self, name: &str) -> Done {
        self.vrnic(name)?;
        let ids: Vec<u64> = self.sessions.iter().filter(|(_, s)| s.vrnic == name).map(|(&id, _)| id).collect();
        for id in ids {
            self.close(id);
        }
        let ids: Vec<u64> = self.lookers.iter().filter(|(_, l)| l.vrnic == name).map(|(&id, _)| id).collect();
        for id in ids {
            self.end_look(id);
        }
        for id in self.machines_of(name) {
            self.end_machine(id);
        }
        // Another vRNIC may get this name.
        self.paused.retain(|p| !matches!(p, Paused::Listener(_, of, _) if of == name));
        let done = self.info(name);
        done.iter().for_each(|v| self.gone.add_done(v));
        if let Some(v) = self.vrnics.remove(name) {
            for (token, listener) in [&v.listener, &v.net_listener, &v.rfc_listener] {
                let _ = epoll::delete(&self.epoll, listener);
                self.sources.remove(token);
            }
            if let Some(id) = v.attached {
                self.switch.remove(id);
            }
            // Pollers get the RNIC between the steps.
            while self.engine.rnic.lock().tear_down_of(v.id, MAX_TORN_DOWN) {}
            self.engine.rnic.lock().remove_vrnic(v.id);
            // Programs may wait in the listeners' queues, with descriptors.
            for (_, listener) in [v.listener, v.net_listener, v.rfc_listener] {
                drop(BlockingFd::refused(listener, &v.ledger));
            }
        }
        Ok(Answer::Done)
    }

    fn set_link(&mut self, name: &str, up: bool) -> Done {
        let v = self.vrnic(name)?;
        self.engine.rnic.lock().set_link(v.id, up);
        if let Some(id) = v.attached {
            self.switch.set_link(id, up);
        }
        self.engine.after_command();
        Ok(Answer::Done)
    }

    /// Adds an address to a vRNIC, in the first free place of its GID table, or removes one, which leaves a free place.
    fn change_address(&mut self, name: &str, ip: IpNet, add: bool) -> Done {
        let v = self.vrnics.get_mut(name).ok_or_else(|| unknown(name))?;
        let gid = Gid::from_ip(ip.addr);
        let mut gids = self.engine.rnic.lock().gids(v.id).to_vec();
        if !add {
            gids.iter_mut().filter(|g| **g == gid).for_each(|g| *g = Gid::default());
            v.ips.retain(|o| !vrnic::same_address(o, &ip));
        } else {
            match gids.iter().position(|g| g.is_zero()) {
                Some(hole) => gids[hole] = gid,
                None if gids.len() < vrnic::MAX_GIDS => gids.push(gid),
                None => return Err(RequestError::TooManyAddresses { name: name.into(), count: gids.len() }),
            }
            v.ips.push(ip);
        }
        v.guard.set_addresses(&v.ips);
        self.engine.rnic.lock().set_gids(v.id, gids);
        self.engine.after_command();
        Ok(Answer::Done)
    }

    fn attach(&mut self, name: &str, id: u64, fd: Option<OwnedFd>) -> Done {
        let group = self.group_id;
        let v = self.vrnics.get_mut(name).ok_or_else(|| unknown(name))?;
        let fd = fd.ok_or(RequestError::NoDescriptor("attach"))?;
        if v.attached.is_some_and(vm_net::is_machine) {
            return Err(RequestError::MachineAttached(name.into()));
        }
        let up = self.engine.rnic.lock().is_up(v.id);
        self.switch.add(id, fd, group, v.guard.clone(), up).map_err(RequestError::Interface)?;
        v.attached = Some(id);
        Ok(Answer::Done)
    }

    fn status(&self) -> WorkerStatus {
        let rnic = self.engine.rnic.lock();
        let (drops, vf_questions) = (rnic.wire_drops(), rnic.vf_questions());
        drop(rnic);
        WorkerStatus {
            sessions: self.sessions.len(),
            rnic_held: self.engine.rnic.held(),
            port: self.engine.port().map(PortIo::counters).unwrap_or_default(),
            drops,
            vf_questions,
            tunnel: self.switch.tunnel_drops(),
            seal: self.switch.seal_info(),
        }
    }

    fn figures(&self, most: usize) -> Figures {
        let mut figures = Figures { status: self.status(), all: self.gone.clone(), vrnics: Vec::new() };
        for info in self.vrnics.keys().filter_map(|name| self.info(name)) {
            figures.all.add(&info);
            if figures.vrnics.len() < most {
                figures.vrnics.push(info);
            }
        }
        figures
    }

    /// The part of a vRNIC's information that this worker has. The supervisor adds the rest.
    fn info(&self, name: &str) -> Option<VrnicInfo> {
        let v = self.vrnics.get(name)?;
        let rnic = self.engine.rnic.lock();
        let u = rnic.usage(v.id);
        Some(VrnicInfo {
            name: name.into(),
            gids: rnic.gids(v.id).iter().map(|g| g.to_string()).collect(),
            up: rnic.is_up(v.id),
            allow_spoof: v.guard.allows_spoof(),
            frames_refused: v.guard.drops(),
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
            kicks: rnic.kicks(v.id),
            counters: rnic.counters(v.id).unwrap_or_default(),
            ..VrnicInfo::default()
        })
    }
}

fn unknown(name: &str) -> RequestError {
    RequestError::NoVrnic(name.into())
}
