//! The socket by which a program gets a context on a VF of a real RNIC: `lease.sock` in the vRNIC's directory, of type
//! SOCK_SEQPACKET. It is for containers; a guest of a VMM has none.
//!
//! The program connects and sends one [`Ask`]. The virtual layer answers with any number of [`WAITS`], then with one of
//! [`HAS`], [`SOFT`] and [`REFUSED`]. The connection stands for the context, and is open as long as the context is. For
//! as long as a program of a vRNIC has [`SOFT`], the vRNIC's other programs get [`SOFT`], too.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Its name in the vRNIC's directory.
pub const SOCKET: &str = "lease.sock";
/// A directory of the vRNIC's directory, which has what a program may see of the VF's verbs device in `/sys/class`:
/// `infiniband_verbs` and `infiniband`, with regular files of the same contents.
pub const SYSFS: &str = "vf/sys/class";
/// [`Ask::version`].
pub const VERSION: u32 = 1;

/// [`Told::kind`]: no VF is free, and the program waits at the place `place`, from 1.
pub const WAITS: u32 = 1;
/// [`Told::kind`]: it is to use the software RNIC, for the reason `text`.
pub const SOFT: u32 = 2;
/// [`Told::kind`]: it gets nothing, for the reason `text`. The connection is closed.
pub const REFUSED: u32 = 3;
/// [`Told::kind`]: it has a VF. A new descriptor of the device node is sent along.
pub const HAS: u32 = 4;
/// [`Told::kind`]: the VF is gone, for the reason `text`. Its context is dead.
pub const EVICTED: u32 = 5;

/// Asks for a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Ask {
    /// [`VERSION`].
    pub version: u32,
    /// Zero.
    pub reserved: [u32; 3],
}

/// A message of the virtual layer. Names and texts are UTF-8 and end with a zero byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Told {
    /// [`WAITS`] to [`EVICTED`].
    pub kind: u32,
    /// See [`WAITS`].
    pub place: u32,
    /// The GID of the VF (RoCE v2) from which its connections go.
    pub gid: [u8; 16],
    /// The number of the device node, as in `stat::st_rdev`.
    pub rdev: u64,
    /// The name of the device node in `/dev/infiniband`.
    pub node: [u8; 32],
    /// The name of the verbs device.
    pub device: [u8; 64],
    /// A reason.
    pub text: [u8; 128],
}

const _: () = assert!(size_of::<Ask>() == 16 && size_of::<Told>() == 256);
