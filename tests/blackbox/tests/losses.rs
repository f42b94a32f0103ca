//! Lost peers, virtual layers and privileges.

use std::process::Command;

use crate::support::*;

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN]);
    let abc = &Shared::new(abc);
    t.on(abc, "a killed program frees all and its peer sees the error of hardware", |lab| {
        let mut server = serve(lab, "a", "ib_write_bw -D 30 -f 1")?;
        let client = lab.spawn("b", &[], "ib_write_bw -D 30 -f 1 10.0.0.1")?;
        goes_on(lab, "a")?;
        server.kill();
        server.finish();
        let c = client.finish();
        require(c.code.is_some_and(|c| c != 0) && c.text.contains("status 12"), format!("{:?}: {}", c.code, c.text))?;
        let o = lab.unirdma(&["vrnic", "show", "a", "--json"]);
        require(o.text.contains("\"qps\": 0") && o.text.contains("\"sessions\": 0"), o.text)
    });
    t.test("a lost virtual layer is IBV_EVENT_DEVICE_FATAL", || {
        let mut lab = Lab::start(Some(own_user()))?;
        lab.vrnic("x", &[])?;
        let watch = lab.spawn("x", &["--net", "host"], "timeout 20 stdbuf -oL ibv_asyncwatch")?;
        wait_for(&watch, "async event FD")?;
        lab.stop_host();
        wait_for(&watch, "IBV_EVENT_DEVICE_FATAL")
    });
    t.test("an ordinary user needs no privilege", || {
        let lab = Lab::start(Some(own_user()))?;
        lab.vrnic("a", &["--ip", "10.0.0.1"])?;
        lab.vrnic("b", &["--ip", "10.0.0.2"])?;
        for p in ["ib_write_bw -n 500", "ibv_rc_pingpong -g 0 -e"] {
            let (s, c) = lab.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?;
            require(s.ok() && c.ok(), format!("server: {}\nclient: {}", s.text, c.text))?;
        }
        Ok(())
    });
    t.need_root("only root can make a directory of somebody else");
    t.test("a fallback directory of somebody else is refused", || {
        const USER: &str = "64321";
        let dir = format!("/tmp/unirdma-{USER}");
        let _ = std::fs::create_dir(&dir);
        let mut c = Command::new("setpriv");
        c.args(["--reuid", USER, "--regid", USER, "--clear-groups"]).arg(harness::unirdma()).args(["vrnic", "ls"]);
        let o = Output::of(c.env_remove("XDG_RUNTIME_DIR"));
        let _ = std::fs::remove_dir(&dir);
        refused(&o, "not this user's own directory")
    });
}
