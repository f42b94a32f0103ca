//! Several vRNICs in one container: each has its device, its interface and its addresses.

use std::path::Path;
use std::process::Command;

use crate::support::*;

const BOTH: [&str; 5] = ["run", "--vrnic", "a", "--vrnic", "b"];
const OTHERS: [&str; 5] = ["run", "--vrnic", "c", "--vrnic", "d"];

/// Addresses of a, b, c and d.
const A: &str = "10.77.0.1";
const B: &str = "10.77.0.2";
const C: &str = "10.77.0.3";
const D: &str = "10.77.0.4";

fn lab_of(user: Option<u32>, vrnics: &[&str]) -> Result<Lab> {
    let lab = Lab::start(user)?;
    for vrnic in vrnics {
        lab.vrnic(vrnic, &[])?;
    }
    Ok(lab)
}

fn both(lab: &Lab, options: &[&str], command: &str) -> Output {
    lab.unirdma(&[&BOTH, options, &["--", "sh", "-c", command]].concat())
}

/// All that a container shows of its devices. `%` is the name of the first one without its number.
const SHOWS: &str = "echo $UNIRDMA_DIR\nenv -u UNIRDMA_DIR ibv_devices | awk 'NR > 2 {print $1}'\nls /dev/infiniband\n\
    cd /sys/class/infiniband; head -n 1 */node_desc */ports/1/gid_attrs/ndevs/0 */device/infiniband_verbs/uverbs?/ibdev\n\
    rdma link | cut -d ' ' -f 2,8\nip -4 -o address show | awk '{print $2, $4}'\n";

fn shown(prefix: &str) -> String {
    let files = |file: &str, values: [&str; 2]| {
        let each = values.iter().enumerate().map(|(i, v)| format!("==> {prefix}{i}/{file} <==\n{v}\n"));
        each.collect::<Vec<_>>().join("\n")
    };
    let names = [0, 1].map(|i| format!("{prefix}{i}"));
    let verbs = |i: usize| format!("==> {0}/device/infiniband_verbs/uverbs{i}/ibdev <==\n{0}\n", names[i]);
    format!(
        "/run/unirdma:/run/unirdma-1\n{0}\n{1}\nuverbs0\nuverbs1\n{2}\n{3}\n{4}\n{5}{0}/1 eth0\n{1}/1 eth1\n\
         lo 127.0.0.1/8\neth0 {A}/16\neth1 {B}/16\n",
        names[0],
        names[1],
        files("node_desc", ["a", "b"]),
        files("ports/1/gid_attrs/ndevs/0", ["eth0", "eth1"]),
        verbs(0),
        verbs(1),
    )
}

/// A server of TCP on all addresses, which says who has come to which.
const TCP_SERVER: &str = "import socket\ns = socket.create_server(('0.0.0.0', 9000))\nprint('listens', flush=True)\n\
    for _ in range(3):\n    c, peer = s.accept()\n    print(peer[0], c.getsockname()[0], flush=True)\n    c.close()\n";
const TCP_CLIENT: &str = "import socket, sys\nfor way in sys.argv[1:]:\n    source, to = way.split('-')\n    \
    s = socket.create_connection((to, 9000), 10, (source, 0))\n    print(s.recv(1))\n";

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::LOADER, packages::CONNECTING]);
    for (who, user) in [("root", None), ("an ordinary user", Some(own_user()))] {
        t.test(format!("several: a container of {who} has a device and an interface for each vRNIC"), move || {
            let lab = lab_of(user, &["a", "b"])?;
            for (options, prefix) in [(&[][..], "unirdma"), (&["--device-name", "mlx5_0"], "mlx5_")] {
                let o = both(&lab, options, SHOWS);
                require(o.text == shown(prefix), o.text)?;
            }
            let mut holds = lab.start_unirdma(&[&BOTH[..], &["--", "sh", "-c", "echo is there; sleep 60"]].concat())?;
            wait_for(&holds, "is there")?;
            for vrnic in ["a", "b"] {
                let o = lab.unirdma(&[
                    "exec",
                    "--vrnic",
                    vrnic,
                    "--",
                    "sh",
                    "-c",
                    "ibv_devices | wc -l; echo $UNIRDMA_DIR",
                ]);
                require(o.text == "4\n/run/unirdma:/run/unirdma-1\n", o.text)?;
                refused(&lab.unirdma(&["run", "--vrnic", vrnic, "--", "true"]), &format!("vRNIC {vrnic} "))?;
                let check = lab.unirdma(&["check", "--vrnic", vrnic, "--json"]);
                let report: serde_json::Value = serde_json::from_str(&check.text).map_err(|e| e.to_string())?;
                let names = [0, 1].map(|i| report[0]["vrnics"][i]["name"].clone());
                let one = report.as_array().is_some_and(|all| all.len() == 1);
                require(one && names == ["a", "b"] && report[0]["processes"][0]["served"] == true, check.text)?;
            }
            holds.kill();
            holds.finish();
            let free = |vrnic: &str| lab.unirdma(&["run", "--vrnic", vrnic, "--", "true"]).ok();
            require(free("a") && free("b"), "a vRNIC is still in use")
        });
    }
    t.test("several: vRNICs that cannot be in one container are refused", || {
        let lab = lab_of(Some(own_user()), &["a", "b"])?;
        let made = lab.unirdma(&["group", "add", "blue"]);
        require(made.ok(), made.text)?;
        lab.vrnic("other", &["--group", "blue"])?;
        let long = "x".repeat(63);
        for (options, says) in [
            (&["--vrnic", "a", "--vrnic", "a"][..], "vRNIC a is given twice"),
            (
                &["--vrnic", "a", "--vrnic", "other"],
                "vRNIC a is of group default, and other of group blue: all vRNICs of a container are of one group",
            ),
            (&["--vrnic", "a", "--vrnic", "nobody"], "nobody"),
            (&["--vrnic", "a", "--vrnic", "b", "--device-name", &long], "1 to 63 letters"),
        ] {
            refused(&lab.unirdma(&[&["run"], options, &["--", "true"]].concat()), says)?;
        }
        let many: Vec<_> = (0..17).flat_map(|_| ["--vrnic", "a"]).collect();
        let o = lab.unirdma(&[&["run"], &many[..], &["--", "true"]].concat());
        refused(&o, "a container has at most 16 vRNICs")?;
        require(lab.unirdma(&["run", "--vrnic", "a", "--", "true"]).ok(), "a is still in use")
    });
    t.test("several: programs reach each vRNIC by its device, its address and its interface", || {
        let lab = lab_of(Some(own_user()), &["a", "b", "c", "d"])?;
        let transfer = |server: &str, client: &str| {
            let serves = lab.start_unirdma(&[&BOTH[..], &["--", "sh", "-c", server]].concat())?;
            wait_for(&serves, "listens")?;
            let o = lab.unirdma(&[&OTHERS[..], &["--", "sh", "-c", client]].concat());
            let served = serves.finish();
            require(o.ok() && served.ok(), format!("{server}: {}\n{client}: {}", served.text, o.text))?;
            Ok::<_, String>((served.text, o.text))
        };
        let moved = |vrnic: &str| written(&lab, vrnic);
        let before = moved("b")?;
        transfer(
            "ib_write_bw -d unirdma1 -p 18600 -s 65536 -n 100 & sleep 1; echo listens; wait $!",
            &format!("ib_write_bw -d unirdma1 -p 18600 -s 65536 -n 100 {B}"),
        )?;
        require(moved("b")? >= before + 100 * 65536 && moved("a")? < 65536, "other vRNICs than those that were named")?;
        // Two clients of one listener, which is asked for by both addresses.
        transfer(
            "rping -s -P -p 7003 & sleep 1; echo listens; sleep 6; kill $!",
            &format!(
                "rping -c -C 3 -p 7003 -a {A} && rping -c -C 3 -p 7003 -a {B} && rping -c -C 3 -p 7003 -I {D} -a {B}"
            ),
        )?;
        transfer(
            "rstream -p 7004 -S 4096 -C 50 & sleep 1; echo listens; wait $!",
            &format!("rstream -p 7004 -s {B} -S 4096 -C 50"),
        )?;
        let ways = format!("{C}-{A} {D}-{B} {D}-{A}");
        let (served, _) =
            transfer(&format!("python3 -c \"{TCP_SERVER}\""), &format!("python3 -c \"{TCP_CLIENT}\" {ways}"))?;
        require(served.ends_with(&format!("{C} {A}\n{D} {B}\n{D} {A}\n")), served)
    });
    t.test("several: one listener hears of all vRNICs, and goes on when one is lost", || {
        let lab = lab_of(Some(own_user()), &["a", "b"])?;
        let source = harness::root().join("tests/c/several.c");
        let mut gcc = Command::new("gcc");
        let built = Output::of(gcc.current_dir(&lab.dir).args(["-O1", "-o", "several"]).arg(source).args([
            "-lrdmacm",
            "-libverbs",
            "-lpthread",
        ]));
        require(built.ok(), built.text)?;
        let exe = lab.dir.join("several").display().to_string();
        let bind = format!("{}:ro", Path::new(&exe).display());
        let program = lab.start_unirdma(&[&BOTH[..], &["--bind", &bind, "--", &exe, A, B]].concat())?;
        wait_for(&program, "ready")?;
        let o = lab.unirdma(&["vrnic", "rm", "b", "--force"]);
        require(o.ok(), o.text)?;
        let o = program.finish();
        require(o.ok() && o.text.ends_with("done\n"), o.text)
    });
}
