//! The options of `unirdma host` for the pool of VFs, and `unirdma vf`.

use std::io;
use std::path::Path;
use std::time::Duration;

use clap::{Args, Subcommand};
use unirdma_ipc::vrnic::IpNet;
use unirdma_supervisor::admin::Request;
use unirdma_vf::{Address, Config, Dry, Isolation, PfConfig};

use crate::units::{self, UnitError};
use crate::{Out, ask};

#[derive(Args)]
pub(crate) struct VfArgs {
    /// VFs of a real RNIC for this host's pool: the PF's network device, how many, how groups are kept apart (vlan:
    /// each group has a VLAN; fabric=GROUP: only this group uses the PF), and the first address of the VFs, for root
    /// only
    #[arg(long, value_name = "NETDEV,vfs=N,vlan|fabric=GROUP,ADDR/PREFIX[,...]", value_parser = parse_pf)]
    vf_pf: Vec<PfConfig>,
    /// What a program gets if no VF is free: it waits (wait=30s), gets the software RNIC, or is refused
    #[arg(long, value_name = "wait=TIME|soft|refuse", requires = "vf_pf", default_value = "soft", value_parser = parse_dry)]
    vf_dry: Dry,
    /// How long a VF stays with a container or virtual machine whose programs have closed it
    #[arg(long, value_name = "TIME", requires = "vf_pf", default_value = "5s", value_parser = units::duration)]
    vf_linger: Duration,
}

impl VfArgs {
    /// The pool; `None` if no PF is named.
    ///
    /// # Errors
    /// One line.
    pub fn config(&self) -> io::Result<Option<Config>> {
        if self.vf_pf.is_empty() {
            return Ok(None);
        }
        let config = Config { pfs: self.vf_pf.clone(), when_dry: self.vf_dry, linger: self.vf_linger };
        config.check().map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        Ok(Some(config))
    }
}

/// Why an option of the pool is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum VfArgError {
    #[error("`{0}` is no number of VFs; write vfs=8")]
    Vfs(String),
    #[error("{0} is missing; write NETDEV,vfs=8,vlan,10.50.0.10/24")]
    Missing(&'static str),
    #[error("how groups are kept apart is missing or said twice; write vlan, or fabric=GROUP for one group only")]
    Isolation,
    #[error("`{0}` is none of vfs=N, vlan, fabric=GROUP, rxe, and no address such as 10.50.0.10/24")]
    Part(String),
    #[error("write wait=30s, soft or refuse")]
    Dry,
    #[error(transparent)]
    Time(#[from] UnitError),
}

/// Reads `ens1f0,vfs=8,vlan,10.50.0.10/24`.
fn parse_pf(text: &str) -> Result<PfConfig, VfArgError> {
    let mut parts = text.split(',');
    let netdev = parts.next().unwrap_or_default().to_owned();
    let (mut vfs, mut isolation, mut addresses, mut rxe) = (None, Vec::new(), Vec::new(), false);
    for part in parts {
        match (part, part.split_once('=')) {
            ("vlan", _) => isolation.push(Isolation::Vlan),
            ("rxe", _) => rxe = true,
            (_, Some(("fabric", group))) => isolation.push(Isolation::Fabric(group.into())),
            (_, Some(("vfs", n))) => vfs = Some(n.parse().map_err(|_| VfArgError::Vfs(part.into()))?),
            _ => {
                // Without its length a range would have a surprising end.
                let net = part.contains('/').then(|| part.parse::<IpNet>().ok()).flatten();
                let IpNet { addr, prefix } = net.ok_or_else(|| VfArgError::Part(part.into()))?;
                addresses.push(Address { addr, prefix });
            }
        }
    }
    let vfs = vfs.ok_or(VfArgError::Missing("the number of VFs"))?;
    let (Some(isolation), true) = (isolation.pop(), isolation.is_empty()) else { return Err(VfArgError::Isolation) };
    if addresses.is_empty() {
        return Err(VfArgError::Missing("the first address of the VFs"));
    }
    Ok(PfConfig { netdev, vfs, isolation, addresses, rxe })
}

/// Reads `wait=30s`, `soft` or `refuse`.
fn parse_dry(text: &str) -> Result<Dry, VfArgError> {
    match (text, text.strip_prefix("wait=")) {
        ("soft", _) => Ok(Dry::Soft),
        ("refuse", _) => Ok(Dry::Refuse),
        (_, Some(time)) => Ok(Dry::Wait(units::duration(time)?)),
        _ => Err(VfArgError::Dry),
    }
}

#[derive(Subcommand)]
pub(crate) enum VfCommand {
    /// List the VFs of this host's pool, their states and leases
    #[command(
        after_help = "Examples:\n  unirdma vf ls\n  unirdma vf ls --json\n\nBelow the table are the reasons why VFs are not in the pool, and what to do. `unirdma host --vf-pf ...` makes a pool (docs/user/real-rnic.md)."
    )]
    Ls {
        #[command(flatten)]
        out: Out,
    },
    /// Take a PF or a VF out of use: its leases go on until they end, and it gets no new ones
    #[command(
        after_help = "Examples:\n  unirdma vf drain ens1f0        all VFs of a PF, for instance before its firmware is updated\n  unirdma vf drain ens1f0/3      one VF\n  unirdma vf drain ens1f0 --off  back into use"
    )]
    Drain {
        /// The PF's network device, or a VF as `unirdma vf ls` names it
        #[arg(value_name = "PF|PF/N")]
        part: String,
        /// Back into use
        #[arg(long)]
        off: bool,
        #[command(flatten)]
        out: Out,
    },
}

pub(crate) fn vf(dir: &Path, command: VfCommand) -> io::Result<u8> {
    match command {
        VfCommand::Ls { out } => ask(dir, &Request::VfList, &out),
        VfCommand::Drain { part, off, out } => ask(dir, &Request::VfDrain { part, on: !off }, &out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pf_is_named_with_its_vfs() {
        let pf = parse_pf("ens1f0,vfs=8,vlan,10.50.0.10/24,fd00::10/64").unwrap();
        assert_eq!((pf.netdev.as_str(), pf.vfs, &pf.isolation, pf.rxe), ("ens1f0", 8, &Isolation::Vlan, false));
        let addresses: Vec<String> = pf.addresses.iter().map(Address::to_string).collect();
        assert_eq!(addresses, ["10.50.0.10/24", "fd00::10/64"]);
        let pf = parse_pf("pf,rxe,fabric=blue,10.50.0.10/24,vfs=2").unwrap();
        assert_eq!((pf.vfs, &pf.isolation, pf.rxe), (2, &Isolation::Fabric("blue".into()), true));
    }

    #[test]
    fn wrong_parts_are_named() {
        for (text, what) in [
            ("pf", "the number of VFs is missing"),
            ("pf,vfs=x,vlan,10.0.0.1/24", "`vfs=x` is no number"),
            ("pf,vfs=70000,vlan,10.0.0.1/24", "`vfs=70000` is no number"),
            ("pf,vfs=2,10.0.0.1/24", "how groups are kept apart"),
            ("pf,vfs=2,vlan,fabric=a,10.0.0.1/24", "how groups are kept apart"),
            ("pf,vfs=2,vlan", "the first address of the VFs is missing"),
            ("pf,vfs=2,vlan,10.0.0.1", "`10.0.0.1` is none of"),
            ("pf,vfs=2,vlan,10.0.0.1/33", "`10.0.0.1/33` is none of"),
            ("pf,vfs=2,vlan,", "`` is none of"),
        ] {
            let e = parse_pf(text).unwrap_err().to_string();
            assert!(e.contains(what), "{text}: {e}");
        }
    }

    #[test]
    fn times_have_units() {
        let time = |s| units::duration(s).map(|t| t.as_millis());
        assert_eq!(
            (time("500ms"), time("5s"), time("2m"), time("1h")),
            (Ok(500), Ok(5_000), Ok(120_000), Ok(3_600_000))
        );
        for wrong in ["", "5", "s", "5x", "-1s", "61m", "99999999999999999999s"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_dry("wait=30s"), Ok(Dry::Wait(Duration::from_secs(30))));
        assert_eq!((parse_dry("soft"), parse_dry("refuse")), (Ok(Dry::Soft), Ok(Dry::Refuse)));
        assert!(parse_dry("wait").is_err() && parse_dry("wait=x").is_err());
    }
}
