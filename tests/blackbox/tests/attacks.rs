//! Each attack of `cargo xtask attack` that is a program, for a second, against one virtual layer: it harms only the
//! attacker. Nothing is timed.

use super::*;
use crate::attack::fixture::{Place, Scene};
use crate::attack::list::{ATTACKS, Attack, Program, Way};
use crate::attack::resource_usage::Footprint;

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

pub(super) fn run(s: &mut Suite<'_>) {
    let title = |a: &Attack| format!("attacks: {}", a.name);
    let program = |a: &'static Attack| if let Way::Program(p) = a.way { Some((a, p)) } else { None };
    let wanted = |(a, _): &(&Attack, Program)| s.only.is_none_or(|o| title(a).contains(o));
    let attacks: Vec<(&Attack, Program)> = ATTACKS.iter().filter_map(program).filter(wanted).collect();
    if attacks.is_empty() {
        return;
    }
    let scene = Scene::build().and_then(|programs| {
        let scene = Scene::start(&programs)?;
        Place::ALL.iter().try_for_each(|&p| scene.check(p))?;
        let before = Footprint::of(&scene.lab)?;
        Ok((scene, before))
    });
    for (attack, program) in attacks {
        s.check(&title(attack), |_| {
            let (scene, before) = scene.as_ref().map_err(Clone::clone)?;
            endure(scene, before, attack, &program)
        });
    }
}
