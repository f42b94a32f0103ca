//! `unirdma control` and the commands that call it, as a user types them.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

const NETWORK: &str = "[[group]]\nname = \"blue\"\nranges = [\"10.0.0.0/16\"]\n\n[[vrnic]]\nname = \"a\"\ngroup = \"blue\"\n\n[[vrnic]]\nname = \"b\"\ngroup = \"blue\"\nips = [\"10.0.0.9\"]\n";

/// A user with a home directory, and a centre that runs until this is dropped.
struct Lab {
    home: PathBuf,
    url: String,
    centre: Child,
}

fn unirdma(home: &Path) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_unirdma"));
    c.env("HOME", home)
        .env_remove("XDG_CONFIG_HOME")
        .env_remove("UNIRDMA_CENTRE")
        .env_remove("UNIRDMA_TOKEN")
        .env_remove("UNIRDMA_AUTHORITY")
        .env_remove("UNIRDMA_LOG");
    c
}

impl Lab {
    fn new() -> Lab {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let home = std::env::temp_dir().join(format!("unirdma-cli-{}-{n}", std::process::id()));
        std::fs::create_dir(&home).unwrap();
        let centre = home.join("centre");
        let done = unirdma(&home).args(["control", "init"]).arg(&centre).output().unwrap();
        assert!(done.status.success(), "{done:?}");
        let mut run = unirdma(&home)
            .args(["control", "run", "--listen", "127.0.0.1:0"])
            .arg(&centre)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(run.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url =
            line.trim().strip_prefix("unirdma control: serves at ").unwrap_or_else(|| panic!("{line}")).to_owned();
        let config = home.join(".config/unirdma/centre.toml");
        let text = std::fs::read_to_string(&config).unwrap().replace("https://127.0.0.1:7443", &url);
        std::fs::write(config, text).unwrap();
        std::fs::write(home.join("network.toml"), NETWORK).unwrap();
        Lab { home, url, centre: run }
    }

    fn run(&self, args: &[&str]) -> Output {
        unirdma(&self.home).args(args).current_dir(&self.home).output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let done = self.run(args);
        assert!(done.status.success(), "{args:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    /// Runs a command that must fail with one line.
    fn refused(&self, args: &[&str], what: &str) {
        self.refused_with(&[], args, what);
    }

    fn refused_with(&self, env: &[(&str, &str)], args: &[&str], what: &str) {
        let done = unirdma(&self.home).args(args).envs(env.iter().copied()).current_dir(&self.home).output().unwrap();
        let text = String::from_utf8(done.stderr).unwrap();
        assert!(!done.status.success() && text.contains(what) && text.trim().lines().count() == 1, "{args:?}: {text}");
        assert!(done.stdout.is_empty(), "{args:?}: what is refused prints nothing else");
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.home.join(name), text).unwrap();
    }

    fn revision(&self) -> serde_json::Value {
        let status: serde_json::Value = serde_json::from_str(&self.ok(&["control", "status", "--json"])).unwrap();
        status["revision"].clone()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.centre.kill();
        let _ = self.centre.wait();
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

#[test]
fn a_fleet_is_declared_looked_at_and_changed() {
    let lab = Lab::new();
    let diff = lab.run(&["diff", "-f", "network.toml"]);
    assert!(diff.status.code() == Some(1) && String::from_utf8_lossy(&diff.stdout).contains("+ vRNIC a"), "{diff:?}");
    assert!(lab.ok(&["apply", "-f", "network.toml", "--dry-run"]).contains("dry run"));
    assert!(lab.ok(&["apply", "-f", "network.toml"]).contains("made vRNIC a: 10.0.0.1/16"));
    assert_eq!(lab.ok(&["diff", "-f", "network.toml"]), "nothing would change\n");
    let mut watch = unirdma(&lab.home).args(["watch", "vrnic"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut news = BufReader::new(watch.stdout.take().unwrap()).lines();
    let lines: Vec<String> = news.by_ref().take(3).map(Result::unwrap).collect();
    assert_eq!(lines[..2], ["made vRNIC a: 10.0.0.1/16", "made vRNIC b: 10.0.0.9/16"]);

    let table = lab.ok(&["get", "vrnic"]);
    assert!(table.starts_with("NAME") && table.contains("10.0.0.9/16"), "{table}");
    let json: serde_json::Value = serde_json::from_str(&lab.ok(&["get", "group", "blue", "--json"])).unwrap();
    assert_eq!(json["objects"][0]["group"]["ranges"][0], "10.0.0.0/16");
    lab.refused(&["get", "vrnic", "z"], "there is no vRNIC z");
    lab.refused(&["delete", "group", "blue"], "or use --force");
    lab.refused(&["vrnic", "move", "a", "h1"], "there is no host h1");
    lab.refused(&["secret", "rotate", "blue"], "has no secret");
    std::fs::write(lab.home.join("bad.toml"), format!("{NETWORK}colour = 1\n")).unwrap();
    lab.refused(&["apply", "-f", "bad.toml"], "bad.toml, line 13: unknown field `colour`");
    std::fs::write(lab.home.join("out.toml"), NETWORK.replace("10.0.0.9", "10.9.0.9")).unwrap();
    lab.refused(&["apply", "-f", "out.toml"], "10.9.0.9 is outside the ranges of group blue");

    let reader = lab.ok(&["token", "create", "eyes", "--role", "reader", "--expires", "1h"]);
    let done = unirdma(&lab.home).args(["delete", "vrnic", "a"]).env("UNIRDMA_TOKEN", reader.trim()).output().unwrap();
    assert!(
        !done.status.success() && String::from_utf8_lossy(&done.stderr).contains("token eyes may only read"),
        "{done:?}"
    );
    assert!(lab.ok(&["token", "ls"]).contains("eyes"));
    lab.ok(&["token", "revoke", "eyes"]);
    assert!(lab.ok(&["audit"]).contains("revoked token eyes"));
    assert!(lab.ok(&["control", "status"]).contains("fleet.redb"));

    std::fs::write(lab.home.join("less.toml"), NETWORK.split("\n[[vrnic]]\nname = \"b\"").next().unwrap()).unwrap();
    assert!(lab.ok(&["apply", "-f", "less.toml", "--prune"]).contains("deleted vRNIC b"));
    assert_eq!(news.next().unwrap().unwrap(), "deleted vRNIC b");
    assert!(lab.ok(&["delete", "vrnic", "a"]).contains("deleted vRNIC a"));
    watch.kill().unwrap();
    watch.wait().unwrap();

    let second = lab.run(&["control", "run", "--listen", "127.0.0.1:0", "centre"]);
    assert!(String::from_utf8_lossy(&second.stderr).contains("in use by another `unirdma control`"), "{second:?}");
    lab.refused(&["control", "init", "centre"], "has an authority already");
}

#[test]
fn what_an_operator_mistypes_changes_nothing_and_is_said_in_a_line() {
    let lab = Lab::new();
    lab.ok(&["apply", "-f", "network.toml"]);
    let before = lab.revision();
    let vrnic = |rest: &str| format!("[[vrnic]]\nname = \"x\"\ngroup = \"blue\"\n{rest}\n");
    for (text, what) in [
        ("hello, world\n", "x.toml, line 1: "),
        ("", "x.toml declares nothing; `unirdma apply --help` shows an example"),
        ("# nothing\n", "declares nothing"),
        ("\u{0}", "x.toml, line 1: "),
        ("[[vrnic]]\nname = \"x\"\n", "`` is no group name"),
        (&vrnic("").replace("blue", "green"), "vRNIC x: there is no group green"),
        (&vrnic("ips = [\"10.9.0.9\"]"), "10.9.0.9 is outside the ranges of group blue: 10.0.0.0/16"),
        (&vrnic("ips = [\"10.0.0.9\"]"), "10.0.0.9"),
        (&vrnic("host = \"h9\""), "vRNIC x: there is no host h9"),
        (&vrnic("").repeat(2), "vRNIC x is declared twice; leave one of them out"),
        (&vrnic("share = { rate = \"fast\" }"), "x.toml, line 4: `fast`: write a number with K, M, G or T"),
        (&vrnic("share = { weight = 0 }"), "vRNIC x: the weight is 0, but must be 1 to 10000"),
        ("[[group]]\nname = \"g\"\nranges = [\"10.0.0.0\"]\n", "`10.0.0.0` has no prefix length; write 10.0.0.0/16"),
        ("[[rule]]\nname = \"r\"\n", "`` is no end of a rule; write group:NAME or vrnic:NAME"),
        ("[[rule]]\nname = \"r\"\nfrom = \"group:blue\"\nto = \"vrnic:z\"\n", "there is no vRNIC z"),
    ] {
        lab.write("x.toml", text);
        lab.refused(&["apply", "-f", "x.toml"], what);
    }
    std::fs::create_dir(lab.home.join("empty.d")).unwrap();
    lab.refused(&["apply", "-f", "empty.d"], "empty.d has no *.toml file");
    lab.refused(&["apply", "-f", "nowhere.toml"], "cannot read nowhere.toml: No such file");
    lab.refused(&["diff", "-f", "x.toml", "-f", "x.toml"], "rule r is declared twice");
    lab.refused(&["control", "run", "empty.d"], "empty.d");
    lab.refused(&["control", "run", "centre", "--plain", "--listen", "0.0.0.0:0"], "--plain is for loopback only");
    lab.refused(&["control", "run", "centre", "--listen", "127.0.0.1:0"], "in use by another `unirdma control`");

    let join = lab.ok(&["token", "create", "--role", "join", "--host", "h1"]);
    let tenant = lab.ok(&["token", "create", "--role", "tenant", "--group", "default"]);
    let before = {
        assert_eq!(lab.revision(), (before.as_str().unwrap().parse::<u64>().unwrap() + 2).to_string());
        lab.revision()
    };
    for (token, what) in [
        ("", "the token is empty: set UNIRDMA_TOKEN"),
        (" \n", "the token is empty"),
        ("one two", "the token has a space or several lines"),
        ("admin.0000", "the token is not known here; make one with `unirdma token create`"),
        (join.trim().rsplit_once('.').unwrap().0, "lets a host join, and no more"),
        (&tenant, "there is no vRNIC a"),
    ] {
        lab.refused_with(&[("UNIRDMA_TOKEN", token)], &["delete", "vrnic", "a"], what);
    }
    lab.refused_with(
        &[("UNIRDMA_TOKEN", &tenant)],
        &["apply", "-f", "network.toml"],
        "that takes a token with the role admin",
    );

    let port = lab.url.rsplit(':').next().unwrap();
    for (url, what) in [
        ("https://127.0.0.1:1", "is the port right, and does `unirdma control run` run there?"),
        (&format!("http://127.0.0.1:{port}"), "does a control centre listen there? One that speaks TLS is at https://"),
        ("http://192.0.2.1:7443", "would show the token to the network: write https://HOST:7443"),
        (&format!("127.0.0.1:{port}"), "is no URL of a centre; write https://HOST:7443"),
        ("", "is no URL of a centre"),
    ] {
        lab.refused(&["get", "vrnic", "--centre", url], what);
    }
    assert!(
        unirdma(&lab.home).args(["control", "init", "other"]).current_dir(&lab.home).output().unwrap().status.success()
    );
    lab.write("empty.pem", "");
    lab.write("half.pem", "-----BEGIN CERTIFICATE-----\n");
    for (file, what) in [
        ("nowhere.pem", "cannot read nowhere.pem"),
        ("empty.pem", "empty.pem has no certificate: use --authority FILE"),
        ("network.toml", "network.toml has no certificate"),
        ("half.pem", "the certificate in half.pem cannot be used: "),
        ("other/authority.pem", "of another authority than that in other/authority.pem"),
    ] {
        lab.refused(&["get", "vrnic", "--authority", file], what);
    }
    let nobody = [("HOME", "/nonexistent")];
    lab.refused_with(&nobody, &["get", "vrnic"], "no control centre is named: use --centre URL");
    lab.refused_with(&nobody, &["get", "vrnic", "--centre", &lab.url], "no token is given: set UNIRDMA_TOKEN");
    let token = [("HOME", "/nonexistent"), ("UNIRDMA_TOKEN", "a.b")];
    lab.refused_with(&token, &["get", "vrnic", "--centre", &lab.url], "use --authority FILE, its authority.pem");
    assert_eq!(lab.revision(), before);
}

#[test]
fn a_declaration_may_be_files_directories_or_standard_input_with_rates_as_people_write_them() {
    use std::io::Write;
    let lab = Lab::new();
    std::fs::create_dir(lab.home.join("fleet.d")).unwrap();
    lab.write(
        "fleet.d/1-groups.toml",
        "[[group]]\nname = \"blue\"\nshare = { rate = \"10 Gbit/s\", ops = \"500k\" }\n",
    );
    lab.write(
        "fleet.d/2-vrnics.toml",
        "[[vrnic]]\nname = \"a\"\ngroup = \"blue\"\nshare = { weight = 200, rate = \"100M\" }\n",
    );
    lab.write("fleet.d/notes.txt", "not read");
    lab.write("more.toml", "[[vrnic]]\nname = \"b\"\ngroup = \"blue\"\nlimits = { max_qp = 7 }\n");
    assert!(lab.ok(&["apply", "-f", "fleet.d", "-f", "more.toml"]).contains("made vRNIC b"));
    assert_eq!(lab.ok(&["diff", "-f", "fleet.d", "-f", "more.toml"]), "nothing would change\n");
    let table = lab.ok(&["get", "vrnic"]);
    let a = table.lines().find(|l| l.starts_with("a ")).unwrap();
    assert!(table.starts_with("NAME") && a.contains("200") && a.contains("100 Mbit/s"), "{table}");
    assert!(lab.ok(&["get", "group", "blue"]).contains("10 Gbit/s  500 K"));
    let mut apply =
        unirdma(&lab.home).args(["apply", "-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    apply.stdin.take().unwrap().write_all(b"[[vrnic]]\nname = \"c\"\ngroup = \"blue\"\n").unwrap();
    let done = apply.wait_with_output().unwrap();
    assert!(done.status.success() && String::from_utf8_lossy(&done.stdout).contains("made vRNIC c"), "{done:?}");
    let help = lab.ok(&["apply", "--help"]);
    assert!(help.contains("rate = \"10G\"") && help.contains("apply -f -") && help.contains("max_qp"), "{help}");
}
