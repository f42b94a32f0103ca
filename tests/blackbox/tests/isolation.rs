//! A container's view of others.

use crate::support::*;

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN]);
    let abc = &Shared::new(abc);
    t.on(abc, "a_container_sees_its_own_vrnic_only", |lab| {
        let run = lab.dir.join("run").display().to_string();
        let o = lab.spawn("b", &[], &format!("sh -c 'ls -R $UNIRDMA_DIR; ls -A {run} | wc -l'"))?.finish();
        require(o.ok() && o.text == "/run/unirdma:\nnet.sock\nrfc.sock\nvhost.sock\n0\n", o.text)
    });
    t.on(abc, "nothing_of_the_host_shows", |lab| {
        let o = lab.spawn("a", &[], "ibv_devinfo -v")?.finish();
        let host = std::fs::read_to_string("/etc/hostname").unwrap_or_default();
        let named = host.trim().len() > 3 && o.text.contains(host.trim());
        require(
            o.ok() && o.text.contains(&shown(lab, "a", "guid")?) && o.text.contains("::ffff:10.0.0.1") && !named,
            o.text,
        )
    });
    t.on(abc, "exit_codes_pass_through", |lab| {
        require(lab.spawn("a", &[], "sh -c 'exit 42'")?.finish().code == Some(42), "expected 42")
    });
    t.on(abc, "groups_do_not_connect", |lab| {
        let p = "ibv_rc_pingpong -g 0 -p 18601";
        let (s, c) = lab.pair(("b", p), ("c", &format!("{p} 127.0.0.1")), &["--net", "host"])?;
        require(!s.ok() && !c.ok() && c.text.contains("RTR"), format!("server: {}\nclient: {}", s.text, c.text))
    });
    t.on(abc, "groups_share_no_ethernet", |lab| {
        let (s, c) =
            lab.pair(("a", "timeout 3 ibv_rc_pingpong -g 0"), ("c", "timeout 2 ibv_rc_pingpong -g 0 10.0.0.2"), &[])?;
        require(!s.ok() && !c.ok(), format!("server: {}\nclient: {}", s.text, c.text))
    });
}
