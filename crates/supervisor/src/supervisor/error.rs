//! Errors of requests of administrators and of the control centre's orders.

use std::io;
use std::net::{IpAddr, Ipv6Addr};

use unirdma_confine::{CgroupError, MAX_GROUP_WEIGHT};
use unirdma_formats::Mac;
use unirdma_ipc::secrets::SecretError;
use unirdma_ipc::vrnic::InvalidValue;

use super::group::CallError;
use crate::admin::Response;
#[cfg(feature = "fleet")]
use crate::centre::AskError;
use crate::vf::{LendError, PartError};

pub(super) type Reply = Result<Response, RequestError>;

/// Why a request or an order fails. Its text is made where it is answered, reported or logged.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    /// The request lacks something, or makes no sense.
    #[error("{0}")]
    Malformed(&'static str),
    #[error(transparent)]
    Value(#[from] InvalidValue),
    #[error("the weight {0} is not 1 to {MAX_GROUP_WEIGHT}")]
    GroupWeight(u32),
    #[error(transparent)]
    Address(#[from] AddressError),

    #[error("there is no {what} {name}")]
    Missing { what: &'static str, name: String },
    #[error("there is no vRNIC {0}; `unirdma vrnic ls` lists those that exist")]
    NoVrnic(String),
    #[error(
        "there is no group {group} (there are: {}); create it with `unirdma group add {group}`", .known.join(", ")
    )]
    NoGroup { group: String, known: Vec<String> },
    #[error("vRNIC {0} exists already; choose another name or remove it with `unirdma vrnic rm {0}`")]
    VrnicExists(String),
    #[error("group {0} exists already")]
    GroupExists(String),
    #[error("the group `default` always exists")]
    DefaultGroup,
    #[error("group {group} still has the vRNIC {vrnic}; remove its vRNICs first")]
    GroupNotEmpty { group: String, vrnic: String },
    /// The group was removed meanwhile.
    #[error("group {0} is gone")]
    GroupGone(String),
    #[error("vRNIC {vrnic} is in use ({sessions} sessions); end its container first, or add --force")]
    InUse { vrnic: String, sessions: usize },
    #[error(
        "vRNIC {0} has a container already; run the command in it with `unirdma exec --vrnic {0}`, end it, or make \
         another vRNIC"
    )]
    Attached(String),
    #[error("another capture runs already; end it first")]
    OtherCapture,
    #[error("no capture runs on this connection")]
    NoCapture,
    #[error(
        "this virtual layer has no pool of VFs; `unirdma host --vf-pf NETDEV,vfs=N,vlan,FIRST-ADDRESS/PREFIX` makes one"
    )]
    NoPool,
    #[error(transparent)]
    Part(#[from] PartError),
    #[error("vRNIC {0} cannot have the way vf: {1}; `--way auto` uses a VF as soon as it can, `--way soft` never")]
    NoVf(String, LendError),
    #[error("{0} is no VLAN; give 1 to 4094, or 0 for none")]
    Vlan(u16),
    #[error("VLAN {vlan} is that of group {group}; give each group another one")]
    VlanTaken { vlan: u16, group: String },
    #[error("programs of group {0} have VFs, which do not encrypt; end them first")]
    GroupOnVfs(String),

    #[error(transparent)]
    Secret(#[from] SecretError),
    /// `whose` is such as `group blue has`.
    #[error("{whose} no secret")]
    NoSecret { whose: String },
    #[error("--with names another group than {0}, whose own secret needs no --with")]
    PairOfOne(String),
    #[error("the secrets of group {group} cannot be read: {error}")]
    UnreadableSecrets { group: String, error: io::Error },
    #[error("no room for the secret: {0}")]
    NoRoom(io::Error),
    #[error(
        "a secret is for packets between hosts, and this one serves no others (`unirdma host --address IP --peers FILE`)"
    )]
    NoNetwork,

    #[error(transparent)]
    Worker(#[from] CallError),
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("cannot serve vRNIC {vrnic}: {error}")]
    Serve { vrnic: String, error: io::Error },

    #[cfg(feature = "fleet")]
    #[error(transparent)]
    Centre(#[from] AskError),
    #[error("groups of a fleet are the control centre's ({url}): use `unirdma apply` there")]
    GroupOfCentre { url: String },
    #[error(
        "vRNICs of a fleet are made at its control centre ({url}): make one with `unirdma vrnic add NAME`, then name it \
         with --vrnic"
    )]
    TakenOfCentre { url: String },
    #[error("vRNIC {vrnic} is the control centre's ({url}): change it there, with `unirdma {command}`")]
    VrnicOfCentre { vrnic: String, url: String, command: &'static str },

    // Orders of the control centre.
    #[error("its MAC or GUID is none")]
    Hardware,
    #[error("vRNIC {vrnic} is to be made anew, as its group, MAC, limits or way are others: {error}")]
    ToBeMadeAnew { vrnic: String, error: Box<RequestError> },
    #[error("vRNIC {0} is to leave this host, but programs use it; it goes when they have ended")]
    ToLeave(String),
    #[error("rule {0}: an end is missing")]
    RuleEnd(String),
    #[error("rule {rule}: `{address}` is no address")]
    RuleAddress { rule: String, address: String },
    #[error("rule {rule}: {priority} is no priority")]
    RulePriority { rule: String, priority: u32 },
    #[error("secret {id} of group {group} has no number from 1 to 255")]
    SecretNumber { id: u32, group: String },
    #[error("secret {id} of group {group} has {bytes} bytes, not 32")]
    SecretLength { id: u8, group: String, bytes: usize },
}

/// Why a vRNIC cannot get or lose an address.
#[derive(Debug, thiserror::Error)]
pub(super) enum AddressError {
    #[error("no automatic address is left; give one with --ip")]
    NoneLeft,
    #[error("{ip} belongs to vRNIC {holder} of group {group} already; choose another address or another group")]
    Taken { ip: IpAddr, holder: String, group: String },
    #[error("the virtual MAC {mac} of these addresses is that of vRNIC {holder}; choose another --ip")]
    MacTaken { mac: Mac, holder: String },
    #[error("{0} is link-local; a vRNIC has one of those by itself")]
    LinkLocal(Ipv6Addr),
    #[error("{0}: a vRNIC has at most one IPv4 address, and no address twice")]
    SecondIpv4(IpAddr),
    #[error("vRNIC {vrnic} does not have the address {ip}; `unirdma vrnic show {vrnic}` lists its own")]
    NotIts { ip: IpAddr, vrnic: String },
    #[error("{ip} is the only address of vRNIC {vrnic}; add another one first, or remove the vRNIC")]
    Only { ip: IpAddr, vrnic: String },
    #[error("vRNIC {vrnic} does not have the address {ip}, or no other one")]
    NotItsOrOnly { ip: IpAddr, vrnic: String },
}
