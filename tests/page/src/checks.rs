//! Checks of the page, one after the other, in one browser with one fleet.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use harness::{Lab, Result, Running, require, within};
use serde_json::Value;
use unirdma_fleet::v1::{self, object::Object};

use super::browser::{self, Browser};
use super::fleet::Fleet;
use super::{host, vrnic};

/// Script that finds accessibility faults of the page.
const AUDIT: &str = include_str!("audit.js");
/// Names that would have effects in a page that takes them for HTML.
const HOSTILE: [&str; 3] =
    ["<img src=x onerror=hacked=1>", "\"><script>hacked=1</script>", "'-hacked=1-' javascript:hacked=1"];
/// Number of vRNICs of a large fleet, and the longest time for which the page may be busy with one message or view of
/// it.
const MANY: usize = 10_000;
const BUSY: Duration = Duration::from_millis(1500);

/// The views, and a text that each shows.
const VIEWS: [(&str, &str, &str); 10] = [
    ("map", "#/", "hosts connected"),
    ("hosts", "#/hosts", "rack1-a"),
    ("groups", "#/groups", "10.1.0.0/16"),
    ("vrnics", "#/vrnics", "mpi-00"),
    ("rules", "#/rules", "not-alice"),
    ("vrnic", "#/vrnics/mpi-03", "memory regions"),
    ("host", "#/hosts/rack2-b", "Revision in force"),
    ("group", "#/groups/compute", "Rules that name it"),
    ("search", "#/search/store", "“store”"),
    ("missing", "#/vrnics/nobody", "There is no vRNIC of this name"),
];

/// A browser, a fleet, and the state of the checks.
pub(crate) struct Scene {
    fleet: Fleet,
    browser: Browser,
    out: PathBuf,
    /// Calls may have failed since the last check, because the centre was away or has refused a token.
    failures_expected: bool,
    real: Option<Real>,
}

/// A host with a data path, and programs that transfer for some seconds.
struct Real {
    lab: Lab,
    programs: [Running; 2],
}

/// A check of the page.
pub struct Check {
    /// What holds.
    pub name: &'static str,
    /// The fleet is another one afterwards.
    pub changes_fleet: bool,
    pub(crate) run: fn(&mut Scene) -> Result<()>,
}

const fn check(name: &'static str, run: fn(&mut Scene) -> Result<()>) -> Check {
    Check { name, changes_fleet: false, run }
}

/// The checks, in the order in which one fleet can have all of them.
pub const CHECKS: [Check; 14] = [
    check("wrong, expired and revoked tokens are refused, and a good one is taken", Scene::tokens),
    check("a real host joins, and its programs connect", Scene::real_host_joins),
    check("changes and traffic come by themselves", Scene::changes),
    check("the connection of a real host's programs", Scene::real_host_connects),
    check("each view in light and dark, narrow and wide, for those who see little", Scene::views),
    check("keys alone", Scene::keys),
    check("the mouse", Scene::mouse),
    check("what a real host has transferred, by its own figures", Scene::real_host_figures),
    check("a reader sees all, a tenant its groups alone", Scene::roles),
    check("a host goes away and comes back", Scene::host_away),
    check("the centre goes away and comes back", Scene::centre_away),
    check("names are no HTML", Scene::hostile),
    Check { changes_fleet: true, ..check("10,000 vRNICs", Scene::many) },
    check("nothing was asked of anybody else", Scene::requests),
];

impl Scene {
    /// A declared fleet, and a browser that trusts its authority. Pictures go to `out`.
    pub fn new(mut fleet: Fleet, out: &Path) -> Result<Scene> {
        super::declare(&mut fleet)?;
        std::fs::create_dir_all(out).map_err(|e| format!("{}: {e}", out.display()))?;
        browser::trust(&fleet.dir, &fleet.authority())?;
        let mut browser = Browser::start(&fleet.dir)?;
        browser.resize(1440, 900)?;
        browser.scheme("light")?;
        Ok(Scene { fleet, browser, out: out.into(), failures_expected: false, real: None })
    }

    /// The administrator looks at the page.
    pub fn enter(&mut self) -> Result<()> {
        let url = self.fleet.url.clone();
        self.browser.go(&url)?;
        self.sign_in_well(&self.fleet.admin.clone())
    }

    /// After each check: the page has no errors.
    pub fn has_no_errors(&mut self) -> Result<()> {
        let said = self.browser.events(&["Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"]);
        let failed = std::mem::take(&mut self.failures_expected);
        let bad = said.iter().find(|e| !(failed && e["params"]["entry"]["source"] == "network"));
        bad.map_or(Ok(()), |e| Err(format!("the page has an error: {e}")))
    }

    fn picture(&mut self, name: &str) -> Result<()> {
        self.browser.picture(&self.out.join(format!("{name}.png")))
    }

    fn go(&mut self, hash: &str) -> Result<()> {
        let quoted = Value::from(hash).to_string();
        self.browser.value(&format!("location.hash = {quoted}")).map(drop)
    }

    fn sign_in(&mut self, token: &str) -> Result<()> {
        self.browser.wait("document.getElementById('token').open", "nobody is asked for a token")?;
        self.browser.value("document.getElementById('secret').value = ''")?;
        self.browser.write(token)?;
        self.browser.key("Enter")
    }

    fn sign_in_well(&mut self, token: &str) -> Result<()> {
        self.sign_in(token)?;
        self.browser.wait("document.getElementById('live').textContent.startsWith('live')", "the page is not live")
    }

    fn token(&self, id: &str, role: v1::Role, groups: &[&str], expires: u64) -> Result<String> {
        let groups = groups.iter().map(ToString::to_string).collect();
        self.fleet.token(v1::Token { id: id.into(), role: role.into(), groups, expires, ..Default::default() })
    }

    fn tokens(&mut self) -> Result<()> {
        self.failures_expected = true;
        let soon = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
        let expired = self.token("old", v1::Role::Reader, &[], soon.map_err(|e| e.to_string())?.as_secs() + 1)?;
        let joins = self.token("joins", v1::Role::Join, &[], 0)?;
        std::thread::sleep(Duration::from_millis(1100));
        self.browser.click("#leave")?;
        for (token, error) in
            [("admin.0000", "token"), ("täuschung", "token"), (expired.as_str(), "expired"), (joins.as_str(), "token")]
        {
            self.sign_in(token)?;
            let error_of = "document.getElementById('token-error').textContent";
            self.browser.wait(&format!("{error_of} !== ''"), "no error is shown")?;
            let said = self.browser.text(error_of)?;
            require(said.contains(error), format!("`{said}` does not say `{error}`"))?;
            let shown = self.browser.text("document.querySelector('main').innerText")?;
            require(!shown.contains("mpi"), format!("{token} shows {shown}"))?;
        }
        self.picture("sign-in")?;
        self.browser.key("Escape")?;
        require(self.browser.value("document.getElementById('token').open")? == true, "Escape goes around the token")?;
        let reader = self.token("brief", v1::Role::Reader, &[], 0)?;
        self.sign_in_well(&reader)?;
        self.browser.shows("mpi-00")?;
        self.fleet.revoke("brief")?;
        self.browser.shows("Sign in")?;
        self.sign_in_well(&self.fleet.admin.clone())?;
        self.browser.wait("document.getElementById('who').textContent === 'admin'", "whose token it is")
    }

    fn changes(&mut self) -> Result<()> {
        self.go("#/")?;
        self.fleet.apply(vec![vrnic("fresh", "lab", "rack1-a")])?;
        self.browser.wait("document.querySelector('a[data-key=fresh]') !== null", "a new vRNIC does not appear")?;
        self.fleet.delete(v1::Kind::Vrnic, "fresh")?;
        self.browser.wait("document.querySelector('a[data-key=fresh]') === null", "a deleted vRNIC stays")?;
        self.go("#/vrnics/mpi-03")?;
        let sent = "document.querySelector('.cards b').textContent";
        self.browser.wait(&format!("{sent}.endsWith('GB/s')"), "there is no traffic")?;
        // Two neighbours at 2.4 and 2.1 GB/s and a store at 0.4, each within 40 %.
        let first = self.browser.text(sent)?;
        let figure: f64 = first.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0.0);
        require((2.5..7.5).contains(&figure), format!("mpi-03 sends {first}"))?;
        self.browser.wait(&format!("{sent} !== '{first}'"), "traffic does not move")?;
        for peer in ["mpi-02", "mpi-04", "store-1"] {
            self.browser.shows(peer)?;
        }
        // The traffic ends. Its figures must end too, although nothing is reported about an idle vRNIC.
        let all = std::mem::take(&mut self.fleet.world()?.links);
        self.fleet.world()?.links = all.iter().cloned().map(|l| super::Link { rates: [0.0; 2], ..l }).collect();
        self.browser.wait(&format!("{sent} === '0'"), "traffic has ended, and its rate has not")?;
        self.fleet.world()?.links = all;
        self.browser.wait(&format!("{sent} !== '0'"), "traffic does not begin again")
    }

    fn views(&mut self) -> Result<()> {
        self.go("#/hosts/rack2-b")?;
        self.browser.shows("Problems")?;
        for (width, height, scheme) in
            [(1440, 900, "light"), (1440, 900, "dark"), (390, 844, "light"), (2560, 1300, "dark")]
        {
            self.browser.resize(width, height)?;
            self.browser.scheme(scheme)?;
            for (name, hash, shows) in VIEWS {
                self.go(hash)?;
                self.browser.shows(shows)?;
                let wrong = self.browser.value(AUDIT)?;
                require(wrong.as_array().is_some_and(Vec::is_empty), format!("{name}, {scheme}, {width}: {wrong}"))?;
                self.picture(&format!("{name}-{width}-{scheme}"))?;
            }
        }
        self.browser.resize(1440, 900)?;
        self.browser.scheme("light")
    }

    /// The text or name of the focused element, and whether its focus is visible.
    fn focus(&mut self) -> Result<String> {
        let look = "(() => { const e = document.activeElement, s = getComputedStyle(e.querySelector?.('rect') ?? e); \
                    const seen = e.matches('main') || (e.matches('.vrnic') ? parseFloat(s.strokeWidth) >= 3 : s.outlineStyle !== 'none' \
                    && parseFloat(s.outlineWidth) >= 2); return `${seen ? '' : 'unseen '}${e.id || e.dataset.key || e.textContent.trim()}`; })()";
        self.browser.text(look)
    }

    fn keys(&mut self) -> Result<()> {
        self.go("#/")?;
        self.browser.reload()?;
        self.browser.wait("document.querySelector('.vrnic') !== null", "the drawing does not come back")?;
        let order = [
            "To the content",
            "uniRDMA",
            "Map",
            "Hosts",
            "Groups",
            "vRNICs",
            "Rules",
            "query",
            "keys",
            "theme",
            "leave",
            "group compute",
            "group lab",
            "group storage",
            "rack1-a",
        ];
        for want in order {
            self.browser.key("Tab")?;
            let is = self.focus()?;
            require(is == want, format!("Tab comes to `{is}` and not to `{want}`"))?;
        }
        let see = |s: &mut Scene, want: &str, key: &str| -> Result<()> {
            s.browser.key(key)?;
            let is = s.focus()?;
            require(is == want, format!("{key} comes to `{is}` and not to `{want}`"))
        };
        see(self, "query", "/")?;
        self.browser.write("store 10.1.0")?;
        self.browser.shows("6 vRNICs")?;
        self.browser.key("Enter")?;
        self.browser.key("j")?;
        self.browser.key("Enter")?;
        self.browser.wait("location.hash === '#/vrnics/store-1'", "Enter does not open what was found")?;
        self.browser.key("Backspace")?;
        self.browser.wait("location.hash.startsWith('#/search')", "Backspace does not go back")?;
        for (key, hash) in [("2", "#/hosts"), ("3", "#/groups"), ("4", "#/vrnics"), ("5", "#/rules"), ("1", "#/")] {
            self.browser.key(key)?;
            self.browser.wait(&format!("location.hash === '{hash}'"), "a number does not open its view")?;
        }
        // The keys arrive faster than the browser reports the changed address to the page.
        let press = |key: &str| {
            format!(
                "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{ key: '{key}', bubbles: true }}));"
            )
        };
        self.browser.value(&["5", "1", "j"].map(press).concat())?;
        let first = self.focus()?;
        require(first == "mpi-00", format!("5, 1 and j come to `{first}`"))?;
        // The two connections of the focused element are highlighted, and it keeps the focus while numbers change.
        let stand_out = "document.querySelectorAll('.picked .link.of').length";
        self.browser.wait(&format!("{stand_out} === 2"), "its connections do not stand out")?;
        // While the mouse is over a vRNIC, the connections of that vRNIC are highlighted instead.
        for (over, n) in [("[data-key=alice]", 1), ("h1", 2)] {
            let moved = "new PointerEvent('pointerover', { bubbles: true })";
            self.browser.value(&format!("document.querySelector('main {over}').dispatchEvent({moved})"))?;
            self.browser.wait(&format!("{stand_out} === {n}"), &format!("not {n} stand out, mouse over {over}"))?;
        }
        self.picture("map-focus")?;
        self.browser.wait(
            "globalThis.old ??= document.querySelector('.vrnic .rate').textContent, \
             document.querySelector('.vrnic .rate').textContent !== globalThis.old",
            "nothing changes",
        )?;
        require(self.focus()? == first, "the focus is lost when numbers change")?;
        self.browser.key("?")?;
        self.browser.wait("document.getElementById('help').open", "`?` shows no keys")?;
        self.picture("keys")?;
        self.browser.key("Escape")?;
        self.browser.wait("!document.getElementById('help').open", "Escape does not close the keys")?;
        let ground = "getComputedStyle(document.body).backgroundColor";
        let before = self.browser.text(ground)?;
        self.browser.key("d")?;
        self.browser.wait(&format!("{ground} !== '{before}'"), "`d` changes nothing")?;
        self.browser.value("localStorage.clear(); delete document.documentElement.dataset.theme").map(drop)
    }

    fn mouse(&mut self) -> Result<()> {
        self.go("#/")?;
        let drawn = "document.querySelectorAll('.vrnic').length";
        let before = self.browser.value(drawn)?;
        self.browser.click(".legend button")?;
        self.browser.wait(&format!("{drawn} < {before}"), "a group is drawn that is not to be")?;
        self.browser.click(".legend button")?;
        self.browser.wait(&format!("{drawn} === {before}"), "a group is not drawn again")?;
        self.browser.click("a[data-key=\"store-3\"]")?;
        self.browser.wait("location.hash === '#/vrnics/store-3'", "a click opens no vRNIC")?;
        self.browser.shows("errors")?;
        self.go("#/vrnics")?;
        self.browser.click("th [data-key='sort 5']")?;
        self.browser
            .wait("document.querySelector('[aria-sort=descending]')?.textContent.startsWith('Sent')", "no sorting")?;
        self.browser
            .wait("document.querySelector('tbody td').textContent.startsWith('mpi')", "it is sorted by another one")?;
        self.browser.click("th [data-key='sort 0']")
    }

    fn roles(&mut self) -> Result<()> {
        let url = self.fleet.url.clone();
        let (reader, tenant) =
            (self.token("r", v1::Role::Reader, &[], 0)?, self.token("t", v1::Role::Tenant, &["lab"], 0)?);
        self.browser.click("#leave")?;
        self.sign_in_well(&reader)?;
        self.go("#/vrnics")?;
        self.browser.shows("27 vRNICs")?;
        self.browser.open_another()?;
        self.browser.resize(1440, 900)?;
        self.browser.scheme("light")?;
        self.browser.go(&url)?;
        self.sign_in_well(&tenant)?;
        self.browser
            .wait("document.querySelectorAll('.vrnic').length === 5", "a tenant sees others than its vRNICs")?;
        for hash in ["#/", "#/vrnics", "#/vrnics/alice", "#/groups", "#/hosts", "#/rules", "#/search/o"] {
            self.go(hash)?;
            let shown = self.browser.text("document.querySelector('main').innerText")?;
            let strange = ["mpi", "store", "compute", "not connected"].into_iter().find(|s| shown.contains(s));
            require(strange.is_none(), format!("a tenant sees {strange:?} in {hash}: {shown}"))?;
        }
        self.go("#/vrnics/mpi-03")?;
        self.browser.shows("or this token does not see it")?;
        self.go("#/")?;
        self.browser.shows("alice")?;
        self.picture("tenant")?;
        self.browser.click("#leave")?;
        self.sign_in_well(&self.fleet.admin.clone())
    }

    fn host_away(&mut self) -> Result<()> {
        self.go("#/")?;
        self.fleet.disconnect("rack2-a");
        self.browser.shows("not connected since")?;
        self.browser.shows("3 of 5")?;
        self.picture("host-away")?;
        self.go("#/vrnics/mpi-02")?;
        self.browser.shows("host not connected")?;
        self.browser.wait("document.querySelector('.cards b').textContent === '0'", "an absent host sends")?;
        self.go("#/")?;
        self.fleet.connect("rack2-a")?;
        self.browser.shows("4 of 5")
    }

    fn centre_away(&mut self) -> Result<()> {
        self.failures_expected = true;
        self.fleet.stop_centre();
        self.browser.shows("The centre does not answer. This is what was known at")?;
        self.browser
            .wait("document.querySelectorAll('.vrnic').length === 27", "what was known is not shown any more")?;
        self.picture("centre-away")?;
        self.go("#/vrnics/mpi-03")?;
        self.browser.shows("memory regions")?;
        self.fleet.start_centre()?;
        self.browser.wait(
            "document.getElementById('stale').hidden && document.getElementById('live').className === 'on'",
            "the page does not recover",
        )?;
        self.browser.wait("document.querySelector('.cards b').textContent.endsWith('GB/s')", "no traffic comes")
    }

    fn hostile(&mut self) -> Result<()> {
        self.fleet.world()?.problems.insert("rack2-b".into(), HOSTILE.map(String::from).to_vec());
        self.fleet.apply(vec![vrnic("nudge", "lab", "rack2-b")])?;
        self.go("#/hosts/rack2-b")?;
        for text in HOSTILE {
            self.browser.shows(text)?;
        }
        for text in HOSTILE {
            let encoded: String = text.bytes().map(|b| format!("%{b:02x}")).collect();
            for kind in ["vrnics", "hosts", "groups", "search"] {
                self.go(&format!("#/{kind}/{encoded}"))?;
                self.browser.shows(text)?;
            }
        }
        for hash in ["#/vrnics/%E0%A4%A", "#/__proto__", "#/constructor/toString", "#//", "#/vrnics/__proto__"] {
            self.go(hash)?;
            self.browser.wait("document.querySelector('main').childElementCount > 0", "nothing is shown")?;
        }
        let made = self.browser.value(
            "document.querySelectorAll('main img, main script, main [onerror]').length + ('hacked' in globalThis)",
        )?;
        require(made == 0, "a name has become HTML")?;
        // The content security policy forbids scripts that the page itself never inserts.
        let ran = "(() => { const s = document.createElement('script'); s.textContent = 'hacked = 1'; document.body.append(s); s.remove(); \
                   return 'hacked' in globalThis; })()";
        require(self.browser.value(ran)? == false, "an inline script runs")?;
        let policy = self.browser.events(&["Log.entryAdded"]);
        require(policy.iter().any(|e| e.to_string().contains("Content Security Policy")), "no policy is in force")?;
        self.fleet.world()?.problems.clear();
        self.fleet.delete(v1::Kind::Vrnic, "nudge")
    }

    fn real_host_joins(&mut self) -> Result<()> {
        if self.real.is_some() {
            return Ok(());
        }
        let state = self.fleet.dir.join("state").display().to_string();
        let token = self.fleet.join_token("real")?;
        let args = ["--centre", &self.fleet.url.clone(), "--join", &token, "--name", "real", "--state", &state];
        let lab = Lab::start_in(None, None, &[&args[..], &["--address", "127.0.0.1"]].concat())?;
        let at = |name: &str, ip: &str| {
            let ips = vec![format!("{ip}/16")];
            v1::Vrnic { name: name.into(), group: "lab".into(), host: "real".into(), ips, ..Default::default() }.into()
        };
        self.fleet.apply(vec![at("left", "10.0.9.1"), at("right", "10.0.9.2")])?;
        let limit = Duration::from_secs(10);
        within(limit, || Ok(lab.socket("left").exists() && lab.socket("right").exists()), "the host makes no vRNICs")?;
        let mut server = lab.spawn("left", &[], "ib_write_bw -D 4 -f 1")?;
        if !server.wait_listening(|| false) {
            return Err(format!("the server does not listen: {}", server.finish().text));
        }
        let client = lab.spawn("right", &[], "ib_write_bw -D 4 -f 1 10.0.9.1")?;
        self.real = Some(Real { lab, programs: [server, client] });
        Ok(())
    }

    fn real_host_connects(&mut self) -> Result<()> {
        self.real_host_joins()?;
        self.go("#/vrnics/right")?;
        let peer = "document.querySelector('table[aria-label=connections] tbody tr')?.innerText.replace(/\\s+/g, ' ')";
        self.browser.wait(&format!("{peer}?.startsWith('left 10.0.9.1 1 ')"), "the connection is not shown")?;
        self.picture("real-host")
    }

    /// After the last packet the centre's figures must become equal to the host's. A host reports every 5 s.
    fn real_host_figures(&mut self) -> Result<()> {
        self.real_host_joins()?;
        let Some(Real { lab, programs }) = self.real.take() else { return Err("there is no real host".into()) };
        for o in programs.map(Running::finish) {
            require(o.ok(), o.text)?;
        }
        let own = |name: &str, what: &str| -> Result<u64> {
            let shown = lab.show(name)?;
            shown["counters"][what].as_u64().ok_or_else(|| format!("no {what} in {shown}"))
        };
        let (sent, received) = (own("right", "sent_bytes")?, own("left", "received_bytes")?);
        require(sent > 1_000_000 && sent == received, format!("{sent} bytes sent, {received} received"))?;
        let same = || -> Result<bool> {
            let (right, left) = (self.fleet.state("right")?, self.fleet.state("left")?);
            Ok(right.sent_bytes == sent && left.received_bytes == received && right.connections.is_empty())
        };
        within(Duration::from_secs(10), same, "the centre has other figures than the host")?;
        self.fleet.delete(v1::Kind::Vrnic, "left")?;
        self.fleet.delete(v1::Kind::Vrnic, "right")?;
        self.fleet.delete(v1::Kind::Host, "real")
    }

    fn many(&mut self) -> Result<()> {
        self.go("#/")?;
        let mut objects: Vec<Object> = (0..40).map(|i| host(&format!("farm-{i:02}"))).collect();
        for g in 0..20 {
            let (name, ranges) = (format!("tenant-{g:02}"), vec!["10.0.0.0/16".into()]);
            objects.push(v1::Group { name, ranges, ..Default::default() }.into());
        }
        let one = |i: usize| {
            vrnic(&format!("v-{i:05}"), &format!("tenant-{:02}", i % 20), &format!("farm-{:02}", i / 20 % 40))
        };
        objects.extend((0..MANY).map(one));
        // The longest time for which the page is busy without a pause.
        self.browser.value(
            "globalThis.longest = 0; new PerformanceObserver((l) => { for (const e of l.getEntries()) longest = Math.max(longest, e.duration); }) \
             .observe({ entryTypes: ['longtask'] })",
        )?;
        self.fleet.apply(objects)?;
        let all = "[...document.querySelectorAll('.cards b')].some((e) => Number(e.textContent) >= 10000)";
        self.browser.wait(all, "the vRNICs do not appear")?;
        self.picture("many-map")?;
        let mut took = BTreeMap::new();
        for (name, hash, shows) in [
            ("vRNICs", "#/vrnics", "The first 500 of 100"),
            ("a group", "#/groups/tenant-07", "v-00007"),
            ("a vRNIC", "#/vrnics/v-09999", "v-09999"),
            ("search", "#/search/v-0999", "10 vRNICs"),
            ("hosts", "#/hosts", "farm-39"),
            ("map", "#/", "hosts connected"),
        ] {
            let start = Instant::now();
            self.go(hash)?;
            self.browser.shows(shows)?;
            took.insert(name, start.elapsed().as_millis());
            self.picture(&format!("many-{}", name.replace(' ', "-")))?;
        }
        let longest = self.browser.value("globalThis.longest")?.as_f64().ok_or("nobody has measured")?;
        let start = Instant::now();
        self.browser.reload()?;
        self.browser.wait(all, "they do not come again")?;
        took.insert("from nothing", start.elapsed().as_millis());
        // Changes of another vRNIC keep arriving.
        self.go("#/vrnics/mpi-03")?;
        let sent = "document.querySelector('.cards b').textContent";
        let first = self.browser.text(sent)?;
        let moves = within(Duration::from_secs(10), || Ok(self.browser.text(sent)? != first), "traffic stands still")?;
        println!(
            "{MANY} vRNICs, ms: {took:?}; the next figures after {} ms; busy at most {longest} ms",
            moves.as_millis()
        );
        require(longest < BUSY.as_millis() as f64, format!("the page was busy for {longest} ms"))
    }

    fn requests(&mut self) -> Result<()> {
        for (_, hash, shows) in VIEWS {
            self.go(hash)?;
            self.browser.shows(shows)?;
        }
        let url = format!("{}/", self.fleet.url);
        let asked = self.browser.events(&["Network.requestWillBeSent", "Network.webSocketCreated"]);
        let of = |e: &Value| e["params"]["request"]["url"].as_str().unwrap_or_default().to_owned();
        let stranger = asked.iter().map(of).find(|u| !u.starts_with(&url) && !u.starts_with("data:"));
        require(stranger.is_none(), format!("the page asked for {stranger:?}"))?;
        require(asked.len() > 5, format!("{} requests", asked.len()))
    }
}
