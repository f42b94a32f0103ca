//! The fixture of the tests: a virtual layer, and drivers on it.

use unirdma_abi::rfc;
use unirdma_testkit::TestHost;
use unirdma_testkit::rfc::{RfcCq, RfcDriver, RfcMr, RfcQp, send};

pub const ALL_ACCESS: u32 = 15;
pub const RC: u8 = rfc::qp_type::RC;
pub const UC: u8 = rfc::qp_type::UC;
pub const UD: u8 = rfc::qp_type::UD;
pub const IP: [&str; 2] = ["10.0.0.1", "10.0.0.2"];
pub const QKEY: u32 = 0x1234;
/// `IBV_QPS_RTS`.
pub const RTS: u8 = 3;

/// A driver with one object of each kind.
pub struct Side {
    pub d: RfcDriver,
    pub pd: u32,
    pub cq: RfcCq,
    pub qp: RfcQp,
    pub mr: RfcMr,
}

impl Side {
    pub fn new(mut d: RfcDriver, typ: u8) -> Side {
        let pd = d.pd();
        let cq = d.cq(64);
        let qp = d.qp(pd, &cq, typ);
        let mr = d.mr(pd, 64 << 10, ALL_ACCESS);
        Side { d, pd, cq, qp, mr }
    }

    /// Posts a signaled send WQE with this range of the MR.
    pub fn send(&mut self, opcode: u32, wr_id: u64, off: u64, len: u32) {
        self.qp.send(send(opcode, wr_id), &[self.mr.sge(off, len)]);
    }

    /// Posts a signaled send WQE with a remote range.
    pub fn rdma(&mut self, opcode: u32, wr_id: u64, local: (u64, u32), remote: rfc::Rdma) {
        let mut r = send(opcode, wr_id);
        r.set_part(&remote);
        self.qp.send(r, &[self.mr.sge(local.0, local.1)]);
    }

    pub fn receive(&mut self, wr_id: u64, off: u64, len: u32) {
        self.qp.receive(wr_id, &[self.mr.sge(off, len)]);
    }

    /// Waits until the device has taken the receives that were posted to a QP in RTS. It takes them before it answers a
    /// command that changes the QP. A datagram waits for a receive for 10 ms only, and the thread that takes them may
    /// get no core for longer.
    pub fn receives_are_taken(&mut self) {
        self.d.move_to(self.qp.qpn, RTS).unwrap();
    }

    pub fn state(&mut self) -> u8 {
        self.d.query(self.qp.qpn).unwrap().qp_state
    }

    pub fn bytes(&self, off: usize, len: usize) -> Vec<u8> {
        self.d.read(&self.mr, off, len)
    }

    pub fn put(&self, off: usize, bytes: &[u8]) {
        self.d.write(&self.mr, off, bytes);
    }
}

/// A virtual layer with one driver.
pub fn one() -> (TestHost, RfcDriver) {
    let host = TestHost::start();
    let d = RfcDriver::new(&host.add_rfc("a", IP[0]), IP[0]);
    (host, d)
}

/// Two drivers, each on its own vRNIC.
pub fn two() -> (TestHost, [RfcDriver; 2]) {
    let host = TestHost::start();
    let drivers = [0, 1].map(|i| RfcDriver::new(&host.add_rfc(["a", "b"][i], IP[i]), IP[i]));
    (host, drivers)
}

/// Two drivers whose QPs are connected, or can send each other datagrams.
pub fn pair(typ: u8) -> (TestHost, Side, Side) {
    let (host, drivers) = two();
    let [mut a, mut b] = drivers.map(|d| Side::new(d, typ));
    if typ == UD {
        a.d.open_datagrams(a.qp.qpn, QKEY).unwrap();
        b.d.open_datagrams(b.qp.qpn, QKEY).unwrap();
    } else {
        connect(&mut a, &mut b, typ);
    }
    (host, a, b)
}

pub fn connect(a: &mut Side, b: &mut Side, typ: u8) {
    a.d.connect(a.qp.qpn, typ, b.d.gid, b.qp.qpn).unwrap();
    b.d.connect(b.qp.qpn, typ, a.d.gid, a.qp.qpn).unwrap();
}

/// Statuses of completions.
pub mod wc {
    pub const SUCCESS: u8 = 0;
    pub const LOC_LEN_ERR: u8 = 1;
    pub const LOC_QP_OP_ERR: u8 = 2;
    pub const LOC_PROT_ERR: u8 = 4;
    pub const WR_FLUSH_ERR: u8 = 5;
    pub const REM_INV_REQ_ERR: u8 = 9;
    pub const REM_ACCESS_ERR: u8 = 10;
    pub const RNR_RETRY_EXC_ERR: u8 = 13;
}
