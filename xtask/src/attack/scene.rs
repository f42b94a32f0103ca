//! A virtual layer with victims and an attacker: what `attack`, `bench isolation` and the tests of attacks share.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::list::{Argument, Program};
use crate::Result;
use crate::bench::{figures, median};
use crate::lab::{self, Lab, Running};
use crate::suite;

/// Victims of a place, which measure one after the other.
pub(crate) const VICTIMS: u32 = 5;
/// How long a victim measures its latency, and then its bandwidth, seconds.
const SECONDS: &str = "0.2";
/// An attack ends by itself after this, if it is not ended before.
const ATTACK_SECONDS: &str = "3600";
/// How long a program may prepare itself.
const PREPARATION: Duration = Duration::from_secs(60);
/// How long an attack goes on before anything is measured.
const BEGIN: Duration = Duration::from_millis(300);
/// How long a victim may take to measure, from when it is told.
const MEASURING: Duration = Duration::from_secs(90);
/// How long programs may take that begin beside an attack and only check what they get.
const CHECK: Duration = Duration::from_secs(15);

/// Where victims are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the attacker's group.
    Same,
    /// In a group that the attacker is not in.
    Other,
}

impl Place {
    pub const ALL: [Place; 2] = [Place::Same, Place::Other];

    /// The vRNICs of the victims.
    fn vrnics(self) -> [&'static str; 2] {
        match self {
            Place::Same => ["a", "b"],
            Place::Other => ["c", "d"],
        }
    }
}

/// Who runs on which core. If the kernel chose, figures of the same work would differ by half from one choice to the other; and what a
/// program takes of another one on the same core is between it and the kernel.
#[derive(Clone, Copy)]
enum Core {
    /// The first one: victims.
    Victims,
    /// The last one: the neighbour, honest or not.
    Neighbour,
}

impl Core {
    /// The words before a command that put it there.
    fn words(self) -> [String; 3] {
        let cores = lab::cores();
        let core = match self {
            Core::Victims => cores.first(),
            Core::Neighbour => cores.last(),
        };
        ["taskset".into(), "--cpu-list".into(), core.copied().unwrap_or(0).to_string()]
    }
}

/// What victims do.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// WRITEs of 8 B, one by one, then of 64 KiB, on one connection.
    Pair,
    /// SENDs of 4 KiB on eight connections.
    Many,
}

impl Kind {
    /// The test kit's program.
    fn program(self) -> &'static str {
        match self {
            Kind::Pair => "victim",
            Kind::Many => "many",
        }
    }
}

/// What a victim measured.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Figures {
    /// From posting a WRITE of 8 B to its completion.
    pub p50_us: f64,
    pub p99_us: f64,
    pub worst_us: f64,
    /// WRITEs of 64 KiB.
    pub mib_s: f64,
}

impl Figures {
    /// A request waited so long that its program heard nothing of the virtual layer.
    pub fn is_silent(self) -> bool {
        self.worst_us > super::SILENCE_US
    }

    /// The median of each figure.
    pub fn medians(all: &[Figures]) -> Figures {
        let of = |f: fn(&Figures) -> f64| median(all.iter().map(f));
        Figures {
            p50_us: of(|f| f.p50_us),
            p99_us: of(|f| f.p99_us),
            worst_us: of(|f| f.worst_us),
            mib_s: of(|f| f.mib_s),
        }
    }
}

/// How many times worse figures are than beside the honest neighbour.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Worse {
    pub p50: f64,
    pub p99: f64,
    pub bandwidth: f64,
}

impl Worse {
    /// Medians over pairs of figures, beside the attack and beside the honest neighbour; nothing if there are none.
    pub fn medians(pairs: &[(Figures, Figures)]) -> Option<Worse> {
        let each: Vec<Worse> = pairs.iter().map(|&(attack, honest)| Worse::than(attack, honest)).collect();
        let of = |f: fn(&Worse) -> f64| median(each.iter().map(f));
        (!pairs.is_empty()).then(|| Worse { p50: of(|w| w.p50), p99: of(|w| w.p99), bandwidth: of(|w| w.bandwidth) })
    }

    /// Figures beside an attack, and beside the honest neighbour.
    pub fn than(attack: Figures, honest: Figures) -> Worse {
        Worse {
            p50: attack.p50_us / honest.p50_us,
            p99: attack.p99_us / honest.p99_us,
            bandwidth: honest.mib_s / attack.mib_s,
        }
    }

    pub fn is_beyond(self, limit: f64) -> bool {
        [self.p50, self.p99, self.bandwidth].iter().any(|&w| w > limit)
    }
}

/// A virtual layer with two groups of victims, and vRNICs `x` and `y` for an attacker.
pub(crate) struct Scene {
    pub lab: Lab,
    programs: PathBuf,
}

impl Scene {
    /// Builds what every scene needs; the path of the test kit's programs.
    ///
    /// # Errors
    /// The build failed.
    pub fn build() -> Result<PathBuf> {
        lab::build()?;
        lab::build_example("unirdma-testkit", "attacks")
    }

    /// # Errors
    /// The virtual layer did not come up.
    pub fn start(programs: &Path) -> Result<Scene> {
        let lab = Lab::start(None)?;
        lab.unirdma(&["group", "add", "other"]);
        for (i, name) in (1..).zip(["a", "b", "x", "y"]) {
            lab.vrnic(name, &["--ip", &format!("10.0.0.{i}")])?;
        }
        for (i, name) in (1..).zip(Place::Other.vrnics()) {
            lab.vrnic(name, &["--ip", &format!("10.0.0.{i}"), "--group", "other"])?;
        }
        Ok(Scene { lab, programs: programs.to_path_buf() })
    }

    fn command(&self, core: Core, name: &str, seconds: &str, vrnics: &[&str]) -> Command {
        let [taskset, option, list] = core.words();
        let mut c = Command::new(taskset);
        c.args([option, list])
            .arg(&self.programs)
            .args([name, seconds])
            .args(vrnics.iter().map(|v| self.lab.socket(v)))
            .stdin(Stdio::null());
        c
    }

    /// [`VICTIMS`] pairs of programs. Those of a pair are connected, and wait.
    ///
    /// # Errors
    /// They could not begin.
    pub fn victims(&self, place: Place) -> Result<Victims> {
        self.victims_of(Kind::Pair, place)
    }

    /// As [`Scene::victims`], of any kind.
    ///
    /// # Errors
    /// They could not begin.
    pub fn victims_of(&self, kind: Kind, place: Place) -> Result<Victims> {
        let (name, vrnics) = (kind.program(), place.vrnics());
        let victim = |i| {
            let mut c = self.command(Core::Victims, name, SECONDS, &vrnics);
            c.stdin(Stdio::piped());
            let mut running = Running::start(c, &self.lab.dir.join(format!("{name}-{}{i}.log", vrnics[0])))?;
            wait_ready(&mut running).map_err(|e| format!("the victim {e}"))?;
            Ok(running)
        };
        Ok(Victims((0..VICTIMS).map(victim).collect::<Result<_>>()?))
    }

    /// Starts a program of the attacker, which goes on when this returns; or why it cannot be done here.
    ///
    /// # Errors
    /// It did not begin.
    pub fn attacker(&self, program: &Program) -> Result<Result<Attacker<'_>>> {
        let (running, captured) = match *program {
            Program::Kit { name, argument, captured } => {
                let mut c = self.command(Core::Neighbour, name, ATTACK_SECONDS, &["x"]);
                match argument {
                    Argument::None => &mut c,
                    Argument::Word(w) => c.arg(w),
                    Argument::Socket(vrnic) => c.arg(self.lab.socket(vrnic)),
                };
                (Running::start(c, &self.lab.dir.join("attacker.log"))?, captured)
            }
            Program::Forge(words) => {
                let forge = suite::compile(&self.lab, "forge", &[])?;
                let pinned = Core::Neighbour.words().join(" ");
                (self.lab.spawn("x", &[], &format!("{pinned} {forge} {words} {ATTACK_SECONDS}"))?, false)
            }
        };
        let mut attacker = Attacker { running, capture: None, scene: self };
        if let Some(why) = wait_ready(&mut attacker.running).map_err(|e| format!("the attacker {e}"))? {
            return Ok(Err(why));
        }
        if captured {
            let capture = ["capture", "--vrnic", "x", "-w", "/dev/null"];
            attacker.capture = Some(self.lab.start_unirdma(&capture)?);
        }
        std::thread::sleep(BEGIN);
        Ok(Ok(attacker))
    }

    /// Programs that begin now get their devices and the right bytes.
    ///
    /// # Errors
    /// What they say, or that they say nothing.
    pub fn check(&self, place: Place) -> Result<()> {
        let vrnics = place.vrnics();
        let c = self.command(Core::Victims, "check", "0", &vrnics);
        let o = Running::start(c, &self.lab.dir.join(format!("check-{}.log", vrnics[0])))?.finish_within(CHECK);
        let why = if o.text.is_empty() { "no answer".into() } else { o.text.trim().replace('\n', "; ") };
        if o.ok() { Ok(()) } else { Err(format!("programs that begin on {} and {}: {why}", vrnics[0], vrnics[1])) }
    }
}

/// Victims of one place, which measure once they are told.
pub(crate) struct Victims(Vec<Running>);

impl Victims {
    /// Lets one after the other measure. Returns the median of each figure.
    ///
    /// # Errors
    /// They did not get their work done.
    pub fn measure(self) -> Result<Figures> {
        let [p50_us, p99_us, worst_us, mib_s] = self.measured(["p50_us", "p99_us", "worst_us", "mib_s"])?;
        Ok(Figures { p50_us, p99_us, worst_us, mib_s })
    }

    /// As [`Victims::measure`]: the medians of what the victims print under these names.
    ///
    /// # Errors
    /// They did not get their work done.
    pub fn measured<const N: usize>(self, names: [&str; N]) -> Result<[f64; N]> {
        let all = self.0.into_iter().map(|v| measured(v, &names)).collect::<Result<Vec<[f64; N]>>>()?;
        Ok(std::array::from_fn(|i| median(all.iter().map(|figures| figures[i]))))
    }
}

fn measured<const N: usize>(mut victim: Running, names: &[&str; N]) -> Result<[f64; N]> {
    // Who has ended meanwhile reads nothing, which its output explains better.
    let _ = victim.stdin().ok_or("the victim has no input")?.write_all(b"go\n");
    let done = victim.finish_within(MEASURING);
    if !done.ok() {
        return Err(done.text.lines().last().unwrap_or("the victim was killed").into());
    }
    let of = figures(&done.text);
    let missing = |name| format!("the victim printed no {name}: {}", done.text);
    let mut found = [0.0; N];
    for (figure, &name) in found.iter_mut().zip(names) {
        *figure = *of.get(name).ok_or_else(|| missing(name))?;
    }
    Ok(found)
}

/// A program of the attacker; it is killed with this value, if it still runs.
pub(crate) struct Attacker<'a> {
    running: Running,
    capture: Option<Running>,
    scene: &'a Scene,
}

impl Attacker<'_> {
    /// Kills it.
    ///
    /// # Errors
    /// What it saw that the virtual layer must not do; or that it has ended too soon.
    pub fn end(mut self) -> Result<()> {
        let ended = self.running.has_ended();
        let text = self.running.text();
        drop((self.capture.take(), self.running));
        if let Some(what) = text.lines().find_map(|l| l.strip_prefix("broken: ")) {
            return Err(what.into());
        }
        if ended {
            let log = std::fs::read_to_string(self.scene.lab.dir.join("host.log")).unwrap_or_default();
            let last = log.lines().last().unwrap_or_default();
            let said: Vec<&str> = text.lines().filter(|l| *l != "ready").collect();
            return Err(format!("it ended too soon: {}; the virtual layer's last line: {last}", said.join("; ")));
        }
        Ok(())
    }
}

/// Waits until a program says that it is ready, or why it cannot be.
fn wait_ready(program: &mut Running) -> Result<Option<String>> {
    let start = Instant::now();
    while start.elapsed() < PREPARATION {
        let ended = program.has_ended();
        let text = program.text();
        if let Some(why) = text.lines().find_map(|l| l.strip_prefix("skip: ")) {
            return Ok(Some(why.into()));
        }
        if text.lines().any(|l| l == "ready") {
            return Ok(None);
        }
        if ended {
            return Err(format!("ended: {text}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(format!("was not ready after {} s", PREPARATION.as_secs()))
}
