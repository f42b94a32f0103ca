//! Machines with a configuration that cannot work: one clear line where a person looks, and no hang.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use super::*;

/// Checks that the guest's kernel has logged a line.
fn said(g: &Guest, line: &str) -> Check {
    let o = g.run("dmesg | grep unirdma")?;
    require(o.text.contains(line), format!("expected `{line}`: {}", o.text))
}

const GET_FEATURES: u32 = 1;
const GET_PROTOCOL_FEATURES: u32 = 15;
const GET_QUEUE_NUM: u32 = 17;
const GET_CONFIG: u32 = 24;
/// VIRTIO_F_VERSION_1 and VHOST_USER_F_PROTOCOL_FEATURES.
const FEATURES: u64 = 1 << 32 | 1 << 30;
/// MQ, REPLY_ACK and CONFIG.
const PROTOCOL_FEATURES: u64 = 1 << 0 | 1 << 3 | 1 << 9;
/// Flags of messages: version 1, a reply, and a requested reply.
const VERSION: u32 = 1;
const ANSWER: u32 = 1 << 2;
const NEEDS_ANSWER: u32 = 1 << 3;

/// Serves a VMM's connection as a device of version 2. It answers only the requests by which a driver reads the
/// version.
fn version_2(mut vmm: UnixStream) -> std::io::Result<()> {
    let mut config = [0; 192];
    config[..6].copy_from_slice(b"uRDM\x02\0");
    loop {
        let mut header = [[0; 4]; 3];
        vmm.read_exact(header.as_flattened_mut())?;
        let [request, flags, size] = header.map(u32::from_le_bytes);
        let mut body = vec![0; size as usize];
        vmm.read_exact(&mut body)?;
        let answer = match request {
            GET_FEATURES => FEATURES.to_le_bytes().to_vec(),
            GET_PROTOCOL_FEATURES => PROTOCOL_FEATURES.to_le_bytes().to_vec(),
            GET_QUEUE_NUM => 256_u64.to_le_bytes().to_vec(),
            // An offset, a size, flags, and room for `size` bytes.
            GET_CONFIG => {
                let offset = body.first_chunk().map_or(0, |o| u32::from_le_bytes(*o)) as usize;
                body.iter_mut().skip(12).zip(config.iter().skip(offset)).for_each(|(to, from)| *to = *from);
                body
            }
            _ if flags & NEEDS_ANSWER != 0 => vec![0; 8],
            _ => continue,
        };
        let header = [request, VERSION | ANSWER, answer.len() as u32].map(u32::to_le_bytes);
        vmm.write_all(&[header.as_flattened(), &answer].concat())?;
    }
}

/// Three unusable devices.
fn unfit(systems: &Shared<Systems>) -> Check {
    let lab = Lab::start(None)?;
    lab.vrnic("few", &["--ip", "10.0.0.1"])?;
    lab.vrnic("small", &["--ip", "10.0.0.2"])?;
    let newer = lab.dir.join("newer.sock");
    let listener = UnixListener::bind(&newer).map_err(|e| e.to_string())?;
    std::thread::spawn(move || listener.accept().and_then(|(vmm, _)| version_2(vmm)));
    let device = |name: &str, socket: &std::path::Path, bytes: u32| {
        let queues = "virtio-id=42,num_vqs=11,vq_size=256";
        let device = format!("vhost-user-test-device-pci,chardev={name},{queues},config_size={bytes}");
        ["-chardev".into(), format!("socket,id={name},path={}", socket.display()), "-device".into(), device]
    };
    let more = [device("small", &lab.socket("small"), 128), device("newer", &newer, 192)].concat();
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let plan = Plan { changes: &[("num_vqs=11", "num_vqs=2")], more: &more, ..Plan::default() };
    let g = with_system(systems, |system| Guest::boot(&lab, system, "few", &plan))?;
    g.come_up()?;
    g.insert()?;
    said(&g, "too few virtqueues: it takes 4 (QEMU: num_vqs=)")?;
    said(&g, "The configuration space is too small: it takes 192 bytes (QEMU: config_size=192)")?;
    said(&g, "The device has version 2, this driver knows version 1")?;
    let o = g.run("ibv_devices")?;
    require(!o.text.contains("unirdma"), o.text)?;
    g.unload()
}

fn not_shared(systems: &Shared<Systems>) -> Check {
    let lab = Lab::start(None)?;
    lab.vrnic("a", &["--ip", "10.0.0.1"])?;
    let plan = Plan { changes: &[("share=on", "share=off")], driver: "timeout=3", ..Plan::default() };
    let g = with_system(systems, |system| Guest::boot(&lab, system, "a", &plan))?;
    g.come_up()?;
    g.insert()?;
    said(&g, "A command was not answered: the device counts as lost")?;
    require(lab.log().contains("the machine's memory is not shared (QEMU: share=on)"), lab.log())?;
    g.unload()
}

/// The second machine of one vRNIC waits, and comes up when the first one has ended.
fn two_machines(systems: &Shared<Systems>) -> Check {
    let lab = Lab::start(None)?;
    lab.vrnic("a", &["--ip", "10.0.0.1"])?;
    lab.vrnic("c", &["--ip", ADDRESS_OF_CONTAINER])?;
    let works = |g: &Guest| pair(container(&lab), End::Guest(g), "ibv_rc_pingpong -c -n 100");
    let first = with_system(systems, |system| Guest::start(&lab, system, "a", &Plan::default()))?;
    let second = with_system(systems, |system| Guest::boot(&lab, system, "a", &Plan::default()))?;
    let said = || lab.log().contains("another virtual machine has it");
    soon(said, "the log does not say why").map_err(|e| format!("{e}: {}", lab.log()))?;
    require(!second.has_ended(), second.console())?;
    works(&first)?;
    first.power_off();
    second.come_up()?;
    second.set_up()?;
    works(&second)
}

/// The provider belongs to another version of rdma-core: its file has another name.
fn other_provider(g: &Guest) -> Check {
    let at = "/usr/local/lib/unirdma/libunirdma-rdmav";
    g.must(&format!("mv {at}34.so {at}99.so"))?;
    let o = g.run("ibv_devices");
    g.must(&format!("mv {at}99.so {at}34.so"))?;
    let text = o?.text;
    require(text.contains("couldn't load driver") && text.contains("libunirdma-rdmav34.so"), text)
}

/// A test with guests of its own.
type Alone = fn(&Shared<Systems>) -> Check;

/// A test with a guest of the scene.
pub(super) fn provider(t: &mut Tests, stage: &Stage) {
    explained(t, stage, 0, "wrong_input: guest: a provider of another rdma-core", |g, _, _| other_provider(g));
}

pub(super) fn tests(t: &mut Tests, systems: &Shared<Systems>) {
    let tests: [(&str, Alone); 3] = [
        ("too few virtqueues, a configuration space that is too small, another version", unfit),
        ("memory that is not shared", not_shared),
        ("a second machine on one vRNIC", two_machines),
    ];
    for (name, test) in tests {
        let systems = systems.clone();
        t.test(format!("wrong_input: guest: {name}"), move || test(&systems));
    }
    t.test("wrong_input: guest: a module without the headers of its kernel", || {
        let dir = harness::root().join("guest/linux").display().to_string();
        let o = Output::of(std::process::Command::new("make").args(["-C", &dir, "KDIR=/nonexistent"]));
        let line = "There are no headers of the kernel in /nonexistent: install them";
        require(o.text.lines().any(|l| l.starts_with(line)), o.text)
    });
}
