//! A multicast group with one member on each host; all members send to it.

use unirdma_formats::net::parse_grh;
use unirdma_formats::{Gid, QpType, WcStatus, WrOpcode};

use crate::net::{Net, gid};
use crate::{address, pattern, status, wqe};

/// Number of messages that a member sends. `RECEIVES`: number of receives that it has. `ROOM`: bytes of each.
const MESSAGES: u64 = 3;
const RECEIVES: u64 = 16;
const ROOM: u64 = 512;
/// Offset of the messages to send in a member's memory.
const FROM: u64 = RECEIVES * ROOM;

/// A multicast group, and the number of messages that each member has sent.
pub struct Group {
    /// The ends of the members.
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

    /// Message `n` of a member. It begins with the member and `n`.
    fn message(&self, member: usize, n: u64) -> Vec<u8> {
        let mut bytes = pattern(16 + self.seed.wrapping_mul(31).wrapping_add(n * 97) as usize % 200, self.seed ^ n);
        bytes[..2].copy_from_slice(&[member as u8, n as u8]);
        bytes
    }

    /// Member `which` sends its next message, unless it has sent all.
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

    /// Checks the messages that each member received. Each message reaches its sender once. It reaches another member
    /// at most once, or twice if the network duplicated it, and more often if members moved meanwhile. Its data and its
    /// source address are right. Returns the number of messages that other members received.
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
                        // A member that moves to another host may receive the copy for that host, too.
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
