//! Changes of a guest while its peers continue: a paused machine, a reloaded driver, a restarted machine, a suspended
//! machine.

use super::*;

/// A change of a guest.
struct Change {
    what: &'static str,
    happen: fn(&Guest) -> Check,
    /// The change is repeated.
    again: bool,
    /// The guest's kernel closes connections, so that peers which only wait are notified. Otherwise they are not, as
    /// with hardware.
    told: bool,
}

const CHANGES: &[Change] = &[
    Change { what: "its programs are killed", happen: |g| g.must(KILL), again: false, told: true },
    Change { what: "its driver is unloaded, and loaded again", happen: reload, again: true, told: true },
    Change { what: "it starts again", happen: Guest::restart, again: true, told: false },
    Change { what: "it is suspended", happen: suspend, again: false, told: false },
];

fn reload(g: &Guest) -> Check {
    g.unload()?;
    // Some programs have ended by themselves.
    g.run(KILL)?;
    g.load()
}

/// Runs the kernel's own test of suspension: its devices suspend, and resume at once.
fn suspend(g: &Guest) -> Check {
    g.must("echo 0 >/sys/module/suspend/parameters/pm_test_delay; echo devices >/sys/power/pm_test && echo mem >/sys/power/state")?;
    g.run(KILL)?;
    g.wait_ready()
}

const KILL: &str = "killall -9 ib_write_bw rping";
/// A program that checks its data, on a connection by address.
const CHECKED: &str = "rping -V -S 4000 -C 100000000";

/// One round of a change: two peers of a guest are busy, one of them with data that is checked. The change happens, the
/// peers are notified, no objects are left, and the guest is usable.
fn round(scene: &Scene, i: usize, change: &Change) -> Check {
    let (g, lab) = (&scene.guests[i], &scene.lab);
    let writes = connected(g, lab, 30)?;
    End::Guest(g).serve(&format!("{CHECKED} -s"))?;
    let checked = other_container(lab).spawn(&format!("{CHECKED} -c -a {}", g.ip))?;
    if let Err(e) = goes_on(lab, "d") {
        return Err(format!("{e}: {}", checked.finish_within(SOON).text));
    }
    (change.happen)(g)?;
    ends_with_error(writes)?;
    let o = checked.finish_within(if change.told { LIMIT } else { Duration::ZERO });
    // By the event, or by the request that was under way, whichever it sees first.
    let told = ["DISCONNECT EVENT", "cq completion failed"].iter().any(|t| o.text.contains(t));
    let wrong = ["mismatch", "verification failed"].iter().any(|t| o.text.contains(t));
    require((told || !change.told) && !wrong, format!("rping ends so: {:?} {}", o.code, o.text))?;
    scene.nothing_left(i)?;
    pair(container(lab), End::Guest(g), "ibv_rc_pingpong -c -n 100")?;
    scene.nothing_left(i)?;
    for peer in ["c", "d"] {
        soon(|| lab.show(peer).is_ok_and(|v| v["qps"] == 0 && v["sessions"] == 0), "a peer's objects are left")?;
    }
    Ok(())
}

pub(super) fn tests(t: &mut Tests, stage: &Stage, i: usize, rounds: u32) {
    let which = NAMES[i];
    explained(t, stage, i, format!("{which} guest: the vRNIC's link goes down and up"), move |g, lab, _| {
        for (state, shows) in [("down", "PORT_DOWN"), ("up", "PORT_ACTIVE")] {
            let o = lab.unirdma(&["vrnic", "link", &g.vrnic, state]);
            require(o.ok(), o.text)?;
            soon(|| g.run("ibv_devinfo").is_ok_and(|o| o.text.contains(shows)), shows)?;
        }
        Ok(())
    });
    explained(
        t,
        stage,
        i,
        format!("{which} guest: nothing of its memory is written while it is paused"),
        move |g, lab, _| {
            let p = "ib_write_bw -b -s 65536 -D 4 -f 1 -u 22";
            let server = End::Guest(g).serve(p)?;
            let client = container(lab).spawn(&format!("{p} {}", g.ip))?;
            goes_on(lab, &g.vrnic)?;
            let mut differs = false;
            for _ in 0..3 {
                g.pause()?;
                let before = written(lab, &g.vrnic);
                std::thread::sleep(Duration::from_millis(100));
                differs |= before? != written(lab, &g.vrnic)?;
                g.go_on()?;
                std::thread::sleep(Duration::from_millis(100));
            }
            require(!differs, "it was written")?;
            let c = client.finish_within(LIMIT);
            both_end_well((server.finish_within(LIMIT), c))
        },
    );
    for change in CHANGES {
        let (what, rounds) = (change.what, if change.again { rounds } else { 1 });
        let times = if rounds > 1 { format!(", {rounds} times") } else { String::new() };
        explained(
            t,
            stage,
            i,
            format!("{which} guest: {what} while peers are connected{times}"),
            move |_, _, scene| {
                (1..=rounds).try_for_each(|n| round(scene, i, change).map_err(|e| format!("round {n}: {e}")))
            },
        );
    }
}

/// A guest loses its power, and is no peer any more.
pub(super) fn power(t: &mut Tests, stage: &Stage, i: usize) {
    explained(t, stage, i, format!("{} guest: loses its power while a peer is connected", NAMES[i]), |g, lab, _| {
        let client = connected(g, lab, 30)?;
        g.power_off();
        ends_with_error(client)?;
        soon(|| lab.show(&g.vrnic).is_ok_and(|v| v["sessions"] == 0), "the session stays")
    });
}
