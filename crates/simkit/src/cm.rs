//! Programs that connect by address.

use std::net::Ipv4Addr;

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Status, port_space};
use unirdma_formats::{QpState, QpType};
use unirdma_rnic::CmEventKind::{self, *};

use crate::net::{Faults, Net};
use crate::{ALL, SECOND};

/// The port that servers listen at.
pub const PORT: u16 = 7174;
/// The event queue of every identifier.
pub const QUEUE: u32 = 3;

/// The socket address 10.0.0.`last`.
pub fn addr(last: u8, port: u16) -> abi::CmAddr {
    abi::CmAddr { ip: Ipv4Addr::new(10, 0, 0, last).to_ipv6_mapped().octets(), port, family: 4, ..Default::default() }
}

impl Net {
    /// Sends a command of connection management of the program of an end. Returns the identifier.
    fn ask_cm(
        &mut self,
        end: usize,
        space: u16,
        op: CmOp,
        id: u32,
        f: impl FnOnce(&mut abi::CmReq),
    ) -> Result<u32, Status> {
        let mut r = abi::CmReq { op: op as u8, id, queue: QUEUE, port_space: space, ..Default::default() };
        f(&mut r);
        let s = self.session(end);
        self.rnic(end).cm(s, &r).map(|r| r.id)
    }

    /// Takes the next event of an end.
    fn cm_event(&mut self, end: usize) -> Option<abi::CmEvent> {
        let s = self.session(end);
        self.rnic(end).cm_event(s, QUEUE).ok()
    }

    /// Moves the QP of an end to RTS with the attributes of the connection, and with more access.
    fn cm_ready(&mut self, end: usize, id: u32, access: u32) {
        let (s, qpn) = (self.session(end), self.ends[end].qpn);
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let (mask, mut a) = self.rnic(end).cm_qp_attr(s, id, state as u32).unwrap();
            a.qp_access_flags |= access;
            self.rnic(end).modify_qp(s, qpn, mask, &a).unwrap();
        }
    }
}

/// Two ends whose programs connect step by step: end 0 is the client, end 1 the server.
pub struct Cm {
    /// Their hosts and the network.
    pub net: Net,
    space: u16,
}

impl Cm {
    /// Two ends on one or two hosts, with UD QPs in the port space UDP and RC QPs in any other.
    pub fn new(hosts: usize, space: u16, seed: u64, faults: Faults) -> Cm {
        let typ = if space == port_space::UDP { QpType::Ud } else { QpType::Rc };
        Cm { net: Net::hosts(hosts, &[typ, typ], seed, faults), space }
    }

    /// Two ends with RC QPs on one host, and on two, the server in another group (blue) than the client (red).
    pub fn apart() -> [(&'static str, Cm); 2] {
        let net = |hosts| Net::groups(hosts, &[QpType::Rc; 2], &[0, 1], |end| end % hosts);
        [1, 2].map(|n| (["one host", "two hosts"][n - 1], Cm { net: net(n), space: port_space::TCP }))
    }

    /// Two ends with RC QPs on one host, and on two.
    pub fn each() -> [(&'static str, Cm); 2] {
        [1, 2].map(|n| (["one host", "two hosts"][n - 1], Cm::new(n, port_space::TCP, 5, Faults::default())))
    }

    /// Sends a command of an end; `f` sets the operation's arguments. Returns the identifier.
    pub fn ask(&mut self, end: usize, op: CmOp, id: u32, f: impl FnOnce(&mut abi::CmReq)) -> Result<u32, Status> {
        self.net.ask_cm(end, self.space, op, id, f)
    }

    /// Takes all events of an end.
    pub fn events(&mut self, end: usize) -> Vec<abi::CmEvent> {
        std::iter::from_fn(|| self.net.cm_event(end)).collect()
    }

    /// The one event that an end must have.
    pub fn event(&mut self, end: usize, kind: CmEventKind) -> abi::CmEvent {
        let e = self.events(end);
        assert_eq!(e.iter().map(|e| e.kind).collect::<Vec<_>>(), [kind as u32], "end {end}: {e:?}");
        e[0]
    }

    /// An identifier of an end that listens at [`PORT`].
    pub fn listen(&mut self, end: usize) -> u32 {
        let id = self.ask(end, CmOp::Create, 0, |_| ()).unwrap();
        self.ask(end, CmOp::Bind, id, |r| r.src = addr(0, PORT)).unwrap_err();
        let any = abi::CmAddr { ip: Ipv4Addr::UNSPECIFIED.to_ipv6_mapped().octets(), ..addr(0, PORT) };
        self.ask(end, CmOp::Bind, id, |r| r.src = any).unwrap();
        self.ask(end, CmOp::Listen, id, |r| r.value = 4).unwrap();
        id
    }

    /// An identifier of end 0 that knows the way to end 1.
    pub fn resolved(&mut self) -> u32 {
        let id = self.ask(0, CmOp::Create, 0, |_| ()).unwrap();
        self.ask(0, CmOp::ResolveAddr, id, |r| r.dst = addr(2, PORT)).unwrap();
        self.event(0, AddrResolved);
        self.ask(0, CmOp::ResolveRoute, id, |_| ()).unwrap();
        self.event(0, RouteResolved);
        id
    }

    /// End 0 asks end 1 for a connection, with this private data. Returns the identifier.
    pub fn connect(&mut self, private: &[u8]) -> u32 {
        let id = self.resolved();
        let qpn = self.net.ends[0].qpn;
        self.ask(0, CmOp::Connect, id, |r| {
            r.param = abi::CmParam { qpn, responder_resources: 3, initiator_depth: 5, retry_count: 6, ..r.param };
            // Above the maximum of 7: programs ask for that (fio).
            r.param.rnr_retry_count = 10;
            r.param.private_len = private.len() as u8;
            r.private.as_flattened_mut()[..private.len()].copy_from_slice(private);
        })
        .unwrap();
        id
    }

    /// End 0 asks end 1 for a connection, and looks at no event. Returns the identifier.
    pub fn connect_unseen(&mut self) -> u32 {
        let id = self.ask(0, CmOp::Create, 0, |_| ()).unwrap();
        self.ask(0, CmOp::ResolveAddr, id, |r| r.dst = addr(2, PORT)).unwrap();
        self.ask(0, CmOp::ResolveRoute, id, |_| ()).unwrap();
        self.ask(0, CmOp::Connect, id, |_| ()).unwrap();
        id
    }

    /// End 1 accepts a request.
    pub fn accept(&mut self, id: u32) {
        let qpn = self.net.ends[1].qpn;
        self.ask(1, CmOp::Accept, id, |r| {
            r.param = abi::CmParam { qpn, responder_resources: 255, initiator_depth: 255, ..r.param };
            // Above the maximum of 7: programs ask for that (fio).
            r.param.rnr_retry_count = 10;
        })
        .unwrap();
    }

    /// Moves the QP of an end to RTS with the attributes of the connection.
    pub fn ready(&mut self, end: usize, id: u32) {
        self.net.cm_ready(end, id, 0);
    }

    /// Two connected ends: their identifiers.
    pub fn connected(&mut self) -> (u32, u32) {
        self.listen(1);
        let a = self.connect(b"hello");
        self.net.run(SECOND / 10);
        let b = self.event(1, ConnectRequest).id;
        self.ready(1, b);
        self.accept(b);
        self.net.run(SECOND / 10);
        self.event(0, ConnectResponse);
        self.ready(0, a);
        self.ask(0, CmOp::Establish, a, |_| ()).unwrap();
        self.net.run(SECOND / 10);
        self.event(1, Established);
        (a, b)
    }
}

/// A connection of two ends by address, made and ended on whatever network there is.
pub struct Meeting {
    ends: [usize; 2],
    ids: [u32; 2],
}

/// A command of an end in a [`Meeting`], which must succeed.
fn ask(net: &mut Net, end: usize, op: CmOp, id: u32, f: impl FnOnce(&mut abi::CmReq)) -> u32 {
    net.ask_cm(end, port_space::TCP, op, id, f).unwrap()
}

impl Meeting {
    /// Connects RC ends that are not in use yet: each step comes once, in order, whatever the network does.
    pub fn new(net: &mut Net, client: usize, server: usize) -> Meeting {
        let port = PORT + server as u16;
        let qpns = [client, server].map(|e| net.ends[e].qpn);
        let listener = ask(net, server, CmOp::Create, 0, |_| ());
        ask(net, server, CmOp::Bind, listener, |r| r.src = addr(1 + server as u8, port));
        ask(net, server, CmOp::Listen, listener, |_| ());
        let a = ask(net, client, CmOp::Create, 0, |_| ());
        ask(net, client, CmOp::ResolveAddr, a, |r| r.dst = addr(1 + server as u8, port));
        ask(net, client, CmOp::ResolveRoute, a, |_| ());
        let param = |r: &mut abi::CmReq, qpn| {
            r.param = abi::CmParam { qpn, responder_resources: 4, initiator_depth: 4, ..r.param };
            (r.param.retry_count, r.param.rnr_retry_count) = (7, 7);
        };
        ask(net, client, CmOp::Connect, a, |r| param(r, qpns[0]));
        let (mut seen, mut b) = ([Vec::new(), Vec::new()], 0);
        for _ in 0..1000 {
            net.run(SECOND / 20);
            while let Some(e) = net.cm_event(server) {
                seen[1].push(e.kind);
                if e.kind == ConnectRequest as u32 {
                    b = e.id;
                    net.cm_ready(server, b, ALL);
                    ask(net, server, CmOp::Accept, b, |r| param(r, qpns[1]));
                }
            }
            while let Some(e) = net.cm_event(client) {
                seen[0].push(e.kind);
                if e.kind == ConnectResponse as u32 {
                    net.cm_ready(client, a, ALL);
                    ask(net, client, CmOp::Establish, a, |_| ());
                }
            }
            if seen[1].len() == 2 {
                break;
            }
        }
        let expected = [vec![AddrResolved, RouteResolved, ConnectResponse], vec![ConnectRequest, Established]];
        assert_eq!(
            seen,
            expected.map(|v| v.into_iter().map(|k| k as u32).collect::<Vec<_>>()),
            "ends {client}, {server}"
        );
        ask(net, server, CmOp::Destroy, listener, |_| ());
        Meeting { ends: [client, server], ids: [a, b] }
    }

    /// The client (0) or the server (1) disconnects. Both must get the event once.
    pub fn end(self, net: &mut Net, by: usize) {
        ask(net, self.ends[by], CmOp::Disconnect, self.ids[by], |_| ());
        net.run(100 * SECOND);
        for (end, id) in self.ends.into_iter().zip(self.ids) {
            let kinds: Vec<u32> = std::iter::from_fn(|| net.cm_event(end)).map(|e| e.kind).collect();
            assert_eq!(kinds, [Disconnected as u32, TimewaitExit as u32], "end {end}");
            ask(net, end, CmOp::Destroy, id, |_| ());
        }
    }
}
