//! `--bind SRC[:DST][:ro]`: gives a directory or file of the host to a container.

use std::path::{Component, Path, PathBuf};

/// A parsed `--bind`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bind {
    pub source: PathBuf,
    pub target: PathBuf,
    pub read_only: bool,
}

/// Paths of a container that cannot be replaced.
const TAKEN: [&str; 4] = ["/", "/dev", "/proc", "/sys"];

fn absolute(path: &str, what: &str) -> Result<PathBuf, String> {
    let path = Path::new(path);
    let plain = path.components().all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    if path.is_absolute() && plain {
        return Ok(path.components().collect());
    }
    let why = if path.is_absolute() { "has `..` in it" } else { "is no absolute path" };
    Err(format!("{what} `{}` {why}; write it from `/` on", path.display()))
}

/// Reads `SRC[:DST][:ro]`.
///
/// # Errors
/// One line that says what is wrong.
pub(crate) fn parse(text: &str) -> Result<Bind, String> {
    let mut words: Vec<&str> = text.split(':').collect();
    let read_only = words.len() > 1 && words.last() == Some(&"ro");
    if read_only {
        words.pop();
    }
    let (source, target) = match words[..] {
        [source] => (source, source),
        [source, target] => (source, target),
        _ => return Err("expected SRC, SRC:DST, SRC:ro or SRC:DST:ro".into()),
    };
    let bind = Bind { source: absolute(source, "SRC")?, target: absolute(target, "DST")?, read_only };
    let shown = bind.target.display();
    if TAKEN.iter().any(|t| bind.target == Path::new(t)) || ["/proc", "/sys"].iter().any(|t| bind.target.starts_with(t))
    {
        return Err(format!("nothing can be put at `{shown}` of a container; choose another DST, as in {source}:/mnt"));
    }
    std::fs::metadata(&bind.source).map_err(|e| format!("SRC `{}`: {e}", bind.source.display()))?;
    Ok(bind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(text: &str) -> (PathBuf, PathBuf, bool) {
        let b = parse(text).unwrap();
        (b.source, b.target, b.read_only)
    }

    #[test]
    fn a_bind_has_one_to_three_parts() {
        let p = PathBuf::from;
        assert_eq!(ok("/tmp"), (p("/tmp"), p("/tmp"), false));
        assert_eq!(ok("/tmp/:ro"), (p("/tmp"), p("/tmp"), true));
        assert_eq!(ok("/tmp:/mnt/x/"), (p("/tmp"), p("/mnt/x"), false));
        assert_eq!(ok("/tmp:/mnt:ro"), (p("/tmp"), p("/mnt"), true));
        assert_eq!(ok("/dev/null:/dev/mine"), (p("/dev/null"), p("/dev/mine"), false));
    }

    #[test]
    fn a_wrong_bind_is_told_what_is_wrong() {
        let cases = [
            ("tmp", "SRC `tmp` is no absolute path"),
            ("/tmp:mnt", "DST `mnt` is no absolute path"),
            ("/tmp/../etc", "has `..` in it"),
            ("/tmp:/a:/b", "expected SRC"),
            ("/tmp:/a:ro:ro", "expected SRC"),
            ("", "SRC `` is no absolute path"),
            ("/nonexistent/x", "SRC `/nonexistent/x`: No such file"),
            ("/", "nothing can be put at `/`"),
            ("/tmp:/proc/sys", "nothing can be put at `/proc/sys`"),
            ("/dev", "nothing can be put at `/dev`"),
        ];
        for (text, why) in cases {
            let e = parse(text).unwrap_err();
            assert!(e.contains(why), "{text}: {e}");
        }
    }
}
