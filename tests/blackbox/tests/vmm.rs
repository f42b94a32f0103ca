//! What a VMM of `unirdma vm run` reaches: as root and as an ordinary user. A script is the VMM.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::support::*;

/// A VMM that has the device, and whose machine is the shell script in the variable MACHINE.
const VMM: &str = "#!/bin/sh
case \"$*\" in
--version) echo 'QEMU emulator version 11.1.0';;
'-device vhost-user-test-device-pci,help') echo '  virtio-id=<uint16>';;
*) eval \"$MACHINE\";;
esac
";

/// Scripts that run outside, and their expected output. `VM` is `$U vm run --vrnic x` with the VMM. A vRNIC `b` exists
/// too. The working directory is `$HOME/m`, with an image.
const SCRIPTS: &[(&str, &str, &str)] = &[
    (
        "it sees the sockets of its vRNIC and no others",
        "MACHINE='find / -path /proc -prune -o -type s -print 2>/dev/null | sort' VM --image a.raw",
        "/run/unirdma/net.sock\n/run/unirdma/rfc.sock\n/run/unirdma/vhost.sock\n",
    ),
    (
        "it connects to its vRNIC, and to no other nor to the administration",
        "MACHINE='for s in /run/unirdma/vhost.sock $LAB/run/vrnics/x/vhost.sock $LAB/run/vrnics/b/vhost.sock $LAB/run/admin.sock; do \
         python3 -c \"import socket,sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1]); print(1)\" $s 2>/dev/null || echo no; done' VM --image a.raw\n\
         ls $LAB/run/admin.sock $LAB/run/vrnics/b/vhost.sock | wc -l",
        "1\nno\nno\nno\n2\n",
    ),
    (
        "it reads and writes its image, and opens neither another machine's nor anything of the home directory",
        "echo disk >a.raw; echo other >$LAB/other.raw; chmod 644 $LAB/other.raw; mkdir -p $HOME/.ssh; echo key >$HOME/.ssh/id; chmod 600 a.raw\n\
         MACHINE='cat a.raw; echo new >a.raw; cat $LAB/other.raw $HOME/.ssh/id 2>/dev/null; ls -A $HOME $PWD; ls -A $LAB/run 2>/dev/null' VM --image a.raw; cat a.raw",
        "disk\nLAB/home:\nm\n\nLAB/home/m:\na.raw\nnew\n",
    ),
    (
        "images in directories of the host that everybody may read do not show",
        "for d in /srv /opt /mnt /var/lib /home; do ls -A $d >/dev/null 2>&1 && echo $d; done >$LAB/dirs; grep -c . $LAB/dirs\n\
         MACHINE='find /srv /opt /mnt /var /root /home -type f 2>/dev/null | wc -l' VM --image a.raw",
        "5\n0\n",
    ),
    (
        "--snapshot keeps the image from it, and gives it room for changes on the disk",
        "MACHINE='cat a.raw; (echo new >a.raw) 2>&1 | grep -c Read-only; echo $TMPDIR; echo t >$TMPDIR/t; df --output=target $TMPDIR | tail -1' VM --image a.raw --snapshot\n\
         ls -d /var/tmp/unirdma-vm-* $TMPDIR/unirdma-vm-* 2>/dev/null | wc -l",
        "disk\n1\n/run/unirdma-vmm\n/run/unirdma-vmm\n0\n",
    ),
    (
        "a kernel and its image are read-only, and so is the VMM",
        "echo k >k; echo i >i; MACHINE='for f in $PWD/k $PWD/i $LAB/vmm; do test -s $f && (echo x >$f) 2>&1 | grep -c Read-only; done' VM --kernel ./k --initrd ../m/i",
        "1\n1\n1\n",
    ),
    (
        "it gets what its own arguments name, but for the command line of the guest",
        "mkdir -p $LAB/d; echo 1 >$LAB/d/1,a; echo 2 >two; echo 3 >$LAB/3; echo other >$LAB/other.raw; n=two; export n\n\
         MACHINE='cat $LAB/d/1,a ../m/two; cat $LAB/3 $LAB/other.raw 2>/dev/null; echo new >two' VM --image a.raw -- \
         -drive if=virtio,file=$LAB/d/1,,a -hda two -append init=$LAB/3; cat two",
        "1\n2\nnew\n",
    ),
    (
        "nothing of the virtual layer is given by an argument or a directory that has it",
        "MACHINE='ls -A $LAB/run; test -e $LAB/run/admin.sock || echo none' VM --image a.raw -- -chardev socket,path=$LAB/run/vrnics/b/vhost.sock -virtfs local,path=$LAB",
        "none\n",
    ),
    (
        "--bind gives other files, and places for files that it makes",
        "mkdir -p $LAB/made; echo base >$LAB/base; echo old >$LAB/made/pid; MACHINE='cat $LAB/base; (echo x >$LAB/base) 2>&1 | grep -c Read-only; rm $LAB/made/pid; echo log >$LAB/made/log' \
         VM --image a.raw --bind $LAB/base:ro --bind $LAB/made -- -pidfile $LAB/made/pid; ls $LAB/made; cat $LAB/made/log",
        "base\n1\nlog\nlog\n",
    ),
    (
        "a device that is given can be opened, also by root's VMM",
        "test $(id -u) != 0 && ln -s /dev/full $LAB/mine || mknod -m 600 $LAB/mine c 1 7\n\
         MACHINE='exec 3<>/dev/mine && echo opened' VM --image a.raw --bind $LAB/mine:/dev/mine",
        "opened\n",
    ),
    (
        "it has KVM if it is to",
        "a=tcg; (: <>/dev/kvm) 2>/dev/null && a=kvm; export a\n\
         export MACHINE='test $a = tcg && ! test -e /dev/kvm || { exec 3<>/dev/kvm && echo kvm; } | grep -q kvm; echo $?'; VM --image a.raw --accel $a",
        "0\n",
    ),
    (
        "it has no network, but the host's with --nat or arguments of its own",
        "ls /sys/class/net | xargs >$LAB/host; export MACHINE='ls /sys/class/net | xargs'\n\
         VM --image a.raw; VM --image a.raw --nat | cmp - $LAB/host; VM --image a.raw -- -device virtio-rng-pci | cmp - $LAB/host && echo same",
        "lo\nsame\n",
    ),
    (
        "it sees no processes, and has no rights of root",
        "MACHINE='ls -d /proc/[0-9]* | wc -l; cat /etc/shadow >/dev/null 2>&1; echo $?; grep -c ^NoNewPrivs:.1 /proc/self/status; env | grep -c ^UNIRDMA_TOKEN; true' UNIRDMA_TOKEN=sesame VM --image a.raw | sed s/[345]/few/",
        "few\n1\n1\n0\n",
    ),
    (
        "exit codes and signals are its own, and a failure says what it may lack",
        "MACHINE='exit 7' VM --image a.raw; echo $?; MACHINE='kill -9 $$' VM --image a.raw; echo $?; MACHINE='exit 1' VM --image a.raw; echo $?\n\
         MACHINE='trap \"exit 9\" TERM; echo up >&2; while :; do sleep 0.05; done' VM --image a.raw 2>$LAB/up & p=$!\n\
         until grep -qs up $LAB/up; do sleep 0.05; done; kill $p; wait $p; echo $?",
        "7\n137\nunirdma: QEMU has only the files that the options name; give it others by --bind PATH, or start it with --unconfined\n1\n9\n",
    ),
    (
        "--unconfined gives it all that its user has",
        "echo other >$LAB/other.raw; MACHINE='cat $LAB/other.raw; test -S $LAB/run/vrnics/b/vhost.sock && echo socket; exit 1' VM --unconfined --image a.raw; echo $?",
        "other\nsocket\n1\n",
    ),
];

/// Runs one of [`SCRIPTS`], and leaves out our own line about the machine, which has its version and MAC address.
fn script(lab: &Lab, text: &str) -> Output {
    let text = text.replace("VM -", "$U vm run --vrnic x --qemu $LAB/vmm -");
    let o = lab.shell(&format!("mkdir -p $HOME/m; cd $HOME/m; echo disk >a.raw; {text}"));
    let lines = o.text.lines().filter(|l| !l.ends_with("Ctrl-A X ends it."));
    Output { text: lines.map(|l| format!("{l}\n")).collect(), ..o }
}

/// A lab whose directory has the VMM.
fn lab(user: Option<u32>) -> Result<Lab> {
    let lab = Lab::start(user)?;
    lab.vrnic("x", &[])?;
    lab.vrnic("b", &[])?;
    let vmm = lab.dir.join("vmm");
    std::fs::write(&vmm, VMM).map_err(failed("the VMM"))?;
    std::fs::set_permissions(&vmm, PermissionsExt::from_mode(0o755)).map_err(failed("the VMM"))?;
    Ok(lab)
}

/// Runs a program as the VMM that tries many escapes.
fn escape(lab: &Lab) -> Check {
    let exe = compile(lab, "escape", &[])?;
    let (run, home) = (lab.dir.join("run"), lab.dir.join("home"));
    let command = format!("{exe} {} {} {}", lab.pid(), run.display(), home.display());
    let o = script(
        lab,
        &format!(
            "cd $HOME; mkdir -p .ssh .config/unirdma .local/share/keyrings; cd m\n\
             for f in .ssh/id .config/unirdma/centre.toml .local/share/keyrings/login.keyring .bashrc plain; do echo secret >$HOME/$f; done\n\
             export UNIRDMA_TOKEN=sesame; exec 9</; MACHINE='exec {command}' VM --image a.raw --accel tcg --bind {exe}:ro"
        ),
    );
    // It does not see what containers may read of the home directory. It has a descriptor of the device's name.
    let is_right = |l: &&str| !l.contains("not reading") && !l.contains("an inherited descriptor 3");
    let found: Vec<&str> = o.text.lines().filter(is_right).collect();
    let tried = found.last().and_then(|l| l.strip_prefix("tried ")?.split(' ').next()?.parse::<u32>().ok());
    require(found.len() == 1 && tried.is_some_and(|n| n > 400), o.text)
}

/// Where the kernel allows no user namespaces, one line says what can be done.
fn without_namespaces(lab: &Lab) -> Check {
    let script = format!(
        "echo 0 >/proc/sys/user/max_user_namespaces; exec {} --dir {}/run vm run --vrnic x --qemu {1}/vmm --kernel {1}/vmm",
        lab.exe().display(),
        lab.dir.display()
    );
    let run = |more: &str| {
        let id = own_user().to_string();
        let mut c = Command::new("setpriv");
        c.args(["--reuid", &id, "--regid", &id, "--clear-groups", "unshare", "-U", "--map-root-user"]);
        Output::of(c.env("MACHINE", "echo started").args(["sh", "-c", &format!("{script} {more}")]))
    };
    let o = run("");
    require(
        o.code == Some(1) && o.text.contains("user.max_user_namespaces") && o.text.contains("--unconfined"),
        o.text,
    )?;
    let o = run("--unconfined");
    require(o.ok() && o.text.contains("started\n"), o.text)
}

/// In `unirdma with`, whose programs preload a library that lies anywhere.
fn in_with(lab: &Lab) -> Check {
    let run =
        format!("exec {} vm run --vrnic v1 --kernel {1}/vmm --qemu {1}/vmm", lab.exe().display(), lab.dir.display());
    let machine = "export MACHINE='ls /run/unirdma; id -u'";
    let o = lab.unirdma(&["with", "1", "-q", "--", "sh", "-c", &format!("{machine}; {run} 2>&1")]);
    let lines: Vec<&str> = o.text.lines().filter(|l| !l.ends_with("Ctrl-A X ends it.")).collect();
    let is_id = |id: &&str| id.parse::<u32>().is_ok();
    let shows = lines.split_last().is_some_and(|(id, l)| l == ["net.sock", "rfc.sock", "vhost.sock"] && is_id(id));
    require(o.ok() && shows, o.text)
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::LOADER]);
    for (who, user) in [("root", None), ("ordinary user", Some(own_user()))] {
        match user {
            None => t.need_root("this user is an ordinary one"),
            Some(_) => t.need_no_root(),
        }
        let lab = &Shared::new(move || lab(user));
        for (name, text, expected) in SCRIPTS {
            t.on(lab, format!("VMM of `vm run`, {who}: {name}"), move |lab| {
                let o = script(lab, text);
                let expected = expected.replace("LAB", &lab.dir.display().to_string());
                require(o.text == expected, format!("expected:\n{expected}\ngot ({:?}):\n{}", o.code, o.text))
            });
        }
        t.on(lab, format!("VMM of `vm run`, {who}: attacks from inside"), escape);
        t.on(lab, format!("VMM of `vm run`, {who}: in `unirdma with`"), in_with);
        if user.is_some() {
            t.on(lab, format!("VMM of `vm run`, {who}: no namespaces"), without_namespaces);
        }
    }
}
