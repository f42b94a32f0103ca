//! Queue pairs of the RFC mode. WQEs are copied from the chains of two virtqueues into rings of the device, which the
//! RNIC reads like the rings of any session.
//!
//! A malformed WQE is replaced by one that the RNIC refuses. So it fails in order, with a completion of its own, and
//! affects its QP as any bad WQE does.

use unirdma_abi as abi;
use unirdma_abi::rfc;
use unirdma_formats::{WrOpcode, send_flags};
use unirdma_link::Ticket;
use unirdma_mem::QpRings;
use vm_memory::GuestMemoryMmap;
use zerocopy::{FromBytes, IntoBytes};

use super::aligned;
use super::gids::Gids;
use super::vq::{Taken, Vq};

/// Most bytes of a WQE, plus one that shows that a WQE is too long.
pub(super) const WQE_ROOM: usize = size_of::<rfc::SqReq>() + abi::MAX_INLINE as usize + 1;
/// An invalid opcode.
const NO_OPCODE: u8 = 0xff;
/// More SGEs than any receive may have.
const NO_SGES: u32 = u32::MAX;
const SGE: usize = size_of::<abi::Sge>();

/// A queue pair.
pub(super) struct Qp {
    pub qpn: u32,
    /// The driver's index of the GID through which the QP is connected.
    pub sgid_index: u8,
    pd: u32,
    is_ud: bool,
    /// Its bit in the doorbell page.
    slot: u32,
    cap: abi::QpCap,
    rings: QpRings,
    /// Number of WQEs copied into the SQ and into the RQ, modulo 2^32.
    sq_copied: u32,
    rq_copied: u32,
    /// Opcodes of the WQEs in the SQ, as the driver has written them.
    opcodes: Box<[u8]>,
    _hold: Ticket,
}

/// The capabilities that a QP gets: as many WQEs as a virtqueue has chains.
pub(super) fn held(cap: abi::QpCap) -> abi::QpCap {
    abi::QpCap { max_send_wr: rfc::MAX_QP_WR, max_recv_wr: rfc::MAX_QP_WR, ..cap }
}

/// Bytes of the rings of a QP, with its control block.
pub(super) fn bytes(layout: &abi::QpLayout) -> usize {
    size_of::<abi::QpCtrl>() + layout.sq_bytes() + layout.rq_bytes()
}

/// Makes the rings of a QP. Strides are multiples of 16, so each part is aligned as required.
pub(super) fn rings(layout: abi::QpLayout) -> Option<QpRings> {
    let memory = aligned(bytes(&layout));
    let (ctrl, sq) = (size_of::<abi::QpCtrl>() as u64, layout.sq_bytes() as u64);
    QpRings::new(memory.sub(0, ctrl)?, memory.sub(ctrl, sq)?, memory.sub(ctrl + sq, layout.rq_bytes() as u64)?, layout)
}

impl Qp {
    /// A QP that the RNIC has made.
    pub fn new((qpn, slot): (u32, u32), pd: u32, typ: u8, cap: abi::QpCap, rings: QpRings, hold: Ticket) -> Self {
        Qp {
            qpn,
            sgid_index: 0,
            pd,
            is_ud: [rfc::qp_type::UD, rfc::qp_type::GSI].contains(&typ),
            slot,
            cap,
            rings,
            sq_copied: 0,
            rq_copied: 0,
            opcodes: vec![0; rfc::MAX_QP_WR as usize].into(),
            _hold: hold,
        }
    }

    /// Its bit in the doorbell page.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// True if the RNIC's SQ has room for further WQEs.
    pub fn has_room_for_sends(&self) -> bool {
        self.rings.sq_free(self.sq_copied) > 0
    }

    /// True if the RNIC's RQ has room for further WQEs.
    pub fn has_room_for_receives(&self) -> bool {
        self.rings.rq_free(self.rq_copied) > 0
    }

    /// Copies at most `limit` send WQEs; returns their number.
    pub fn take_sends(&mut self, vq: &mut Vq, guest: &GuestMemoryMmap, gids: &Gids, buf: &mut [u8], limit: u32) -> u32 {
        let free = self.rings.sq_free(self.sq_copied).min(limit);
        let mut n = 0;
        while n < free
            && let Some(taken) = vq.take(guest, buf, self.sq_copied)
        {
            let bytes = if let Taken::Bytes(n) = taken { &buf[..n] } else { &[] };
            let (wqe, opcode, data) = self.send(bytes, gids);
            self.rings.sq_put(self.sq_copied, 0, wqe.as_bytes());
            self.rings.sq_put(self.sq_copied, abi::SQ_DATA, data);
            self.opcodes[(self.sq_copied % rfc::MAX_QP_WR) as usize] = opcode;
            self.sq_copied = self.sq_copied.wrapping_add(1);
            n += 1;
        }
        if n > 0 {
            self.rings.set_sq_prod(self.sq_copied);
        }
        n
    }

    /// Copies at most `limit` receive WQEs; returns their number, and whether the RNIC wants its doorbell rung for
    /// them.
    pub fn take_receives(&mut self, vq: &mut Vq, guest: &GuestMemoryMmap, buf: &mut [u8], limit: u32) -> (u32, bool) {
        let free = self.rings.rq_free(self.rq_copied).min(limit);
        let mut n = 0;
        while n < free
            && let Some(taken) = vq.take(guest, buf, self.rq_copied)
        {
            let bytes = if let Taken::Bytes(n) = taken { &buf[..n] } else { &[] };
            let (wqe, sges) = self.receive(bytes);
            self.rings.rq_put(self.rq_copied, 0, wqe.as_bytes());
            self.rings.rq_put(self.rq_copied, abi::RQ_DATA, sges);
            self.rq_copied = self.rq_copied.wrapping_add(1);
            n += 1;
        }
        (n, n > 0 && self.rings.set_rq_prod(self.rq_copied))
    }

    /// Translates the bytes of a chain: the RNIC's WQE, the driver's opcode, and the SGEs or inline data that follow
    /// the WQE.
    fn send<'a>(&self, bytes: &'a [u8], gids: &Gids) -> (abi::SqWqe, u8, &'a [u8]) {
        let wr_id = bytes.get(12..20).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
        let opcode = bytes.get(8).copied().unwrap_or(0);
        let bad = abi::SqWqe { wr_id, opcode: NO_OPCODE, ..abi::SqWqe::default() };
        match self.good_send(bytes, gids) {
            Some((wqe, data)) => (wqe, opcode, data),
            None => (bad, opcode, &[]),
        }
    }

    fn good_send<'a>(&self, bytes: &'a [u8], gids: &Gids) -> Option<(abi::SqWqe, &'a [u8])> {
        let (r, data) = rfc::SqReq::read_from_prefix(bytes).ok()?;
        let (flags, num_sge) = (r.send_flags.get(), r.num_sge.get());
        let op = u8::try_from(r.opcode.get()).ok().filter(|&op| is_offered(op))?;
        let inline = flags & rfc::send_flags::INLINE != 0;
        let fits = match inline {
            true => num_sge == 0 && data.len() <= self.cap.max_inline_data as usize,
            false => num_sge <= self.cap.max_send_sge && data.len() == num_sge as usize * SGE,
        };
        if flags & !rfc::send_flags::KNOWN != 0 || !fits {
            return None;
        }
        let mut wqe = abi::SqWqe {
            wr_id: r.wr_id.get(),
            opcode: op,
            num_sge: num_sge as u8,
            inline_len: if inline { data.len() as u16 } else { 0 },
            send_flags: flags,
            imm: r.ex.get(),
            ..abi::SqWqe::default()
        };
        match WrOpcode::from_raw(op.into())? {
            _ if self.is_ud => {
                let ud: rfc::Ud = r.part();
                let av = ud.av;
                if av.port.get() != 1 || av.pdn.get() != self.pd {
                    return None;
                }
                wqe.set_address(&address_of(&av, gids.native(av.gid_index)?));
                wqe.send_flags |= send_flags::ADDRESS;
                (wqe.dest_qpn, wqe.qkey) = (ud.remote_qpn.get(), ud.remote_qkey.get());
            }
            op if op.is_atomic() => {
                let a: rfc::Atomic = r.part();
                (wqe.remote_addr, wqe.rkey) = (a.remote_addr.get(), a.rkey.get());
                (wqe.compare_add, wqe.swap) = (a.compare_add.get(), a.swap.get());
            }
            op if !op.is_send() => {
                let rdma: rfc::Rdma = r.part();
                (wqe.remote_addr, wqe.rkey) = (rdma.remote_addr.get(), rdma.rkey.get());
            }
            _ => {}
        }
        Some((wqe, data))
    }

    fn receive<'a>(&self, bytes: &'a [u8]) -> (abi::RqWqe, &'a [u8]) {
        let wr_id = bytes.get(4..12).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
        let good = rfc::RqReq::read_from_prefix(bytes).ok().filter(|(r, sges)| {
            r.num_sge.get() <= self.cap.max_recv_sge && sges.len() == r.num_sge.get() as usize * SGE
        });
        let (num_sge, sges) = good.map_or((NO_SGES, &[][..]), |(r, sges)| (r.num_sge.get(), sges));
        (abi::RqWqe { wr_id, num_sge, reserved: 0 }, sges)
    }

    /// Returns the chains of the WQEs that the RNIC has finished.
    pub fn give_back(&mut self, sq: &mut Vq, rq: &mut Vq, guest: &GuestMemoryMmap) {
        sq.give_back(guest, self.rings.sq_retired());
        let waiting = self.rings.layout().rq_entries - self.rings.rq_free(self.rq_copied);
        rq.give_back(guest, self.rq_copied.wrapping_sub(waiting));
    }

    /// The driver's opcode of the send whose completion has `wqe_index` `index`.
    pub fn opcode(&self, index: u32) -> u8 {
        self.opcodes[(index.wrapping_sub(1) % rfc::MAX_QP_WR) as usize]
    }

    /// Called when the RNIC has reset the QP.
    pub fn reset(&mut self) {
        (self.sq_copied, self.rq_copied) = (0, 0);
        self.rings.set_sq_prod(0);
        self.rings.set_rq_prod(0);
    }
}

/// True for the opcodes of a device without MEM_MGT_EXTENSIONS.
fn is_offered(op: u8) -> bool {
    u32::from(op) <= rfc::opcode::ATOMIC_FETCH_AND_ADD
}

/// An address vector in the RNIC's form, with the RNIC's index of the source GID.
fn address_of(av: &rfc::Av, sgid_index: u8) -> abi::AhAttr {
    let packed = av.sl_tclass_flowlabel.get();
    let grh = abi::GlobalRoute {
        dgid: av.dgid,
        flow_label: packed & 0xf_ffff,
        sgid_index,
        traffic_class: (packed >> 20) as u8,
        hop_limit: av.hop_limit,
        reserved: 0,
    };
    abi::AhAttr { grh, sl: (packed >> 28) as u8, static_rate: av.static_rate, ..abi::AhAttr::default() }
}
