//! A fleet moves from one centre with its state in a file to two centres on an etcd of three members, which require
//! certificates and passwords.

use std::path::Path;
use std::time::{Duration, Instant};

use harness::{Lab, Output, Result, require};

use super::etcd::PASSWORD;
use super::{Centres, Etcd, refused, wait_until};

/// Moves the fleet, then kills each member of etcd in turn.
///
/// # Errors
/// The first check that fails.
pub fn run() -> Result<()> {
    let mut c = Centres::prepare(Etcd::start_secured, false)?;
    c.start_centre_on(0, &[])?;
    let token = c.join_token(0)?;
    let host = c.host("127.0.16.3", &c.dir.join("h1"), &c.urls.join(","), Some(&token))?;
    for name in ["a", "b"] {
        let o = host.unirdma(&["vrnic", "add", name]);
        require(o.ok(), &o.text)?;
    }
    let (found, revision) = (c.vrnics(0)?, c.status(0)?["revision"].clone());
    let at = format!("at revision {} were copied", revision.as_str().unwrap_or_default());
    refused(&copy(&c), "is in use by another `unirdma control`")?;
    if let Some(mut centre) = c.centres[0].take() {
        harness::terminate(&centre.0);
        centre.0.wait().map_err(|e| e.to_string())?;
    }

    refused(&copy(&c), "does not answer")?;
    let log_in = |password| (0..2).try_for_each(|n| c.etcd.log_in_from(Path::new(&c.of(n)), password));
    log_in("wrong").map_err(|e| e.to_string())?;
    refused(&copy(&c), "authentication failed")?;
    log_in(PASSWORD).map_err(|e| e.to_string())?;
    let o = copy(&c);
    require(o.ok() && o.text.contains(&at), &o.text)?;
    refused(&copy(&c), "has a fleet already")?;

    c.start()?;
    require(c.vrnics(1)? == found, "the second centre shows other vRNICs")?;
    wait_until(|| c.host_is_connected(), "the host does not come to the centres on etcd")?;
    require(c.status(0)?["revision"] == revision, "something has changed by the move")?;
    ["a", "b"].iter().try_for_each(|name| host.show(name).map(drop))?;
    refused(
        &run_copy(&c, &["--from", &c.store(), "--to", &c.dir.join("back.redb").display().to_string()]),
        "end all centres",
    )?;
    members_die(&mut c, &host)
}

fn copy(c: &Centres) -> Output {
    run_copy(c, &["--to", &c.store()])
}

fn run_copy(c: &Centres, args: &[&str]) -> Output {
    c.run(&[&["control", "copy", &c.of(0)], args].concat(), None)
}

/// Kills one member after the other: changes still succeed. Then kills two: changes are refused, and hosts stay
/// connected.
fn members_die(c: &mut Centres, host: &Lab) -> Result<()> {
    let mut longest = Duration::ZERO;
    for member in 0..c.etcd.members() {
        c.etcd.kill(member);
        let begun = Instant::now();
        for centre in 0..2 {
            let name = format!("m{member}c{centre}");
            wait_until(
                || c.declare(&name, Some(centre)).ok(),
                "nothing can be changed after a member of etcd was killed",
            )?;
        }
        longest = longest.max(begun.elapsed());
        let name = format!("m{member}");
        let mut said = String::new();
        let added = || {
            let o = host.unirdma(&["vrnic", "add", &name]);
            said += &o.text;
            o.ok()
        };
        wait_until(added, "the host cannot add a vRNIC then").map_err(|e| format!("{e}: {said}"))?;
        require(c.host_is_connected(), "the host's connection has ended")?;
        c.etcd.start_again(member)?;
    }
    c.etcd.kill(0);
    c.etcd.kill(1);
    refused(&c.declare("late", Some(0)), "nothing can be changed now: ")?;
    require(c.host_is_connected(), "the host's connection has ended with etcd's majority")?;
    c.etcd.start_member(0)?;
    c.etcd.start_again(1)?;
    wait_until(|| c.declare("late", Some(1)).ok(), "nothing can be changed after etcd's majority is back")?;
    wait_until(|| c.agreed().is_some_and(|v| v.len() == 12), "the centres do not show the same")?;
    println!("each of etcd's members killed: both centres made a change within {:.1} s", longest.as_secs_f64());
    Ok(())
}
