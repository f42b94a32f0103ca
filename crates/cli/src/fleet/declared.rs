//! Files that declare a network: TOML with the nouns of the API.

use std::io;
use std::path::Path;

use serde::Deserialize;
use unirdma_fleet::v1;

pub(super) const EXAMPLES: &str = "Example, network.toml:
  [[group]]
  name = \"blue\"
  ranges = [\"10.0.0.0/16\"]

  [[vrnic]]
  name = \"web\"
  group = \"blue\"
  host = \"h1\"

  [[vrnic]]
  name = \"db\"
  group = \"blue\"
  host = \"h2\"
  ips = [\"10.0.0.9\"]
  share = { rate = 10_000_000_000 }

  [[rule]]
  name = \"web-to-red\"
  from = \"vrnic:web\"
  to = \"group:red\"
  action = \"ALLOW\"
  both = true
  priority = 100

  unirdma apply -f network.toml --dry-run";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Network {
    host: Vec<v1::Host>,
    group: Vec<v1::Group>,
    vrnic: Vec<v1::Vrnic>,
    rule: Vec<v1::Rule>,
}

/// Reads a file.
pub(super) fn read(path: &Path) -> io::Result<Vec<v1::Object>> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| io::Error::new(e.kind(), format!("cannot read {}: {e}", path.display())))?;
    parse(&text).map_err(|e| io::Error::other(format!("{}{e}", path.display())))
}

fn parse(text: &str) -> Result<Vec<v1::Object>, String> {
    let network: Network = toml::from_str(text).map_err(|e| {
        let line = e.span().map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1);
        let line = line.map(|l| format!(", line {l}")).unwrap_or_default();
        format!("{line}: {}", e.message().lines().collect::<Vec<_>>().join(" "))
    })?;
    let hosts = network.host.into_iter().map(Into::into);
    let groups = network.group.into_iter().map(Into::into);
    let vrnics = network.vrnic.into_iter().map(Into::into);
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
        assert_eq!(objects.len(), 4);
        let Some(v1::object::Object::Vrnic(db)) = &objects[2].object else { panic!("{objects:?}") };
        assert_eq!((db.ips[0].as_str(), db.share.unwrap().rate), ("10.0.0.9", Some(10_000_000_000)));
        let Some(v1::object::Object::Rule(rule)) = &objects[3].object else { panic!("{objects:?}") };
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
        ] {
            let e = parse(text).unwrap_err();
            assert!(e.contains(line) && e.contains(what) && !e.contains('\n'), "{text}: {e}");
        }
    }
}
