//! The memory that belongs to a record: who provides it, and which size and kind it must have.

use std::collections::HashMap;
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_mem::{Bell, CqRing, QpRings, Span};

use super::data::{LayoutData, VrnicData, WayData};
use super::{Object, RestoreError};
use crate::objects::{Backing, Resolve};

/// How the memory of an MR is reached: the kind of [`Backing`] that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Way {
    Mapped,
    Process,
    Session,
    Null,
    /// A list of pages. It keeps the same value alive as at its creation; the record has the pages.
    Pages,
}

/// Provides the memory of a vRNIC that is being restored, with its content at the time of the save. Sessions have their
/// numbers in the record, and objects their numbers in the session. `None` means that there is no such memory, and
/// nothing is restored.
pub trait Attach {
    /// Doorbell page `number` of a session; 0 names the page of SET_DOORBELL.
    fn doorbell(&mut self, session: u32, number: u32) -> Option<Bell>;
    /// The memory of a session by bus address. Its regions have the numbers that they had before.
    fn memory(&mut self, session: u32) -> Option<Arc<dyn Resolve>>;
    /// The stage of a session, `bytes` long.
    fn stage(&mut self, session: u32, bytes: u64) -> Option<Span>;
    /// The ring of a CQ, with `entries` entries.
    fn cq(&mut self, session: u32, cq: u32, entries: u32) -> Option<CqRing>;
    /// The ring of an SRQ, of this layout.
    fn srq(&mut self, session: u32, srq: u32, layout: abi::QpLayout) -> Option<QpRings>;
    /// The rings of a QP, of this layout.
    fn qp(&mut self, qpn: u32, layout: abi::QpLayout) -> Option<QpRings>;
    /// The memory of an MR of `len` bytes. For [`Way::Pages`], `len` is the most pages that the list may have.
    fn mr(&mut self, session: u32, mr: u32, way: Way, len: u64) -> Option<Backing>;
}

/// The memory of a vRNIC that was taken from its RNIC: for a restore in the same process.
#[derive(Default)]
pub struct Attached {
    pub(super) doorbells: HashMap<(u32, u32), Bell>,
    pub(super) memories: HashMap<u32, Arc<dyn Resolve>>,
    pub(super) stages: HashMap<u32, Span>,
    pub(super) cqs: HashMap<(u32, u32), CqRing>,
    pub(super) srqs: HashMap<(u32, u32), QpRings>,
    pub(super) qps: HashMap<u32, QpRings>,
    pub(super) mrs: HashMap<(u32, u32), Backing>,
}

impl Attach for Attached {
    fn doorbell(&mut self, session: u32, number: u32) -> Option<Bell> {
        self.doorbells.get(&(session, number)).cloned()
    }
    fn memory(&mut self, session: u32) -> Option<Arc<dyn Resolve>> {
        self.memories.get(&session).cloned()
    }
    fn stage(&mut self, session: u32, _: u64) -> Option<Span> {
        self.stages.get(&session).cloned()
    }
    fn cq(&mut self, session: u32, cq: u32, _: u32) -> Option<CqRing> {
        self.cqs.get(&(session, cq)).map(|ring| ring.at(ring.position()))
    }
    fn srq(&mut self, session: u32, srq: u32, _: abi::QpLayout) -> Option<QpRings> {
        self.srqs.get(&(session, srq)).cloned()
    }
    fn qp(&mut self, qpn: u32, _: abi::QpLayout) -> Option<QpRings> {
        self.qps.get(&qpn).cloned()
    }
    fn mr(&mut self, session: u32, mr: u32, _: Way, _: u64) -> Option<Backing> {
        self.mrs.get(&(session, mr)).map(Backing::share)
    }
}

impl Backing {
    /// Another reference to the same memory.
    pub(super) fn share(&self) -> Backing {
        match self {
            Backing::Mapped(span) => Backing::Mapped(span.clone()),
            Backing::Pieces(pieces, base) => Backing::Pieces(pieces.clone(), *base),
            Backing::Process(mem, base) => Backing::Process(mem.clone(), *base),
            Backing::Session => Backing::Session,
            Backing::Null => Backing::Null,
            Backing::Pages(list) => Backing::Pages(list.clone()),
        }
    }

    pub(super) fn way(&self) -> WayData {
        match self {
            Backing::Mapped(_) | Backing::Pieces(..) => WayData::Mapped,
            Backing::Process(..) => WayData::Process,
            Backing::Session => WayData::Session,
            Backing::Null => WayData::Null,
            Backing::Pages(_) => WayData::Pages,
        }
    }
}

impl From<WayData> for Way {
    fn from(way: WayData) -> Way {
        match way {
            WayData::Mapped => Way::Mapped,
            WayData::Process => Way::Process,
            WayData::Session => Way::Session,
            WayData::Null => Way::Null,
            WayData::Pages => Way::Pages,
        }
    }
}

impl LayoutData {
    pub fn save(live: &abi::QpLayout) -> Self {
        let abi::QpLayout { sq_entries, sq_stride, rq_entries, rq_stride } = *live;
        LayoutData { sq_entries, sq_stride, rq_entries, rq_stride }
    }

    pub fn restore(&self) -> abi::QpLayout {
        let LayoutData { sq_entries, sq_stride, rq_entries, rq_stride } = *self;
        abi::QpLayout { sq_entries, sq_stride, rq_entries, rq_stride }
    }
}

impl Attached {
    /// Asks for all memory of a record, and checks its sizes and kinds.
    pub(super) fn ask(d: &VrnicData, attach: &mut dyn Attach) -> Result<Attached, RestoreError> {
        use super::data::MrKind;
        fn given<T>(object: Object, r: Option<T>, fits: impl Fn(&T) -> bool) -> Result<T, RestoreError> {
            let r = r.ok_or(RestoreError::NotGiven(object))?;
            if fits(&r) { Ok(r) } else { Err(RestoreError::Unlike(object)) }
        }
        let mut all = Attached::default();
        for s in &d.sessions {
            let session = s.number;
            for number in s.doors.iter().map(|d| d.number) {
                let bell = given(Object::Doorbell { session, number }, attach.doorbell(session, number), |_| true)?;
                all.doorbells.insert((session, number), bell);
            }
            if s.memory {
                let memory = given(Object::Memory { session }, attach.memory(session), |_| true)?;
                all.memories.insert(session, memory);
            }
            if let Some(stage) = &s.stage {
                let fits = |span: &Span| span.len() as u64 == stage.bytes && span.addr() % 64 == 0;
                let span = given(Object::BounceMemory { session }, attach.stage(session, stage.bytes), fits)?;
                all.stages.insert(session, span);
            }
            for c in &s.cqs {
                let number = c.number;
                let fits = |ring: &CqRing| ring.entries() == c.entries;
                let ring = given(Object::Cq { session, number }, attach.cq(session, number, c.entries), fits)?;
                all.cqs.insert((session, number), ring);
            }
            for q in &s.srqs {
                let (number, layout) = (q.number, q.layout.restore());
                let fits = |rings: &QpRings| *rings.layout() == layout;
                let rings = given(Object::Srq { session, number }, attach.srq(session, number, layout), fits)?;
                all.srqs.insert((session, number), rings);
            }
            for m in &s.mrs {
                let MrKind::Region(way) = m.kind else { continue };
                let number = m.number;
                let fits = |b: &Backing| {
                    let room = match b {
                        Backing::Mapped(span) => span.len() as u64,
                        Backing::Pieces(pieces, base) => pieces.len().saturating_sub(*base),
                        _ => u64::MAX,
                    };
                    b.way() == way && room >= m.len
                };
                let size = m.pages.as_ref().map_or(m.len, |p| p.most.into());
                let backing = attach.mr(session, number, way.into(), size);
                all.mrs.insert((session, number), given(Object::Mr { session, number }, backing, fits)?);
            }
        }
        for q in &d.qps {
            let (qpn, layout) = (q.qpn, q.layout.restore());
            let rings = given(Object::Qp { qpn }, attach.qp(qpn, layout), |r: &QpRings| *r.layout() == layout)?;
            all.qps.insert(qpn, rings);
        }
        Ok(all)
    }
}
