//! Each attack of `cargo xtask attack` that is a program, for a second: nobody but the attacker loses anything. Nothing is timed.

use super::*;
use crate::attack::footprint::Footprint;
use crate::attack::list::{ATTACKS, Program, Way};
use crate::attack::scene::{Place, Scene};

/// How long an attack goes on once it has begun.
const TIME: Duration = Duration::from_secs(1);

/// Runs an attack, and programs beside it and after it.
fn endure(scene: &Scene, program: &Program) -> Check {
    let before = Footprint::of(&scene.lab)?;
    match scene.attacker(program)? {
        Err(why) => println!("skipped: {}: {why}", program.name),
        Ok(attacker) => {
            std::thread::sleep(TIME);
            Place::ALL.iter().try_for_each(|&p| scene.check(p))?;
            attacker.end()?;
        }
    }
    let (after, given_back) = Footprint::settled(&scene.lab, &before)?;
    require(given_back, format!("not given back: {before:?}, now {after:?}"))?;
    require(after.workers_as(&before) != Some(false), format!("a worker ended: {before:?}, now {after:?}"))?;
    Place::ALL.iter().try_for_each(|&p| scene.check(p))
}

pub(super) fn run(s: &mut Suite<'_>) {
    let title = |name: &str| format!("attacks: {name}");
    let programs = |a: &'static crate::attack::list::Attack| match a.way {
        Way::Program(p) => Some((title(a.name), p)),
        Way::Check(_) | Way::Elsewhere(_) => None,
    };
    let wanted = |(name, _): &(String, Program)| s.only.is_none_or(|o| name.contains(o));
    let attacks: Vec<(String, Program)> = ATTACKS.iter().filter_map(programs).filter(wanted).collect();
    if attacks.is_empty() {
        return;
    }
    let scene = Scene::build().and_then(|programs| {
        let scene = Scene::start(&programs)?;
        Place::ALL.iter().try_for_each(|&p| scene.check(p))?;
        Ok(scene)
    });
    for (name, program) in attacks {
        s.check(&name, |_| endure(scene.as_ref().map_err(Clone::clone)?, &program));
    }
}
