//! Storage over RDMA by the kernels of two guests, which register memory by work requests.

use super::*;

const NQN: &str = "nqn.2026-01.local.unirdma:disk";
/// Writes blocks of many sizes at random places, many at a time, and then reads and checks them.
const FIO: &str = "fio --name=checked --thread --direct=1 --rw=randwrite --bsrange=4k-1m --size=24m --iodepth=16 --ioengine=libaio \
                   --verify=crc32c --verify_fatal=1";

/// Runs commands in a guest, one after the other, up to the first that fails.
fn all(guest: &Guest, commands: &[&str]) -> Check {
    for c in commands {
        let o = guest.spawn(&format!("timeout {} sh -c '{c}'", LIMIT.as_secs()))?.finish_within(LIMIT);
        require(o.ok(), format!("{}: {c}: {}", guest.vrnic, o.text))?;
    }
    Ok(())
}

/// One guest exports a disk in its memory, which the other one uses by NVMe.
fn nvme([host, target]: [&Guest; 2]) -> Check {
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
    soon(|| host.run("test -b /dev/nvme0n1").is_ok_and(|o| o.ok()), "there is no disk")?;
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

/// One guest exports a directory in its memory, which the other one uses by NFS. The written data is the same at both
/// ends, and when it is read.
fn nfs([server, client]: [&Guest; 2]) -> Check {
    all(
        server,
        &[
            "/load-nfs-server && mkdir -p /export /var/lib/nfs/v4recovery && mount -t tmpfs -o size=128m none /export",
            "mount -t nfsd none /proc/fs/nfsd && touch /var/lib/nfs/etab /var/lib/nfs/rmtab",
            "exportfs -i -o rw,fsid=0,no_root_squash,insecure,no_subtree_check \"*:/export\"",
            "rpc.mountd -N 3",
            // After its start the server accepts only former clients, for at least 10 s. Kernels that cannot store the
            // state of clients, like Linux 7.2 without a daemon for it, cannot be told to end that time early.
            "cd /proc/fs/nfsd && echo 10 >nfsv4leasetime && echo 10 >nfsv4gracetime && echo -3 +4 >versions",
            "cd /proc/fs/nfsd && echo rdma 20049 >portlist && echo 2 >threads && (echo Y >v4_end_grace || true)",
        ],
    )?;
    let options = format!("vers=4.2,proto=rdma,port=20049,sec=sys,addr={},clientaddr={}", server.ip, client.ip);
    all(
        client,
        &[
            "/load-nfs-client && mkdir -p /mnt && dd if=/dev/urandom of=/tmp/sent bs=1M count=16",
            &format!("mount -i -t nfs4 -o {options} {}:/ /mnt", server.ip),
            "grep proto=rdma /proc/mounts",
            "dd if=/tmp/sent of=/mnt/large bs=1M oflag=direct && dd if=/tmp/sent of=/mnt/small bs=4k count=500 oflag=direct",
            "cp /tmp/sent /mnt/cached && sync && echo 3 >/proc/sys/vm/drop_caches",
            "dd if=/mnt/large bs=1M iflag=direct | cmp - /tmp/sent && cmp /mnt/cached /tmp/sent",
            "dd if=/mnt/small bs=8k iflag=direct | cmp -n 2048000 - /tmp/sent",
        ],
    )?;
    let sums: Vec<String> = [(client, "/tmp/sent"), (server, "/export/large"), (server, "/export/cached")]
        .into_iter()
        .map(|(g, file)| Ok(g.run(&format!("sha256sum <{file}"))?.text))
        .collect::<Result<_>>()?;
    require(sums[0] == sums[1] && sums[0] == sums[2], format!("what the server has differs: {sums:?}"))?;
    all(client, &["umount /mnt && rm /tmp/sent && /unload-nfs-client"])?;
    all(
        server,
        &[
            "echo 0 >/proc/fs/nfsd/threads && killall rpc.mountd && exportfs -ua && umount /export",
            "umount /proc/fs/nfsd && /unload-nfs-server",
        ],
    )
}

/// A test with the first guest, which has programs of Debian 13, and the second one.
type Use = fn([&Guest; 2]) -> Check;

pub(super) fn tests(t: &mut Tests, stage: &Stage) {
    let tests: [(&str, Use); 2] = [("NVMe over RDMA", nvme), ("NFS over RDMA", nfs)];
    for (what, test) in tests {
        let name = format!("guests' kernels: {what}; what is read is what was written, and nothing is left");
        explained(t, stage, 0, name, move |first, _, scene| {
            let second = &scene.guests[1];
            test([first, second]).map_err(|e| second.explain(&e))?;
            // The kernel keeps CQs for later users.
            for (i, guest) in [first, second].into_iter().enumerate() {
                guest.unload()?;
                guest.load()?;
                scene.nothing_left(i)?;
            }
            Ok(())
        });
    }
}
