//! The network interfaces of virtual machines, one for each vRNIC, beside its device. A VMM connects to a separate
//! socket for it (vhost-user, virtio network device). Its frames go through the switch like frames of containers.

use unirdma_device::{NET_TX, NetDevice, NetFrontend};

use super::*;

/// Virtqueues of an interface.
const QUEUES: usize = NET_TX + 1;
/// Added to the session's number to make the number of a machine's interface in the switch. Interfaces of containers
/// have smaller numbers.
const MACHINE: u64 = 1 << 62;
/// Time after which the connection of a refused VMM is closed, ns. QEMU reconnects at once, without end.
const REFUSED_NS: u64 = 1_000_000_000;
/// Most refused connections that are kept for that time.
const MOST_REFUSED: usize = 64;

/// A VMM that connects its machine to a vRNIC's network interface.
pub(super) struct Machine {
    vrnic: String,
    backend: Backend,
    front: NetFrontend,
    kick: Option<Arc<BlockingFd>>,
    token: u64,
}

impl Machine {
    pub fn is_of(&self, vrnic: &str) -> bool {
        self.vrnic == vrnic
    }

    pub fn memory(&self) -> &Memory {
        self.backend.memory()
    }
}

impl Worker {
    /// Accepts a VMM for the network interface of a vRNIC.
    pub(super) fn on_machine_listener(&mut self, name: &str) {
        let Some(v) = self.vrnics.get_mut(name) else { return };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(sock) = rustix::net::accept_with(&v.net_listener.1, flags) else { return };
        // The VMM may have sent descriptors already, which are closed together with the socket.
        let ticket = v.ledger.take(Resource::Descriptors, 1).filter(|_| !v.ledger.is_overdrawn());
        let why = match (&ticket, v.attached) {
            (None, _) => Some("the vRNIC holds too many descriptors"),
            (_, Some(id)) if is_machine(id) => Some("another virtual machine has it"),
            (_, Some(_)) => Some("a container has it"),
            _ => None,
        };
        let sock = match (ticket, why) {
            (Some(ticket), None) => BlockingFd::new(sock, ticket),
            (ticket, why) => {
                if let Some(left_out) = v.identity.log.next(self.engine.now()) {
                    tracing::warn!(vrnic = name, why, left_out, "a virtual machine gets no network interface");
                }
                return match ticket {
                    Some(ticket) => self.refuse_later(BlockingFd::new(sock, ticket)),
                    None => drop(BlockingFd::refused(sock, &v.ledger)),
                };
            }
        };
        // See the program's socket in `on_listener`.
        if rustix::net::sockopt::set_socket_oobinline(&sock, true).is_err() {
            return;
        }
        let id = self.next_token;
        let (ledger, guard, log, vrnic) = (v.ledger.clone(), v.guard.clone(), v.identity.log.clone(), v.id);
        let Ok(token) = self.watch(sock.as_fd(), Source::Socket(id), false) else { return };
        let device = Arc::new(NetDevice::default());
        let up = self.engine.rnic.lock().is_up(vrnic);
        self.switch.add_machine(MACHINE | id, device.clone(), self.group_id, guard, up);
        if let Some(v) = self.vrnics.get_mut(name) {
            v.attached = Some(MACHINE | id);
        }
        let front = NetFrontend { device, changed: None, vrnic: name.into(), log };
        let backend = Backend::new(sock, QUEUES, ledger);
        self.machines.insert(id, Machine { vrnic: name.into(), backend, front, kick: None, token });
    }

    /// Keeps a refused connection for a while before it is closed.
    fn refuse_later(&mut self, sock: BlockingFd) {
        if self.refused.len() == MOST_REFUSED {
            self.refused.pop_front();
        }
        self.refused.push_back((self.engine.now(), sock));
    }

    /// Time until the oldest refused connection is closed, ns.
    pub(super) fn refused_limit(&self) -> Option<u64> {
        self.refused.front().map(|r| (r.0 + REFUSED_NS).saturating_sub(self.engine.now()))
    }

    /// Closes the refused connections whose time is over.
    pub(super) fn end_refused(&mut self) {
        while self.refused_limit() == Some(0) {
            self.refused.pop_front();
        }
    }

    /// Handles messages of a VMM for a network interface; false if there is no such session.
    pub(super) fn on_machine_socket(&mut self, id: u64) -> bool {
        let Some(m) = self.machines.get_mut(&id) else { return false };
        let result = m.backend.on_readable(&mut m.front, BURST);
        let half = m.backend.is_half();
        if let Some(kick) = m.front.changed.take() {
            if let Some(old) = m.kick.take() {
                self.switch.unwatch(old.as_fd());
            }
            m.kick = kick.filter(|k| self.switch.watch(MACHINE | id, k.as_fd()).is_ok());
        }
        self.note_half(id, half);
        if !matches!(result, Ok(Progress::Open)) {
            self.end_machine(id);
        }
        true
    }

    /// Ends the network interface of a virtual machine.
    pub(super) fn end_machine(&mut self, id: u64) {
        self.note_half(id, false);
        let Some(m) = self.machines.remove(&id) else { return };
        self.sources.remove(&m.token);
        let _ = epoll::delete(&self.epoll, m.backend.socket());
        if let Some(kick) = &m.kick {
            self.switch.unwatch(kick.as_fd());
        }
        self.switch.remove(MACHINE | id);
        if let Some(v) = self.vrnics.get_mut(&m.vrnic) {
            v.attached.take_if(|a| *a == MACHINE | id);
        }
    }

    /// Ends the interfaces of machines whose memory is gone.
    pub(super) fn end_broken_machines(&mut self) {
        let broken = self.machines.iter().filter(|(_, m)| m.memory().is_broken()).map(|(&id, _)| id);
        for id in broken.collect::<Vec<_>>() {
            self.end_machine(id);
        }
    }

    /// The network interface sessions of a vRNIC.
    pub(super) fn machines_of(&self, vrnic: &str) -> Vec<u64> {
        self.machines.iter().filter(|(_, m)| m.is_of(vrnic)).map(|(&id, _)| id).collect()
    }
}

/// True if `id` is the number of a machine's interface.
pub(super) fn is_machine(id: u64) -> bool {
    id & MACHINE != 0
}
