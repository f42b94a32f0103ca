//! `unirdma cdi`: gives vRNICs to a container of podman, docker, containerd or LXC. The engine runs it, since files of
//! the Container Device Interface (`unirdma_supervisor::cdi`) or the container's configuration say so, when the
//! container's namespaces and mounts are there and its program is not running yet.
//!
//! A process stays behind, the keeper. It holds the connections to the virtual layer that attach the container, and
//! serves the files of its devices, until the container's first process has ended, however it ends. Another one enters
//! the container's namespaces and makes what a program looks for; it is `inside`.

mod image;
mod inside;
mod request;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use clap::Subcommand;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use unirdma_ipc::vrnic::{IpNet, VrnicInfo};
use unirdma_supervisor::Client;
use unirdma_supervisor::admin::{Request, TakeVrnic};
use unirdma_supervisor::cdi::Class;

use crate::errors::context;
use crate::{confine, container, net, process, sandbox, vrnics};
use request::{Asked, Container};

#[derive(Subcommand)]
pub(crate) enum CdiCommand {
    /// Give vRNICs to a container whose state (of the OCI runtime specification) is on standard input
    Hook {
        /// A device: unirdma.io/vrnic=NAME, unirdma.io/vrnic-preload=NAME, unirdma.io/group=NAME or
        /// unirdma.io/group-eth0=NAME. The hook of a container's first device serves all of them
        #[arg(value_name = "DEVICE")]
        device: Asked,
    },
    /// Give vRNICs to the LXC container whose first process is in LXC_PID, as its hook `start-host`
    Lxc {
        /// Devices, as for `hook`, with commas between them
        #[arg(value_name = "DEVICE[,...]", value_parser = request::list)]
        devices: Box<[Asked]>,
        /// Words that LXC adds: the container's name and so on
        #[arg(value_name = "WORD")]
        _more: Vec<String>,
    },
}

pub(crate) fn run(dir: &Path, command: &CdiCommand) -> io::Result<u8> {
    // The engine waits for the end of pipes that it has given to this process, and the keeper stays.
    confine::close_descriptors(false)?;
    let container = match command {
        CdiCommand::Hook { device } => {
            let container = Container::read(io::stdin().lock(), device)?;
            if container.devices.first() != Some(device) {
                return Ok(0);
            }
            container
        }
        CdiCommand::Lxc { devices, .. } => Container::of_lxc(devices)?,
    };
    let (mut ours, theirs) = UnixStream::pair()?;
    let Some(keeper) = process::fork(UnshareFlags::empty())? else {
        drop(ours);
        let kept = sandbox::end_with_parent().and_then(|()| Kept::give(dir, &container));
        match kept.and_then(|kept| leave(theirs).map(|()| kept)) {
            Ok(kept) => kept.until_the_end(),
            Err(e) => sandbox::fail(&e),
        }
    };
    drop(theirs);
    // A keeper that fails has printed why.
    if ours.read(&mut [0])? == 1 { Ok(0) } else { Ok(process::wait(keeper)?.code.max(1)) }
}

/// Says that the container has its vRNICs, and leaves everything that the engine waits for.
fn leave(mut engine: UnixStream) -> io::Result<()> {
    std::env::set_current_dir("/")?;
    rustix::process::setsid()?;
    let nothing = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&nothing)?;
    rustix::stdio::dup2_stdout(&nothing)?;
    rustix::stdio::dup2_stderr(&nothing)?;
    rustix::process::set_parent_process_death_signal(None)?;
    engine.write_all(&[0])
}

/// A container's vRNICs, which it has until it ends.
struct Kept {
    clients: Vec<Client>,
    /// The container's first process.
    first: OwnedFd,
    /// Keeps its network in existence.
    network: Option<OwnedFd>,
}

impl Kept {
    /// Gives its vRNICs to a container.
    fn give(dir: &Path, container: &Container) -> io::Result<Kept> {
        let pid = Pid::from_raw(container.pid).ok_or_else(|| io::Error::other("the container has no process"))?;
        let first = pidfd_open(pid, PidfdFlags::empty()).map_err(context("the container has ended"))?;
        let of = |file: &str| format!("/proc/{}/{file}", container.pid);
        let inode = |file: &str| Ok::<_, io::Error>(std::fs::metadata(file)?.ino());
        let own = |space: &str| Ok::<_, io::Error>(inode(&of(space))? != inode(&format!("/proc/self/{space}"))?);
        let (own_net, own_users) = (own("ns/net")?, own("ns/user")?);
        let network = own_net.then(|| of("ns/net"));
        let taken = take(dir, &container.devices, network.as_deref())?;
        let (mut clients, vrnics): (Vec<_>, Vec<_>) = taken.into_iter().unzip();
        let names = container::device_names("unirdma0", vrnics.len())?;
        let on_eth0 = container.devices.iter().any(|d| d.class == Class::GroupEth0);
        let interfaces = match on_eth0 {
            true => vec![ETH0.to_string()],
            false => free_interfaces(&std::fs::read_to_string(of("net/dev"))?, vrnics.len()),
        };
        let devices = container::devices(&vrnics, &names, &interfaces);
        let libraries = container::library_dir()?;
        let (ours, theirs) = UnixStream::pair()?;
        let Some(child) = process::fork(UnshareFlags::empty())? else {
            drop((clients, ours));
            let plan = inside::Plan {
                root: &container.root,
                view: of("root"),
                network,
                interfaces: !on_eth0,
                users: own_users.then(|| of("ns/user")),
                mounts: of("ns/mnt"),
                devices: &devices,
                libraries: &libraries,
                preload: container.devices.iter().any(|d| d.class == Class::VrnicPreload),
            };
            match plan.make(theirs) {
                Ok(()) => std::process::exit(0),
                Err(e) => sandbox::fail(&e),
            }
        };
        drop(theirs);
        let mut given = false;
        let network = container::serve(&mut clients, dir, &devices, container.pid, ours, false, || given = true)?;
        let code = process::wait(child)?.code;
        if !given || code != 0 {
            std::process::exit(1);
        }
        Ok(Kept { clients, first, network })
    }

    fn until_the_end(mut self) -> ! {
        while poll(&mut [PollFd::new(&self.first.as_fd(), PollFlags::IN)], None).is_err() {}
        for client in &mut self.clients {
            let _ = client.ask(&Request::Detach, None);
        }
        // The virtual layer still passes on the last frames that the container sent.
        drop(self.network);
        std::process::exit(0)
    }
}

/// The interface that engines give to their containers.
const ETH0: &str = "eth0";

/// The addresses of a container's [`ETH0`]. `network`: its network namespace, if it has one of its own.
fn addresses_of_eth0(network: Option<&str>) -> io::Result<Vec<IpNet>> {
    let hint = "take unirdma.io/group, whose vRNIC has an address of its own";
    let refused = |why: &str| io::Error::other(format!("{why}; {hint}"));
    let network = network.ok_or_else(|| refused("the container has the host's network, and no eth0"))?;
    let network = File::open(network).map_err(context("cannot open the container's network"))?;
    // A thread of its own, since this process stays in the host's network.
    let look = || {
        inside::enter(&network, LinkNameSpaceType::Network)?;
        net::addresses()
    };
    let all = thread::scope(|s| s.spawn(look).join()).map_err(|_| io::ErrorKind::Other)??;
    let all = all.into_iter().filter(|(name, ip)| name == ETH0 && !net::is_link_local(*ip));
    let all: Vec<IpNet> = all.filter_map(|(_, ip)| ip.to_string().parse().ok()).collect();
    if all.is_empty() {
        return Err(refused("eth0 has no address yet: docker 28 and newer give it later, `--network none` never"));
    }
    Ok(all)
}

/// The vRNICs for these devices, each with the connection that holds it. `network`: the container's network namespace,
/// if it has one of its own.
fn take(dir: &Path, devices: &[Asked], network: Option<&str>) -> io::Result<Vec<(Client, VrnicInfo)>> {
    container::check_count(devices.len())?;
    if devices.len() > 1 && devices.iter().any(|d| d.class == Class::GroupEth0) {
        return Err(io::Error::other("a vRNIC with the addresses of eth0 is the only one of its container"));
    }
    let mut all = Vec::new();
    for Asked { class, name } in devices {
        let mut client = Client::connect(dir)?;
        let info = match class {
            Class::Vrnic | Class::VrnicPreload => vrnics::show(&mut client, name)?,
            Class::Group | Class::GroupEth0 => {
                let own = *class == Class::GroupEth0;
                let ips = if own { addresses_of_eth0(network)? } else { Vec::new() };
                let take = TakeVrnic { new: true, group: Some(name.clone()), ips, ..TakeVrnic::default() };
                vrnics::ask(&mut client, &Request::VrnicTake(take))?
            }
        };
        if let Some(pid) = info.container {
            let hint = "a vRNIC is for one container";
            return Err(io::Error::other(format!("vRNIC {name} has a container already (process {pid}): {hint}")));
        }
        container::add_to(&mut all, client, info)?;
    }
    Ok(all)
}

/// Names of interfaces that a network does not have. `present`: what /proc/net/dev says about it.
fn free_interfaces(present: &str, count: usize) -> Vec<String> {
    let taken: Vec<&str> = present.lines().filter_map(|l| Some(l.split_once(':')?.0.trim())).collect();
    (0..).map(|n| format!("rdma{n}")).filter(|name| !taken.contains(&&**name)).take(count).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn interfaces_have_free_names() {
        let present = "Inter-| Receive\n face |bytes\n    lo:   0\n rdma0: 12 0\n  eth0: 7 0\n";
        assert_eq!(super::free_interfaces(present, 2), ["rdma1", "rdma2"]);
        assert_eq!(super::free_interfaces("", 1), ["rdma0"]);
    }
}
