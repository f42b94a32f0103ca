//! Answers to questions about RDMA devices by netlink (NETLINK_RDMA), which the kernel cannot answer for a vRNIC.
//!
//! The preloaded library gives a program another netlink socket in place of one of this family, and hands on what the
//! program sends there. Answers come from a second socket, so that the program waits for them and reads them as it does
//! the kernel's. What is in `/sys/class/infiniband` is what is answered.
//!
//! Numbers and attributes: `include/uapi/rdma/rdma_netlink.h`, netlink(7).

use std::ffi::{CString, c_int, c_void};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use crate::done;

const CLASS: &str = "/sys/class/infiniband";

/// The kind of message: the client of RDMA netlink (devices), and what is asked.
const DEVICES: u16 = 5;
const GET: u16 = 1;
const PORT_GET: u16 = 5;
const SYS_GET: u16 = 6;

const HEADER: usize = 16;
const INDEX: u16 = 1;
const NAME: u16 = 2;
const PORT: u16 = 3;
const CAPABILITIES: u16 = 4;
const FIRMWARE: u16 = 5;
const NODE_GUID: u16 = 6;
const IMAGE_GUID: u16 = 7;
const STATE: u16 = 12;
const PHYSICAL_STATE: u16 = 13;
const NODE_TYPE: u16 = 14;
const NETDEV_INDEX: u16 = 50;
const NETDEV_NAME: u16 = 51;
const NETNS_MODE: u16 = 66;
const PROTOCOL: u16 = 67;
const COPY_ON_FORK: u16 = 93;

/// A device with one port.
#[derive(Clone, Debug, Default, PartialEq)]
struct Device {
    index: u32,
    name: String,
    firmware: String,
    node_guid: u64,
    image_guid: u64,
    node_type: u8,
    capabilities: u64,
    state: u8,
    physical_state: u8,
    /// The interface of the port, if it has one in this network namespace.
    netdev: Option<(u32, String)>,
}

impl Device {
    /// Reads the files of a device.
    fn read(index: u32, class: &Path, name: &str) -> Device {
        let text = |file: &str| fs::read_to_string(class.join(name).join(file)).unwrap_or_default().trim().to_string();
        // Such as `4: ACTIVE`.
        let number = |file: &str| text(file).split(':').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let guid = |file: &str| u64::from_str_radix(&text(file).replace(':', ""), 16).unwrap_or(0);
        let capabilities = text("ports/1/cap_mask");
        let netdev = text("ports/1/gid_attrs/ndevs/0");
        // SAFETY: the name is a text.
        let found = CString::new(&*netdev).map_or(0, |n| unsafe { libc::if_nametoindex(n.as_ptr()) });
        Device {
            index,
            name: name.into(),
            firmware: text("fw_ver"),
            node_guid: guid("node_guid"),
            image_guid: guid("sys_image_guid"),
            node_type: number("node_type"),
            capabilities: u64::from_str_radix(capabilities.trim_start_matches("0x"), 16).unwrap_or(0),
            state: number("ports/1/state"),
            physical_state: number("ports/1/phys_state"),
            netdev: (found != 0).then_some((found, netdev)),
        }
    }

    /// All devices, in the order of their names.
    fn all(class: &Path) -> Vec<Device> {
        let entries = fs::read_dir(class).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        (0..).zip(&names).map(|(index, name)| Device::read(index, class, name)).collect()
    }

    fn handle(&self) -> Vec<u8> {
        [attribute(INDEX, &self.index.to_ne_bytes()), text(NAME, &self.name)].concat()
    }

    fn about_device(&self) -> Vec<u8> {
        [
            self.handle(),
            attribute(PORT, &1u32.to_ne_bytes()),
            text(FIRMWARE, &self.firmware),
            attribute(NODE_GUID, &self.node_guid.to_ne_bytes()),
            attribute(IMAGE_GUID, &self.image_guid.to_ne_bytes()),
            attribute(NODE_TYPE, &[self.node_type]),
            text(PROTOCOL, "roce"),
        ]
        .concat()
    }

    fn about_port(&self) -> Vec<u8> {
        let mut all = [
            self.handle(),
            attribute(PORT, &1u32.to_ne_bytes()),
            attribute(CAPABILITIES, &self.capabilities.to_ne_bytes()),
            attribute(STATE, &[self.state]),
            attribute(PHYSICAL_STATE, &[self.physical_state]),
        ]
        .concat();
        if let Some((index, name)) = &self.netdev {
            all.extend(attribute(NETDEV_INDEX, &index.to_ne_bytes()));
            all.extend(text(NETDEV_NAME, name));
        }
        all
    }
}

/// An attribute, padded to 4 bytes.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = 4 + value.len();
    let mut a = [(length as u16).to_ne_bytes(), kind.to_ne_bytes()].concat();
    a.extend_from_slice(value);
    a.resize(length.next_multiple_of(4), 0);
    a
}

fn text(kind: u16, value: &str) -> Vec<u8> {
    attribute(kind, &[value.as_bytes(), b"\0"].concat())
}

/// A question: one message of a program.
#[derive(Clone, Copy, Debug)]
struct Question<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    attributes: &'a [u8],
}

/// Splits what a program has sent into its messages. What follows a wrong length is left out, as the kernel does.
fn questions(mut bytes: &[u8]) -> Vec<Question<'_>> {
    let mut all = Vec::new();
    while let Some(header) = bytes.first_chunk::<HEADER>() {
        let [a, b, c, d, k, i, f, g, s, t, u, v, ..] = *header;
        let length = u32::from_ne_bytes([a, b, c, d]) as usize;
        let Some(attributes) = bytes.get(HEADER..length) else { break };
        let (kind, flags) = (u16::from_ne_bytes([k, i]), u16::from_ne_bytes([f, g]));
        all.push(Question { kind, flags, sequence: u32::from_ne_bytes([s, t, u, v]), attributes });
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    all
}

impl Question<'_> {
    /// A number among its attributes.
    fn number(&self, wanted: u16) -> Option<u32> {
        let mut rest = self.attributes;
        loop {
            let [a, b, k, i, ..] = *rest else { return None };
            let (length, kind) = (usize::from(u16::from_ne_bytes([a, b])), u16::from_ne_bytes([k, i]));
            let value = rest.get(4..length)?;
            if kind & !(libc::NLA_F_NESTED | libc::NLA_F_NET_BYTEORDER) as u16 == wanted {
                return value.first_chunk().map(|v| u32::from_ne_bytes(*v));
            }
            rest = rest.get(length.next_multiple_of(4)..)?;
        }
    }

    fn message(&self, kind: u16, flags: i32, port: u32, body: &[u8]) -> Vec<u8> {
        let mut m = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
        m.extend([kind.to_ne_bytes(), (flags as u16).to_ne_bytes()].concat());
        m.extend([self.sequence.to_ne_bytes(), port.to_ne_bytes()].concat());
        m.extend_from_slice(body);
        m
    }

    /// An error, or 0: that all was done. The message that is answered follows.
    fn error(&self, errno: i32, port: u32) -> Vec<u8> {
        let asked = self.message(self.kind, self.flags.into(), 0, &[]);
        self.message(libc::NLMSG_ERROR as u16, 0, port, &[&(-errno).to_ne_bytes()[..], &asked].concat())
    }

    /// The answers to this question of the program whose socket has the address `port`.
    fn answers(&self, devices: &[Device], port: u32) -> Vec<Vec<u8>> {
        let all = i32::from(self.flags) & libc::NLM_F_DUMP == libc::NLM_F_DUMP;
        let one = || self.number(INDEX).and_then(|i| devices.iter().find(|d| d.index == i)).ok_or(libc::ENODEV);
        let bodies: Result<Vec<Vec<u8>>, i32> = match (self.kind >> 10, self.kind & 0x3ff) {
            (DEVICES, GET) if all => Ok(devices.iter().map(Device::about_device).collect()),
            (DEVICES, GET) => one().map(|d| vec![d.about_device()]),
            (DEVICES, PORT_GET) if all => one().map(|d| vec![d.about_port()]),
            (DEVICES, PORT_GET) => match self.number(PORT) {
                Some(1) => one().map(|d| vec![d.about_port()]),
                _ => Err(libc::EINVAL),
            },
            // Each device is in one network namespace. A child gets copies of registered memory.
            (DEVICES, SYS_GET) => Ok(vec![[attribute(NETNS_MODE, &[0]), attribute(COPY_ON_FORK, &[1])].concat()]),
            _ => Err(libc::EOPNOTSUPP),
        };
        let flags = if all { libc::NLM_F_MULTI } else { 0 };
        match bodies {
            Ok(bodies) => {
                let mut messages: Vec<_> = bodies.iter().map(|b| self.message(self.kind, flags, port, b)).collect();
                if all {
                    messages.push(self.message(libc::NLMSG_DONE as u16, flags, port, &0i32.to_ne_bytes()));
                } else if i32::from(self.flags) & libc::NLM_F_ACK != 0 {
                    messages.push(self.error(0, port));
                }
                messages
            }
            Err(errno) => vec![self.error(errno, port)],
        }
    }
}

/// Answers what a program has sent by a socket that it has in place of one of NETLINK_RDMA. Returns the length, or -1
/// with errno.
///
/// # Safety
/// `bytes` has `length` bytes.
pub unsafe extern "C" fn x_unirdma_answer_netlink(fd: c_int, bytes: *const c_void, length: usize) -> isize {
    // SAFETY: as promised.
    let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) };
    let answered = answer(fd, bytes).map_err(|e| e.raw_os_error().unwrap_or(libc::EIO));
    if done(answered) < 0 { -1 } else { length as isize }
}

fn answer(fd: c_int, bytes: &[u8]) -> io::Result<()> {
    let checked = |r: isize| if r < 0 { Err(io::Error::last_os_error()) } else { Ok(r) };
    // SAFETY: an address of zeros is one of no port.
    let mut to: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    to.nl_family = libc::AF_NETLINK as u16;
    let mut size = size_of_val(&to) as libc::socklen_t;
    // SAFETY: the address and its size live until the call returns. The first call fails if the socket has an address.
    unsafe {
        libc::bind(fd, (&raw const to).cast(), size);
        checked(libc::getsockname(fd, (&raw mut to).cast(), &mut size) as isize)?;
    }
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: makes a descriptor, which is then owned.
    let own = unsafe {
        let made = checked(libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_USERSOCK) as isize)?;
        OwnedFd::from_raw_fd(made as c_int)
    };
    let port = to.nl_pid;
    to.nl_groups = 0;
    let devices = Device::all(Path::new(CLASS));
    for message in questions(bytes).iter().flat_map(|q| q.answers(&devices, port)) {
        let at = (&raw const to).cast();
        // SAFETY: the message and the address live until the call returns. A full socket loses it, as the kernel's do.
        unsafe {
            checked(libc::sendto(
                own.as_raw_fd(),
                message.as_ptr().cast(),
                message.len(),
                libc::MSG_DONTWAIT,
                at,
                size,
            ))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> Device {
        Device {
            name: "unirdma0".into(),
            node_guid: 7,
            node_type: 1,
            state: 4,
            physical_state: 5,
            netdev: Some((2, "eth0".into())),
            ..Device::default()
        }
    }

    fn ask(op: u16, flags: i32, attributes: &[u8]) -> Vec<u8> {
        let kind = DEVICES << 10 | op;
        let q = Question { kind, flags: flags as u16, sequence: 9, attributes: &[] };
        q.message(kind, flags, 0, attributes)
    }

    fn kinds(answers: &[Vec<u8>]) -> Vec<(u16, i32)> {
        let kind = |a: &Vec<u8>| u16::from_ne_bytes([a[4], a[5]]);
        let error = |a: &Vec<u8>| i32::from_ne_bytes([a[16], a[17], a[18], a[19]]);
        answers.iter().map(|a| (kind(a), if kind(a) == libc::NLMSG_ERROR as u16 { error(a) } else { 0 })).collect()
    }

    fn answers(bytes: &[u8]) -> Vec<Vec<u8>> {
        questions(bytes).iter().flat_map(|q| q.answers(&[device()], 77)).collect()
    }

    #[test]
    fn devices_and_ports_are_listed() {
        let (get, port) = (DEVICES << 10 | GET, DEVICES << 10 | PORT_GET);
        let (done, error) = (libc::NLMSG_DONE as u16, libc::NLMSG_ERROR as u16);
        let all = answers(&ask(GET, libc::NLM_F_DUMP, &[]));
        assert_eq!(kinds(&all), [(get, 0), (done, 0)]);
        assert!(all[0].windows(9).any(|w| w == b"unirdma0\0"));
        // The sequence number and the port of who has asked.
        assert_eq!((all[0][8], all[0][12], all[0].len() % 4), (9, 77, 0));
        let first = attribute(INDEX, &0u32.to_ne_bytes());
        let one = answers(&ask(PORT_GET, libc::NLM_F_DUMP, &first));
        assert_eq!(kinds(&one), [(port, 0), (done, 0)]);
        assert!(one[0].windows(5).any(|w| w == b"eth0\0"));
        let both = [&first[..], &attribute(PORT, &1u32.to_ne_bytes())].concat();
        assert_eq!(kinds(&answers(&ask(PORT_GET, libc::NLM_F_ACK, &both))), [(port, 0), (error, 0)]);
        assert_eq!(kinds(&answers(&ask(PORT_GET, 0, &first))), [(error, -libc::EINVAL)]);
        let other = attribute(INDEX, &1u32.to_ne_bytes());
        assert_eq!(kinds(&answers(&ask(GET, 0, &other))), [(error, -libc::ENODEV)]);
        assert_eq!(kinds(&answers(&ask(9, libc::NLM_F_DUMP, &[]))), [(error, -libc::EOPNOTSUPP)]);
    }

    #[test]
    fn wrong_lengths_are_no_questions() {
        let good = ask(GET, 0, &attribute(INDEX, &0u32.to_ne_bytes()));
        for end in 0..good.len() {
            assert!(answers(&good[..end]).is_empty(), "{end}");
        }
        for length in [0u32, 15, u32::MAX] {
            let wrong = [&length.to_ne_bytes()[..], &good[4..]].concat();
            assert!(answers(&wrong).is_empty(), "{length}");
        }
        // An attribute that is longer than the message, and one that is too short.
        for length in [0u16, 3, 200] {
            let wrong = [length.to_ne_bytes(), INDEX.to_ne_bytes(), [0; 2], [0; 2]].concat();
            let error = (libc::NLMSG_ERROR as u16, -libc::ENODEV);
            assert_eq!(kinds(&answers(&ask(GET, 0, &wrong))), [error], "{length}");
        }
        assert_eq!(answers(&[&good[..], &good].concat()).len(), 2);
    }

    #[test]
    fn the_files_of_a_device_are_read() {
        let dir = std::env::temp_dir().join(format!("unirdma-netlink-{}", std::process::id()));
        let put = |file: &str, text: &str| {
            let path = dir.join("d0").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        };
        put("node_guid", "0001:0203:0405:0607");
        put("node_type", "1: CA");
        put("ports/1/state", "4: ACTIVE");
        put("ports/1/cap_mask", "0x04010000");
        put("ports/1/gid_attrs/ndevs/0", "lo");
        let all = Device::all(&dir);
        fs::remove_dir_all(&dir).unwrap();
        let [d] = &all[..] else { panic!("{all:?}") };
        assert_eq!((&*d.name, d.node_guid, d.node_type), ("d0", 0x0001_0203_0405_0607, 1));
        assert_eq!((d.state, d.physical_state, d.capabilities), (4, 0, 0x0401_0000));
        assert_eq!(d.netdev.as_ref().map(|n| &*n.1), Some("lo"));
        assert!(Device::all(&dir).is_empty(), "there is no such directory");
    }
}
