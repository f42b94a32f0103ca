//! The command line as a person has it: completions in real shells, manual pages, the state of the machine.

use std::process::Command;

use crate::support::*;

/// Runs a shell script with `unirdma` in its PATH, for the lab's virtual layer.
fn shell(lab: &Lab, script: &str) -> Output {
    let exe = lab.exe().parent().unwrap_or(lab.exe()).display().to_string();
    let mut c = Command::new("timeout");
    c.args(["60", "bash", "-c", script]).env("UNIRDMA_HOST_DIR", lab.dir.join("run")).current_dir(&lab.dir);
    Output::of(c.env("PATH", format!("{exe}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")).env("TERM", "dumb"))
}

/// Types lines into a shell on a terminal, whose output has `wanted` as a line of its own.
fn typed(lab: &Lab, shell_and_options: &str, lines: &[&str], wanted: &str) -> Check {
    let typed = lab.dir.join("typed");
    std::fs::write(&typed, lines.iter().map(|line| format!("{line}\n")).collect::<String>())
        .map_err(failed("typed"))?;
    let o = shell(lab, &format!("script -qec '{shell_and_options}' /dev/null <typed"));
    let found = o.text.lines().any(|line| line.trim_end_matches('\r').trim_end().ends_with(wanted));
    require(found, format!("{shell_and_options}, {:?}: {}", o.code, o.text))
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::COMMAND_LINE]);
    let lab = || -> Result<Lab> {
        let lab = Lab::start(None)?;
        lab.vrnic("first-vrnic", &[])?;
        let made = lab.unirdma(&["group", "add", "blue-group"]);
        require(made.ok(), made.text)?;
        Ok(lab)
    };
    let lab = &Shared::new(lab);
    // The completed line runs, and prints the name, which was not typed.
    const SHOW: &str = "unirdma vrnic sho\tfirst-v\t-q";
    t.on(lab, "command_line: bash completes commands and names", |lab| {
        let bash = |line| ["source <(unirdma completion bash)", line, "exit"];
        typed(lab, "bash --norc --noprofile -i", &bash(SHOW), "first-vrnic")?;
        let group = "unirdma group set bl\t--weight 7 && echo is-$((1+1))";
        typed(lab, "bash --norc --noprofile -i", &bash(group), "is-2")
    });
    t.on(lab, "command_line: zsh completes commands and names", |lab| {
        let lines = ["autoload -U compinit; compinit -D -u; source <(unirdma completion zsh)", SHOW, "exit"];
        typed(lab, "zsh -f -i", &lines, "first-vrnic")
    });
    t.on(lab, "command_line: fish completes commands and names", |lab| {
        let ask = |words: &str| {
            let script = format!("unirdma completion fish | source; complete -C \"{words}\"");
            shell(lab, &format!("fish --no-config -c '{script}'")).text
        };
        let (command, name, group) = (ask("unirdma vrnic sho"), ask("unirdma vrnic show "), ask("unirdma group set b"));
        require(command.starts_with("show\t") && command.trim().lines().count() == 1, command)?;
        require(name.lines().any(|line| line.trim() == "first-vrnic"), name)?;
        require(group.trim() == "blue-group", group)
    });
    t.on(lab, "command_line: manual pages are without errors", |lab| {
        let pages = harness::package::man()?;
        let o = shell(lab, &format!("cd {} && ls && mandoc -Tlint -Werror *.1", pages.display()));
        let all = ["unirdma.1", "unirdma-run.1", "unirdma-vrnic-wait.1", "unirdma-vrnic-ip-add.1", "unirdma-doctor.1"];
        require(all.iter().all(|page| o.text.lines().any(|line| line == *page)), &o.text)?;
        require(o.ok() && o.text.lines().all(|line| line.ends_with(".1")), o.text)
    });
    t.test("command_line: doctor finds what is there, for root and for an ordinary user", || {
        let lab = &Lab::start(Some(own_user()))?;
        let as_own_user = format!("setpriv --reuid={0} --regid={0} --clear-groups ", own_user());
        let users = ["", &as_own_user];
        for as_user in &users[..if harness::uid() == 0 { 2 } else { 1 }] {
            let o = shell(lab, &format!("{as_user}unirdma doctor --json"));
            let found: serde_json::Value = serde_json::from_str(&o.text).map_err(|e| format!("{e}: {}", o.text))?;
            let all = || found.as_array().into_iter().flatten();
            let of = |topic: &str| all().find(|f| f["topic"] == topic).cloned().unwrap_or_default();
            let is_right =
                |f: &serde_json::Value| f["level"] != "error" && f["remedy"].is_null() == (f["level"] == "ok");
            require(o.ok() && all().all(is_right) && of("namespaces")["level"] == "ok", &o.text)?;
            require(of("virtual layer")["fact"].as_str().is_some_and(|fact| fact.contains(": 0 vRNICs")), &o.text)?;
        }
        let _taken = std::net::UdpSocket::bind("127.0.9.2:4791").map_err(failed("the port"))?;
        let o = shell(lab, "unirdma doctor");
        let line = o.text.lines().find(|line| line.contains("UDP port 4791")).unwrap_or_default();
        let own = format!("({})", std::process::id());
        require(line.starts_with("warning") && line.contains("127.0.9.2 by ") && line.contains(&own), o.text)
    });
}
