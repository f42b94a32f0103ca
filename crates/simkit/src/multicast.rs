//! A multicast group with one member on each host, who all send to it.

use unirdma_formats::net::parse_grh;
use unirdma_formats::{Gid, QpType, WcStatus, WrOpcode};

use crate::net::{Net, gid};
use crate::{address, pattern, status, wqe};

/// Messages that a member sends, and receives that it has, all together.
const MESSAGES: u64 = 3;
const RECEIVES: u64 = 16;
const ROOM: u64 = 512;
/// Where messages are sent from.
const FROM: u64 = RECEIVES * ROOM;

/// A multicast group, what its members have sent, and what they must have heard.
pub struct Group {
    /// Its ends.
    members: Vec<usize>,
    ahs: Vec<u32>,
    sent: Vec<u64>,
    seed: u64,
}

impl Group {
    /// The ends are UD QPs, not in use yet.
    pub fn new(net: &mut Net, members: Vec<usize>, seed: u64) -> Group {
        let mgid = Gid::from_ip(std::net::IpAddr::from([239, 1, 1, 1]));
        let ahs = members.iter().map(|&m| {
            net.connect(QpType::Ud, m, m, &|a| a);
            let (session, qpn, pd) = (net.ends[m].session, net.ends[m].qpn, net.ends[m].pd);
            net.rnic(m).attach_mcast(session, qpn, mgid).unwrap();
            for i in 0..RECEIVES {
                let sge = net.ends[m].sge(i * ROOM, ROOM as u32);
                net.ends[m].recv(i, &[sge]);
            }
            net.rnic(m).create_ah(session, pd, &address(mgid)).unwrap()
        });
        let ahs = ahs.collect();
        Group { sent: vec![0; members.len()], members, ahs, seed }
    }

    /// Message `n` of a member: who sent it and which it is stand in front.
    fn message(&self, member: usize, n: u64) -> Vec<u8> {
        let mut bytes = pattern(16 + self.seed.wrapping_mul(31).wrapping_add(n * 97) as usize % 200, self.seed ^ n);
        bytes[..2].copy_from_slice(&[member as u8, n as u8]);
        bytes
    }

    /// One member sends, if it has not sent all yet.
    pub fn send(&mut self, net: &mut Net, which: u64) {
        let member = which as usize % self.members.len();
        let (end, n) = (self.members[member], self.sent[member]);
        if n < MESSAGES {
            self.sent[member] += 1;
            let bytes = self.message(member, n);
            let from = FROM + n * ROOM;
            net.ends[end].fill(from as usize, &bytes);
            let sge = net.ends[end].sge(from, bytes.len() as u32);
            net.ends[end].post_to(wqe(WrOpcode::Send, 1000 + n), self.ahs[member], 0xff_ffff, &[sge]);
        }
    }

    /// Each message reaches its sender once, and the others once, twice if the network doubled it, or not at all; more
    /// often if members moved meanwhile. It is whole, and from whom it says. How many have reached others.
    pub fn check(&self, net: &mut Net) -> u64 {
        let mut heard = 0;
        for (at, &end) in self.members.iter().enumerate() {
            let what = format!("seed {}, group, end {end}", self.seed);
            let mut got = vec![[0; MESSAGES as usize]; self.members.len()];
            let mut own = 0;
            for c in net.ends[end].poll() {
                assert_eq!(status(&c), WcStatus::Success, "{what}");
                if c.wr_id >= 1000 {
                    own += 1;
                    continue;
                }
                let bytes = net.ends[end].bytes((c.wr_id * ROOM) as usize, c.byte_len as usize);
                let (grh, data) = bytes.split_first_chunk::<40>().unwrap();
                let (member, n) = (usize::from(data[0]), usize::from(data[1]));
                assert!(data == self.message(member, n as u64), "{what}, message {n} of {member}");
                assert_eq!(parse_grh(grh).unwrap().0, gid(self.members[member]), "{what}");
                got[member][n] += 1;
                heard += u64::from(member != at);
            }
            assert_eq!(own, self.sent[at], "{what}: sends");
            for (member, counts) in got.iter().enumerate() {
                for (n, &count) in counts.iter().enumerate() {
                    let sent = u32::from((n as u64) < self.sent[member]);
                    let allowed = match net.moves {
                        0 if member == at => sent..=sent,
                        0 => 0..=2 * sent,
                        // Who moves to another host may find the copy for that host there.
                        _ if member == at => sent..=2 * sent * net.rnics.len() as u32,
                        _ => 0..=2 * sent * net.rnics.len() as u32,
                    };
                    assert!(allowed.contains(&count), "{what}: {count} times message {n} of {member}");
                }
            }
        }
        heard
    }
}
