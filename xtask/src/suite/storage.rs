//! Storage over RDMA by the kernels of guests: the first guest serves, the second one uses it. Their kernels register memory by work
//! requests.

use super::guest::{LIMIT, Scene, nothing_left};
use super::*;
use crate::vm::Guest;

const NQN: &str = "nqn.2026-01.local.unirdma:disk";
/// Blocks of many sizes are written at random places, many at a time, and then read and checked.
const FIO: &str = "fio --name=checked --thread --direct=1 --rw=randwrite --bsrange=4k-1m --size=24m --iodepth=16 --ioengine=libaio \
                   --verify=crc32c --verify_fatal=1 --minimal --output=/dev/null";

/// Runs commands of a guest, one after the other, up to the first that fails.
fn all(guest: &Guest, commands: &[&str]) -> Check {
    for c in commands {
        let o = guest.spawn(&format!("timeout {} sh -c '{c}'", LIMIT.as_secs()))?.finish_within(LIMIT);
        require(o.ok(), format!("{}: {c}: {}", guest.vrnic, o.text))?;
    }
    Ok(())
}

/// A disk in the memory of one guest, that the other one uses by NVMe.
fn nvme([target, host]: [&Guest; 2]) -> Check {
    let at = "cd /sys/kernel/config/nvmet &&";
    all(
        target,
        &[
            "/load-nvme-target && insmod /modules/brd.ko rd_nr=1 rd_size=32768",
            "mkdir -p /sys/kernel/config && mount -t configfs none /sys/kernel/config",
            &format!(
                "{at} mkdir subsystems/{NQN} && cd subsystems/{NQN} && echo 1 >attr_allow_any_host && mkdir namespaces/1"
            ),
            &format!("{at} cd subsystems/{NQN}/namespaces/1 && echo /dev/ram0 >device_path && echo 1 >enable"),
            &format!(
                "{at} mkdir ports/1 && cd ports/1 && echo rdma >addr_trtype && echo ipv4 >addr_adrfam && echo {} >addr_traddr && echo 4420 >addr_trsvcid",
                target.ip
            ),
            &format!("{at} ln -s /sys/kernel/config/nvmet/subsystems/{NQN} ports/1/subsystems/"),
        ],
    )?;
    let connect = format!(
        "nvme connect -t rdma -a {} -s 4420 -n {NQN} -i 2 -Q 32 --hostnqn=nqn.2026-01.local.unirdma:host --hostid=6b1f0ab4-6d04-4b2c-9f37-3a4b1a0d8d11",
        target.ip
    );
    all(host, &["/load-nvme-host", &connect])?;
    wait_until(|| host.run("test -b /dev/nvme0n1").is_ok_and(|o| o.ok()), "there is no disk")?;
    all(host, &[&format!("{FIO} --filename=/dev/nvme0n1"), &format!("nvme disconnect -n {NQN}"), "/unload-nvme-host"])?;
    all(
        target,
        &[
            &format!("{at} rm ports/1/subsystems/{NQN} && rmdir ports/1"),
            &format!("{at} rmdir subsystems/{NQN}/namespaces/1 subsystems/{NQN}"),
            "umount /sys/kernel/config && rmmod brd && /unload-nvme-target",
        ],
    )
}

/// A directory of one guest that the other one uses by NFS.
fn nfs([server, client]: [&Guest; 2]) -> Check {
    all(
        server,
        &[
            "/load-nfs-server && mkdir -p /export /var/lib/nfs/v4recovery && mount -t tmpfs -o size=128m none /export",
            "mount -t nfsd none /proc/fs/nfsd && touch /var/lib/nfs/etab /var/lib/nfs/rmtab",
            "exportfs -i -o rw,fsid=0,no_root_squash,insecure,no_subtree_check \"*:/export\"",
            "rpc.mountd -N 3",
            "cd /proc/fs/nfsd && echo -3 +4 >versions && echo rdma 20049 >portlist && echo 2 >threads && echo Y >v4_end_grace",
        ],
    )?;
    all(
        client,
        &[
            "/load-nfs-client && mkdir -p /mnt",
            &format!("mount.nfs4 {}:/ /mnt -o proto=rdma,port=20049,vers=4.2", server.ip),
            "grep proto=rdma /proc/mounts",
            &format!("{FIO} --filename=/mnt/file"),
            "umount /mnt && /unload-nfs-client",
        ],
    )?;
    all(
        server,
        &[
            "echo 0 >/proc/fs/nfsd/threads && killall rpc.mountd && umount /export",
            "umount /proc/fs/nfsd && /unload-nfs-server",
        ],
    )
}

/// What the second guest does with storage of the first one.
type Use = fn([&Guest; 2]) -> Check;

pub(super) fn run<'a>(s: &mut Suite<'_>, scene: &dyn Fn() -> Result<&'a Scene>) {
    let tests: [(&str, Use); 2] = [("NVMe over RDMA", nvme), ("NFS over RDMA", nfs)];
    for (what, test) in tests {
        s.check(&format!("guests' kernels: {what}, checked by fio; nothing is left"), |_| {
            let scene = scene()?;
            let [server, client] = [&scene.guests[0], &scene.guests[1]];
            let explained = |e: String| format!("{}\n{}", server.explain(&client.explain(&e)), scene.lab.log());
            test([server, client]).map_err(explained)?;
            nothing_left(scene, 0)?;
            nothing_left(scene, 1)
        });
    }
}
