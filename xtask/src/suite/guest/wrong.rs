//! Machines that are started in a way that cannot work: one clear line where a person looks, and no hang.

use super::*;

/// The guest's kernel says a line.
fn said(g: &Guest, line: &str) -> Check {
    let o = g.run("dmesg | grep unirdma")?;
    require(o.text.contains(line), format!("expected `{line}`: {}", o.text))
}

/// Two devices, of which neither can be used.
fn too_small(prepared: &Prepared<'_>) -> Check {
    let lab = Lab::start(None)?;
    lab.vrnic("few", &["--ip", "10.0.0.1"])?;
    lab.vrnic("small", &["--ip", "10.0.0.2"])?;
    let chardev = format!("socket,id=small,path={}", lab.socket("small").display());
    let device = "vhost-user-test-device-pci,chardev=small,virtio-id=42,num_vqs=11,vq_size=256,config_size=128";
    let more = ["-chardev", &chardev, "-device", device];
    let plan = Plan { changes: &[("num_vqs=11", "num_vqs=2")], more: &more, ..Plan::default() };
    let g = Guest::boot(&lab, prepared.system()?, "few", &plan)?;
    g.come_up()?;
    g.insert()?;
    said(&g, "too few virtqueues: it takes 4 (QEMU: num_vqs=)")?;
    said(&g, "The configuration space is too small: it takes 192 bytes (QEMU: config_size=192)")?;
    let o = g.run("ibv_devices")?;
    require(!o.text.contains("unirdma"), o.text)?;
    g.unload()
}

fn not_shared(prepared: &Prepared<'_>) -> Check {
    let lab = Lab::start(None)?;
    lab.vrnic("a", &["--ip", "10.0.0.1"])?;
    let plan = Plan { changes: &[("share=on", "share=off")], driver: "timeout=3", ..Plan::default() };
    let g = Guest::boot(&lab, prepared.system()?, "a", &plan)?;
    g.come_up()?;
    g.insert()?;
    said(&g, "A command was not answered: the device counts as lost")?;
    require(lab.log().contains("the machine's memory is not shared (QEMU: share=on)"), lab.log())?;
    g.unload()
}

/// The second one waits, and comes up when the first one is gone.
fn two_machines(prepared: &Prepared<'_>) -> Check {
    let lab = Lab::start(None)?;
    lab.vrnic("a", &["--ip", "10.0.0.1"])?;
    lab.vrnic("c", &["--ip", ADDRESS_OF_CONTAINER])?;
    let works = |g: &Guest| pair(container(&lab), End::Guest(g), "ibv_rc_pingpong -c -n 100");
    let first = Guest::start(&lab, prepared.system()?, "a", &Plan::default())?;
    let second = Guest::boot(&lab, prepared.system()?, "a", &Plan::default())?;
    let said = || lab.log().contains("another virtual machine has it");
    wait_until(said, "the log does not say why").map_err(|e| format!("{e}: {}", lab.log()))?;
    require(!second.has_ended(), second.console())?;
    works(&first)?;
    first.power_off();
    second.come_up()?;
    second.set_up()?;
    works(&second)
}

/// The provider is of another version of rdma-core: its file has another name.
fn other_provider(g: &Guest) -> Check {
    let at = "/usr/local/lib/unirdma/libunirdma-rdmav";
    g.must(&format!("mv {at}34.so {at}99.so"))?;
    let o = g.run("ibv_devices");
    g.must(&format!("mv {at}99.so {at}34.so"))?;
    let text = o?.text;
    require(text.contains("couldn't load driver") && text.contains("libunirdma-rdmav34.so"), text)
}

/// What a guest of the scene shows.
pub(super) fn provider(s: &mut Suite<'_>, stage: &Stage<'_>) {
    s.check("wrong_input: guest: a provider of another rdma-core", |_| stage.explained(0, &|g, _| other_provider(g)));
}

pub(super) fn run(s: &mut Suite<'_>, prepared: &Prepared<'_>) {
    s.check("wrong_input: guest: too few virtqueues, and a configuration space that is too small", |_| {
        too_small(prepared)
    });
    s.check("wrong_input: guest: memory that is not shared", |_| not_shared(prepared));
    s.check("wrong_input: guest: a second machine on one vRNIC", |_| two_machines(prepared));
    s.check("wrong_input: guest: a module without the headers of its kernel", |_| {
        let dir = lab::root().join("guest/linux").display().to_string();
        let o = std::process::Command::new("make").args(["-C", &dir, "KDIR=/nonexistent"]).output();
        let text = o.map(|o| String::from_utf8_lossy(&o.stderr).into_owned()).map_err(|e| e.to_string())?;
        let line = "There are no headers of the kernel in /nonexistent: install them";
        require(text.lines().any(|l| l.starts_with(line)), text)
    });
}
