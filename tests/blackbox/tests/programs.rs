//! Debian's programs between two containers of one host.

use std::process::Command;

use crate::support::*;

/// Programs that must run unmodified between two containers.
pub(crate) fn programs() -> Vec<String> {
    let mut v: Vec<String> = [
        "",
        " -e",
        " -c",
        " -e -c",
        " -N",
        " -N -t",
        " -c -o",
        " -j",
        " -s 1 -n 200",
        " -s 1048576 -n 200 -r 4",
        " -m 256",
    ]
    .iter()
    .map(|o| format!("ibv_rc_pingpong -g 0{o}"))
    .collect();
    let each = |v: &mut Vec<String>, program: &str, options: &[&str]| {
        v.extend(options.iter().map(|o| format!("{program} {o}").trim_end().to_string()));
    };
    // perftest itself refuses -e on WRITE, -a on atomics, and -b and -q on latency tests. Without -C it measures the
    // processor's clock for a fifth of a second for each size, and the search for its peaks takes time quadratic in the
    // number of messages.
    each(
        &mut v,
        "ib_write_bw",
        &["", "-a -n 40", "-b", "-q 8 -n 1000", "-s 1 -n 2000", "-I 220 -s 220", "-m 256", "-t 1", "-x 1"],
    );
    each(&mut v, "ib_read_bw", &["", "-a -n 40", "-b", "-e", "-q 8", "-o 16"]);
    each(&mut v, "ib_send_bw", &["", "-a -n 40", "-b", "-e", "-q 8", "-r 16", "-I 64 -s 64"]);
    each(&mut v, "ib_atomic_bw", &["", "-b", "-e", "-q 8", "-A CMP_AND_SWAP"]);
    each(&mut v, "ib_write_lat", &["", "-a -C -n 20", "-I 64"]);
    each(&mut v, "ib_read_lat", &["", "-a -C -n 20", "-e"]);
    each(&mut v, "ib_send_lat", &["", "-a -C -n 20", "-e"]);
    each(&mut v, "ib_atomic_lat", &["", "-e", "-A FETCH_AND_ADD"]);
    each(&mut v, "ibv_uc_pingpong -g 0", &["", "-e", "-c", "-s 1 -n 200", "-s 1048576 -n 200 -r 4", "-m 256"]);
    each(&mut v, "ibv_ud_pingpong -g 0", &["", "-e", "-c", "-s 1 -n 200"]);
    each(&mut v, "ib_write_bw -c UC", &["", "-a -n 40", "-q 8 -n 1000"]);
    each(&mut v, "ib_write_lat -c UC", &["", "-a -C -n 20"]);
    each(&mut v, "ib_send_bw -c UC", &["", "-q 8"]);
    each(&mut v, "ib_send_lat -c UC", &["", "-e"]);
    // All of them should fit into a socket's buffer, because nothing slows down their sender.
    each(&mut v, "ib_send_bw -c UD", &["", "-e", "-q 8 -n 300", "--use-srq"]);
    each(&mut v, "ibv_srq_pingpong -g 0", &["", "-e", "-c -q 4"]);
    each(&mut v, "ibv_xsrq_pingpong -g 0", &["", "-e"]);
    each(&mut v, "ib_send_bw --use-srq", &["", "-q 8", "-c UC"]);
    each(&mut v, "ib_send_lat -c UD", &["", "-a -C -n 20", "-e"]);
    v
}

/// Checks that the same program succeeds in both containers.
fn pair(lab: &Lab, command: &str) -> Check {
    both_end_well(lab.pair(("a", command), ("b", &format!("{command} 10.0.0.1")), &[])?)
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN]);
    let abc = &Shared::new(abc);
    t.test("the functions that execute work requests lie beside each other in the program", || {
        functions_lie_together()
    });
    t.on(abc, "ibv_devices", |lab| {
        let o = lab.spawn("a", &[], "ibv_devices")?.finish();
        require(o.ok() && o.text.contains("unirdma0"), o.text)
    });
    t.on(abc, "without a virtual layer there are no devices", |lab| {
        let lib = harness::unirdma().with_file_name("dropin");
        let o = Command::new("ibv_devices").env("LD_LIBRARY_PATH", lib).env("UNIRDMA_DIR", &lab.dir).output();
        let o = o.map_err(|e| e.to_string())?;
        require(o.status.success(), String::from_utf8_lossy(&o.stderr))
    });
    t.on(abc, "trace", |lab| {
        let o = lab.spawn("a", &[], "env UNIRDMA_TRACE=1 ibv_devinfo")?.finish();
        require(o.ok() && o.text.contains("ibv_open_device()") && o.text.contains("ibv_query_port(1)"), o.text)
    });
    t.on(abc, "every symbol resolves", |lab| {
        for p in ["ib_write_bw --version", "ib_send_lat --version", "ibv_devinfo -l"] {
            let o = lab.spawn("a", &[], &format!("env LD_BIND_NOW=1 LD_WARN=1 {p}"))?.finish();
            require(!o.text.contains("undefined symbol") && !o.text.contains("no version information"), o.text)?;
        }
        Ok(())
    });
    for p in programs() {
        t.on(abc, p.clone(), move |lab| pair(lab, &p));
    }
}

/// Checks that the functions in each line of `link-order.txt` lie close together. Another compiler may have inlined
/// some of them.
fn functions_lie_together() -> Check {
    const PLACE_BYTES: u64 = 512 << 10;
    let list = std::fs::read_to_string(harness::root().join("crates/cli/link-order.txt")).map_err(|e| e.to_string())?;
    let nm = Command::new("nm").arg(harness::unirdma()).output().map_err(|e| format!("nm: {e}"))?;
    let symbols = String::from_utf8_lossy(&nm.stdout);
    let function = |l| match &str::split_whitespace(l).collect::<Vec<_>>()[..] {
        [address, "t" | "T", name] => Some((u64::from_str_radix(address, 16).ok()?, *name)),
        _ => None,
    };
    let functions: Vec<(u64, &str)> = symbols.lines().filter_map(function).collect();
    let is_named = |name: &str, line: &str| {
        line.split('*').try_fold(name, |rest, part| rest.split_once(part).map(|(_, rest)| rest)).is_some()
    };
    let (mut lines, mut missing, mut places) = (0, Vec::new(), Vec::new());
    for line in list.lines().filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let of_line = functions.iter().filter(|f| is_named(f.1, line)).map(|f| f.0);
        let before = places.len();
        places.extend(of_line);
        lines += 1;
        if places.len() == before {
            missing.push(line);
        }
    }
    require(
        lines > 50 && missing.len() * 5 < lines,
        format!("nothing has these names of link-order.txt: {missing:?}"),
    )?;
    let (first, last) = (places.iter().min().copied().unwrap_or(0), places.iter().max().copied().unwrap_or(u64::MAX));
    require(
        last - first < PLACE_BYTES,
        format!("they lie from {first:#x} to {last:#x}: the linker has not ordered them"),
    )
}
