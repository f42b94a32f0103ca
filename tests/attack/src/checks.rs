//! Attacks that are checks without measurements. The black-box tests make them too.

use std::process::Command;

use harness::{Lab, Link, Output, Result, TwoHosts, compile, own_user, require, shown, wait_for};

/// A container answers ARP for the address of vRNIC b, which vRNIC a resolves.
pub fn arp_spoof(lab: &Lab) -> Result<()> {
    let forge = compile(lab, "forge", &[])?;
    lab.vrnic("evil", &["--ip", "10.0.0.66"])?;
    let (own, others) = (shown(lab, "b", "mac")?, shown(lab, "evil", "mac")?);
    // The MAC address that vRNIC a resolves while `evil` claims b's address.
    let believed = || {
        let b = lab.spawn("b", &[], "sleep 30")?;
        let a = lab.spawn("a", &[], &format!("{forge} neighbour 10.0.0.2 5"))?;
        wait_for(&a, &format!("10.0.0.2 is at {own}"))?;
        let evil = lab.spawn("evil", &[], &format!("{forge} arp 10.0.0.2 30"))?.finish();
        require(evil.ok(), evil.text)?;
        let text = a.finish().text;
        drop(b);
        require(text.contains(&own), text.clone())?;
        Ok::<_, String>(text)
    };
    let text = believed()?;
    require(!text.contains(&others), text)?;
    let o = lab.unirdma(&["vrnic", "show", "evil"]);
    require(o.text.contains("refused: 30 with ARP or ND of another address"), o.text)?;
    // The same attack by a router succeeds, which shows that the test can detect it.
    let o = lab.unirdma(&["vrnic", "set", "evil", "--allow-spoof", "on"]);
    require(o.ok() && o.text.contains("may send with any IP address"), o.text)?;
    let text = believed()?;
    require(text.contains(&others), text)?;
    let o = lab.unirdma(&["vrnic", "rm", "evil", "--force"]);
    require(o.ok(), o.text)
}

/// Runs a program on a host as a user without privileges.
fn as_nobody(two: &TwoHosts, host: usize, program: &str) -> Output {
    let id = own_user();
    let mut c = Command::new("ip");
    c.args(["netns", "exec", two.netns(host), "setpriv"]);
    c.args([format!("--reuid={id}"), format!("--regid={id}"), "--clear-groups".into()]);
    Output::of(c.args(program.split_whitespace()))
}

/// Runs an attack as a user of the first host. Returns the packets that arrive in the container of the second host.
pub fn attacked(two: &TwoHosts, forge: &str, attack: &str) -> Result<String> {
    let victim = two.labs[1].spawn("b", &[], &format!("{forge} listen 2"))?;
    wait_for(&victim, "listening")?;
    let o = as_nobody(two, 0, &format!("{forge} {attack}"));
    require(o.text.contains("sent as user 65534"), o.text)?;
    Ok(victim.finish().text)
}

/// VXLAN frames from a random port, of `forge`.
pub const RANDOM_PORT: &str = "vxlan 192.168.7.1 0 192.168.7.2 1";
/// VXLAN frames from the port of the virtual layer itself.
pub const OWN_PORT: &str = "vxlan-pktinfo 192.168.7.1 4789 192.168.7.2 1";

/// VXLAN frames from an ordinary user of a peer host, between two hosts of their own. Needs root.
pub fn vxlan_injection() -> Result<()> {
    let two = TwoHosts::start(Link { name: "n", ipv6: false, mtu: 1500, args: &[] })?;
    let forge = compile(&two.labs[1], "forge", &[])?;
    let text = attacked(&two, &forge, RANDOM_PORT)?;
    require(text.contains("nothing"), text)?;
    let o = two.labs[1].unirdma(&["status"]);
    let text = o.unwrapped();
    require(text.contains("dropped 5 not from a peer's port") && text.contains("firewall: none"), text)?;
    // The attack that remains without the firewall: a socket may send from an address that it is not bound to.
    let text = attacked(&two, &forge, OWN_PORT)?;
    require(text.contains("arrived"), format!("docs/security.md says that this arrives: {text}"))
}

/// Runs a program that tries many escapes, in a container of vRNIC x.
pub fn escape(lab: &Lab) -> Result<()> {
    let exe = compile(lab, "escape", &[])?;
    let run = lab.dir.join("run");
    let home = lab.dir.join("home");
    let command = format!("{exe} {} {} {}", lab.pid(), run.display(), home.display());
    let steal = "cd $HOME; mkdir -p .ssh .config/unirdma .local/share/keyrings .local/bin .cargo/bin\n\
                 for f in .ssh/id .config/unirdma/centre.toml .local/share/keyrings/login.keyring .bashrc plain; do echo secret >$f; done";
    require(script(lab, steal).ok(), "the home directory cannot be filled")?;
    // With a descriptor that must not be inherited, in a container of each kind, and by `exec`.
    for how in ["", "--net host "] {
        let o = script(lab, &format!("export UNIRDMA_TOKEN=sesame; exec 9</; RUN {how}-- {command}"));
        let tried = o.text.strip_prefix("tried ").and_then(|t| t.split(' ').next()).and_then(|n| n.parse::<u32>().ok());
        require(o.ok() && tried.is_some_and(|n| n > 400), format!("{how}: {:?} {}", o.code, o.text))?;
    }
    let o = script(
        lab,
        &format!(
            "RUN -- sh -c 'echo up; exec sleep 30' >$LAB/up3 & p=$!\n\
             until grep -qs up $LAB/up3; do sleep 0.05; done\nexport UNIRDMA_TOKEN=sesame; exec 9</; EXEC -- {command}; kill $p"
        ),
    );
    require(o.text.starts_with("tried "), format!("exec: {:?} {}", o.code, o.text))
}

/// Runs a shell script outside of containers. `RUN` is `$U run --vrnic x`, `EXEC` is `$U exec --vrnic x`.
pub fn script(lab: &Lab, text: &str) -> Output {
    let text = text.replace("RUN -", "$U run --vrnic x -").replace("EXEC -", "$U exec --vrnic x -");
    lab.shell(&text)
}
