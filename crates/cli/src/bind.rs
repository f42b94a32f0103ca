//! `--bind SRC[:DST][:ro]`: gives a directory or file of the host to a container.

use std::path::{Component, Path, PathBuf};

/// A parsed `--bind`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bind {
    pub source: PathBuf,
    pub target: PathBuf,
    pub read_only: bool,
}

/// An error in a `--bind`. Each text is one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    #[error("expected SRC, SRC:DST, SRC:ro or SRC:DST:ro")]
    Form,
    #[error("{part} `{}` {why}; write it from `/` on", .path.display())]
    Path { part: &'static str, path: PathBuf, why: &'static str },
    #[error("nothing can be put at `{}` of a container; choose another DST, as in {from}:/mnt", .target.display())]
    Taken { target: PathBuf, from: String },
    #[error("SRC `{}`: {error}", .path.display())]
    Source { path: PathBuf, error: std::io::Error },
}

/// Paths of a container that cannot be replaced.
const TAKEN: [&str; 4] = ["/", "/dev", "/proc", "/sys"];

fn absolute(path: &str, part: &'static str) -> Result<PathBuf, BindError> {
    let path = Path::new(path);
    let plain = path.components().all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    if path.is_absolute() && plain {
        return Ok(path.components().collect());
    }
    let why = if path.is_absolute() { "has `..` in it" } else { "is no absolute path" };
    Err(BindError::Path { part, path: path.into(), why })
}

/// Reads `SRC[:DST][:ro]`.
pub(crate) fn parse(text: &str) -> Result<Bind, BindError> {
    let mut words: Vec<&str> = text.split(':').collect();
    let read_only = words.len() > 1 && words.last() == Some(&"ro");
    if read_only {
        words.pop();
    }
    let (source, target) = match words[..] {
        [source] => (source, source),
        [source, target] => (source, target),
        _ => return Err(BindError::Form),
    };
    let bind = Bind { source: absolute(source, "SRC")?, target: absolute(target, "DST")?, read_only };
    if TAKEN.iter().any(|t| bind.target == Path::new(t)) || ["/proc", "/sys"].iter().any(|t| bind.target.starts_with(t))
    {
        return Err(BindError::Taken { target: bind.target, from: source.into() });
    }
    match std::fs::metadata(&bind.source) {
        Ok(_) => Ok(bind),
        Err(error) => Err(BindError::Source { path: bind.source, error }),
    }
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
            let e = parse(text).unwrap_err().to_string();
            assert!(e.contains(why), "{text}: {e}");
        }
    }
}
