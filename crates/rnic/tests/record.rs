//! Inconsistent records of vRNICs: each is refused as a whole, with the reason.

use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_abi::QpLayout;
use unirdma_formats::{QpType, WrOpcode};
use unirdma_mem::{Bell, CqRing, QpRings, Span};
use unirdma_rnic::*;
use unirdma_simkit::net::Net;
use unirdma_simkit::*;

/// A vRNIC with an object of each kind, as bytes; and the host that it was taken from.
fn full() -> (Net, Vec<u8>, Attached) {
    let mut net = Net::together(QpType::Rc);
    let (session, pd, cqn) = (net.ends[0].session, net.ends[0].pd, net.ends[0].cqn);
    net.ah(0, 1);
    net.rnic(0).alloc_mw(session, pd, 1).unwrap();
    net.rnic(0).modify_cq(session, cqn, 5, 1000).unwrap();
    net.rnic(0).req_notify_cq(session, cqn, abi::NOTIFY_NEXT).unwrap();
    net.rnic(0).set_stage(session, aligned(8192)).unwrap();
    let e = std::mem::replace(&mut net.ends[0], End::new(&mut Rnic::new(1, 0), 9, 99));
    let private = OpenXrcd { key: Some((3, 4)), create: true, exclusive: false };
    let _ = xrc::XrcSrq::new(net.rnic(0), &e, private);
    net.ends[0] = e;
    let sge = net.ends[0].sge(0, 3000);
    for i in 0..3 {
        let w = net.request(WrOpcode::Write, i);
        net.ends[0].post(w, &[sge]);
    }
    net.rnics[0].poll(0);
    let now = net.now;
    let (record, attached) = net.rnics[0].take_vrnic(now, net.ends[0].vrnic).unwrap();
    (net, record.to_bytes().unwrap(), attached)
}

#[test]
fn bytes_that_are_no_record_are_refused() {
    let (_, bytes, _) = full();
    for n in 0..bytes.len() {
        let r = Record::from_bytes(&bytes[..n]);
        assert!(matches!(r, Err(RecordError::Truncated { found, .. }) if found == n as u64), "{n}: {r:?}");
    }
    for n in 0..bytes.len() {
        for bit in 0..8 {
            let mut bad = bytes.clone();
            bad[n] ^= 1 << bit;
            assert!(Record::from_bytes(&bad).is_err(), "byte {n}, bit {bit}");
        }
    }
    let mut newer = bytes.clone();
    newer[8] = 9;
    let e = Record::from_bytes(&newer).unwrap_err();
    assert_eq!(e.to_string(), "the record has version 9; only version 8 can be read");
    let longer = [&bytes[..], &[0]].concat();
    assert_eq!(Record::from_bytes(&longer), Err(RecordError::Trailing(1)));
    assert_eq!(Record::from_bytes(b"something else"), Err(RecordError::NotARecord));
    assert!(Record::from_bytes(&bytes).is_ok());
}

/// The visible state of a host.
fn seen(rnic: &mut Rnic, vrnic: VrnicId) -> (Vec<u8>, Usage, bool) {
    (rnic.save_vrnic(0, vrnic).unwrap().to_bytes().unwrap(), rnic.usage(vrnic), rnic.is_busy())
}

#[test]
fn what_is_taken_on_the_host_is_refused() {
    let (mut net, bytes, mut attached) = full();
    let record = Record::from_bytes(&bytes).unwrap();
    let stranger = net.ends[1].vrnic;
    let before = seen(&mut net.rnics[0], stranger);
    let vrnic = net.rnics[0].restore_vrnic(0, &record, &mut attached).unwrap();
    let again = net.rnics[0].restore_vrnic(0, &record, &mut attached).unwrap_err();
    assert_eq!(again, RestoreError::Taken(Object::Gid(ip(1))));
    assert_eq!(again.to_string(), "GID ::ffff:10.0.0.1 exists on this host already");
    // Without the address it is the number of the QP.
    net.rnics[0].set_gids(vrnic, vec![ip(77)]);
    let e = net.rnics[0].restore_vrnic(0, &record, &mut attached).unwrap_err();
    assert_eq!(e, RestoreError::Taken(Object::Qp { qpn: net.ends[0].qpn }));
    // Hosts with the same seed give the same keys.
    let mut other = Rnic::new(9, 0);
    let config = VrnicConfig { group: 0, gids: vec![ip(5)], limits: Limits::default(), share: Share::default() };
    let id = other.add_vrnic(config).unwrap();
    let s = other.add_session(id).unwrap();
    let pd = other.create_pd(s).unwrap();
    let backing = Backing::Mapped(Span::anonymous(4096));
    let (_, key) = other.reg_mr(s, pd, ALL, IOVA, 4096, (backing, vec![])).unwrap();
    assert_eq!(key, net.ends[0].key);
    let e = other.restore_vrnic(0, &record, &mut attached).unwrap_err();
    assert_eq!(e, RestoreError::Taken(Object::Key(key)));
    let mut narrow = Rnic::new(10, 0);
    narrow.set_wire_mtu(512);
    let e = narrow.restore_vrnic(0, &record, &mut attached).unwrap_err();
    assert_eq!(e, RestoreError::Mtu { qpn: net.ends[0].qpn, mtu: 1024, most: 512 });
    net.rnics[0].remove_vrnic(vrnic);
    assert_eq!(seen(&mut net.rnics[0], stranger).1, before.1);
}

/// Leaves out one resource, or gives another one than it was.
struct Forgetful<'a> {
    of: &'a mut Attached,
    skips: usize,
    unlike: bool,
    asked: usize,
}

impl Forgetful<'_> {
    fn give<T>(&mut self, r: Option<T>, other: Option<T>) -> Option<T> {
        self.asked += 1;
        if self.asked <= self.skips || self.asked > self.skips + 1 {
            return r;
        }
        if self.unlike { other.or(r) } else { None }
    }
}

impl Attach for Forgetful<'_> {
    fn doorbell(&mut self, session: u32, number: u32) -> Option<Bell> {
        let r = self.of.doorbell(session, number);
        self.give(r, None)
    }
    fn memory(&mut self, session: u32) -> Option<Arc<dyn Resolve>> {
        let r = self.of.memory(session);
        self.give(r, None)
    }
    fn stage(&mut self, session: u32, bytes: u64) -> Option<Span> {
        let r = self.of.stage(session, bytes);
        self.give(r, Some(aligned(4096)))
    }
    fn cq(&mut self, session: u32, cq: u32, entries: u32) -> Option<CqRing> {
        let r = self.of.cq(session, cq, entries);
        self.give(r, CqRing::new(aligned(128), aligned(2 * 64 * entries as usize), 2 * entries))
    }
    fn srq(&mut self, session: u32, srq: u32, layout: QpLayout) -> Option<QpRings> {
        let r = self.of.srq(session, srq, layout);
        self.give(r, rings(QpLayout { rq_entries: 2 * layout.rq_entries, ..layout }))
    }
    fn qp(&mut self, qpn: u32, layout: QpLayout) -> Option<QpRings> {
        let r = self.of.qp(qpn, layout);
        self.give(r, rings(QpLayout { sq_entries: 2 * layout.sq_entries, ..layout }))
    }
    fn mr(&mut self, session: u32, mr: u32, way: Way, len: u64) -> Option<Backing> {
        let r = self.of.mr(session, mr, way, len);
        self.give(r, Some(Backing::Mapped(Span::anonymous(len as usize - 1))))
    }
}

fn rings(layout: QpLayout) -> Option<QpRings> {
    QpRings::new(aligned(128), aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout)
}

#[test]
fn memory_that_is_missing_or_does_not_fit_is_refused() {
    let (mut net, bytes, mut attached) = full();
    let record = Record::from_bytes(&bytes).unwrap();
    let stranger = net.ends[1].vrnic;
    let before = seen(&mut net.rnics[0], stranger);
    let (mut missing, mut unlike) = (0, 0);
    for unlike_it in [false, true] {
        for skips in 0.. {
            let mut some = Forgetful { of: &mut attached, skips, unlike: unlike_it, asked: 0 };
            // A resource of which there is no other kind is given unchanged.
            match net.rnics[0].restore_vrnic(0, &record, &mut some) {
                Err(RestoreError::NotGiven(_)) if !unlike_it => missing += 1,
                Err(RestoreError::Unlike(_)) if unlike_it => unlike += 1,
                Err(e) => panic!("{e}"),
                Ok(vrnic) => {
                    let all = some.asked <= skips;
                    let now = net.now;
                    (_, attached) = net.rnics[0].take_vrnic(now, vrnic).unwrap();
                    if all {
                        break;
                    }
                }
            }
            assert!(seen(&mut net.rnics[0], stranger) == before, "nothing has changed");
        }
    }
    // A doorbell page, a stage, a CQ, an SRQ, an MR and a QP.
    assert_eq!((missing, unlike), (6, 5));
}

/// Bytes that were changed on purpose, with a correct checksum, are refused or make a vRNIC that harms nobody.
#[test]
fn forged_records_do_no_harm() {
    const HEADER: usize = 24;
    let (_, bytes, mut attached) = full();
    let mut rng = Rng::new(5);
    let mut taken = 0;
    for round in 0..20_000 {
        let mut forged = bytes.clone();
        for _ in 0..1 + rng.next_u64() % 3 {
            let at = HEADER + rng.next_u64() as usize % (bytes.len() - HEADER);
            // Most numbers are small, and their highest bit says that another byte follows.
            let change = [0xff, 0x80, 0x01, rng.next_u64() as u8][rng.next_u64() as usize % 4];
            forged[at] ^= change;
        }
        let mut crc = crc32fast::Hasher::new();
        crc.update(&forged[..HEADER - 4]);
        crc.update(&forged[HEADER..]);
        forged[HEADER - 4..HEADER].copy_from_slice(&crc.finalize().to_le_bytes());
        let Ok(record) = Record::from_bytes(&forged) else { continue };
        let mut rnic = Rnic::new(round, 0);
        let Ok(vrnic) = rnic.restore_vrnic(round, &record, &mut attached) else { continue };
        taken += 1;
        let mut now = round;
        for _ in 0..20 {
            while poll(&mut rnic, now) {}
            let sent = rnic.tx().packets().len();
            rnic.tx().sent(sent);
            now = rnic.next_timeout().unwrap_or(now).max(now + 1);
        }
        // Its memory is returned unchanged, except for the positions in its rings.
        let again = rnic.take_vrnic(now, vrnic).unwrap();
        assert!(Record::from_bytes(&again.0.to_bytes().unwrap()).is_ok(), "round {round}: it can be saved again");
        rnic.remove_vrnic(vrnic);
    }
    assert!(taken > 1000, "{taken}");
}
