//! A virtual layer with victims and an attacker, shared by `attack`, `bench isolation` and the tests of attacks.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use harness::{Lab, Result, Running, compile, figures, median};
use serde::Serialize;

use super::list::{Argument, Program};

/// Number of victims of a place. They measure one after the other.
pub const VICTIMS: u32 = 5;
/// Time for which a victim measures its latency, and then its bandwidth, s.
const SECONDS: &str = "0.2";
/// Duration after which an attack ends by itself, s. It is usually killed before.
const ATTACK_SECONDS: &str = "3600";
/// Longest time for a program to print `ready`.
const PREPARATION: Duration = Duration::from_secs(60);
/// Duration of an attack before anything is measured.
const BEGIN: Duration = Duration::from_millis(300);
/// Longest time for a victim to measure, from when it is told to.
const MEASURING: Duration = Duration::from_secs(90);
/// Longest time for programs that start during an attack and only check data.
const CHECK: Duration = Duration::from_secs(15);

/// Where victims are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the attacker's group.
    Same,
    /// In a group that the attacker is not in.
    Other,
}

impl Place {
    /// Both places.
    pub const ALL: [Place; 2] = [Place::Same, Place::Other];

    /// The vRNICs of the victims.
    fn vrnics(self) -> [&'static str; 2] {
        match self {
            Place::Same => ["a", "b"],
            Place::Other => ["c", "d"],
        }
    }
}

/// The core of a program. If the kernel chose, figures of the same work would differ by half from run to run. How
/// programs on the same core share it is between them and the kernel.
#[derive(Clone, Copy)]
enum Core {
    /// The first core: victims.
    Victims,
    /// The last core: the neighbour, honest or not.
    Neighbour,
}

impl Core {
    /// The words before a command that pin it to this core.
    fn words(self) -> [String; 3] {
        let cores = harness::cores();
        let core = match self {
            Core::Victims => cores.first(),
            Core::Neighbour => cores.last(),
        };
        ["taskset".into(), "--cpu-list".into(), core.copied().unwrap_or(0).to_string()]
    }
}

/// Kinds of victims.
#[derive(Clone, Copy)]
pub enum Kind {
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

/// Measurements of a victim.
#[derive(Clone, Copy, Serialize)]
pub struct Figures {
    /// Time from posting a WRITE of 8 B to its completion.
    pub p50_us: f64,
    /// The 99th percentile of that time.
    pub p99_us: f64,
    /// The longest time for a WRITE.
    pub worst_us: f64,
    /// WRITEs of 64 KiB.
    pub mib_s: f64,
}

impl Figures {
    /// True if one request waited longer than [`super::SILENCE_US`].
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
pub struct Worse {
    /// Of the median latency.
    pub p50: f64,
    /// Of the 99th percentile of latency.
    pub p99: f64,
    /// Of the bandwidth.
    pub bandwidth: f64,
}

impl Worse {
    /// Medians over pairs of figures, during the attack and beside the honest neighbour; `None` if there are none.
    pub fn medians(pairs: &[(Figures, Figures)]) -> Option<Worse> {
        let each: Vec<Worse> = pairs.iter().map(|&(attack, honest)| Worse::than(attack, honest)).collect();
        let of = |f: fn(&Worse) -> f64| median(each.iter().map(f));
        (!pairs.is_empty()).then(|| Worse { p50: of(|w| w.p50), p99: of(|w| w.p99), bandwidth: of(|w| w.bandwidth) })
    }

    /// Ratios of the figures during an attack to the figures beside the honest neighbour.
    pub fn than(attack: Figures, honest: Figures) -> Worse {
        Worse {
            p50: attack.p50_us / honest.p50_us,
            p99: attack.p99_us / honest.p99_us,
            bandwidth: honest.mib_s / attack.mib_s,
        }
    }

    /// True if one of the figures is more than `limit` times worse.
    pub fn is_beyond(self, limit: f64) -> bool {
        [self.p50, self.p99, self.bandwidth].iter().any(|&w| w > limit)
    }
}

/// A virtual layer with two groups of victims, and vRNICs `x` and `y` for an attacker.
pub struct Scene {
    /// Its virtual layer.
    pub lab: Lab,
    programs: PathBuf,
}

impl Scene {
    /// Builds the programs that every scene needs. Returns the path of the test kit's programs.
    ///
    /// # Errors
    /// If the build fails.
    pub fn build() -> Result<PathBuf> {
        harness::build()?;
        Ok(harness::unirdma().with_file_name("attacks"))
    }

    /// # Errors
    /// If the virtual layer does not come up.
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

    /// Starts [`VICTIMS`] pairs of programs. The programs of a pair connect, and wait.
    ///
    /// # Errors
    /// If they do not get ready.
    pub fn victims(&self, place: Place) -> Result<Victims> {
        self.victims_of(Kind::Pair, place)
    }

    /// As [`Scene::victims`], with victims of any kind.
    ///
    /// # Errors
    /// If they do not get ready.
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

    /// Starts a program of the attacker. Returns the running program, or the reason why the attack is impossible here.
    ///
    /// # Errors
    /// If it does not get ready.
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
                let forge = compile(&self.lab, "forge", &[])?;
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

    /// Checks that programs which start now get their devices and the right bytes.
    ///
    /// # Errors
    /// Output of the programs, or a note that they print nothing.
    pub fn check(&self, place: Place) -> Result<()> {
        let vrnics = place.vrnics();
        let c = self.command(Core::Victims, "check", "0", &vrnics);
        let o = Running::start(c, &self.lab.dir.join(format!("check-{}.log", vrnics[0])))?.finish_within(CHECK);
        let why = if o.text.is_empty() { "no answer".into() } else { o.text.trim().replace('\n', "; ") };
        if o.ok() { Ok(()) } else { Err(format!("programs that begin on {} and {}: {why}", vrnics[0], vrnics[1])) }
    }
}

/// Victims of one place, which wait until they are told to measure.
pub struct Victims(Vec<Running>);

impl Victims {
    /// Lets one after the other measure. Returns the median of each figure.
    ///
    /// # Errors
    /// If they do not finish.
    pub fn measure(self) -> Result<Figures> {
        let [p50_us, p99_us, worst_us, mib_s] = self.measured(["p50_us", "p99_us", "worst_us", "mib_s"])?;
        Ok(Figures { p50_us, p99_us, worst_us, mib_s })
    }

    /// As [`Victims::measure`], for the figures that the victims print under these names.
    ///
    /// # Errors
    /// If they do not finish.
    pub fn measured<const N: usize>(self, names: [&str; N]) -> Result<[f64; N]> {
        let all = self.0.into_iter().map(|v| measured(v, &names)).collect::<Result<Vec<[f64; N]>>>()?;
        Ok(std::array::from_fn(|i| median(all.iter().map(|figures| figures[i]))))
    }
}

fn measured<const N: usize>(mut victim: Running, names: &[&str; N]) -> Result<[f64; N]> {
    // If the victim has ended meanwhile, this write fails, and the victim's output explains why.
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

/// A running program of the attacker. Dropping this value kills it.
pub struct Attacker<'a> {
    running: Running,
    capture: Option<Running>,
    scene: &'a Scene,
}

impl Attacker<'_> {
    /// Kills it.
    ///
    /// # Errors
    /// If it has seen the virtual layer do something forbidden, or has ended too soon.
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

/// Waits until a program prints `ready`, or a reason to skip it.
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
