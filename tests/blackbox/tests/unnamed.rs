//! `unirdma run` without `--vrnic`: on a virtual layer that is there, and where there is none.

use std::process::Command;

use crate::support::*;

/// A directory in which no virtual layer serves.
fn nobody(user: Option<u32>) -> Result<Lab> {
    let mut lab = Lab::start(user)?;
    lab.stop_host();
    Ok(lab)
}

/// Waits until no virtual layer serves any more, and checks that it left nothing.
fn ends(lab: &Lab) -> Check {
    let is_there = || std::fs::exists(lab.dir.join("run/admin.sock")).unwrap_or(true);
    soon(|| !is_there() && lab.unirdma(&["status"]).text.contains("no virtual layer"), "it serves on")?;
    let left = std::fs::read_dir(lab.dir.join("run")).map_err(failed("run"))?.flatten();
    // The second is what a killed `run` leaves of its working directory's guard: a lock that nobody holds.
    let known = |name: &std::ffi::OsString| name == "host.lock" || name.to_string_lossy().starts_with("working-");
    let left: Vec<_> = left.map(|e| e.file_name()).filter(|name| !known(name)).collect();
    require(left.is_empty(), format!("left: {left:?}"))
}

/// The name and the address in the line that `run` prints.
fn taken(text: &str) -> Result<(String, String)> {
    let line = text.lines().find_map(|l| l.strip_prefix("unirdma: vRNIC ")).ok_or_else(|| text.to_string())?;
    let (name, rest) = line.split_once(" with address ").ok_or(line)?;
    Ok((name.into(), rest.split(' ').next().unwrap_or_default().into()))
}

/// Starts a program that goes on. Returns when it has begun.
fn goes_on(lab: &Lab, options: &[&str]) -> Result<Running> {
    let program = lab.start_unirdma(&[&["run"], options, &["--", "sh", "-c", "echo begun; sleep 60"]].concat())?;
    wait_for(&program, "begun")?;
    Ok(program)
}

/// The names of all vRNICs.
fn names(lab: &Lab) -> String {
    lab.unirdma(&["vrnic", "ls", "-q"]).text.trim().replace('\n', " ")
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN]);
    for (who, user) in [("this user", None), ("an ordinary user", Some(own_user()))] {
        t.test(format!("run without a vRNIC: two programs of {who} find each other, and nothing is left"), move || {
            let lab = nobody(user)?;
            let mut server = lab.start_unirdma(&["run", "--", "ib_write_bw", "-n", "100"])?;
            server.wait_listening(|| false);
            let (name, address) = taken(&server.text())?;
            require(name == "run-1", format!("{name} {address}"))?;
            let client = lab.unirdma(&["run", "--", "ib_write_bw", "-n", "100", &address]);
            both_end_well((server.finish(), client))?;
            // The last of the two waited for the end.
            require(lab.unirdma(&["status"]).text.contains("no virtual layer"), "it serves on")?;
            ends(&lab)
        });
    }
    t.test("run without a vRNIC: many at once have different ones", || {
        let lab = nobody(None)?;
        let show = ["run", "--", "sh", "-c", "ip -4 -brief address show eth0; sleep 0.3"];
        let all: Vec<Running> = (0..4).map(|_| lab.start_unirdma(&show)).collect::<Result<_>>()?;
        let mut addresses = Vec::new();
        for program in all {
            let o = program.finish();
            let address = taken(&o.text)?.1;
            require(o.ok() && o.text.contains(&format!("{address}/")), o.text)?;
            addresses.push(address);
        }
        addresses.sort();
        addresses.dedup();
        require(addresses.len() == 4, format!("{addresses:?}"))?;
        ends(&lab)
    });
    t.test("run without a vRNIC: some begin while others end", || {
        let lab = nobody(None)?;
        let run_all = || -> Check {
            for n in 0..15 {
                let o = lab.unirdma(&["run", "--quiet", "--", "true"]);
                require(o.ok() && o.text.is_empty(), format!("command {n}: {:?} {}", o.code, o.text))?;
            }
            Ok(())
        };
        let all: Vec<Check> = std::thread::scope(|s| {
            let threads: Vec<_> = (0..3).map(|_| s.spawn(run_all)).collect();
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("it panicked".into()))).collect()
        });
        all.into_iter().collect::<Check>()?;
        ends(&lab)
    });
    t.test("run without a vRNIC: nothing is left of one that is killed", || {
        let lab = nobody(None)?;
        let mut program = goes_on(&lab, &[])?;
        program.kill();
        program.finish();
        ends(&lab)
    });
    t.test("run without a vRNIC: the virtual layer ends after a vRNIC that an administrator made", || {
        let lab = nobody(None)?;
        let mut program = goes_on(&lab, &[])?;
        lab.vrnic("a", &[])?;
        program.kill();
        program.finish();
        soon(|| names(&lab) == "a", "run-1 is left")?;
        require(lab.unirdma(&["vrnic", "rm", "a"]).ok(), "a cannot be removed")?;
        ends(&lab)
    });
    t.test("run without a vRNIC: one that nothing uses is taken and kept", || {
        let lab = Lab::start(None)?;
        require(lab.unirdma(&["group", "add", "blue"]).ok(), "no group")?;
        lab.vrnic("a", &["--group", "blue"])?;
        lab.vrnic("b", &[])?;
        lab.vrnic("c", &[])?;
        let (first, second) = (goes_on(&lab, &[])?, goes_on(&lab, &["--net", "host"])?);
        let new = goes_on(&lab, &[])?;
        let taken = [&first, &second, &new].map(|p| taken(&p.text()).map(|t| t.0));
        require(taken == [Ok("b".into()), Ok("c".into()), Ok("run-1".into())], format!("{taken:?}"))?;
        let other = lab.unirdma(&["run", "--vrnic", "b", "--", "true"]);
        refused(&other, "has a container already")?;
        for mut program in [first, second, new] {
            program.kill();
            program.finish();
        }
        soon(|| names(&lab) == "a b c", "others are left")?;
        let o = lab.unirdma(&["run", "--new", "--quiet", "--", "true"]);
        require(o.ok() && o.text.is_empty() && names(&lab) == "a b c", o.text)?;
        let o = lab.unirdma(&["run", "--", "true"]);
        require(o.ok() && o.text.contains("vRNIC b") && names(&lab) == "a b c", o.text)
    });
    t.test("run without a vRNIC: the next supervisor removes it at its container's end", || {
        let mut lab = Lab::start(None)?;
        let (mut stays, mut ended) = (goes_on(&lab, &[])?, goes_on(&lab, &[])?);
        lab.kill_host();
        ended.kill();
        ended.finish();
        lab.start_again()?;
        soon(|| names(&lab) == "run-1", "run-2 is left, or run-1 is gone")?;
        stays.kill();
        stays.finish();
        soon(|| names(&lab).is_empty(), "run-1 is left")
    });
    t.test("run without a vRNIC: no virtual layer can be started", || {
        let lab = nobody(None)?;
        let file = lab.dir.join("file");
        std::fs::write(&file, "").map_err(failed("file"))?;
        for (dir, why) in [(lab.dir.join("no/where"), "make it, or correct --dir"), (file, "cannot create")] {
            let o = Output::of(Command::new(lab.exe()).arg("--dir").arg(dir).args(["run", "--", "true"]));
            refused(&o, why)?;
        }
        ends(&lab)
    });
}
