//! A hostile process in a guest, and other processes of that guest and of its peers that it must not harm.

use super::*;

/// A program whose memory region peers write.
const VICTIM: &str = "ib_write_bw -s 65536 -D 12";
/// A program that other processes of the guest run meanwhile.
const MEANWHILE: &str = "ibv_rc_pingpong -c -n 100";

/// QPN, key and address of the peer's memory, from the output of a perftest program.
fn remote(text: &str) -> Option<[&str; 3]> {
    let line = text.lines().find(|l| l.contains("remote address:"))?;
    let mut words = line.split_whitespace();
    let mut after = |name: &str| words.find(|w| *w == name).and_then(|_| words.next());
    Some([after("QPN")?, after("RKey")?, after("VAddr")?])
}

fn endure(g: &Guest, lab: &Lab, seconds: u32, seed: usize) -> Check {
    let victim = End::Guest(g).serve(VICTIM)?;
    let client = lab.spawn("d", &[], &format!("stdbuf -oL {VICTIM} -F -x 0 {}", g.ip))?;
    soon(|| remote(&client.text()).is_some(), "the victim shows no key")?;
    let shown = client.text();
    let [qpn, rkey, addr] = remote(&shown).ok_or("no key")?;
    let hostile = g.spawn(&format!("guest-hostile {seconds} {seed} {rkey} {addr} {qpn} {}", g.gid()?))?;
    while !hostile.has_ended() {
        pair(container(lab), End::Guest(g), MEANWHILE)?;
        pair(End::Guest(g), End::Guest(g), &format!("{MEANWHILE} -e"))?;
    }
    let o = hostile.finish();
    require(o.ok() && !o.text.contains("broken") && o.text.contains("hostile processes"), o.text)?;
    both_end_well((victim.finish_within(LIMIT), client.finish_within(LIMIT)))
}

pub(super) fn tests(t: &mut Tests, stage: &Stage, i: usize, seconds: u32) {
    explained(t, stage, i, format!("{} guest: a hostile process harms no other", NAMES[i]), move |g, lab, scene| {
        endure(g, lab, seconds, i)?;
        scene.nothing_left(i)
    });
}
