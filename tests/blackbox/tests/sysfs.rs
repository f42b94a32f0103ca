//! A container's /sys: its own interfaces, the RDMA device as the kernel shows one, and files that follow the vRNIC. As
//! root and as an ordinary user.

use attack::checks::script;

use crate::support::*;

const PORT: &str = "/sys/class/infiniband/unirdma0/ports/1";

/// Scripts, and their expected output. `RUN` is `$U run --vrnic x`, `EXEC` is `$U exec --vrnic x`, `PORT` is [`PORT`].
const SCRIPTS: &[(&str, &str, &str)] = &[
    (
        "/sys/class/net has the container's own interfaces, and /sys/fs/cgroup is as outside",
        "ls -A /sys/fs/cgroup >$LAB/cgroups; cat >$LAB/look <<'end'\n\
         cd /sys/class/net; ls | grep -v bonding_masters >/tmp/has\n\
         ip -o link | cut -d: -f2 | sed 's/ //; s/@.*//' | sort | diff - /tmp/has && echo same\n\
         ip -o link show eth0 | grep -c \" mtu $(cat eth0/mtu) .* $(cat eth0/address) \"; ls -A /sys/fs/cgroup\nend\n\
         RUN -- sh -c \"$(cat $LAB/look)\" >$LAB/out; head -n 2 $LAB/out; tail -n +3 $LAB/out | diff - $LAB/cgroups",
        "same\n1\n",
    ),
    (
        "with the host's network it has the host's interfaces",
        "RUN --net host -- ls /sys/class/net >$LAB/in; ls /sys/class/net | diff - $LAB/in && echo same",
        "same\n",
    ),
    (
        "the device is a link into /sys/devices, and leads to its interface and class",
        "RUN -- sh -c 'cd /sys/class/infiniband; test -L unirdma0 && realpath unirdma0 unirdma0/*/1/net/* unirdma0/device/net/* unirdma0/subsystem\n\
         cd ../infiniband_verbs; test -L uverbs0 && realpath uverbs0 uverbs0/device uverbs0/device/infiniband/*; cat uverbs0/ibdev ../infiniband/unirdma0/uevent'",
        "/sys/devices/virtual/infiniband/unirdma0\n/sys/devices/virtual/net/eth0\n/sys/devices/virtual/net/eth0\n\
         /sys/class/infiniband\n/sys/devices/virtual/infiniband_verbs/uverbs0\n\
         /sys/devices/virtual/infiniband/unirdma0/device\n/sys/devices/virtual/infiniband/unirdma0\n\
         unirdma0\nNAME=unirdma0\n",
    ),
    (
        "the device has the name that was chosen, for libraries and scripts",
        "RUN --device-name mlx5_0 -- sh -c 'ls /sys/class/infiniband; ibv_devinfo -d mlx5_0 | grep hca_id; rdma link | cut -d\" \" -f2'\n\
         for n in '' a/b .. $(printf %064d 0); do RUN --device-name \"$n\" -- true 2>/dev/null; echo $?; done",
        "mlx5_0\nhca_id:\tmlx5_0\nmlx5_0/1\n2\n2\n2\n2\n",
    ),
    (
        "the state of the port follows the link, also for exec",
        "RUN -- sh -c 'cd PORT; cat state; while grep -q ACTIVE state; do sleep 0.05; done; cat state phys_state; sleep 9' >$LAB/out & p=$!\n\
         until grep -qs ACTIVE $LAB/out; do sleep 0.05; done; $U vrnic link x down >/dev/null\n\
         until grep -q Disabled $LAB/out; do sleep 0.05; done; EXEC -- cat PORT/state; $U vrnic link x up >/dev/null; kill $p; wait $p; cat $LAB/out",
        "1: DOWN\n4: ACTIVE\n1: DOWN\n3: Disabled\n",
    ),
    (
        "all files can be read, except those of empty entries",
        "RUN -- sh -c 'cd -P PORT/../..; cat $(find . -type f) >/dev/null 2>/tmp/errors; grep -v Invalid /tmp/errors; grep -c Invalid /tmp/errors'",
        "28\n",
    ),
];

/// Adds all tests in a lab of `user`. `place` names it.
fn in_place(t: &mut Tests, place: &str, user: Option<u32>) {
    let title = |name: &str| format!("sysfs, {place}: {name}");
    let lab = &Shared::new(move || {
        let lab = Lab::start(user)?;
        lab.vrnic("x", &["--ip", "10.0.0.1"])?;
        lab.vrnic("y", &["--ip", "10.0.0.2"])?;
        Ok(lab)
    });
    for (name, text, expected) in SCRIPTS {
        t.on(lab, title(name), move |lab| {
            let o = script(lab, &text.replace("PORT", PORT));
            require(o.text == *expected, format!("expected:\n{expected}\ngot ({:?}):\n{}", o.code, o.text))
        });
    }
    t.on(lab, title("GID files follow the GID table"), |lab| {
        let exe = compile(lab, "sysfs", &["-libverbs"])?;
        let program = lab.spawn("x", &[], &format!("{exe} wait 3"))?;
        wait_for(&program, "begun")?;
        require(lab.unirdma(&["vrnic", "ip", "add", "x", "fd00::7"]).ok(), "no address")?;
        let o = program.finish();
        require(lab.unirdma(&["vrnic", "ip", "rm", "x", "fd00::7"]).ok(), "the address stays")?;
        require(o.ok() && o.text.contains("same"), o.text)?;
        let o = lab.spawn("x", &[], &format!("{exe} table"))?.finish();
        require(o.ok() && o.text == "same\n", o.text)
    });
    t.on(lab, title("nothing can be changed, and open files have a limit"), |lab| {
        let exe = compile(lab, "sysfs", &["-libverbs"])?;
        let o = lab.spawn("x", &[], &format!("{exe} hostile"))?.finish();
        require(o.ok() && o.text == "4096 at most are opened\n", o.text)?;
        let o = lab.spawn("x", &[], &format!("cat {PORT}/state"))?.finish();
        require(o.text == "4: ACTIVE\n", o.text)
    });
    t.on(lab, title("counters move with traffic"), |lab| {
        let read = format!("cat {PORT}/counters/port_xmit_data {PORT}/counters/port_xmit_packets");
        let write = "ib_write_bw -s 65536 -n 100 10.0.0.1 >/dev/null";
        let server = serve(lab, "x", "ib_write_bw -s 65536 -n 100")?;
        let client = lab.spawn("y", &[], &format!("sh -c '{read}; {write}; {read}'"))?.finish();
        server.finish();
        let n: Vec<u64> = client.text.lines().filter_map(|l| l.parse().ok()).collect();
        let [data, packets, more_data, more_packets] = n[..] else { return Err(client.text) };
        require(more_data - data >= 100 * 65536 / 4 && more_packets > packets, client.text)
    });
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN]);
    t.test("sysfs: files have their last values while no virtual layer serves, and follow the next one", || {
        let mut lab = Lab::start(None)?;
        lab.vrnic("x", &[])?;
        let show = format!("sh -c 'while cat {PORT}/state; do sleep 0.1; done'");
        let mut program = lab.spawn("x", &[], &show)?;
        wait_for(&program, "ACTIVE")?;
        lab.kill_host();
        let seen = program.text().len();
        soon(|| program.text().len() > seen + 40, "nothing can be read")?;
        lab.start_again()?;
        require(lab.unirdma(&["vrnic", "link", "x", "down"]).ok(), "the link stays up")?;
        wait_for(&program, "DOWN")?;
        program.kill();
        program.finish();
        Ok(())
    });
    t.need_root("only root can hide /dev/fuse");
    t.test("sysfs: without /dev/fuse the files have the values of the start", || {
        let lab = Lab::start(None)?;
        lab.vrnic("x", &[])?;
        let text = "unshare -m sh -c \"mount --bind /dev/null /dev/fuse; $U run --vrnic x -- cat PORT/state PORT/gids/0 PORT/counters/link_downed\" | cut -d: -f1,2";
        let o = lab.shell(&text.replace("PORT", PORT));
        let told = o.text.matches("stay as they are now").count();
        require(told == 1 && o.text.contains("4: ACTIVE\n0000:0000\n0\n"), o.text)
    });
    in_place(t, "root", None);
    t.need_no_root();
    in_place(t, "ordinary user", Some(own_user()));
}
