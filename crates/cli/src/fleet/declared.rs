//! Files that declare a network: TOML with the nouns of the API, and rates and times as people write them.

use std::fmt;
use std::io::{self, Read};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use unirdma_fleet::v1;

use crate::units::{self, UnitError};

pub(super) const EXAMPLES: &str = "Example, network.toml:
  [[group]]
  name = \"blue\"
  ranges = [\"10.0.0.0/16\"]
  share = { rate = \"10G\" }
  max_vrnics = 500        # for everybody; without these lines tenants make up
  max_rules = 100         # to 62,500 and 4,096, and administrators any number
  vlan = 100              # for VFs of real RNICs: no other group has it

  [[group]]
  name = \"red\"
  ranges = [\"10.1.0.0/16\"]

  [[vrnic]]
  name = \"web\"
  group = \"blue\"
  host = \"h1\"            # which has joined; without this line it waits for a host

  [[vrnic]]
  name = \"db\"
  group = \"blue\"
  ips = [\"10.0.0.9\"]
  way = \"auto\"            # a VF if the host has one for it; also \"vf\" and \"soft\"
  share = { weight = 200, rate = \"2.5 Gbit/s\", ops = \"500k\", burst = \"10ms\" }
  limits = { max_qp = 64, max_mr_bytes = 1_000_000_000 }

  [[rule]]
  name = \"web-to-red\"
  from = \"vrnic:web\"
  to = \"group:red\"
  action = \"ALLOW\"
  both = true
  priority = 100

  unirdma apply -f network.toml --dry-run
  unirdma apply -f fleet.d                  all *.toml files of a directory, as one
  generate | unirdma apply -f -             standard input

`share` and `limits` have the words of `unirdma vrnic add`; a vRNIC has those of its group where it does not say its own.
A call has at most 20,000 objects, or 16 MiB.";

/// Most bytes of all files together; the centre takes no more.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Network {
    host: Vec<v1::Host>,
    group: Vec<Group>,
    vrnic: Vec<Vrnic>,
    rule: Vec<v1::Rule>,
}

/// [`v1::Group`] as people write it.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Group {
    name: String,
    vni: Option<u32>,
    ranges: Vec<String>,
    weight: Option<u32>,
    #[serde(alias = "maxVrnics")]
    max_vrnics: Option<u32>,
    #[serde(alias = "maxRules")]
    max_rules: Option<u32>,
    secret: bool,
    vlan: Option<u32>,
    limits: Option<Limits>,
    share: Option<Share>,
}

/// [`v1::Vrnic`] as people write it.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Vrnic {
    name: String,
    group: String,
    host: String,
    ips: Vec<String>,
    mac: String,
    guid: String,
    limits: Option<Limits>,
    share: Option<Share>,
    #[serde(alias = "allowSpoof")]
    allow_spoof: bool,
    down: bool,
    #[serde(alias = "byHost")]
    by_host: bool,
    way: Way,
    instance: String,
}

/// The way of programs ([`v1::Way`]), in the words of `unirdma vrnic add` or of JSON.
#[derive(Clone, Copy, Debug, Default, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum Way {
    #[default]
    #[serde(alias = "SOFT")]
    Soft,
    #[serde(alias = "VF")]
    Vf,
    #[serde(alias = "AUTO")]
    Auto,
}

impl From<Way> for v1::Way {
    fn from(way: Way) -> Self {
        match way {
            Way::Soft => v1::Way::Soft,
            Way::Vf => v1::Way::Vf,
            Way::Auto => v1::Way::Auto,
        }
    }
}

/// [`v1::Share`] as people write it.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Share {
    weight: Option<u32>,
    rate: Option<Number<Bits>>,
    ops: Option<Number<Count>>,
    burst: Option<Number<Time>>,
}

/// [`v1::Limits`] as people write it.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Limits {
    #[serde(alias = "maxQp")]
    max_qp: Option<u32>,
    #[serde(alias = "maxCq")]
    max_cq: Option<u32>,
    #[serde(alias = "maxMr")]
    max_mr: Option<u32>,
    #[serde(alias = "maxMrBytes")]
    max_mr_bytes: Option<Number<Most>>,
    #[serde(alias = "maxSessions")]
    max_sessions: Option<u32>,
    #[serde(alias = "maxDescriptors")]
    max_descriptors: Option<Number<Most>>,
    #[serde(alias = "maxMappings")]
    max_mappings: Option<Number<Most>>,
    #[serde(alias = "maxAddressSpace")]
    max_address_space: Option<Number<Most>>,
    #[serde(alias = "maxPieces")]
    max_pieces: Option<Number<Most>>,
    #[serde(alias = "maxFilled")]
    max_filled: Option<Number<Most>>,
}

/// A notation of a number as text.
trait Written {
    const READ: fn(&str) -> Result<u64, UnitError>;
}

/// Bits per second, as `10G`.
#[derive(Debug)]
struct Bits;
/// Operations per second, as `500k`.
#[derive(Debug)]
struct Count;
/// A time, as `10ms`, in microseconds.
#[derive(Debug)]
struct Time;
/// A number, or `none`.
#[derive(Debug)]
struct Most;

impl Written for Bits {
    const READ: fn(&str) -> Result<u64, UnitError> = units::bits;
}

impl Written for Count {
    const READ: fn(&str) -> Result<u64, UnitError> = units::rate;
}

impl Written for Time {
    const READ: fn(&str) -> Result<u64, UnitError> = units::micros;
}

impl Written for Most {
    const READ: fn(&str) -> Result<u64, UnitError> = units::most;
}

/// A number as such, or as text.
#[derive(Debug)]
struct Number<W>(u64, PhantomData<W>);

impl<'de, W: Written> Deserialize<'de> for Number<W> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Reader<W>(PhantomData<W>);
        impl<W: Written> Visitor<'_> for Reader<W> {
            type Value = u64;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number that is not negative, or text")
            }
            fn visit_u64<E: Error>(self, n: u64) -> Result<u64, E> {
                Ok(n)
            }
            fn visit_i64<E: Error>(self, n: i64) -> Result<u64, E> {
                u64::try_from(n).map_err(|_| E::custom(format_args!("{n} is negative")))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
                (W::READ)(text).map_err(|e| E::custom(format_args!("`{}`: {e}", text.escape_debug())))
            }
        }
        d.deserialize_any(Reader::<W>(PhantomData)).map(|n| Number(n, PhantomData))
    }
}

fn plain<W>(n: Option<Number<W>>) -> Option<u64> {
    n.map(|n| n.0)
}

impl From<Share> for v1::Share {
    fn from(s: Share) -> Self {
        v1::Share { weight: s.weight, rate: plain(s.rate), ops: plain(s.ops), burst: plain(s.burst) }
    }
}

impl From<Limits> for v1::Limits {
    fn from(l: Limits) -> Self {
        v1::Limits {
            max_qp: l.max_qp,
            max_cq: l.max_cq,
            max_mr: l.max_mr,
            max_mr_bytes: plain(l.max_mr_bytes),
            max_sessions: l.max_sessions,
            max_descriptors: plain(l.max_descriptors),
            max_mappings: plain(l.max_mappings),
            max_address_space: plain(l.max_address_space),
            max_pieces: plain(l.max_pieces),
            max_filled: plain(l.max_filled),
        }
    }
}

impl From<Group> for v1::Group {
    fn from(g: Group) -> Self {
        let (limits, share) = (g.limits.map(Into::into), g.share.map(Into::into));
        let Group { name, vni, ranges, weight, max_vrnics, max_rules, secret, vlan, .. } = g;
        v1::Group { name, vni, ranges, weight, max_vrnics, max_rules, secret, limits, share, vlan }
    }
}

impl From<Vrnic> for v1::Vrnic {
    fn from(v: Vrnic) -> Self {
        let (limits, share) = (v.limits.map(Into::into), v.share.map(Into::into));
        let way = v1::Way::from(v.way).into();
        let Vrnic { name, group, host, ips, mac, guid, allow_spoof, down, by_host, instance, .. } = v;
        v1::Vrnic { name, group, host, ips, mac, guid, limits, share, allow_spoof, down, by_host, way, instance }
    }
}

/// Reads the paths given by `-f`: files, `-` for standard input, and directories for their `*.toml` files. All of them
/// form one declaration.
pub(super) fn read(paths: &[PathBuf]) -> io::Result<Vec<v1::Object>> {
    let mut objects = Vec::new();
    for path in paths {
        if path.as_os_str() != "-" && path.is_dir() {
            for file in files_of(path)? {
                objects.extend(read_file(&file)?);
            }
        } else {
            objects.extend(read_file(path)?);
        }
    }
    Ok(objects)
}

/// The `*.toml` files of a directory, in the order of their names.
fn files_of(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("cannot read {}: {e}", dir.display()));
    let entries = std::fs::read_dir(dir).map_err(named)?.collect::<Result<Vec<_>, _>>().map_err(named)?;
    let mut files: Vec<PathBuf> =
        entries.into_iter().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "toml")).collect();
    files.sort();
    if files.is_empty() {
        return Err(io::Error::other(format!("{} has no *.toml file", dir.display())));
    }
    Ok(files)
}

fn read_file(path: &Path) -> io::Result<Vec<v1::Object>> {
    let stdin = path.as_os_str() == "-";
    let shown = if stdin { "standard input".into() } else { path.display().to_string() };
    let mut bytes = Vec::new();
    let done = if stdin {
        io::stdin().take(MAX_BYTES + 1).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|f| f.take(MAX_BYTES + 1).read_to_end(&mut bytes))
    };
    done.map_err(|e| io::Error::new(e.kind(), format!("cannot read {shown}: {e}")))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("{shown} is larger than {} MiB; apply it in parts", MAX_BYTES >> 20)));
    }
    let text = String::from_utf8(bytes).map_err(|_| io::Error::other(format!("{shown} is no TOML: it is no text")))?;
    let objects = parse(&text).map_err(|e| io::Error::other(format!("{shown}{e}")))?;
    if objects.is_empty() {
        let text = format!("{shown} declares nothing; `unirdma apply --help` shows an example");
        return Err(io::Error::other(text));
    }
    Ok(objects)
}

/// Why a file is no declaration. The text follows the file's name.
#[derive(Debug, thiserror::Error)]
#[error("{}: {what}", .line.map(|l| format!(", line {l}")).unwrap_or_default())]
struct NotDeclared {
    line: Option<usize>,
    what: String,
}

fn parse(text: &str) -> Result<Vec<v1::Object>, NotDeclared> {
    let network: Network = toml::from_str(text).map_err(|e| NotDeclared {
        line: e.span().map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1),
        what: e.message().lines().collect::<Vec<_>>().join(" "),
    })?;
    let hosts = network.host.into_iter().map(Into::into);
    let groups = network.group.into_iter().map(|g| v1::Group::from(g).into());
    let vrnics = network.vrnic.into_iter().map(|v| v1::Vrnic::from(v).into());
    let rules = network.rule.into_iter().map(Into::into);
    let all = hosts.chain(groups).chain(vrnics).chain(rules);
    Ok(all.map(|o| v1::Object { object: Some(o), revision: 0 }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_help_is_read() {
        let toml = EXAMPLES.strip_prefix("Example, network.toml:").unwrap().split("  unirdma apply").next().unwrap();
        let objects = parse(toml).unwrap();
        assert_eq!(objects.len(), 5);
        let Some(v1::object::Object::Group(blue)) = &objects[0].object else { panic!("{objects:?}") };
        assert_eq!(blue.share.unwrap().rate, Some(10_000_000_000));
        assert_eq!((blue.max_vrnics, blue.max_rules, blue.vlan), (Some(500), Some(100), Some(100)));
        let Some(v1::object::Object::Vrnic(db)) = &objects[3].object else { panic!("{objects:?}") };
        let share = v1::Share { weight: Some(200), rate: Some(2_500_000_000), ops: Some(500_000), burst: Some(10_000) };
        assert_eq!((db.ips[0].as_str(), db.share, db.way()), ("10.0.0.9", Some(share), v1::Way::Auto));
        assert_eq!(db.limits.unwrap().max_mr_bytes, Some(1_000_000_000));
        let Some(v1::object::Object::Rule(rule)) = &objects[4].object else { panic!("{objects:?}") };
        assert!(rule.both && rule.action() == v1::rule::Action::Allow && rule.priority == 100);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        for (text, line, what) in [
            ("[[group]]\nname = \"a\"\ncolour = 1\n", "line 3", "colour"),
            ("[[group]]\nname = \"a\"\n[[switch]]\n", "line 3", "switch"),
            ("[[group]\n", "line 1", ""),
            ("[[rule]]\nname = \"r\"\naction = \"PERHAPS\"\n", "line 3", "PERHAPS"),
            ("[[vrnic]]\nips = 7\n", "line 2", ""),
            ("[[vrnic]]\nname = \"a\"\nshare = { rate = \"fast\" }\n", "line 3", "`fast`: write a number with K, M, G"),
            ("[[vrnic]]\nname = \"a\"\nshare = { rate = -1 }\n", "line 3", "-1 is negative"),
            ("[[vrnic]]\nname = \"a\"\nshare = { ops = \"10 Gbit/s\" }\n", "line 3", "`10 Gbit/s`: "),
            ("[[group]]\nname = \"a\"\nshare = { burst = \"1h\" }\n", "line 3", "`1h`: write a time with us, ms or s"),
            ("[[group]]\nname = \"a\"\nlimits = { max_filled = \"1 GiB\" }\n", "line 3", "write a number, or `none`"),
            ("[[group]]\nname = \"a\"\nname = \"b\"\n", "line 3", "duplicate key"),
        ] {
            let e = parse(text).unwrap_err().to_string();
            assert!(e.contains(line) && e.contains(what) && !e.contains('\n'), "{text}: {e}");
        }
    }

    /// The output of `get --json` may be written here; its field names are in camel case.
    #[test]
    fn names_of_fields_may_be_those_of_json() {
        let toml = "[[vrnic]]\nname = \"a\"\nallowSpoof = true\nlimits = { maxQp = 7, maxFilled = \"none\" }\n";
        let Some(v1::object::Object::Vrnic(a)) = &parse(toml).unwrap()[0].object else { panic!() };
        let limits = a.limits.unwrap();
        assert_eq!((a.allow_spoof, limits.max_qp, limits.max_filled), (true, Some(7), Some(u64::MAX)));
    }
}
