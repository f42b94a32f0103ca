//! Devices that container engines may give to their containers: a file for each vRNIC and each group in a directory of
//! the Container Device Interface (CDI 0.5.0, github.com/cncf-tags/container-device-interface, SPEC.md). The engine
//! runs `unirdma cdi hook` when it makes a container that asks for one of these devices.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::json;
use tracing::warn;

use crate::context;

/// The vendor in the names of devices: `unirdma.io/vrnic=a`.
pub const VENDOR: &str = "unirdma.io";
/// The directory that engines read, beside `/etc/cdi`.
pub const DIRECTORY: &str = "/var/run/cdi";

/// Classes of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A vRNIC.
    Vrnic,
    /// A vRNIC, and programs that bring a libibverbs of their own use it, too.
    VrnicPreload,
    /// A new vRNIC of a group, which ends with the container.
    Group,
    /// The same, with the addresses that the engine has given to the container's `eth0`.
    GroupEth0,
}

impl Class {
    /// All classes.
    pub const ALL: [Class; 4] = [Class::Vrnic, Class::VrnicPreload, Class::Group, Class::GroupEth0];

    /// The part of a device's name before `=`.
    pub fn kind(self) -> String {
        let class = match self {
            Class::Vrnic => "vrnic",
            Class::VrnicPreload => "vrnic-preload",
            Class::Group => "group",
            Class::GroupEth0 => "group-eth0",
        };
        format!("{VENDOR}/{class}")
    }
}

/// The files of a virtual layer.
#[derive(Clone, Debug)]
pub struct Cdi {
    /// The directory, which exists.
    pub directory: PathBuf,
    /// The program that engines run: this one.
    pub program: PathBuf,
}

impl Cdi {
    fn path(&self, class: Class, name: &str) -> PathBuf {
        // No name has this sign, so the files of a group `eth0-a` and of the group `a` for eth0 differ.
        self.directory.join(format!("{}={name}.json", class.kind().replace('/', "-")))
    }

    /// Removes the files of all vRNICs and groups, also those that an earlier virtual layer has left.
    ///
    /// # Errors
    /// The directory cannot be read, or a file cannot be removed.
    pub(crate) fn clear(&self) -> io::Result<()> {
        let all = std::fs::read_dir(&self.directory).map_err(context("cannot read", &self.directory))?;
        for entry in all.flatten() {
            let (name, ours) = (entry.file_name(), format!("{VENDOR}-"));
            if name.to_str().is_some_and(|n| n.starts_with(&ours) && n.ends_with(".json")) {
                std::fs::remove_file(entry.path()).map_err(context("cannot remove", &entry.path()))?;
            }
        }
        Ok(())
    }

    /// Offers a vRNIC or a group of the virtual layer in `dir`.
    pub(crate) fn put(&self, dir: &Path, classes: &[Class], name: &str) {
        for &class in classes {
            // Names of devices end with a letter or a digit.
            if name.ends_with(|c: char| c.is_ascii_alphanumeric()) {
                let path = self.path(class, name);
                let new = path.with_extension("new");
                let text = self.device(dir, class, name);
                if let Err(e) = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path)) {
                    warn!("container engines will not find {}={name}: {}: {e}", class.kind(), path.display());
                }
            }
        }
    }

    /// Offers it no more.
    pub(crate) fn remove(&self, classes: &[Class], name: &str) {
        for &class in classes {
            let _ = std::fs::remove_file(self.path(class, name));
        }
    }

    /// The file of a device.
    fn device(&self, dir: &Path, class: Class, name: &str) -> String {
        let device = format!("{}={name}", class.kind());
        let hook = json!({
            "hookName": "createRuntime",
            "path": self.program,
            "args": ["unirdma", "--dir", dir, "cdi", "hook", device],
            "timeout": 60,
        });
        // The fast way for private memory of programs with threads; most engines refuse the system call.
        let userfaultfd = Path::new("/dev/userfaultfd");
        let nodes: Vec<_> =
            userfaultfd.exists().then(|| json!({ "path": userfaultfd, "fileMode": 0o666 })).into_iter().collect();
        let device = json!({ "name": name, "containerEdits": { "hooks": [hook], "deviceNodes": nodes } });
        let file = json!({ "cdiVersion": "0.5.0", "kind": class.kind(), "devices": [device] });
        format!("{file:#}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_made_and_removed_and_others_stay() {
        let directory = std::env::temp_dir().join(format!("unirdma-cdi-{}/new", std::process::id()));
        let cdi = Cdi { directory: directory.clone(), program: "/usr/bin/unirdma".into() };
        let names = || {
            let all = std::fs::read_dir(&directory).unwrap().flatten();
            let mut all: Vec<_> = all.map(|e| e.file_name().into_string().unwrap()).collect();
            all.sort();
            all
        };
        std::fs::create_dir_all(&directory).unwrap();
        cdi.clear().unwrap();
        std::fs::write(directory.join("vendor.com-gpu.json"), "{}").unwrap();
        cdi.put(Path::new("/run/unirdma"), &[Class::Vrnic, Class::VrnicPreload], "a");
        cdi.put(Path::new("/run/unirdma"), &[Class::Vrnic], "no-device.");
        cdi.put(Path::new("/run/unirdma"), &[Class::Group], "eth0-blue");
        cdi.put(Path::new("/run/unirdma"), &[Class::GroupEth0], "blue");
        let ours = [
            "unirdma.io-group-eth0=blue.json",
            "unirdma.io-group=eth0-blue.json",
            "unirdma.io-vrnic-preload=a.json",
            "unirdma.io-vrnic=a.json",
        ];
        assert_eq!(names(), [&ours[..], &["vendor.com-gpu.json"]].concat());
        let text = std::fs::read_to_string(directory.join(ours[3])).unwrap();
        let file: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(file["kind"], "unirdma.io/vrnic");
        assert_eq!(file["devices"][0]["name"], "a");
        let hook = &file["devices"][0]["containerEdits"]["hooks"][0];
        assert_eq!(hook["args"], json!(["unirdma", "--dir", "/run/unirdma", "cdi", "hook", "unirdma.io/vrnic=a"]));
        cdi.remove(&[Class::Vrnic], "a");
        assert_eq!(names(), [&ours[..3], &["vendor.com-gpu.json"]].concat());
        cdi.clear().unwrap();
        assert_eq!(names(), ["vendor.com-gpu.json"]);
        std::fs::remove_dir_all(directory.parent().unwrap()).unwrap();
    }
}
