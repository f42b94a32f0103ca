//! The list of all known attacks, and how each is tried.

use harness::{Lab, Result};

use crate::checks;

/// Additional argument of a program, after its own vRNIC's socket and its duration.
#[derive(Clone, Copy)]
pub enum Argument {
    /// No argument.
    None,
    /// A word.
    Word(&'static str),
    /// The socket of this vRNIC, which belongs to the same user or to a victim that the program checks.
    Socket(&'static str),
}

/// A program of the attacker.
#[derive(Clone, Copy)]
pub enum Program {
    /// An attack of the test kit's program `attacks`, which describes each of them.
    Kit {
        /// Its name there.
        name: &'static str,
        /// Its additional argument.
        argument: Argument,
        /// The administrator captures its packets during the attack.
        captured: bool,
    },
    /// `tests/c/forge.c` with these words and a time, in a container.
    Forge(&'static str),
}

/// How an attack is tried.
#[derive(Clone, Copy)]
pub enum Way {
    /// A program runs beside victims that measure.
    Program(Program),
    /// A check of the black-box tests, without measurements.
    Check {
        /// The check.
        check: fn(&Lab) -> Result<()>,
        /// It cannot be set up without root.
        needs_root: bool,
    },
    /// Not tried here, but where this text says.
    Elsewhere(&'static str),
}

/// A known attack.
pub struct Attack {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it does.
    pub what: &'static str,
    /// How it is tried.
    pub way: Way,
    /// It tries to take time from others, so `bench isolation` measures it too.
    pub takes_time: bool,
}

const fn program(name: &'static str, argument: Argument) -> Way {
    Way::Program(Program::Kit { name, argument, captured: false })
}

const fn check(check: fn(&Lab) -> Result<()>, needs_root: bool) -> Way {
    Way::Check { check, needs_root }
}

const fn attack(name: &'static str, what: &'static str, way: Way) -> Attack {
    Attack { name, what, way, takes_time: false }
}

const fn slow(name: &'static str, what: &'static str, way: Way) -> Attack {
    Attack { takes_time: true, ..attack(name, what, way) }
}

/// Two programs of the attacker's vRNICs that are always busy, and do nothing wrong.
pub const HONEST: Program = Program::Kit { name: "honest", argument: Argument::Socket("y"), captured: false };

/// A program of the attacker that has nothing to do with RDMA.
pub const COMPUTING: Program = Program::Kit { name: "field", argument: Argument::Word("compute"), captured: false };

const CAPTURED: Way = Way::Program(Program::Kit { name: "capw", argument: Argument::None, captured: true });

use Argument::{None as Nothing, Socket, Word};

/// All known attacks.
pub const ATTACKS: &[Attack] = &[
    slow("rnr 1024", "SENDs of 1,024 QPs to receivers that are never ready", program("rnr", Word("1024"))),
    slow("rnr 16384", "the same of 16,384 QPs", program("rnr", Word("16384"))),
    slow("bells", "64 sessions ring all their doorbell bits", program("bells", Nothing)),
    slow("flood", "WRITEs of 64 B without a pause", program("flood", Nothing)),
    slow("slowmm fuse", "READs of a page of its own FUSE file, which never comes", program("slowmm", Word("fuse"))),
    slow("slowmm fork", "READs of a process of 16 GiB that forks all the time", program("slowmm", Word("fork"))),
    slow("regmr", "registers and deregisters beside 60,000 MRs", program("regmr", Nothing)),
    slow("capw", "WRITEs of 128 MiB with the smallest MTU while it is captured", CAPTURED),
    slow(
        "pages",
        "lists of very many pages, and very many lists of pages that are mapped one by one",
        program("pages", Nothing),
    ),
    slow("remap", "maps and unmaps regions without a pause", program("remap", Nothing)),
    slow("teardown", "sessions with very many QPs that end at once", program("teardown", Nothing)),
    slow("connect", "connections and sessions that come and go", program("connect", Nothing)),
    slow("cmreq", "requests for connections that nobody takes", program("cmreq", Nothing)),
    slow("frames", "ARP frames to all, as fast as it can", Way::Program(Program::Forge("flood 10.0.0.3"))),
    slow("forged", "the same with another one's address", Way::Program(Program::Forge("flood 10.0.0.1"))),
    slow("objects", "as many objects of each kind as it gets, again and again", program("objects", Nothing)),
    slow("kicks", "kicks of 16 control virtqueues, for nothing", program("kicks", Nothing)),
    slow("mcast", "datagrams to a group of 2,048 QPs without receives", program("mcast", Nothing)),
    slow("backlog", "datagrams to 2,000 QPs without receives, one after the other", program("backlog", Nothing)),
    slow("crumbs", "WRITEs through MRs whose pieces are one byte long", program("crumbs", Nothing)),
    slow("lists", "one MR of as many lists as there may be, again and again", program("lists", Nothing)),
    slow("revoked", "a memory region with 30,000 MRs, which goes and comes back", program("revoked", Nothing)),
    slow("ranges", "as many ranges of addresses as there may be, again and again", program("ranges", Nothing)),
    slow("uc flood", "SENDs of 8 B by UC, without receives", program("field", Word("uc-no-recv"))),
    slow("atomics", "atomics by 64 QPs, without a pause", program("field", Word("faa-8"))),
    slow("pds", "registers and deregisters, each time in a PD of its own", program("field", Word("register-pd"))),
    slow("queues", "makes, connects and destroys QPs and CQs without a pause", program("field", Word("ht-queues-rc"))),
    slow("sparse punch", "WRITEs to a file whose pages it takes away, slowly", program("sparse", Word("punch"))),
    slow("sparse fill", "WRITEs that make the pages of a sparse file", program("sparse", Word("fill"))),
    slow(
        "guest",
        "a guest's driver that does nothing right, and a VMM that changes all meanwhile",
        program("guest", Nothing),
    ),
    slow("net", "a guest's network interface with junk in frames and rings", program("net", Nothing)),
    attack("sigbus mr", "WRITEs to every second page of a file that is truncated", program("sigbus", Word("mr"))),
    attack("sigbus doorbell", "a doorbell page in a file that is truncated", program("sigbus", Word("doorbell"))),
    attack("huge", "a huge page as doorbell page, truncated", program("huge", Nothing)),
    attack("vaspace", "sparse files that would take all addresses", program("vaspace", Nothing)),
    attack("cqaba", "a completion for a CQ that is destroyed, beside a CQ of a victim", program("cqaba", Socket("a"))),
    attack("cmjoin", "joins multicast groups and fetches no event", program("cmjoin", Nothing)),
    attack("blockfd", "an eventfd that is always full and blocks", program("blockfd", Nothing)),
    attack("flush", "event buffers of 1 byte, without end", program("flush", Nothing)),
    attack("fds", "descriptors beside half a message, on 500 connections", program("fds", Nothing)),
    attack("linger", "descriptors whose closing waits for ten minutes", program("linger", Nothing)),
    attack("channels", "all event channels, opened and closed without a pause", program("channels", Nothing)),
    attack("strange", "kick descriptors that are always readable, or hung up", program("strange", Nothing)),
    attack("halfclosed", "connections of which one direction is closed", program("halfclosed", Nothing)),
    attack("unread", "requests whose answers it never reads", program("unread", Nothing)),
    attack("junk", "connections with random bytes", program("junk", Nothing)),
    attack("logs", "requests that are refused, and written to the log", program("logs", Nothing)),
    attack("arp", "a container answers ARP with another one's address", check(checks::arp_spoof, false)),
    attack("inject", "an ordinary user of a peer host sends VXLAN frames", check(|_| checks::vxlan_injection(), true)),
    attack("escape", "a container reaches for the host, in more than 500 ways", check(checks::escape, false)),
    attack("qpns", "the next QPN of another tenant", Way::Elsewhere("statistics: tests of rnic::random")),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = ATTACKS.iter().map(|a| a.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ATTACKS.len());
    }
}
