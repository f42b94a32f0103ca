//! Captured packets, read by Wireshark.

use std::process::Command;

use crate::support::*;

/// Captures while `f` runs, and checks by Wireshark's dissectors that no packet is malformed. Returns the number of
/// packets.
pub(crate) fn capture(lab: &Lab, f: impl FnOnce() -> Check) -> Result<usize> {
    let file = lab.dir.join("capture.pcap");
    let file = file.display().to_string();
    let running = lab.start_unirdma(&["capture", "-w", &file])?;
    std::thread::sleep(Duration::from_millis(300));
    let done = f();
    running.interrupt();
    let o = running.finish();
    done?;
    let count = o.text.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok());
    let count = count.filter(|_| o.ok() && o.text.contains(" 0 lost")).ok_or(o.text)?;
    let read = |filter: &str| -> Result<usize> {
        // That dissector takes payload for a protocol above RDMA that is not there.
        let args = ["-n", "-r", &file, "--disable-protocol", "rpcordma", "-Y", filter];
        let o = Command::new("tshark").args(args).output().map_err(|e| format!("tshark: {e}"))?;
        if o.status.success() {
            return Ok(String::from_utf8_lossy(&o.stdout).lines().count());
        }
        Err(String::from_utf8_lossy(&o.stderr).into_owned())
    };
    require(read("_ws.malformed")? == 0, "tshark finds malformed packets")?;
    require(read("infiniband")? == count, format!("tshark does not see RoCE in all of the {count} packets"))?;
    Ok(count)
}

/// Programs whose packets are captured.
pub(crate) const CAPTURED: &[&str] = &[
    "ibv_rc_pingpong -g 0 -n 20",
    "ibv_uc_pingpong -g 0 -n 20",
    "ibv_ud_pingpong -g 0 -n 20",
    "ib_write_bw -n 20 -s 10000",
    "ib_read_bw -n 20 -s 10000",
    "ib_atomic_bw -n 20",
];

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::CAPTURE]);
    let abc = &Shared::new(abc);
    t.on(abc, "capture: tshark reads what never left the host", |lab| {
        let run = |p: &str| both_end_well(lab.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?);
        let count = capture(lab, || CAPTURED.iter().try_for_each(|p| run(p)))?;
        require(count > 20 * CAPTURED.len(), format!("{count} packets only"))
    });
    t.on(abc, "capture: a line for each packet, of one vRNIC", |lab| {
        let watch = lab.start_unirdma(&["capture", "--vrnic", "b", "-c", "12"])?;
        std::thread::sleep(Duration::from_millis(300));
        let p = "ibv_rc_pingpong -g 0 -s 100 -n 20";
        both_end_well(lab.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?)?;
        let o = watch.finish();
        let lines = o.text.lines().filter(|l| l.contains("10.0.0.2 > 10.0.0.1: RC SEND only to QP 0x")).count();
        require(o.ok() && lines >= 3 && o.text.contains("12 packets captured"), o.text)
    });
    t.on(abc, "wrong_input_a_second_capture, and one into a directory", |lab| {
        let first = lab.start_unirdma(&["capture", "-w", "/dev/null"])?;
        std::thread::sleep(Duration::from_millis(300));
        let second = lab.unirdma(&["capture", "-w", "/dev/null"]);
        first.interrupt();
        first.finish();
        refused(&second, "another capture runs already")?;
        refused(&lab.unirdma(&["capture", "-w", "/"]), "cannot write /")?;
        refused(&lab.unirdma(&["capture", "--vrnic", "z"]), "there is no vRNIC z")
    });
}
