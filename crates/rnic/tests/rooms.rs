//! The modules of the crate: a module is a file or directory below `src`, and uses only modules that do not use it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The modules of the crate that a file's `use` lines name.
fn used_rooms(text: &str) -> impl Iterator<Item = &str> {
    let paths = text.match_indices("crate::").map(|(at, found)| &text[at + found.len()..]);
    paths.map(|p| p.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default())
}

fn read(dir: &Path, room: Option<&str>, uses: &mut BTreeMap<String, BTreeSet<String>>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let room = room.unwrap_or(&name).to_owned();
        if path.is_dir() {
            read(&path, Some(&room), uses);
        } else if room != "lib" {
            let text = std::fs::read_to_string(&path).unwrap();
            let code: String =
                text.lines().filter(|l| !l.trim_start().starts_with("//")).flat_map(|l| [l, "\n"]).collect();
            uses.entry(room.clone()).or_default().extend(used_rooms(&code).map(str::to_owned).filter(|r| *r != room));
        }
    }
}

#[test]
fn no_rooms_know_each_other_in_a_circle() {
    let mut uses = BTreeMap::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), None, &mut uses);
    assert!(uses["rnic"].contains("core") && uses["core"].contains("objects"), "{uses:?}");
    let rooms: BTreeSet<String> = uses.keys().cloned().collect();
    uses.values_mut().for_each(|u| u.retain(|r| rooms.contains(r)));
    // Modules that use none of the remaining ones are removed, until none is left.
    while let Some(room) = uses.iter().find(|(_, u)| u.is_empty()).map(|(r, _)| r.clone()) {
        uses.remove(&room);
        uses.values_mut().for_each(|u| {
            u.remove(&room);
        });
    }
    assert!(uses.is_empty(), "rooms in circles, and what they know of each other: {uses:#?}");
}
