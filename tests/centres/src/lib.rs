//! Several control centres on one etcd: processes are killed and stopped while vRNICs are created, and the result is
//! checked.

mod etcd;
mod moved;

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub use etcd::Etcd;
use harness::{Lab, Output, Result, require};
pub use moved::run as move_to_etcd;
use serde_json::Value;

/// Longest time for the election of a centre, and for recovery.
const RECOVERY: Duration = Duration::from_secs(30);
/// Number of concurrent calls.
const CALLERS: usize = 6;

/// A process that this module started. Dropping this value kills it.
struct Process(Child);

impl Process {
    fn start(mut c: Command, log: &Path) -> Result<Process> {
        let out = std::fs::File::options().create(true).append(true).open(log).map_err(|e| e.to_string())?;
        let err = out.try_clone().map_err(|e| e.to_string())?;
        let child = c.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        child.map(Process).map_err(|e| format!("{:?}: {e}", c.get_program()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Free ports of this machine.
fn free_ports(n: usize) -> Result<Vec<u16>> {
    let open = (0..n).map(|_| TcpListener::bind("127.0.0.1:0"));
    // All stay bound until the last one is known, so that they differ.
    let open: Vec<TcpListener> = open.collect::<std::io::Result<_>>().map_err(|e| e.to_string())?;
    Ok(open.iter().filter_map(|l| l.local_addr().ok().map(|a| a.port())).collect())
}

fn wait_until(is_so: impl FnMut() -> bool, otherwise: &str) -> Result<()> {
    harness::wait_until(RECOVERY, is_so, &format!("{otherwise} for {} s", RECOVERY.as_secs()))
}

/// A fleet with two centres on one etcd, and a host that is connected to the first one.
pub struct Centres {
    etcd: Etcd,
    dir: PathBuf,
    urls: [String; 2],
    centres: [Option<Process>; 2],
    token: String,
}

impl Drop for Centres {
    fn drop(&mut self) {
        self.centres = [None, None];
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Centres {
    /// Starts etcd, and creates the fleet of both centres in it, or in a file.
    ///
    /// # Errors
    /// If they do not come up.
    fn prepare(etcd: impl FnOnce(&Path) -> Result<Etcd>, in_etcd: bool) -> Result<Centres> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("unirdma-centres-{}-{n}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).map_err(|e| e.to_string())?;
        let etcd = etcd(&dir)?;
        let ports = free_ports(2)?;
        let urls = [0, 1].map(|n| format!("https://127.0.0.1:{}", ports[n]));
        let mut all = Centres { etcd, dir, urls, centres: [None, None], token: String::new() };
        let (store, of) = (all.store(), all.of(0));
        let store: &[&str] = if in_etcd { &["--store", &store] } else { &[] };
        let o = all.run(&[&["control", "init", &of], store].concat(), None);
        let token = o.text.lines().find_map(|l| l.split_once("not shown again: ")).map(|(_, t)| t.trim().to_owned());
        all.token = token.ok_or(format!("control init: {}", o.text))?;
        // The second centre has a copy of the directory.
        std::fs::create_dir(all.of(1)).map_err(|e| e.to_string())?;
        for file in ["authority.pem", "authority.key"] {
            let copy = std::fs::copy(Path::new(&all.of(0)).join(file), Path::new(&all.of(1)).join(file));
            copy.map_err(|e| e.to_string())?;
        }
        Ok(all)
    }

    fn start(&mut self) -> Result<()> {
        self.start_centre(0)?;
        self.wait_for_allocator(0)?;
        self.start_centre(1)
    }

    fn store(&self) -> String {
        format!("etcd://{}/{}", self.etcd.address(), etcd::PREFIX)
    }

    /// The directory of a centre.
    fn of(&self, centre: usize) -> String {
        self.dir.join(format!("centre{centre}")).display().to_string()
    }

    fn start_centre(&mut self, centre: usize) -> Result<()> {
        self.start_centre_on(centre, &["--store", &self.store()])
    }

    fn start_centre_on(&mut self, centre: usize, store: &[&str]) -> Result<()> {
        let mut c = Command::new(harness::unirdma());
        let listen = self.urls[centre].trim_start_matches("https://");
        c.args(["control", "run", &self.of(centre), "--listen", listen]).args(store);
        self.centres[centre] = Some(Process::start(c, &self.dir.join(format!("centre{centre}.log")))?);
        wait_until(|| self.status(centre).is_ok(), &format!("centre {centre} does not answer"))
            .map_err(|e| format!("{e}: {}", self.log(centre)))
    }

    fn log(&self, centre: usize) -> String {
        std::fs::read_to_string(self.dir.join(format!("centre{centre}.log"))).unwrap_or_default()
    }

    /// Runs a command of an administrator at one of the centres, or with both to choose from.
    fn run(&self, args: &[&str], centre: Option<usize>) -> Output {
        let mut c = Command::new(harness::unirdma());
        c.args(args).env("UNIRDMA_TOKEN", &self.token).env("XDG_CONFIG_HOME", self.dir.join("config"));
        c.env("UNIRDMA_AUTHORITY", Path::new(&self.of(0)).join("authority.pem"));
        c.env("UNIRDMA_CENTRE", centre.map_or_else(|| self.urls.join(","), |n| self.urls[n].clone()));
        Output::of(&mut c)
    }

    fn json(&self, args: &[&str], centre: usize) -> Result<Value> {
        let o = self.run(&[args, &["--json"]].concat(), Some(centre));
        require(o.ok(), &o.text)?;
        serde_json::from_str(&o.text).map_err(|e| format!("{e}: {}", o.text))
    }

    fn status(&self, centre: usize) -> Result<Value> {
        self.json(&["control", "status"], centre)
    }

    fn wait_for_allocator(&self, centre: usize) -> Result<()> {
        let allocates = || self.status(centre).is_ok_and(|s| s["allocates"] == true);
        wait_until(allocates, &format!("centre {centre} does not allocate"))
            .map_err(|e| format!("{e}: {}", self.log(centre)))
    }

    /// Declares a vRNIC that is on no host.
    fn declare(&self, name: &str, centre: Option<usize>) -> Output {
        self.declare_with(name, "", centre)
    }

    /// Declares a vRNIC with these additional lines.
    fn declare_with(&self, name: &str, more: &str, centre: Option<usize>) -> Output {
        let file = self.dir.join(format!("{name}.toml"));
        let text = format!("[[vrnic]]\nname = \"{name}\"\ngroup = \"default\"\n{more}\n");
        if let Err(e) = std::fs::write(&file, text) {
            return Output { code: None, text: e.to_string() };
        }
        self.run(&["apply", "-f", &file.display().to_string()], centre)
    }

    /// Names and addresses of all vRNICs, as a centre shows them.
    ///
    /// # Errors
    /// If the centre does not answer, or a name or an address is there twice.
    fn vrnics(&self, centre: usize) -> Result<BTreeMap<String, String>> {
        let all = self.json(&["get", "vrnic"], centre)?;
        let mut found = BTreeMap::new();
        let mut addresses = BTreeSet::new();
        for object in all["objects"].as_array().into_iter().flatten() {
            let v = &object["vrnic"];
            let (name, ips) = (v["name"].as_str().unwrap_or_default().to_owned(), v["ips"].to_string());
            require(addresses.insert(ips.clone()), format!("{name} has {ips}, which another vRNIC has"))?;
            require(found.insert(name.clone(), ips).is_none(), format!("{name} is there twice"))?;
        }
        Ok(found)
    }

    /// The vRNICs that both centres show, if they show the same.
    fn agreed(&self) -> Option<BTreeMap<String, String>> {
        self.vrnics(0).ok().filter(|found| self.vrnics(1).is_ok_and(|other| other == *found))
    }

    /// A token by which host `h1` joins.
    fn join_token(&self, centre: usize) -> Result<String> {
        let token = self.run(&["token", "create", "--role", "join", "--host", "h1"], Some(centre));
        require(token.ok(), format!("a token by centre {centre}: {}", token.text))?;
        Ok(token.text.trim().to_owned())
    }

    /// Whether both centres show host `h1` as connected.
    fn host_is_connected(&self) -> bool {
        (0..2).all(|c| self.json(&["get", "host", "h1"], c).is_ok_and(|h| h["hosts"][0]["connected"] == true))
    }

    /// Starts a host of the fleet that knows these centres.
    fn host(&self, address: &str, state: &Path, urls: &str, token: Option<&str>) -> Result<Lab> {
        let state = state.display().to_string();
        let mut args = vec!["--address", address, "--centre", urls, "--state", &state, "--name", "h1"];
        args.extend(token.map(|t| ["--join", t]).into_iter().flatten());
        Lab::start_in(None, None, &args)
    }
}

/// Outcomes of all calls.
#[derive(Default)]
struct Answers {
    /// Names of the vRNICs that were created.
    done: BTreeSet<String>,
    /// Names of the vRNICs whose calls were refused or lost, with the messages.
    failed: BTreeMap<String, String>,
}

/// Runs `unirdma vrnic add` on a host, from any thread.
fn add_at(exe: &Path, dir: &Path, name: &str) -> Output {
    let mut c = Command::new(exe);
    Output::of(c.arg("--dir").arg(dir.join("run")).args(["vrnic", "add", name]))
}

/// Creates vRNICs, every eighth of them on the host, and kills centre 0, which allocates, in the middle. Failed calls
/// are repeated until they succeed.
fn make_vrnics(c: &mut Centres, host: &Lab, calls: usize) -> Result<Answers> {
    let (next, made) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let answers = Mutex::new(Answers::default());
    let victim = c.centres[0].take();
    let (c, exe, dir) = (&*c, host.exe(), host.dir.as_path());
    std::thread::scope(|s| {
        for _ in 0..CALLERS {
            s.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= calls {
                        return;
                    }
                    let name = format!("v{n}");
                    let one = || match n % 8 {
                        0 => add_at(exe, dir, &name),
                        // A third of the calls name centre 0 alone, which is killed.
                        n => c.declare(&name, [None, Some(1), Some(0)][n % 3]),
                    };
                    let mut o = one();
                    for _ in 0..20 {
                        if o.ok() {
                            break;
                        }
                        answers.lock().unwrap_or_else(|e| e.into_inner()).failed.insert(name.clone(), o.text.clone());
                        std::thread::sleep(Duration::from_millis(300));
                        o = if n % 8 == 0 { one() } else { c.declare(&name, None) };
                    }
                    made.fetch_add(1, Ordering::Relaxed);
                    let mut all = answers.lock().unwrap_or_else(|e| e.into_inner());
                    if o.ok() {
                        all.done.insert(name);
                    } else {
                        all.failed.insert(format!("{name}, at last"), o.text);
                    }
                }
            });
        }
        while made.load(Ordering::Relaxed) < calls / 2 {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(victim);
    });
    Ok(answers.into_inner().unwrap_or_else(|e| e.into_inner()))
}

/// The whole test: creates `calls` vRNICs while the allocating centre is killed, then stops etcd for `away` by a signal
/// and, with `restart`, by killing and restarting it.
///
/// # Errors
/// The first check that fails.
pub fn run(calls: usize, away: Duration, restart: bool) -> Result<()> {
    let mut c = Centres::prepare(Etcd::start, true)?;
    c.start()?;
    let state = c.dir.join("h1");
    // The host joins by the centre that does not allocate.
    let host = c.host("127.0.16.1", &state, &c.urls.join(","), Some(&c.join_token(1)?))?;
    wait_until(|| c.host_is_connected(), "the host is not connected at both centres")?;
    shared_knowledge(&c, &host, &state)?;

    let begun = Instant::now();
    let answers = make_vrnics(&mut c, &host, calls)?;
    let took = begun.elapsed();
    require(answers.done.len() == calls, format!("{} of {calls} answered: {:?}", answers.done.len(), answers.failed))?;
    c.wait_for_allocator(1)?;
    let found = c.vrnics(1)?;
    let wanted: BTreeSet<String> = (0..calls).map(|n| format!("v{n}")).chain(["busy".into()]).collect();
    let names: BTreeSet<String> = found.keys().cloned().collect();
    require(names == wanted, format!("lost or too many: {:?}", names.symmetric_difference(&wanted)))?;
    // A repeated call gets the same vRNIC.
    for n in (1..calls).step_by(calls / 5).filter(|n| n % 8 != 0) {
        let o = c.declare(&format!("v{n}"), Some(1));
        require(o.ok(), &o.text)?;
    }
    require(c.vrnics(1)? == found, "who asked again has changed something")?;
    println!(
        "{calls} vRNICs in {:.1} s, {} of them asked for again while a centre was killed; none lost, none doubled",
        took.as_secs_f64(),
        answers.failed.len()
    );

    // The killed centre restarts and follows.
    c.start_centre(0)?;
    wait_until(|| c.vrnics(0).is_ok_and(|v| v == found), "the centre that came back does not show the same")?;
    require(c.status(0)?["allocates"] != true, "two centres allocate")?;
    wait_until(|| c.host_is_connected(), "the host is not connected after that")?;

    etcd_away(&mut c, &host, away, false)?;
    if restart {
        etcd_away(&mut c, &host, away, true)?;
    }
    Ok(())
}

/// Checks that the centre to which the host is not connected does not move or delete a vRNIC that programs use, and
/// that an identity is connected only once.
fn shared_knowledge(c: &Centres, host: &Lab, state: &Path) -> Result<()> {
    let o = c.declare_with("busy", "host = \"h1\"", Some(1));
    require(o.ok(), &o.text)?;
    wait_until(|| host.show("busy").is_ok(), "the host has not made what the second centre was told")?;
    let mut program = host.spawn("busy", &[], "ib_write_bw")?;
    require(program.wait_listening(|| false), "the program does not listen")?;
    for centre in 0..2 {
        let shows = || c.json(&["get", "vrnic", "busy"], centre).is_ok_and(|v| v["vrnics"][0]["programs"] == 1);
        wait_until(shows, &format!("centre {centre} does not know of the program"))?;
        let o = c.run(&["delete", "vrnic", "busy"], Some(centre));
        require(!o.ok() && o.text.contains("1 programs use vRNIC busy"), format!("centre {centre}: {}", o.text))?;
    }
    program.kill();
    drop(program);
    let copy = c.dir.join("copy");
    std::fs::create_dir(&copy).map_err(|e| e.to_string())?;
    for entry in std::fs::read_dir(state).map_err(|e| e.to_string())?.flatten() {
        std::fs::copy(entry.path(), copy.join(entry.file_name())).map_err(|e| e.to_string())?;
    }
    let other = c.host("127.0.16.2", &copy, &c.urls[1], None)?;
    let why = "another host is connected with the certificate of host h1";
    let told = || other.unirdma(&["status"]).unwrapped().contains(why);
    wait_until(told, "a second host with the certificate of the first one is not refused")?;
    require(c.host_is_connected(), "the first host is connected no more")
}

/// Checks that a command has failed with one line that contains `why`.
fn refused(o: &Output, why: &str) -> Result<()> {
    let clear = !o.ok() && o.text.contains(why) && o.text.trim().lines().count() == 1;
    require(clear, format!("instead of one line with `{why}`: {}", o.text))
}

/// Checks that reads and hosts continue while etcd does not answer, and that changes are refused in one line. Then
/// everything continues.
fn etcd_away(c: &mut Centres, host: &Lab, away: Duration, killed: bool) -> Result<()> {
    if killed {
        c.etcd.kill(0);
    } else if let Some(etcd) = c.etcd.process() {
        harness::signal(etcd, libc::SIGSTOP);
        let stat = format!("/proc/{}/stat", etcd.id());
        let stopped = || std::fs::read_to_string(&stat).is_ok_and(|s| s.contains(") T "));
        wait_until(stopped, "etcd is not stopped")?;
    }
    let (begun, revision) = (Instant::now(), c.status(1)?["revision"].clone());
    for centre in 0..2 {
        refused(&c.declare("away", Some(centre)), "nothing can be changed now: ")
            .map_err(|e| format!("centre {centre}: {e}"))?;
    }
    refused(&host.unirdma(&["vrnic", "add", "away2"]), "nothing can be changed now: ")
        .map_err(|e| format!("at the host: {e}"))?;
    while begun.elapsed() < away {
        require(c.host_is_connected(), "the host's connection has ended")?;
        require(c.vrnics(0)?.len() == c.vrnics(1)?.len(), "the centres show other things")?;
        std::thread::sleep(Duration::from_millis(500));
    }
    require(c.status(0)?["revision"] == revision, "something has changed")?;
    if killed {
        c.etcd.start_again(0)?;
    } else if let Some(etcd) = c.etcd.process() {
        harness::signal(etcd, libc::SIGCONT);
    }
    let back = Instant::now();
    wait_until(|| c.declare("away", None).ok(), "nothing can be changed after etcd is back")?;
    let again = back.elapsed();
    wait_until(|| host.unirdma(&["vrnic", "add", "away2"]).ok(), "the host cannot add a vRNIC after etcd is back")?;
    let same = || c.agreed().is_some_and(|v| v.contains_key("away2"));
    wait_until(same, "the centres do not come to show the same")?;
    // The centres' leases have expired meanwhile, so each knows the other's hosts only after it has found the other
    // again.
    wait_until(|| c.host_is_connected(), "the host is not connected at both centres after that")?;
    for name in ["away", "away2"] {
        let o = c.run(&["delete", "vrnic", name, "--force"], None);
        require(o.ok(), &o.text)?;
    }
    let how = if killed { "killed" } else { "stopped" };
    println!("etcd {how} for {} s: the first change {:.1} s after it was back", away.as_secs(), again.as_secs_f64());
    Ok(())
}
