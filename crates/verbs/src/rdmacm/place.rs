//! The device on which an identifier is. It is made on the first device, and moves to the one with the address to which
//! its program binds it. An address that names no device makes it one of all devices.

use unirdma_abi as abi;
use unirdma_abi::{CM_XRC, CmOp};
use unirdma_verbs_abi::rdma_event_channel;

use super::{EventChannelObj, IdObj, Place, request, with_device};

const QPT_XRC_SEND: u32 = 9;
const QPT_XRC_RECV: u32 = 10;

/// Makes an identifier on the first device that is not lost.
pub(super) fn first(channel: &EventChannelObj, ps: u32, qp_type: u32) -> Result<Place, i32> {
    let mut made = Err(libc::ENODEV);
    for part in &channel.parts {
        made = make(channel, part.device, ps, qp_type);
        if !matches!(made, Err(libc::EIO)) {
            break;
        }
    }
    made
}

fn make(channel: &EventChannelObj, device: usize, ps: u32, qp_type: u32) -> Result<Place, i32> {
    let slot = channel.part(device)?.events.number();
    let made = request(CmOp::Create, Place { device, handle: 0 }, |r| {
        (r.port_space, r.queue) = (u16::try_from(ps).unwrap_or(0), slot);
        r.option = if [QPT_XRC_SEND, QPT_XRC_RECV].contains(&qp_type) { CM_XRC } else { 0 };
    })?;
    Ok(Place { device, handle: made.id })
}

impl IdObj {
    fn channel(&self) -> &EventChannelObj {
        // SAFETY: an identifier's channel lives as long as it.
        unsafe { EventChannelObj::of(self.c.channel) }
    }

    fn other_devices(&self) -> Vec<usize> {
        self.channel().parts.iter().map(|p| p.device).filter(|&d| d != self.at.device).collect()
    }

    /// All its places.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> + use<> {
        std::iter::once(self.at).chain(self.others.clone())
    }

    /// Lets events of a place find the identifier.
    pub(super) fn enter(&mut self, place: Place) {
        let own: *mut IdObj = self;
        let _ = with_device(place.device, |d| d.ids.insert(place.handle, own));
    }

    /// Destroys it at one place.
    pub(super) fn leave(&self, place: Place) -> Result<(), i32> {
        match request(CmOp::Destroy, place, |_| ()) {
            Ok(r) => _ = self.channel().part(place.device).map(|part| part.discard(r.dropped)),
            // An identifier ends with the virtual layer, and a forked child does not have its parent's identifiers.
            Err(libc::EIO | libc::ENOENT) => {}
            Err(e) => return Err(e),
        }
        let _ = with_device(place.device, |d| d.ids.remove(&place.handle));
        Ok(())
    }

    /// Keeps its place on one device only.
    pub(super) fn leave_others(&mut self) {
        for place in std::mem::take(&mut self.others) {
            _ = self.leave(place);
        }
    }

    /// Makes it on a device once more, with what its program has set.
    fn make_on(&self, device: usize) -> Result<Place, i32> {
        let place = make(self.channel(), device, self.c.ps, self.c.qp_type)?;
        for &(option, value) in &self.options {
            if let Err(e) = request(CmOp::SetOption, place, |r| (r.option, r.value) = (option, value)) {
                _ = self.leave(place);
                return Err(e);
            }
        }
        Ok(place)
    }

    /// Moves it to a device, where it has no address yet.
    fn move_to(&mut self, device: usize) -> Result<(), i32> {
        let new = self.make_on(device)?;
        let old = std::mem::replace(&mut self.at, new);
        self.enter(new);
        self.leave(old)
    }

    /// Asks for something that names an address of its own, on the device that has the address.
    pub(super) fn where_it_fits(
        &mut self,
        ask: impl Fn(Place) -> Result<abi::CmResp, i32>,
    ) -> Result<abi::CmResp, i32> {
        let first = self.at.device;
        let mut answer = ask(self.at);
        if !matches!(answer, Err(libc::ENODEV)) || self.is_bound() {
            return answer;
        }
        for device in self.other_devices() {
            // One that is lost has no address.
            if self.move_to(device).is_ok() {
                answer = ask(self.at);
                if !matches!(answer, Err(libc::ENODEV)) {
                    return answer;
                }
            }
        }
        if self.at.device != first {
            self.move_to(first)?;
        }
        answer
    }

    fn is_bound(&self) -> bool {
        self.c.route.addr.src.ss_family != 0
    }

    /// Binds it on all other devices to the address that it has here, which names no device. If another identifier has
    /// the port there, it is bound nowhere.
    pub(super) fn spread(&mut self, src: &abi::CmAddr) -> Result<(), i32> {
        for device in self.other_devices() {
            let place = match self.make_on(device) {
                Ok(place) => place,
                Err(libc::EIO) => continue,
                Err(e) => return self.give_up(e),
            };
            if let Err(e) = request(CmOp::Bind, place, |r| r.src = *src) {
                _ = self.leave(place);
                return self.give_up(e);
            }
            self.others.push(place);
            self.enter(place);
        }
        Ok(())
    }

    fn give_up(&mut self, e: i32) -> Result<(), i32> {
        self.leave_others();
        self.move_to(self.at.device)?;
        Err(e)
    }

    /// Has its events come to another channel.
    pub(super) fn migrate_places(&mut self, new: *mut rdma_event_channel) -> Result<(), i32> {
        // SAFETY: the caller's channel is one of this library.
        let new = unsafe { EventChannelObj::of(new) };
        for place in self.places() {
            let slot = new.part(place.device).map(|p| p.events.number());
            let Ok(slot) = slot else { continue };
            match request(CmOp::Migrate, place, |r| r.queue = slot) {
                Ok(r) => self.channel().part(place.device)?.discard(r.dropped),
                // Nothing comes from a device that is lost.
                Err(libc::EIO) if place.device != self.at.device => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// True if an address names no device: a wildcard or, as with the kernel, a loopback address.
pub(super) fn names_no_device(a: &abi::CmAddr) -> bool {
    let ip = unirdma_formats::Gid(a.ip).ip();
    ip.is_unspecified() || ip.is_loopback()
}
