//! Random events in a pool on a simulated kernel: whatever happens, no VF serves two, and everything ends.

mod kernel;
mod world;

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use unirdma_formats::Mac;
use unirdma_vf::*;

use crate::kernel::{LINGER, WAIT, config};
use crate::world::{Event, World, event, pf_name, request};

/// Asks for a context of the first vRNIC of an instance.
fn ask(world: &mut World, instance: u8, when_dry: Dry) -> Answer {
    let request = Request { when_dry: Some(when_dry), ..request(instance, 0) };
    world.leases.ask(&world.config, &world.kernel.0, request, world.now)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_vf_serves_two_and_everything_ends(events in vec(event(), 0..60)) {
        let mut world = World::new();
        world.apply();
        for event in events {
            world.turn(event);
        }
        // All programs end, intruders leave, and the operator helps: then the pool is as it was.
        world.turn(Event::Plug { on: true });
        for (_, id) in config().vfs() {
            world.turn(Event::Refuse { vf: id.clone(), on: false });
            world.turn(Event::Link { vf: id.clone(), on: true });
            world.turn(Event::Drain { vf: id.clone(), whole: false, on: false });
            world.turn(Event::Drain { vf: id.clone(), whole: true, on: false });
            world.turn(Event::Exit { vf: id.clone() });
            if world.exists(&id) && matches!(world.states()[&id], State::Foreign(_)) {
                world.turn(Event::Unbind { vf: id.clone() });
            }
        }
        for _ in 0..20 {
            world.turn(Event::Wait { seconds: 10 });
            while !world.contexts.is_empty() {
                world.turn(Event::End { nth: 0, keeps: false });
            }
        }
        prop_assert_eq!((world.leases.iter().count(), world.leases.waiting().count()), (0, 0));
        for (id, state) in world.states() {
            let wanted = if id.pf == "ens2" && id.index == 2 { State::Absent } else { State::Ready };
            prop_assert_eq!(state, wanted, "{}", id);
        }
    }

    #[test]
    fn any_log_is_adopted_without_a_double_lease(
        bytes in vec(any::<u8>(), 0..80),
        leases in vec((0..3u64, 0..5u16, 0..3u8, 0..3u8, any::<bool>()), 0..12),
        events in vec(event(), 0..12),
    ) {
        let mut world = World::new();
        world.apply();
        events.into_iter().for_each(|e| world.turn(e));
        // Records that no supervisor would write in this order.
        let record = |(id, index, instance, phase, one): (u64, u16, u8, u8, bool)| {
            let since = Duration::from_secs(phase.into());
            let (evicted, id) = (one, LeaseId(if id == 2 { u64::MAX } else { id }));
            log::Record::Lease(Lease {
                id,
                vf: VfId { pf: pf_name(one), index },
                instance: format!("i{instance}"),
                group: "g0".into(),
                vlan: one.then_some(100),
                rate_mbps: 0,
                purpose: if index == 1 { Purpose::Vfio } else { Purpose::Verbs },
                vrnics: [(format!("i{instance}-0"), Contexts { count: phase.into(), rate_mbps: 0 })].into(),
                phase: [Phase::Open, Phase::Lingers { since }, Phase::Returning { since, evicted }][usize::from(phase)],
            })
        };
        let forged: Vec<u8> = leases.into_iter().map(record).flat_map(|r| log::encode(&r)).collect();
        world.log = [&bytes[..], &forged, &bytes, &world.log].concat();
        let (leases, _) = Leases::adopt(&world.config, &world.kernel.0, log::read(&world.log), world.now);
        let (mut vfs, mut vrnics) = (BTreeSet::new(), BTreeSet::new());
        for lease in leases.iter() {
            prop_assert!(world.config.pf_of(&lease.vf).is_some() && vfs.insert(&lease.vf), "{:?}", lease);
            prop_assert!(!lease.is_live() || lease.vrnics.keys().all(|v| vrnics.insert(v)), "{:?}", lease);
        }
        world.restart(Some((usize::MAX, 0)));
        world.apply();
        world.tick();
        world.apply();
    }
}

#[test]
fn a_dry_pool_waits_goes_soft_or_refuses() {
    let mut world = World::new();
    world.apply();
    // Group 1 has the three VFs with VLANs.
    for n in [1, 3, 5] {
        assert!(matches!(ask(&mut world, n, Dry::Refuse), Answer::Has { .. }));
    }
    assert_eq!(ask(&mut world, 7, Dry::Refuse), Answer::Refused(Refusal::Dry));
    assert_eq!(ask(&mut world, 7, Dry::Soft), Answer::Soft);
    let Answer::Waits { ticket: first, place: 1 } = ask(&mut world, 7, Dry::Wait(WAIT)) else { panic!() };
    let Answer::Waits { ticket: second, place: 2 } = ask(&mut world, 9, Dry::Wait(WAIT)) else { panic!() };
    // A group with a PF of its own does not wait behind them.
    assert!(matches!(ask(&mut world, 0, Dry::Refuse), Answer::Has { vf, .. } if vf.pf == "ens2"));
    let lease = world.leases.iter().next().unwrap().clone();
    world.leases.end(lease.id, "i1-0", world.now);
    world.now += LINGER;
    let seen = |world: &World| Seen { at: world.now + Duration::from_nanos(1), ..world.kernel.0.clone() };
    let changes = world.leases.tick(&world.config, &seen(&world), world.now);
    assert_eq!(changes, [Change::Ended { lease: lease.id, vf: lease.vf.clone() }]);
    // A look that is older than the lease's end says nothing about the VF.
    assert_eq!(world.leases.tick(&world.config, &world.kernel.0, world.now), []);
    let changes = world.leases.tick(&world.config, &seen(&world), world.now);
    assert_eq!(changes[0], Change::Returned { lease: lease.id, vf: lease.vf.clone() });
    assert!(matches!(&changes[1..], [Change::Granted { ticket, vf, .. }] if *ticket == first && *vf == lease.vf));
    world.now += WAIT;
    assert_eq!(world.leases.tick(&world.config, &seen(&world), world.now), [Change::TimedOut { ticket: second }]);
}

#[test]
fn a_lease_that_has_lingered_is_not_used_again_before_its_vf_is_returned() {
    let mut world = World::new();
    world.apply();
    let Answer::Has { lease, vf } = ask(&mut world, 1, Dry::Refuse) else { panic!() };
    for (waits, is_same) in [(LINGER - Duration::from_secs(1), true), (LINGER, false)] {
        world.leases.end(lease, "i1-0", world.now);
        world.now += waits;
        let Answer::Has { lease: next, vf: other } = ask(&mut world, 1, Dry::Refuse) else { panic!() };
        assert_eq!((next == lease, other == vf), (is_same, is_same));
    }
}

#[test]
fn a_vf_has_the_vlan_of_its_group_until_its_last_program_has_closed_it() {
    let mut world = World::new();
    world.apply();
    let Answer::Has { lease, vf } = ask(&mut world, 1, Dry::Refuse) else { panic!() };
    world.opened(lease, "i1-0".into(), &vf, &[]);
    let mac = world.config.pfs[0].mac_of(0);
    let settings = Settings { mac, vlan: 101, rate_mbps: 0, spoof_check: true, trust: false };
    assert_eq!((world.kernel.vf(&vf).settings, mac), (settings, Mac([2, b'V', 10, 0, 0, 1])));
    world.turn(Event::End { nth: 0, keeps: true });
    world.turn(Event::Wait { seconds: 6 });
    world.turn(Event::Wait { seconds: 6 });
    assert_eq!(world.kernel.vf(&vf).settings, settings);
    assert!(matches!(&world.states()[&vf], State::Dirty(Why::Used { users, .. }) if users.len() == 1));
    world.turn(Event::Exit { vf: vf.clone() });
    world.turn(Event::Wait { seconds: 0 });
    assert_eq!(world.kernel.vf(&vf).settings.vlan, 0);
    assert_eq!(world.states()[&vf], State::Ready);
    // The number of the lease is not used again, although two snapshots of the log no longer have it.
    (0..2).for_each(|_| world.restart(None));
    assert!(matches!(ask(&mut world, 1, Dry::Refuse), Answer::Has { lease: next, .. } if next > lease));
}

#[test]
fn wrong_requests_are_refused_with_a_reason() {
    let mut world = World::new();
    world.apply();
    assert!(matches!(ask(&mut world, 1, Dry::Refuse), Answer::Has { .. }));
    let r = || request(1, 0);
    for (wrong, why) in [
        (Request { pf: Some("other".into()), ..r() }, "no PF of the pool has the name `other`"),
        (Request { vlan: None, ..r() }, "no PF serves the group `g1`"),
        (Request { vlan: Some(4095), ..r() }, "4095 is no VLAN"),
        (Request { group: "g2".into(), ..r() }, "VLAN 101 is that of the group `g1`"),
        (Request { vlan: Some(7), ..r() }, "leases or requests with the VLAN 101"),
        (Request { instance: "i2".into(), ..r() }, "with another instance"),
        (Request { purpose: Purpose::Vfio, ..r() }, "with another instance, group, PF or purpose"),
    ] {
        let Answer::Refused(e) = world.leases.ask(&world.config, &world.kernel.0, wrong, world.now) else { panic!() };
        assert!(e.to_string().contains(why), "{e}");
    }
}
