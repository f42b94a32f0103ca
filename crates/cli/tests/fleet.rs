//! `unirdma control` and the commands that call it, as a user types them.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

const NETWORK: &str = "[[group]]\nname = \"blue\"\nranges = [\"10.0.0.0/16\"]\n\n[[vrnic]]\nname = \"a\"\ngroup = \"blue\"\n\n[[vrnic]]\nname = \"b\"\ngroup = \"blue\"\nips = [\"10.0.0.9\"]\n";

/// A user with a home directory, and a centre that runs until the end.
struct Lab {
    home: PathBuf,
    centre: Child,
}

fn unirdma(home: &Path) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_unirdma"));
    c.env("HOME", home)
        .env_remove("XDG_CONFIG_HOME")
        .env_remove("UNIRDMA_CENTRE")
        .env_remove("UNIRDMA_TOKEN")
        .env_remove("UNIRDMA_AUTHORITY");
    c
}

impl Lab {
    fn new() -> Lab {
        let home = std::env::temp_dir().join(format!("unirdma-cli-{}", std::process::id()));
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
        Lab { home, centre: run }
    }

    fn run(&self, args: &[&str]) -> Output {
        unirdma(&self.home).args(args).current_dir(&self.home).output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let done = self.run(args);
        assert!(done.status.success(), "{args:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    /// A command that fails with one line.
    fn refused(&self, args: &[&str], what: &str) {
        let done = self.run(args);
        let text = String::from_utf8(done.stderr).unwrap();
        assert!(!done.status.success() && text.contains(what) && text.trim().lines().count() == 1, "{args:?}: {text}");
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
