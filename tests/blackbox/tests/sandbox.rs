//! The isolation of a container, the files that it shows, and the appearance of its commands from outside: as root and
//! as an ordinary user.

use attack::checks::{escape, script};

use crate::support::*;

/// Scripts that run outside of containers, and their expected output. `RUN` is `$U run --vrnic x`, `EXEC` is `$U exec
/// --vrnic x`.
const SCRIPTS: &[(&str, &str, &str)] = &[
    (
        "the home directory is read-only, without names that begin with a dot",
        "mkdir -p $HOME/.ssh $HOME/d; echo key >$HOME/.ssh/id; echo in >$HOME/d/in; ln -s d/in $HOME/link\n\
         RUN -- sh -c 'cat $HOME/d/in $HOME/link; cat $HOME/.ssh/id 2>/dev/null; touch $HOME/x $HOME/d/x 2>&1 | grep -c Read-only'; ls $HOME/x $HOME/d/x 2>/dev/null",
        "in\nin\n2\n",
    ),
    (
        "programs find directories of theirs in it, which end with the container, and those that the user has installed",
        "mkdir -p $HOME/.local/bin $HOME/.cache; echo old >$HOME/.cache/f; echo tool >$HOME/.local/bin/tool\n\
         RUN -- sh -c 'cd; for d in .cache .config .local/share .local/state; do ls -A $d; echo new >$d/f; done; cat .cache/f .local/bin/tool'; cat $HOME/.cache/f",
        "new\ntool\nold\n",
    ),
    (
        "--home rw gives it as it is, and files made in it belong to its owner",
        "rm -rf $HOME/f; echo in >$HOME/.in; RUN --home rw -- sh -c 'cat $HOME/.in; touch $HOME/f'; test $(stat -c %u:%g $HOME/f) = $(id -u):$(id -g) && echo same",
        "in\nsame\n",
    ),
    (
        "--home none gives nothing of it",
        "echo in >$HOME/in; RUN --home none -- sh -c 'ls -A $HOME; echo out >$HOME/in'; cat $HOME/in",
        "in\n",
    ),
    (
        "a bind shows the home directory by the same rule, unless it names it",
        "mkdir -p $HOME/.ssh; echo key >$HOME/.ssh/id; echo in >$HOME/in; h=/mnt/${HOME##*/}; export h\n\
         RUN --bind $LAB:/mnt -- sh -c 'cat $h/in; cat $h/.ssh/id 2>/dev/null; touch $h/x 2>&1 | grep -c Read-only'\n\
         RUN --bind $HOME:/mnt -- sh -c 'cat /mnt/.ssh/id; cat $HOME/.ssh/id 2>/dev/null'",
        "in\n1\nkey\n",
    ),
    (
        "directories that XDG variables name are the container's own, too",
        "mkdir -p $HOME/cfg; echo token >$HOME/cfg/f; XDG_CONFIG_HOME=$HOME/cfg RUN -- sh -c 'cd $HOME/cfg; ls -A; echo new >f; cat f'; cat $HOME/cfg/f",
        "new\ntoken\n",
    ),
    (
        "a working directory in the home directory can be written, but for what git and others act upon",
        "mkdir -p $HOME/w/.git; cd $HOME/w; echo old >.git/config; n='.git/config .envrc .vscode/x .idea/x HEAD'; export n\n\
         RUN -- sh -c 'echo new >f; for f in $n; do mkdir -p ${f%/*}; echo new >$f; mv .git g; done' 2>/dev/null; cat f .git/config; ls -A | xargs",
        "new\nold\n.git f\n",
    ),
    (
        "what is missing there is kept from being made until the last of two containers ends",
        "mkdir -p $HOME/two; cd $HOME/two; RUN -- sh -c 'until test -e done; do sleep 0.05; done; mkdir .git' 2>&1 | grep -c 'File exists' & p=$!\n\
         until test -S .git; do sleep 0.05; done; $U run --vrnic b -- true; touch done; wait $p; ls -A",
        "1\ndone\n",
    ),
    (
        "a working directory that is the home directory, hidden, a part of a repository or one itself cannot be written",
        "mkdir -p $HOME/.d $HOME/r/.git/hooks $HOME/bare/objects $HOME/bare/refs $HOME/l $HOME/dots; ln -sf dots/zshrc $HOME/.zshrc; echo >$HOME/dots/zshrc; echo ref: >$HOME/bare/HEAD; ln -s ../r/.git $HOME/l/.git\n\
         for d in . .d r/.git/hooks bare dots l; do (cd $HOME/$d; RUN -- touch x >/dev/null 2>&1 || echo $d); done; cd $HOME/l; RUN -- true",
        ".\n.d\nr/.git/hooks\nbare\ndots\nl\nunirdma: the working directory LAB/home/l is read-only: .git is a symbolic link, which cannot be kept as it is\n",
    ),
    (
        "what a container of root may read of the home directory is what everybody may",
        "echo all >$HOME/a; echo own >$HOME/o; chmod 600 $HOME/o; test $(id -u) = 0 && w=1 || w=0\n\
         RUN -- sh -c 'cat $HOME/a; cat $HOME/o >/dev/null 2>&1; echo $?' | sed s/^$w$/right/",
        "all\nright\n",
    ),
    (
        "tokens of the fleet are not in the environment",
        "UNIRDMA_TOKEN=sesame UNIRDMA_JOIN=sesame RUN -- sh -c 'env | grep -c sesame; grep -sc sesame /proc/*/environ | grep -v :0'",
        "0\n",
    ),
    ("a home directory may be closed to others", "chmod 700 $HOME; echo deep >$HOME/x; RUN -- cat $HOME/x", "deep\n"),
    (
        "--bind gives a directory, at any place",
        "mkdir -p $LAB/d/e; chmod 700 $LAB/d; echo 1 >$LAB/d/e/f\n\
         RUN --bind $LAB/d -- sh -c 'cat $LAB/d/e/f; echo 2 >$LAB/d/e/f'; cat $LAB/d/e/f\n\
         RUN --bind $LAB/d:/data/x --bind $LAB/d/e:/mnt:ro -- sh -c 'cat /data/x/e/f; cat /mnt/f'",
        "1\n2\n2\n2\n",
    ),
    (
        "--bind :ro cannot be written",
        "mkdir -p $LAB/d; RUN --bind $LAB/d:ro -- sh -c 'touch $LAB/d/ro 2>&1 | grep -c Read-only'; ls $LAB/d | grep -c ro",
        "1\n0\n",
    ),
    ("--bind gives a file", "echo one >$LAB/one; RUN --bind $LAB/one:/etc/hosts:ro -- cat /etc/hosts", "one\n"),
    (
        "--bind gives a device",
        "RUN --bind /dev/null:/dev/other -- sh -c 'echo gone >/dev/other; test -c /dev/other && echo ok'",
        "ok\n",
    ),
    (
        "the virtual layer's directory is hidden wherever it would show",
        "RUN --bind $LAB:/mnt --bind $LAB -- sh -c 'ls -A /mnt/run; ls -A $LAB/run; ls /mnt | grep -cx run'",
        "1\n",
    ),
    (
        "/tmp, /run, /dev/shm and /var/tmp are private and can be written",
        "for d in /tmp /dev/shm /var/tmp /run/lock; do f=$d/unirdma-test-$$; RUN -- sh -c \"echo x >$f && ls -A $d | grep -c unirdma-test\"; ls $f 2>/dev/null; done",
        "1\n1\n1\n1\n",
    ),
    (
        "a working directory within /tmp is there, and nothing beside it",
        "cd $(mktemp -d /tmp/unirdma-test-XXXXXX); touch /tmp/unirdma-test-$$; echo in >in\n\
         RUN -- sh -c 'cat in; echo out >out; ls -A /tmp | grep -c unirdma-test'; cat out; rm -r $PWD /tmp/unirdma-test-$$",
        "in\n1\nout\n",
    ),
    (
        "a working directory within the virtual layer's directory is not there",
        "cd $LAB/run/vrnics; ls | grep -c x; RUN -- ls -A $LAB/run/vrnics 2>/dev/null | grep -c .",
        "1\n0\n",
    ),
    (
        "processes of the host do not show",
        "test $(RUN -- sh -c 'ls -d /proc/[0-9]* | wc -l') -le 4 && echo few",
        "few\n",
    ),
    (
        "the host's name and IPC are not the container's",
        "ipcs -m | wc -l >$LAB/n; RUN -- sh -c 'ipcmk -M 4096 >/dev/null; ipcs -m | grep -c 4096'; ipcs -m | wc -l | cmp - $LAB/n",
        "1\n",
    ),
    (
        "the environment is as it is",
        "X='a b' LD_LIBRARY_PATH=/x RUN -- sh -c 'echo $X $LD_LIBRARY_PATH $UNIRDMA_DIR'",
        "a b /run/unirdma-lib:/x /run/unirdma\n",
    ),
    (
        "exit codes of run",
        "RUN -- sh -c 'exit 42'; echo $?; RUN -- sh -c 'kill -9 $$'; echo $?; RUN -- /etc/passwd 2>/dev/null; echo $?; RUN -- nonesuch 2>/dev/null; echo $?",
        "42\n137\n126\n127\n",
    ),
    ("options of the command are its own", "RUN -- echo --bind -x -- --help", "--bind -x -- --help\n"),
    ("standard input and output pass", "echo in | RUN -- cat", "in\n"),
    (
        "a signal to run reaches the command, once",
        "RUN -- sh -c 'trap \"echo usr1; exit 7\" USR1; echo up; while :; do sleep 0.1; done' >$LAB/sig & p=$!\n\
         until grep -qs up $LAB/sig; do sleep 0.05; done; kill -USR1 $p; wait $p; echo $?; cat $LAB/sig",
        "7\nup\nusr1\n",
    ),
    ("SIGTERM ends it", "RUN -- sleep 30 & p=$!; sleep 0.5; kill $p; wait $p; echo $?", "143\n"),
    (
        "what runs in the background ends with the command",
        "RUN -- sh -c 'sleep 4711 & sleep 4711 & exit 3'; echo $?; pgrep -x -f 'sleep 4711' | wc -l",
        "3\n0\n",
    ),
    ("orphans are waited for", "RUN -- sh -c '(true & ) ; (sleep 0.1 &); sleep 0.3; ps -eo stat | grep -c Z'", "0\n"),
    (
        "Ctrl-C in a terminal ends the command, not what comes after it",
        "(sleep 1; printf '\\003'; sleep 1) | script -qec 'RUN -- sleep 20; echo code $?' /dev/null | tr -d '\\r' | grep -o 'code.*'",
        "code 130\n",
    ),
    (
        "Ctrl-Z stops it, and fg lets it go on",
        "(sleep 0.5; echo 'RUN -- sh -c \"sleep 1; echo slept\"'; sleep 0.7; printf '\\032'; sleep 0.3; echo fg; sleep 2; echo exit) | \
         script -qec 'bash --norc -i' /dev/null | tr -d '\\r' | grep -oE '(Stopped|^slept)'",
        "Stopped\nslept\n",
    ),
    (
        "a shell in a terminal has job control, and leaves the terminal to its starter",
        "(sleep 1; printf 'sleep 9 | cat &\\njobs\\nkill %%1; tty; exit 5\\n'; sleep 1; echo word) | \
         script -qec 'RUN -- bash --norc -i; echo code $?; read w; echo read $w' /dev/null | tr -d '\\r' | grep -oE '(.1..  Running|/dev/console|^code.*|^read .*)'",
        "[1]+  Running\n/dev/console\ncode 5\nread word\n",
    ),
    (
        "exec enters the container, twice at a time, with exit codes and signals",
        "RUN -- sh -c 'echo mine >/tmp/mine; echo up; exec sleep 5' >$LAB/up & p=$!\n\
         until grep -qs up $LAB/up; do sleep 0.05; done\n\
         EXEC -- sh -c 'cat /tmp/mine; ip -o -4 a show dev eth0 | wc -l; echo $UNIRDMA_DIR; exit 9'; echo $?\n\
         EXEC -- sleep 20 & q=$!; EXEC -- sh -c 'sleep 0.5; pgrep -c sleep'; kill -INT $q; kill $q; wait $q; echo $?\n\
         EXEC -- nonesuch 2>/dev/null; echo $?; EXEC -- sleep 20 & q=$!; sleep 0.3; kill $p; wait $q; echo $?",
        "mine\n1\n/run/unirdma\n9\n2\n143\n127\n137\n",
    ),
    (
        "exec gives no more rights than run",
        "RUN -- sh -c 'grep -E \"^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp)\" /proc/self/status >$LAB/a; echo up; exec sleep 5' >$LAB/up2 & p=$!\n\
         until grep -qs up $LAB/up2; do sleep 0.05; done\n\
         EXEC -- grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp)' /proc/self/status | cmp - $LAB/a && echo same; kill $p",
        "same\n",
    ),
    (
        "a container on the host's network has the host's interfaces",
        "RUN --net host -- ip -br link | cut -d' ' -f1 | sort >$LAB/i; ip -br link | cut -d' ' -f1 | sort | cmp - $LAB/i && echo same",
        "same\n",
    ),
    (
        "gdb, inside",
        "RUN -- gdb -q -batch -ex 'break main' -ex run -ex 'p 6*7' /bin/true 2>&1 | grep -o '. = 42'",
        "1 = 42\n",
    ),
];

/// Command lines that are refused with one line of output.
const REFUSED: &[(&str, &str)] = &[
    ("RUN --home rx -- true", "invalid value 'rx' for '--home <HOW>'"),
    ("HOME=/nonexistent RUN --home rw -- true", "HOME names no directory that belongs to this user"),
    ("RUN --bind etc -- true", "is no absolute path"),
    ("RUN --bind /nonexistent/x -- true", "No such file"),
    ("RUN --bind /etc:/proc/x -- true", "nothing can be put at"),
    ("RUN --bind /etc:/usr/nonesuch -- true", "cannot put anything at /usr/nonesuch"),
    ("RUN -- true </", "standard input is a directory"),
    ("EXEC -- true", "vRNIC x has no container; start one with `unirdma run --vrnic x -- CMD`"),
    ("$U exec --vrnic nonesuch -- true", "there is no vRNIC nonesuch"),
    (
        "d=$(mktemp -d -p /dev/shm); cd $d; RUN -- ./nonesuch; code=$?; rmdir $d; exit $code",
        "does not have the working directory",
    ),
];

/// Adds all tests in a lab of `user`. `place` names it.
fn in_place(t: &mut Tests, place: &str, user: Option<u32>) {
    let title = |name: &str| format!("sandbox, {place}: {name}");
    let lab = &Shared::new(move || {
        let lab = Lab::start(user)?;
        lab.vrnic("x", &[])?;
        lab.vrnic("b", &[])?;
        Ok(lab)
    });
    t.on(lab, title("attacks from inside"), escape);
    for (name, text, expected) in SCRIPTS {
        t.on(lab, title(name), move |lab| {
            let o = script(lab, text);
            let expected = expected.replace("LAB", &lab.dir.display().to_string());
            require(o.text == expected, format!("expected:\n{expected}\ngot ({:?}):\n{}", o.code, o.text))
        });
    }
    t.on(lab, title("wrong input"), |lab| {
        REFUSED.iter().try_for_each(|(text, why)| {
            let o = script(lab, text);
            require(o.code.is_some_and(|c| c != 0) && o.text.contains(why), format!("{text}: {:?} {}", o.code, o.text))
        })
    });
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::C_PROGRAMS, packages::SANDBOX]);
    t.need_root("this user is an ordinary one");
    in_place(t, "root", None);
    t.test("sandbox, root: what is given below a closed directory is within reach", || {
        let lab = Lab::start(None)?;
        lab.vrnic("x", &[])?;
        let o = script(&lab, "mkdir d; echo 1 >d/f; RUN --bind $LAB/d:/root/deep/x -- cat /root/deep/x/f");
        require(o.text == "1\n", o.text)
    });
    t.test("sandbox, root: memory of a program with threads is shared, if the host has /dev/userfaultfd", || {
        let lab = &abc()?;
        let exe = compile(lab, "memory-writers", &["-libverbs", "-pthread", "-ldl"])?;
        let o = lab.spawn("a", &[], &format!("env UNIRDMA_MR=share UNIRDMA_TRACE=1 {exe} threads"))?.finish();
        let way = if std::path::Path::new("/dev/userfaultfd").exists() { "way Share" } else { "way Copy" };
        require(o.ok() && o.text.contains(way), o.text)
    });
    t.need_no_root();
    in_place(t, "ordinary user", Some(own_user()));
}
