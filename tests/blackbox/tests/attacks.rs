//! Each attack of `cargo xtask attack` that is a program, for a second, against one virtual layer: it harms only the
//! attacker. Nothing is timed.

use attack::fixture::{Place, Scene};
use attack::list::{ATTACKS, Attack, Program, Way};
use attack::resource_usage::Footprint;

use crate::support::*;

/// Duration of an attack before other programs start, in addition to the time that a scene gives it.
const TIME: Duration = Duration::from_millis(500);

/// Runs an attack, and programs during it and after it. Checks that the virtual layer then holds no more than before
/// all attacks.
fn endure(scene: &Scene, before: &Footprint, attack: &Attack, program: &Program) -> Check {
    match scene.attacker(program)? {
        Err(why) => println!("skipped: {}: {why}", attack.name),
        Ok(attacker) => {
            std::thread::sleep(TIME);
            Place::ALL.iter().try_for_each(|&p| scene.check(p))?;
            attacker.end()?;
        }
    }
    let (after, given_back) = Footprint::settled(&scene.lab, before)?;
    require(given_back, format!("not given back: {before:?}, now {after:?}"))?;
    require(after.workers_as(before) != Some(false), format!("a worker ended: {before:?}, now {after:?}"))?;
    Place::ALL.iter().try_for_each(|&p| scene.check(p))
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN]);
    let scene = &Shared::new(|| {
        let scene = Scene::start(&Scene::build()?)?;
        Place::ALL.iter().try_for_each(|&p| scene.check(p))?;
        let before = Footprint::of(&scene.lab)?;
        Ok((scene, before))
    });
    for attack in ATTACKS {
        if let Way::Program(program) = attack.way {
            t.on(scene, format!("attacks: {}", attack.name), move |(scene, before)| {
                endure(scene, before, attack, &program)
            });
        }
    }
}
