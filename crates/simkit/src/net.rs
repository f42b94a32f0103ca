//! Hosts with one RNIC each, and a bad network between them, on a virtual clock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash};
use std::net::IpAddr;

use unirdma_abi as abi;
use unirdma_formats::cm::{GSI_QKEY, GSI_QPN, Mad};
use unirdma_formats::net::{ETH_BYTES, Flow, VXLAN_BYTES, vxlan_source};
use unirdma_formats::wire::{
    Deth, Envelope, Extra, ICRC_BYTES, MAX_HEADER_BYTES, Op, Opcode, Packet, Part, ROCE_PORT, Transport, icrc,
};
use unirdma_formats::{Gid, QpType, WrOpcode};
use unirdma_policy::Rule;
use unirdma_rnic::{
    Arrival, Attached, Counters, Job, MAX_OUTER_BYTES, Object, Record, RestoreError, Rng, Rnic, Route, SessionId,
};

use crate::{End, IOVA, SECOND, address, attrs_of, ip, poll, wqe};

/// Transit time of a packet that is not delayed.
const DELAY_NS: u64 = 5_000;

/// VNI of group 0.
pub const FIRST_VNI: u32 = 77;
/// The names of groups 0, 1 and 2 in rules.
pub const NAMES: [&str; 3] = ["red", "blue", "green"];

/// Longest time for which a vRNIC is on no host.
const MOST_AWAY_NS: u64 = SECOND / 10;
/// Shortest time between retries of a request: an ACK timeout of code 16.
const TRY_NS: u64 = SECOND / 4;

/// Probabilities with which the network loses or changes packets, in thousandths.
#[derive(Clone, Copy, Default)]
pub struct Faults {
    /// Packets that do not arrive.
    pub loss: u64,
    /// Packets that arrive twice.
    pub duplication: u64,
    /// Packets that later ones may overtake.
    pub reordering: u64,
    /// Packets in which one bit changes.
    pub corruption: u64,
}

/// A packet on its way.
struct Flying {
    from: usize,
    to: usize,
    /// Destination QPN.
    dest: u32,
    /// Bytes of the VXLAN header and of the inner headers; 0 for a plain packet.
    outer: usize,
    bytes: Vec<u8>,
}

/// A job that is being done on a host.
struct Doing {
    host: usize,
    job: Box<Job>,
    /// The job was done, but the RNIC does not know that yet.
    done: bool,
}

/// An end whose vRNIC was saved and is on no host.
struct Away {
    record: Vec<u8>,
    memory: Attached,
    since: u64,
    /// When it is restored, on host `to`.
    until: u64,
    to: usize,
}

/// Several hosts, their ends, and the network between them.
pub struct Net {
    /// The RNIC of each host.
    pub rnics: Vec<Rnic>,
    /// End `i` has the address `ip(1 + i)`.
    pub ends: Vec<End>,
    /// The group of each end.
    groups: Vec<u32>,
    /// The host of each end; for an end that is away, the host that it left.
    homes: Vec<usize>,
    /// Ends whose vRNICs are on no host.
    away: BTreeMap<usize, Away>,
    /// Probability, in thousandths, that a vRNIC is saved and removed at a moment at which something happens. It is
    /// restored on some host a little later.
    pub wander: u64,
    /// How many times a vRNIC was restored.
    pub moves: u64,
    /// The virtual clock, in nanoseconds.
    pub now: u64,
    /// By arrival and number.
    flying: BTreeMap<(u64, u64), Flying>,
    /// Number of packets that were sent and of jobs that were delayed. Orders those that are due at the same time.
    sent: u64,
    /// Faults of the network, from now on.
    pub faults: Faults,
    /// Longest time between the creation and the start of a job, and between its start and its end, ns. 0: jobs are
    /// done at once.
    pub late_ns: u64,
    /// Jobs are not done. They wait in `kept`, with the host that made them.
    pub keeps_jobs: bool,
    /// Jobs that were not started.
    pub kept: Vec<(usize, Box<Job>)>,
    /// By time and number.
    doing: BTreeMap<(u64, u64), Doing>,
    rng: Rng,
    /// For each host, whether all packets that it sends are lost.
    cut: Vec<bool>,
    /// The network marks every packet as congested.
    pub congested: bool,
    /// Corrupted packets that the ICRC revealed.
    pub caught: u64,
    /// Digest of all packets and the times at which they were sent. Two runs with the same digest were the same.
    pub digest: DefaultHasher,
    /// Number of packets for each QP that were lost or corrupted.
    lost: HashMap<u32, u32>,
    /// Messages of connection management that were sent.
    pub mads: Vec<Mad>,
}

/// Address of host `i`.
pub fn host(i: usize) -> IpAddr {
    IpAddr::from([192, 168, 0, 1 + i as u8])
}

/// The [`Arrival`] of a plain packet from `from`.
pub fn arrival(from: IpAddr) -> Arrival {
    Arrival { from, port: ROCE_PORT, to: host(0), congested: false, group: None, source: None, sealed: false }
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

    /// `hosts` hosts and one end of each of these types, not connected yet. End `i` lives on host `i` modulo their
    /// number.
    pub fn hosts(hosts: usize, types: &[QpType], seed: u64, faults: Faults) -> Net {
        Self::homes(hosts, types, seed, faults, |end| end % hosts)
    }

    /// Two connected ends of this type on the first of two hosts, without faults. Their connections survive the loss of
    /// one packet.
    pub fn together(typ: QpType) -> Net {
        let mut net = Net::homes(2, &[typ, typ], 9, Faults::default(), |_| 0);
        let few = |a| abi::QpAttr { retry_cnt: 1, rnr_retry: 7, ..a };
        net.connect(typ, 0, 1, &few);
        net.connect(typ, 1, 0, &few);
        net
    }

    /// As [`Net::hosts`], with end `i` on host `home(i)`.
    pub fn homes(hosts: usize, types: &[QpType], seed: u64, faults: Faults, home: impl Fn(usize) -> usize) -> Net {
        Net::made(hosts, types, &vec![0; types.len()], seed, faults, home)
    }

    /// As [`Net::homes`] without faults, with ends in these groups. Group `g` has the VNI `FIRST_VNI + g`.
    pub fn groups(hosts: usize, types: &[QpType], groups: &[u32], home: impl Fn(usize) -> usize) -> Net {
        let mut net = Net::made(hosts, types, groups, 3, Faults::default(), home);
        net.rules(&[]);
        net
    }

    fn made(
        hosts: usize,
        types: &[QpType],
        groups: &[u32],
        seed: u64,
        faults: Faults,
        home: impl Fn(usize) -> usize,
    ) -> Net {
        let mut rnics: Vec<Rnic> = (0..hosts as u64).map(|i| Rnic::new(seed ^ (i * 0xabcd), 0)).collect();
        let end = |(i, &t)| End::of_type(&mut rnics[home(i)], groups[i], 1 + i as u8, t);
        let ends: Vec<End> = types.iter().enumerate().map(end).collect();
        rnics.iter_mut().enumerate().for_each(|(h, rnic)| rnic.set_own_host(host(h)));
        let rng = Rng::new(seed);
        let cut = vec![false; hosts];
        let mut net = Net {
            groups: groups.to_vec(),
            homes: (0..ends.len()).map(home).collect(),
            away: BTreeMap::new(),
            wander: 0,
            moves: 0,
            rnics,
            ends,
            now: 0,
            flying: BTreeMap::new(),
            sent: 0,
            faults,
            late_ns: 0,
            keeps_jobs: false,
            kept: Vec::new(),
            doing: BTreeMap::new(),
            rng,
            cut,
            congested: false,
            caught: 0,
            digest: DefaultHasher::new(),
            lost: HashMap::new(),
            mads: Vec::new(),
        };
        net.set_routes();
        net
    }

    /// Gives each host the routes to the ends on other hosts, and to the ends of other groups on the same host. An end
    /// that is away is routed to the host that it left, and on that host to nowhere.
    fn set_routes(&mut self) {
        let groups: BTreeSet<u32> = self.groups.iter().copied().collect();
        for (h, rnic) in self.rnics.iter_mut().enumerate() {
            let nowhere = IpAddr::from([0; 4]);
            let all =
                groups.iter().flat_map(|&g| self.homes.iter().enumerate().map(move |(end, &home)| (g, end, home)));
            let routes = all.filter_map(|(g, end, home)| match home == h && self.groups[end] == g {
                false => Some((g, end, host(home))),
                true => self.away.contains_key(&end).then_some((g, end, nowhere)),
            });
            let vni = |end: usize| FIRST_VNI + self.groups[end];
            let route = |(g, end, host)| ((g, gid(end)), Route { host, foreign: false, vni: vni(end) });
            rnic.set_routes(routes.map(route).collect::<HashMap<_, _>>());
        }
    }

    /// Puts these rules in force on all hosts. They name groups as in [`NAMES`], in the order of their numbers.
    pub fn rules(&mut self, rules: &[&str]) {
        let groups: BTreeSet<u32> = self.groups.iter().copied().collect();
        let vni = |name: &String| NAMES.iter().position(|n| n == name).map(|i| FIRST_VNI + i as u32);
        let rules = rules.iter().map(|r| r.parse::<Rule>().unwrap());
        let rules: Vec<Rule<u32, Gid>> = rules.map(|r| r.translate(vni, |a| Gid::from_ip(*a)).unwrap()).collect();
        for rnic in &mut self.rnics {
            for &g in &groups {
                rnic.at(self.now).set_rules(g, FIRST_VNI + g, &rules);
                while rnic.recheck(1) {}
            }
        }
    }

    fn host_of(&self, end: usize) -> usize {
        self.homes[end]
    }

    /// Saves the vRNIC of an end and removes it from its host. It is restored on host `to` after `away_ns`, or earlier
    /// if its RNIC is used.
    pub fn leave(&mut self, end: usize, to: usize, away_ns: u64) {
        if self.away.contains_key(&end) {
            return;
        }
        let (home, now) = (self.host_of(end), self.now);
        let (record, memory) = self.rnics[home].take_vrnic(now, self.ends[end].vrnic).unwrap();
        let record = record.to_bytes().unwrap();
        self.away.insert(end, Away { record, memory, since: now, until: now + away_ns, to });
        self.set_routes();
    }

    /// Restores the vRNIC of an end that is away.
    pub fn come_back(&mut self, end: usize) {
        let Some(mut a) = self.away.remove(&end) else { return };
        let now = self.now;
        let record = Record::from_bytes(&a.record).unwrap();
        // A host on which another vRNIC has the same key or QPN refuses it. Then the next host is tried.
        let vrnic = loop {
            match self.rnics[a.to].restore_vrnic(now, &record, &mut a.memory) {
                Ok(vrnic) => break vrnic,
                Err(RestoreError::Taken(Object::Key(_) | Object::Qp { .. })) => a.to = (a.to + 1) % self.rnics.len(),
                Err(e) => panic!("end {end}: {e}"),
            }
        };
        let rnic = &mut self.rnics[a.to];
        // Nothing was lost: the vRNIC saves to the same record again.
        let again = rnic.save_vrnic(now, vrnic).unwrap();
        assert!(again == record, "end {end}: {again:?}\nand before\n{record:?}");
        assert!(again.to_bytes().unwrap() == a.record);
        let e = &mut self.ends[end];
        e.vrnic = vrnic;
        e.session = rnic.numbered_sessions(vrnic)[0].1;
        self.homes[end] = a.to;
        self.moves += 1;
        *self.lost.entry(self.ends[end].qpn).or_default() += 1 + ((now - a.since) / TRY_NS) as u32;
        self.set_routes();
        for h in (0..self.rnics.len()).filter(|&h| h != a.to) {
            self.rnics[h].reroute(0, gid(end));
        }
    }

    /// With probability `wander`, a random vRNIC leaves its host.
    fn wander(&mut self) {
        if self.wander == 0 || !self.chance(self.wander) {
            return;
        }
        let [end, to, time] = [(); 3].map(|()| self.rng.next_u64() as usize);
        let to = to % self.rnics.len();
        // Half of them come back at once, so that their peers notice nothing.
        let away_ns = if time % 2 == 0 { 0 } else { time as u64 / 2 % MOST_AWAY_NS };
        self.leave(end % self.ends.len(), to, away_ns);
    }

    /// The RNIC of an end.
    pub fn rnic(&mut self, end: usize) -> &mut Rnic {
        self.come_back(end);
        let h = self.host_of(end);
        let now = self.now;
        self.rnics[h].at(now)
    }

    /// Reaches the memory of an end as private memory of a process from now on.
    pub fn go_through_process(&mut self, end: usize) {
        let home = self.host_of(end);
        self.ends[end].go_through_process(&mut self.rnics[home]);
    }

    /// The session of an end. An end that is away is restored first.
    pub fn session(&mut self, end: usize) -> SessionId {
        self.come_back(end);
        self.ends[end].session
    }

    /// Takes end `a` from RESET to RTS, connected to `b`.
    pub fn connect(&mut self, typ: QpType, a: usize, b: usize, change: &impl Fn(abi::QpAttr) -> abi::QpAttr) {
        let (session, qpn) = (self.session(a), self.ends[a].qpn);
        for (mask, attr) in attrs_of(typ, self.ends[b].qpn, gid(b)) {
            self.rnic(a).modify_qp(session, qpn, mask, &change(attr)).unwrap();
        }
    }

    /// Sends a MAD from a QP to QP 1 in the network of end 0's group, from a host to the host of end 0, with any inner
    /// addresses.
    pub fn send_mad(&mut self, from: usize, src_qp: u32, own: Gid, to: Gid, mad: &[u8]) {
        let flow = Flow::roce(own, to);
        let opcode = Opcode { transport: Transport::Ud, op: Op::Send(Part::Only), extra: Extra::None };
        let mut head = Packet::new(opcode, GSI_QPN, 0);
        head.deth = Deth { qkey: GSI_QKEY, src_qp };
        let mut bytes = vec![0; MAX_OUTER_BYTES + MAX_HEADER_BYTES + mad.len() + ICRC_BYTES];
        let outer = flow.put(&mut bytes, opcode.header_bytes() + mad.len() + ICRC_BYTES);
        let at = outer + head.put(&mut bytes[outer..], mad.len());
        bytes[at..at + mad.len()].copy_from_slice(mad);
        let end = at + mad.len();
        let crc = icrc(&flow.envelope(), &bytes[outer..end]);
        bytes[end..end + ICRC_BYTES].copy_from_slice(&crc.to_le_bytes());
        let (now, group) = (self.now, self.groups[0]);
        self.rnic(0).handle_packet(now, &Arrival::inside(host(from), group), &bytes[..end + ICRC_BYTES]);
    }

    /// An AH of end `a` that leads to `b`.
    pub fn ah(&mut self, a: usize, b: usize) -> u32 {
        let (session, pd) = (self.session(a), self.ends[a].pd);
        self.rnic(a).create_ah(session, pd, &address(gid(b))).unwrap()
    }

    /// Sets whether all packets that a host sends are lost.
    pub fn cut(&mut self, host: usize, cut: bool) {
        self.cut[host] = cut;
    }

    /// Polls a host's RNIC and handles its jobs as `late_ns` and `keeps_jobs` say. True if there was anything to do.
    fn poll(&mut self, host: usize) -> bool {
        if self.late_ns == 0 && !self.keeps_jobs {
            return poll(&mut self.rnics[host], self.now);
        }
        let mut found = self.rnics[host].poll(self.now);
        while let Some(job) = self.rnics[host].take_job() {
            if self.keeps_jobs {
                self.kept.push((host, job));
            } else {
                self.do_later(Doing { host, job, done: false });
            }
            found = true;
        }
        found
    }

    /// Does the only kept job, and returns it to its RNIC.
    pub fn do_kept(&mut self) {
        let [(host, job)] = &mut self.kept[..] else { panic!("{} jobs are kept", self.kept.len()) };
        job.run(&mut [0; 4096], || 0);
        let host = *host;
        for (_, job) in self.kept.drain(..) {
            self.rnics[host].at(self.now).end_job(job);
        }
    }

    fn do_later(&mut self, d: Doing) {
        self.sent += 1;
        let at = self.now + self.rng.next_u64() % self.late_ns;
        self.doing.insert((at, self.sent), d);
    }

    /// Starts a job, or returns a job that is done to its RNIC.
    fn go_on(&mut self, mut d: Doing) {
        let rnic = self.rnics[d.host].at(self.now);
        if d.done {
            return rnic.end_job(d.job);
        }
        if self.rng.next_u64() % 16 == 0 {
            // As if a watcher found that the job takes long.
            rnic.note_slow(d.job.number());
        }
        d.job.run(&mut [0; 4096], || 0);
        self.do_later(Doing { done: true, ..d });
    }

    fn chance(&mut self, thousandths: u64) -> bool {
        self.rng.next_u64() % 1000 < thousandths
    }

    /// Takes the packets that a host sends and applies the network's faults. True if there were any.
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
            (self.now, from, to, &bytes).hash(&mut self.digest);
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
                self.flying.insert((self.now + DELAY_NS + late, self.sent), Flying { from, to, dest, outer, bytes });
            }
        }
        !packets.is_empty()
    }

    /// Number of packets of the connection between two ends, in both directions, that were lost or corrupted.
    pub fn lost_between(&self, a: usize, b: usize) -> u32 {
        self.lost_for(self.ends[a].qpn) + self.lost_for(self.ends[b].qpn)
    }

    /// Number of packets for this QP that were lost or corrupted.
    pub fn lost_for(&self, qpn: u32) -> u32 {
        self.lost.get(&qpn).copied().unwrap_or(0)
    }

    fn arrive(&mut self, f: &Flying) {
        let congested = self.congested;
        let rnic = &mut self.rnics[f.to];
        if f.outer > 0 {
            let before = rnic.wire_drops().bad_icrc;
            let header = f.bytes.first_chunk::<VXLAN_BYTES>().unwrap();
            let vni = u32::from_be_bytes([0, header[4], header[5], header[6]]);
            // If a bit of the VNI has changed, the packet is for a group that does not exist.
            let group = vni.wrapping_sub(FIRST_VNI);
            let a = Arrival { source: vxlan_source(header), ..Arrival::inside(host(f.from), group) };
            rnic.handle_packet(self.now, &a, &f.bytes[VXLAN_BYTES + ETH_BYTES..]);
            self.caught += rnic.wire_drops().bad_icrc - before;
            return;
        }
        let (body, crc) = f.bytes.split_last_chunk::<ICRC_BYTES>().unwrap();
        let dropped = |rnic: &Rnic| rnic.wire_drops().no_qp + rnic.wire_drops().wrong_source;
        if icrc(&envelope(f.from, f.to, 0, &f.bytes), body).to_le_bytes() == *crc {
            let before = dropped(rnic);
            rnic.handle_packet(self.now, &Arrival { congested, ..arrival(host(f.from)) }, body);
            // Its QP is not on this host any more, or this host does not know yet that the peer is on the sending host.
            *self.lost.entry(f.dest).or_default() += (dropped(rnic) - before) as u32;
        } else {
            self.caught += 1;
        }
    }

    /// Runs until `limit` nanoseconds have passed.
    pub fn run(&mut self, limit: u64) {
        let end = self.now + limit;
        loop {
            for i in 0..self.rnics.len() {
                while self.poll(i) | self.collect(i) {}
            }
            self.wander();
            let arrival = self.flying.keys().next().map(|k| k.0);
            let timers = self.rnics.iter().filter_map(|r| r.next_timeout());
            let back = self.away.values().map(|a| a.until).min();
            let job = self.doing.keys().next().map(|k| k.0);
            let Some(next) = timers.chain(arrival).chain(back).chain(job).min().filter(|&t| t <= end) else { break };
            self.now = self.now.max(next);
            let due = self.away.iter().filter(|(_, a)| a.until <= self.now).map(|(&end, _)| end);
            for end in due.collect::<Vec<_>>() {
                self.come_back(end);
            }
            while let Some(e) = self.doing.first_entry().filter(|e| e.key().0 <= self.now) {
                let d = e.remove();
                self.go_on(d);
            }
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

    /// As [`Net::remote`], with immediate data and the operands of atomics.
    pub fn request(&self, op: WrOpcode, wr_id: u64) -> abi::SqWqe {
        abi::SqWqe { compare_add: 3, swap: 9, imm: 7, ..self.remote(op, wr_id, 0) }
    }

    /// Counters of the vRNIC of an end. The end must not be away.
    pub fn counters(&self, end: usize) -> Counters {
        self.rnics[self.host_of(end)].counters(self.ends[end].vrnic).unwrap()
    }

    /// State of the QP of an end, as QUERY_QP has it.
    pub fn state(&mut self, end: usize) -> u8 {
        let (session, qpn) = (self.session(end), self.ends[end].qpn);
        self.rnic(end).query_qp(session, qpn).unwrap().qp_state
    }
}

/// The fields outside the packet's bytes that its ICRC covers.
fn envelope(from: usize, to: usize, outer: usize, bytes: &[u8]) -> Envelope {
    if outer > 0 {
        let (f, _) = Flow::parse(&bytes[VXLAN_BYTES + ETH_BYTES..]).unwrap();
        return Envelope { src: f.src, dst: f.dst, src_port: f.src_port, ip_id: f.ip_id };
    }
    Envelope { src: host(from), dst: host(to), src_port: ROCE_PORT, ip_id: 0 }
}
