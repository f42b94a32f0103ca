//! Hosts with one RNIC each, and a bad network between them, on a virtual clock.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use unirdma_abi as abi;
use unirdma_formats::cm::{GSI_QPN, Mad};
use unirdma_formats::net::{ETH_BYTES, Flow, VXLAN_BYTES};
use unirdma_formats::wire::{Envelope, ICRC_BYTES, Packet, ROCE_PORT, icrc};
use unirdma_formats::{Gid, QpType, WrOpcode};
use unirdma_rnic::{Arrival, Counters, Rng, Rnic, Route};

use crate::{End, IOVA, address, attrs_of, ip, poll, wqe};

/// How long a packet takes that is not held up.
const DELAY_NS: u64 = 5_000;

/// What the network does to packets, in thousandths.
#[derive(Clone, Copy, Default)]
pub struct Faults {
    /// Packets that do not arrive.
    pub loss: u64,
    /// Packets that arrive twice.
    pub duplication: u64,
    /// Packets that others may overtake.
    pub reordering: u64,
    /// Packets in which one bit changes.
    pub corruption: u64,
}

/// A packet on its way.
struct Flying {
    from: usize,
    to: usize,
    /// Bytes of the headers of VXLAN and of the packet within; 0 if it is a plain packet.
    outer: usize,
    bytes: Vec<u8>,
}

/// Several hosts, their ends, and the network between them.
pub struct Net {
    /// The RNIC of each host.
    pub rnics: Vec<Rnic>,
    /// End `i` lives on host `i` modulo the number of hosts and has the address `ip(1 + i)`.
    pub ends: Vec<End>,
    /// The virtual clock, in nanoseconds.
    pub now: u64,
    /// By arrival and number.
    flying: BTreeMap<(u64, u64), Flying>,
    /// How many packets are on their way or have been.
    sent: u64,
    faults: Faults,
    rng: Rng,
    /// Packets that left these hosts are lost.
    cut: Vec<bool>,
    /// The network marks every packet as congested.
    pub congested: bool,
    /// Corrupted packets that the ICRC gave away.
    pub caught: u64,
    /// Packets for each QP that did not arrive, or not whole.
    lost: HashMap<u32, u32>,
    /// Messages of connection management that were sent.
    pub mads: Vec<Mad>,
}

/// Address of host `i`.
pub fn host(i: usize) -> IpAddr {
    IpAddr::from([192, 168, 0, 1 + i as u8])
}

/// Where a packet from `from` came in.
pub fn arrival(from: IpAddr) -> Arrival {
    Arrival { from, port: ROCE_PORT, to: host(0), congested: false, group: None }
}

/// GID of end `i`.
pub fn gid(i: usize) -> Gid {
    ip(1 + i as u8)
}

impl Net {
    /// Two hosts with one RC QP each, connected.
    pub fn new(seed: u64, faults: Faults, change: impl Fn(abi::QpAttr) -> abi::QpAttr) -> Net {
        Self::of_type(QpType::Rc, seed, faults, change)
    }

    /// Two hosts with one QP each, connected.
    pub fn of_type(typ: QpType, seed: u64, faults: Faults, change: impl Fn(abi::QpAttr) -> abi::QpAttr) -> Net {
        let mut net = Net::hosts(2, &[typ, typ], seed, faults);
        net.connect(typ, 0, 1, &change);
        net.connect(typ, 1, 0, &change);
        net
    }

    /// `hosts` hosts and one end of each of these types, not connected yet.
    pub fn hosts(hosts: usize, types: &[QpType], seed: u64, faults: Faults) -> Net {
        let mut rnics: Vec<Rnic> = (0..hosts as u64).map(|i| Rnic::new(seed ^ (i * 0xabcd), 0)).collect();
        let ends: Vec<End> =
            types.iter().enumerate().map(|(i, &t)| End::of_type(&mut rnics[i % hosts], 0, 1 + i as u8, t)).collect();
        for (h, rnic) in rnics.iter_mut().enumerate() {
            let others = (0..ends.len()).filter(|i| i % hosts != h);
            let route = |i: usize| Route { host: host(i % hosts), foreign: false, vni: 77 };
            rnic.set_routes(others.map(|i| ((0, gid(i)), route(i))).collect::<HashMap<_, _>>());
        }
        let rng = Rng::new(seed);
        let cut = vec![false; hosts];
        Net {
            rnics,
            ends,
            now: 0,
            flying: BTreeMap::new(),
            sent: 0,
            faults,
            rng,
            cut,
            congested: false,
            caught: 0,
            lost: HashMap::new(),
            mads: Vec::new(),
        }
    }

    fn host_of(&self, end: usize) -> usize {
        end % self.rnics.len()
    }

    /// The RNIC of an end.
    pub fn rnic(&mut self, end: usize) -> &mut Rnic {
        let h = self.host_of(end);
        let now = self.now;
        self.rnics[h].at(now)
    }

    /// Takes end `a` from RESET to RTS, connected to `b`.
    pub fn connect(&mut self, typ: QpType, a: usize, b: usize, change: &impl Fn(abi::QpAttr) -> abi::QpAttr) {
        let (session, qpn) = (self.ends[a].session, self.ends[a].qpn);
        for (mask, attr) in attrs_of(typ, self.ends[b].qpn, gid(b)) {
            self.rnic(a).modify_qp(session, qpn, mask, &change(attr)).unwrap();
        }
    }

    /// An AH of end `a` that leads to `b`.
    pub fn ah(&mut self, a: usize, b: usize) -> u32 {
        let (session, pd) = (self.ends[a].session, self.ends[a].pd);
        self.rnic(a).create_ah(session, pd, &address(gid(b))).unwrap()
    }

    /// Loses everything that a host sends, or no longer.
    pub fn cut(&mut self, host: usize, cut: bool) {
        self.cut[host] = cut;
    }

    fn chance(&mut self, thousandths: u64) -> bool {
        self.rng.next_u64() % 1000 < thousandths
    }

    /// Takes what a host sends; true if there was anything.
    fn collect(&mut self, from: usize) -> bool {
        let tx = self.rnics[from].tx();
        let packets: Vec<_> = tx.packets().to_vec();
        let all: Vec<Vec<u8>> = packets.iter().map(|p| tx.bytes(p).to_vec()).collect();
        tx.sent(packets.len());
        for (p, mut bytes) in packets.iter().zip(all) {
            let to = (0..self.rnics.len()).find(|&i| host(i) == p.path.to).unwrap();
            let outer = p.outer();
            let crc = icrc(&envelope(from, to, outer, &bytes), &bytes[outer..bytes.len() - ICRC_BYTES]);
            let end = bytes.len() - ICRC_BYTES;
            bytes[end..].copy_from_slice(&crc.to_le_bytes());
            let parsed = Packet::parse(&bytes[outer..end]).ok();
            let dest = parsed.as_ref().map_or(0, |p| p.dest_qp);
            if let Some(p) = parsed.filter(|p| p.dest_qp == GSI_QPN) {
                self.mads.extend(Mad::parse(p.payload));
            }
            if self.cut[from] || self.chance(self.faults.loss) {
                *self.lost.entry(dest).or_default() += 1;
                continue;
            }
            let copies = 1 + u64::from(self.chance(self.faults.duplication));
            for _ in 0..copies {
                let mut bytes = bytes.clone();
                if self.chance(self.faults.corruption) {
                    *self.lost.entry(dest).or_default() += 1;
                    let bit = self.rng.next_u64() as usize % (8 * (bytes.len() - outer));
                    bytes[outer + bit / 8] ^= 1 << (bit % 8);
                }
                let late = if self.chance(self.faults.reordering) { self.rng.next_u64() % 20_000 } else { 0 };
                self.sent += 1;
                self.flying.insert((self.now + DELAY_NS + late, self.sent), Flying { from, to, outer, bytes });
            }
        }
        !packets.is_empty()
    }

    /// Packets of the connection between two ends, either way, that did not arrive, or not whole.
    pub fn lost_between(&self, a: usize, b: usize) -> u32 {
        let lost = |end: usize| self.lost.get(&self.ends[end].qpn).copied().unwrap_or(0);
        lost(a) + lost(b)
    }

    fn arrive(&mut self, f: &Flying) {
        let congested = self.congested;
        let rnic = &mut self.rnics[f.to];
        if f.outer > 0 {
            let before = rnic.wire_drops().bad_icrc;
            rnic.handle_packet(self.now, &Arrival::inside(host(f.from), 0), &f.bytes[VXLAN_BYTES + ETH_BYTES..]);
            self.caught += rnic.wire_drops().bad_icrc - before;
            return;
        }
        let (body, crc) = f.bytes.split_last_chunk::<ICRC_BYTES>().unwrap();
        if icrc(&envelope(f.from, f.to, 0, &f.bytes), body).to_le_bytes() == *crc {
            rnic.handle_packet(self.now, &Arrival { congested, ..arrival(host(f.from)) }, body);
        } else {
            self.caught += 1;
        }
    }

    /// Runs until nothing is due before `limit` nanoseconds have passed.
    pub fn run(&mut self, limit: u64) {
        let end = self.now + limit;
        loop {
            for i in 0..self.rnics.len() {
                while poll(&mut self.rnics[i], self.now) | self.collect(i) {}
            }
            let arrival = self.flying.keys().next().map(|k| k.0);
            let timers = self.rnics.iter().filter_map(|r| r.next_timeout());
            let Some(next) = timers.chain(arrival).min().filter(|&t| t <= end) else { break };
            self.now = self.now.max(next);
            while let Some(e) = self.flying.first_entry().filter(|e| e.key().0 <= self.now) {
                let f = e.remove();
                self.arrive(&f);
            }
        }
        self.now = end;
    }

    /// A send WQE that reaches the memory of end 1.
    pub fn remote(&self, op: WrOpcode, wr_id: u64, off: u64) -> abi::SqWqe {
        abi::SqWqe { remote_addr: IOVA + off, rkey: self.ends[1].key, ..wqe(op, wr_id) }
    }

    /// Counters of the vRNIC of an end.
    pub fn counters(&self, end: usize) -> Counters {
        self.rnics[self.host_of(end)].counters(self.ends[end].vnic).unwrap()
    }

    /// State of the QP of an end, as QUERY_QP has it.
    pub fn state(&mut self, end: usize) -> u8 {
        let (session, qpn) = (self.ends[end].session, self.ends[end].qpn);
        self.rnic(end).query_qp(session, qpn).unwrap().qp_state
    }
}

/// What the ICRC of a packet covers beside its bytes.
fn envelope(from: usize, to: usize, outer: usize, bytes: &[u8]) -> Envelope {
    if outer > 0 {
        let (f, _) = Flow::parse(&bytes[VXLAN_BYTES + ETH_BYTES..]).unwrap();
        return Envelope { src: f.src, dst: f.dst, src_port: f.src_port, ip_id: f.ip_id };
    }
    Envelope { src: host(from), dst: host(to), src_port: ROCE_PORT, ip_id: 0 }
}
