//! RDMA netlink (`rdma/rdma_netlink.h` of the kernel's user interface): verbs devices, their network devices and ports,
//! and the objects that programs have on them.

use std::io;

use netlink_packet_core::NLM_F_DUMP;

use super::netlink::{Message, Requests};

/// `RDMA_NL_GROUP_NOTIFY`, of Linux 6.12 and later.
pub(super) const NOTIFY_GROUP: u32 = 4;

/// The client `RDMA_NL_NLDEV`, in the upper bits of a message's type.
const NLDEV: u16 = 5 << 10;
const CMD_GET: u16 = 1;
const CMD_NEWLINK: u16 = 3;
const CMD_PORT_GET: u16 = 5;

const DEV_INDEX: u16 = 1;
const DEV_NAME: u16 = 2;
const PORT_STATE: u16 = 12;
const RES_KERN_NAME: u16 = 29;
const NDEV_INDEX: u16 = 50;
const NDEV_NAME: u16 = 51;
const LINK_TYPE: u16 = 65;

/// Kinds of objects: the command that lists them, and the attribute that has the list. A context is the use of a
/// device by one program, also if that has closed its descriptor and keeps a mapping.
const OBJECTS: [(u16, u16); 7] = [
    // RES_QP, RES_CM_ID, RES_CQ, RES_MR, RES_PD, RES_CTX, RES_SRQ
    (10, 19),
    (11, 30),
    (12, 35),
    (13, 40),
    (14, 46),
    (22, 86),
    (23, 88),
];

/// Bits of an attribute's type that are flags (`NLA_F_NESTED`, `NLA_F_NET_BYTEORDER`).
const TYPE_MASK: u16 = 0x3fff;

/// A verbs device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub index: u32,
    pub name: String,
    /// The number of the network device of its first port that has one.
    pub netdev: Option<u32>,
    /// One of its ports is active.
    pub active: bool,
}

/// `IB_PORT_ACTIVE`.
const ACTIVE: u8 = 4;

/// RDMA netlink.
pub(super) struct Rdma(Requests);

impl Rdma {
    /// # Errors
    /// The kernel's module `ib_core` is not loaded.
    pub fn open() -> io::Result<Rdma> {
        Requests::open(netlink_sys::protocols::NETLINK_RDMA).map(Rdma)
    }

    /// All verbs devices of this network namespace.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn devices(&mut self) -> io::Result<Vec<Device>> {
        let answer = self.0.ask(NLDEV | CMD_GET, NLM_F_DUMP, &[])?;
        let mut devices: Vec<Device> = answer.iter().filter_map(|m| device(&m.body)).collect();
        for device in &mut devices {
            // The device may have gone meanwhile.
            let ports =
                self.0.ask(NLDEV | CMD_PORT_GET, NLM_F_DUMP, &attribute(DEV_INDEX, &device.index.to_ne_bytes()));
            let ports = ports.unwrap_or_default();
            device.netdev = ports.iter().find_map(|m| netdev(&m.body));
            device.active = ports.iter().any(|m| is_active(&m.body));
        }
        Ok(devices)
    }

    /// The number of objects of programs on a device. Kinds that this kernel does not list are left out.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn objects(&mut self, device: u32) -> io::Result<u32> {
        let mut count = 0u32;
        for (command, list) in OBJECTS {
            match self.0.ask(NLDEV | command, NLM_F_DUMP, &attribute(DEV_INDEX, &device.to_ne_bytes())) {
                Ok(answer) => count = count.saturating_add(count_objects(&answer, list)),
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOENT)) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(count)
    }

    /// Makes a device of the kernel's software RNIC on a network device, as `rdma link add`.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn add_rxe(&mut self, name: &str, netdev: &str) -> io::Result<()> {
        let text = |kind, value: &str| attribute(kind, &[value.as_bytes(), &[0]].concat());
        let body = [text(DEV_NAME, name), text(LINK_TYPE, "rxe"), text(NDEV_NAME, netdev)].concat();
        self.0.change(NLDEV | CMD_NEWLINK, 0, &body)
    }
}

fn device(body: &[u8]) -> Option<Device> {
    let index = number(find(body, DEV_INDEX)?)?;
    let name = find(body, DEV_NAME)?;
    let name = std::str::from_utf8(name.strip_suffix(&[0]).unwrap_or(name)).ok()?;
    Some(Device { index, name: name.into(), netdev: None, active: false })
}

fn netdev(body: &[u8]) -> Option<u32> {
    number(find(body, NDEV_INDEX)?)
}

fn is_active(body: &[u8]) -> bool {
    find(body, PORT_STATE).is_some_and(|state| state.first() == Some(&ACTIVE))
}

/// Counts the entries of lists, without the kernel's own. Only these have a name of their owner.
fn count_objects(answer: &[Message], list: u16) -> u32 {
    let lists = answer.iter().filter_map(|m| find(&m.body, list));
    let entries = lists.flat_map(Attributes).filter(|(kind, _)| *kind == list + 1);
    entries.filter(|(_, entry)| find(entry, RES_KERN_NAME).is_none()).count() as u32
}

/// The value of the first attribute of a kind.
fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    Attributes(bytes).find(|a| a.0 == kind).map(|a| a.1)
}

fn number(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|v| u32::from_ne_bytes(*v))
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (4 + value.len()) as u16;
    let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Attributes: their types without flags, and their values. Ends at the first one that is malformed.
struct Attributes<'a>(&'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let [a, b, c, d] = *self.0.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([a, b]));
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([c, d]) & TYPE_MASK, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NESTED: u16 = 1 << 15;
    const QP: u16 = 19;
    const PID: u16 = 28;

    /// Three QPs: one of the kernel, one of a program, one of a program of another PID namespace.
    fn qps() -> Vec<u8> {
        let of = |owner: &[u8]| attribute(NESTED | (QP + 1), &[&attribute(21, &[1, 0, 0, 0]), owner].concat());
        let entries =
            [of(&attribute(RES_KERN_NAME, b"ib_core\0")), of(&attribute(PID, &[9, 0, 0, 0])), of(&[])].concat();
        [attribute(DEV_INDEX, &[3, 0, 0, 0]), attribute(DEV_NAME, b"rxe0\0"), attribute(NESTED | QP, &entries)].concat()
    }

    #[test]
    fn objects_of_programs_are_counted() {
        let answer = [Message { kind: NLDEV | 10, flags: 0, sequence: 0, body: qps() }];
        assert_eq!(count_objects(&answer, QP), 2);
        assert_eq!(count_objects(&answer, 35), 0);
    }

    #[test]
    fn a_device_has_a_number_a_name_and_a_network_device() {
        let d = device(&qps()).unwrap();
        assert_eq!((d.index, d.name.as_str()), (3, "rxe0"));
        let port = [attribute(DEV_INDEX, &[3, 0, 0, 0]), attribute(NDEV_INDEX, &[7, 0, 0, 0])].concat();
        assert_eq!((netdev(&port), netdev(&qps())), (Some(7), None));
    }

    #[test]
    fn a_port_is_active_or_not() {
        let states = [1, 3, 4, 5].map(|state| is_active(&attribute(PORT_STATE, &[state])));
        assert_eq!(states, [false, false, true, false]);
        assert!(!is_active(&attribute(PORT_STATE, &[])) && !is_active(&qps()));
    }

    #[test]
    fn any_bytes_are_parsed() {
        let parse = |body: &[u8]| {
            let message = Message { kind: 0, flags: 0, sequence: 0, body: body.to_vec() };
            (device(body), netdev(body), is_active(body), count_objects(&[message], QP))
        };
        let whole = qps();
        for cut in 0..whole.len() {
            parse(&whole[..cut]);
            for bit in 0..8 {
                let mut wrong = whole.clone();
                wrong[cut] ^= 1 << bit;
                parse(&wrong);
            }
        }
        for length in 0..8u16 {
            let bytes = [length.to_ne_bytes(), [1, 0], [0xff, 0xff], [0xff, 0xff]].concat();
            parse(&bytes);
        }
    }

    #[test]
    fn names_are_texts_with_a_zero_in_whole_words() {
        assert_eq!(attribute(DEV_NAME, b"rxe0\0"), [9, 0, 2, 0, b'r', b'x', b'e', b'0', 0, 0, 0, 0]);
    }
}
