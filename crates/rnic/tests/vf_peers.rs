//! Programs on VFs of several hosts: what a host asks another one about a GID, and what it believes.

use unirdma_abi::Status;
use unirdma_formats::cm::GSI_QPN;
use unirdma_formats::where_is::{ByVf, HOST_QPN, Method, WhereIs};
use unirdma_formats::{Gid, QpType};
use unirdma_rnic::{Output, VfPath, VfUse};
use unirdma_simkit::net::{Faults, Net, gid};
use unirdma_simkit::{SECOND, ip};

const MS: u64 = 1_000_000;

/// The GID of the VF of an end.
fn vf(end: usize) -> Gid {
    Gid::from_ip([10, 50, 0, 10 + end as u8].into())
}

/// Gives a VF to an end, or takes it away.
fn lend(net: &mut Net, end: usize, real: Option<Gid>) {
    let (id, vf) = (net.ends[end].vrnic, real.map(|gid| VfPath { gid: gid.0, mtu: 3 }));
    net.rnic(end).set_vf_use(id, VfUse { asks: true, vf });
}

/// Ends with a VF each, of these groups; end `i` is on host `i` modulo `hosts`.
fn ends(hosts: usize, groups: &[u32]) -> Net {
    let mut net = Net::groups(hosts, &vec![QpType::Rc; groups.len()], groups, |end| end % hosts);
    (0..groups.len()).for_each(|end| lend(&mut net, end, Some(vf(end))));
    net
}

/// Sessions whose commands may be executed again.
fn released(net: &mut Net, end: usize) -> usize {
    let mut out = Vec::new();
    net.rnic(end).drain_outputs(&mut out);
    let session = net.session(end);
    out.iter().filter(|o| **o == Output::Released { session }).count()
}

/// Executes a command as the device does. Returns its result and how often it has asked.
fn command<T>(
    net: &mut Net,
    end: usize,
    ask: impl Fn(&mut Net) -> bool,
    execute: impl Fn(&mut Net) -> Result<T, Status>,
) -> (Result<T, Status>, usize) {
    let session = net.session(end);
    let mut asked = 0;
    while ask(net) {
        asked += 1;
        assert!(net.rnic(end).is_asking(session) && released(net, end) == 0);
        let until = net.now + 2 * SECOND;
        while net.rnic(end).is_asking(session) {
            assert!(net.now < until, "the question is never over");
            net.run(MS);
        }
        assert_eq!(released(net, end), 1);
    }
    (execute(net), asked)
}

fn resolve(net: &mut Net, end: usize, to: Gid) -> (Result<Gid, Status>, usize) {
    resolve_for(net, end, to, QpType::Rc)
}

fn resolve_for(net: &mut Net, end: usize, to: Gid, typ: QpType) -> (Result<Gid, Status>, usize) {
    let s = net.session(end);
    let ask = |net: &mut Net| net.rnic(end).ask_to_resolve(s, to);
    command(net, end, ask, |net| net.rnic(end).resolve_by_vf(s, 0, to, typ).map(|p| Gid(p.gid)))
}

fn name(net: &mut Net, end: usize, real: Gid) -> (Result<Gid, Status>, usize) {
    let s = net.session(end);
    let ask = |net: &mut Net| net.rnic(end).ask_to_name(s, real);
    command(net, end, ask, |net| net.rnic(end).name_of_vf(s, real))
}

fn questions(net: &mut Net, end: usize) -> (u64, u64) {
    let q = net.rnic(end).vf_questions();
    (q.asked, q.unanswered)
}

#[test]
fn a_vrnic_on_another_host_is_reached_by_its_vf_after_one_question() {
    let mut net = ends(2, &[0, 0]);
    assert_eq!(resolve(&mut net, 0, gid(1)), (Ok(vf(1)), 1));
    // Both sides remember the answer.
    assert_eq!(resolve(&mut net, 0, gid(1)), (Ok(vf(1)), 0));
    assert_eq!(resolve(&mut net, 1, gid(0)), (Ok(vf(0)), 0));
    for end in [0, 1] {
        assert_eq!(name(&mut net, end, vf(1 - end)), (Ok(gid(1 - end)), 0));
        let there = vf(1 - end);
        assert_eq!(resolve_for(&mut net, end, there, QpType::Ud), (Ok(there), 0), "the GID of a GRH");
        assert_eq!(resolve(&mut net, end, there), (Err(Status::Unreachable), 0), "connections have other names");
    }
    // Later it is asked anew.
    net.run(SECOND);
    assert_eq!(name(&mut net, 1, vf(0)), (Ok(gid(0)), 1));
    assert_eq!(resolve(&mut net, 0, gid(1)), (Ok(vf(1)), 0), "the question says it, too");
    net.run(SECOND);
    assert_eq!(resolve_for(&mut net, 0, vf(1), QpType::Ud), (Ok(vf(1)), 1));
    assert_eq!(name(&mut net, 0, ip(77)), (Err(Status::Unreachable), 0), "nobody has said that it has this VF");
    assert_eq!((questions(&mut net, 0), questions(&mut net, 1)), ((2, 0), (1, 0)));
}

#[test]
fn who_has_no_vf_any_more_or_another_one_is_not_reached_by_the_old_one() {
    let mut net = ends(2, &[0, 0]);
    assert_eq!(resolve(&mut net, 0, gid(1)), (Ok(vf(1)), 1));
    lend(&mut net, 1, Some(vf(7)));
    net.run(SECOND);
    assert_eq!(name(&mut net, 0, vf(1)), (Err(Status::Unreachable), 1));
    assert_eq!(name(&mut net, 0, vf(7)), (Ok(gid(1)), 0));
    lend(&mut net, 1, None);
    net.run(SECOND);
    assert_eq!(resolve(&mut net, 0, gid(1)), (Err(Status::Unreachable), 1));
    // A refusal is not remembered: the program there may open its device any time.
    lend(&mut net, 1, Some(vf(1)));
    assert_eq!(resolve(&mut net, 0, gid(1)), (Ok(vf(1)), 1));
    // One without a VF asks nobody.
    lend(&mut net, 0, None);
    assert_eq!(resolve(&mut net, 0, gid(1)), (Err(Status::BadState), 0));
}

#[test]
fn vrnics_that_share_a_vf_have_the_name_of_the_first_one_and_then_of_the_next() {
    // Ends 1 and 3 are on the same host.
    let mut net = ends(2, &[0, 0, 0, 0]);
    lend(&mut net, 3, Some(vf(1)));
    assert_eq!(resolve(&mut net, 0, gid(1)), (Ok(vf(1)), 1));
    assert_eq!(resolve(&mut net, 0, gid(3)), (Ok(vf(1)), 1));
    assert_eq!(name(&mut net, 0, vf(1)), (Ok(gid(1)), 0));
    lend(&mut net, 1, None);
    net.run(SECOND);
    assert_eq!(name(&mut net, 0, vf(1)), (Ok(gid(3)), 2));
}

#[test]
fn a_host_that_does_not_answer_costs_a_second_and_is_counted() {
    let mut net = ends(2, &[0, 0]);
    net.cut(1, true);
    let began = net.now;
    assert_eq!(resolve(&mut net, 0, gid(1)), (Err(Status::Unreachable), 1));
    assert!((SECOND..SECOND + 2 * MS).contains(&(net.now - began)), "{} ns", net.now - began);
    assert_eq!(questions(&mut net, 0), (1, 1));
    net.cut(1, false);
    assert_eq!(resolve(&mut net, 0, gid(1)), (Ok(vf(1)), 1));
    // Lost and doubled messages are made up for.
    let mut net = Net::hosts(2, &[QpType::Rc; 2], 7, Faults { loss: 100, duplication: 300, ..Faults::default() });
    (0..2).for_each(|end| lend(&mut net, end, Some(vf(end))));
    for _ in 0..20 {
        assert_eq!(resolve(&mut net, 0, gid(1)), (Ok(vf(1)), 1));
        net.run(2 * SECOND);
    }
}

#[test]
fn a_session_that_ends_or_begins_anew_takes_its_question_with_it() {
    let mut net = ends(2, &[0, 0]);
    net.cut(1, true);
    let s = net.session(0);
    assert!(net.rnic(0).ask_to_resolve(s, gid(1)));
    net.rnic(0).renew_session(s);
    assert!(!net.rnic(0).is_asking(s));
    assert!(net.rnic(0).ask_to_resolve(s, gid(1)));
    net.rnic(0).remove_session(s);
    net.run(2 * SECOND);
    assert_eq!((released(&mut net, 0), questions(&mut net, 0)), (0, (2, 0)));
    assert_eq!(net.rnic(0).next_timeout(), None);
}

#[test]
fn rules_and_groups_hold_before_anything_is_asked() {
    // End 1 is of the same group, end 3 of another one on the same host, which a rule joins.
    let mut net = ends(2, &[0, 0, 0, 1]);
    net.rules(&["allow from group:red to group:blue both"]);
    assert_eq!(resolve(&mut net, 0, gid(3)), (Err(Status::Unreachable), 0), "VFs of two groups are on two VLANs");
    assert_eq!(net.counters(0).refused, 0);
    net.rules(&["deny from vrnic:red/10.0.0.1 to vrnic:red/10.0.0.2 both"]);
    assert_eq!(resolve(&mut net, 0, gid(1)), (Err(Status::Unreachable), 0));
    assert_eq!(net.counters(0).refused, 1);
    assert_eq!(resolve(&mut net, 2, gid(1)), (Ok(vf(1)), 1));
}

/// A host is believed about its own vRNICs only, and answers are believed only if they were asked for.
#[test]
fn what_other_hosts_say_about_vrnics_that_are_not_theirs_is_dropped() {
    let mut net = ends(3, &[0, 0, 0]);
    let say = |net: &mut Net, from: usize, about: usize, method, real: Gid| {
        let m = WhereIs { method, tid: 5, vf: Some(ByVf { gid: real, mtu: 3 }) };
        net.send_mad(from, HOST_QPN, gid(about), gid(0), &m.bytes());
    };
    // A guest there, which has QP 1, says it about itself.
    let of_guest = WhereIs { method: Method::Get, tid: 5, vf: Some(ByVf { gid: vf(1), mtu: 3 }) };
    net.send_mad(2, GSI_QPN, gid(2), gid(0), &of_guest.bytes());
    assert_eq!(name(&mut net, 0, vf(1)), (Err(Status::Unreachable), 0));
    // Host 2 claims that vRNIC 1 has a VF of host 2.
    say(&mut net, 2, 1, Method::Get, vf(2));
    assert_eq!(name(&mut net, 0, vf(2)), (Err(Status::Unreachable), 0));
    assert_eq!(net.rnics[0].wire_drops().wrong_source, 1);
    // It answers what nobody has asked.
    say(&mut net, 2, 2, Method::GetResp, vf(2));
    assert_eq!(name(&mut net, 0, vf(2)), (Err(Status::Unreachable), 0));
    // It claims the VF of a vRNIC here.
    say(&mut net, 2, 2, Method::Get, vf(0));
    assert_eq!(name(&mut net, 0, vf(0)), (Ok(gid(0)), 0));
    assert_eq!(resolve_for(&mut net, 0, vf(0), QpType::Ud), (Ok(vf(0)), 0));
    // It claims the VF of another host, which was known before.
    assert_eq!(resolve(&mut net, 0, gid(1)), (Ok(vf(1)), 1));
    say(&mut net, 2, 2, Method::Get, vf(1));
    assert_eq!(name(&mut net, 0, vf(1)), (Ok(gid(1)), 0));
    // A vRNIC that is not where it was is asked about at its new host.
    let mut routes = unirdma_rnic::Route { host: unirdma_simkit::net::host(2), foreign: false, vni: 77 };
    net.rnic(0).change_routes(0, [(gid(1), Some(routes))]);
    assert_eq!(resolve(&mut net, 0, gid(1)), (Err(Status::Unreachable), 1), "host 2 does not have it");
    routes.host = unirdma_simkit::net::host(1);
    net.rnic(0).change_routes(0, [(gid(1), Some(routes))]);
    assert_eq!(resolve(&mut net, 0, gid(1)), (Ok(vf(1)), 1));
}
