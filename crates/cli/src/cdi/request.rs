//! The request of an engine: the container's state and configuration, as the OCI runtime specification has them.

use std::io::{self, Read};
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use unirdma_supervisor::cdi::Class;

use crate::errors::context;

/// Longest state, bytes.
const MOST: u64 = 1 << 20;

/// A text that names no device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("give a device, such as unirdma.io/vrnic=a")]
pub(crate) struct NoDevice;

/// A device that a container asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub class: Class,
    /// A vRNIC, or a group.
    pub name: String,
}

impl FromStr for Asked {
    type Err = NoDevice;

    fn from_str(device: &str) -> Result<Asked, NoDevice> {
        let classes = Class::ALL.into_iter();
        let found = classes.filter_map(|class| Some((class, device.strip_prefix(&class.kind())?.strip_prefix('=')?)));
        let mut found = found.filter(|(_, name)| !name.is_empty());
        let (class, name) = found.next().ok_or(NoDevice)?;
        Ok(Asked { class, name: name.into() })
    }
}

/// Devices with commas between them.
pub(super) fn list(devices: &str) -> Result<Box<[Asked]>, NoDevice> {
    devices.split(',').map(str::parse).collect()
}

/// A container that an engine makes.
pub(super) struct Container {
    /// Its first process.
    pub pid: i32,
    /// Its root directory, as its mount namespace has it.
    pub root: PathBuf,
    /// The devices that it asks for, of this virtual layer.
    pub devices: Vec<Asked>,
}

#[derive(Deserialize)]
struct State {
    #[serde(default)]
    pid: i32,
    bundle: PathBuf,
}

#[derive(Deserialize)]
struct Config {
    root: Root,
    #[serde(default)]
    hooks: Hooks,
}

#[derive(Deserialize)]
struct Root {
    path: PathBuf,
}

#[derive(Default, Deserialize)]
struct Hooks {
    #[serde(default, rename = "createRuntime")]
    create_runtime: Vec<Hook>,
}

#[derive(Deserialize)]
struct Hook {
    #[serde(default)]
    args: Vec<String>,
}

impl Container {
    /// Reads the state, and the configuration to which it leads. `device`: the argument of this process.
    pub fn read(state: impl Read, device: &Asked) -> io::Result<Container> {
        let state: State = serde_json::from_reader(state.take(MOST)).map_err(|e| {
            let hint = "container engines run this, by files of `unirdma host --cdi`";
            io::Error::other(format!("standard input is not a container's state: {e} ({hint})"))
        })?;
        let path = state.bundle.join("config.json");
        let config = std::fs::read(&path).map_err(context(format!("cannot read {}", path.display())))?;
        let config: Config = serde_json::from_slice(&config)
            .map_err(|e| io::Error::other(format!("{} is not a container's configuration: {e}", path.display())))?;
        let own: Vec<String> = std::env::args().collect();
        let mut container = Container::of(&state, &config, &own);
        if container.devices.is_empty() {
            // Somebody else has written the hook.
            container.devices.push(device.clone());
        }
        Ok(container)
    }

    /// A container of LXC, which runs its hook when the container's root directory is its own.
    pub fn of_lxc(devices: &[Asked]) -> io::Result<Container> {
        let pid = std::env::var("LXC_PID").ok().and_then(|pid| pid.parse().ok());
        let pid = pid.ok_or_else(|| io::Error::other("LXC_PID names no process; this is for lxc.hook.start-host"))?;
        Ok(Container { pid, root: "/".into(), devices: devices.to_vec() })
    }

    /// `own`: the arguments of this process. Those of the hooks of other devices differ in the last one.
    fn of(state: &State, config: &Config, own: &[String]) -> Container {
        let alike = &own[..own.len().saturating_sub(1)];
        let hooks = config.hooks.create_runtime.iter();
        let devices = hooks.filter_map(|h| h.args.split_last().filter(|(_, others)| *others == alike)?.0.parse().ok());
        // A path that is not absolute is relative to the bundle.
        Container { pid: state.pid, root: state.bundle.join(&config.root.path), devices: devices.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        let asked = |device: &str| device.parse::<Asked>();
        assert_eq!(asked("unirdma.io/vrnic=a"), Ok(Asked { class: Class::Vrnic, name: "a".into() }));
        assert_eq!(asked("unirdma.io/vrnic-preload=a").unwrap().class, Class::VrnicPreload);
        assert_eq!(asked("unirdma.io/group=blue").unwrap().name, "blue");
        assert_eq!(asked("unirdma.io/group-eth0=blue").unwrap().class, Class::GroupEth0);
        for wrong in ["", "a", "unirdma.io/vrnic", "unirdma.io/vrnic=", "unirdma.io/nic=a", "nvidia.com/gpu=0"] {
            assert!(asked(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_devices_of_one_virtual_layer_are_found_in_order() {
        let args =
            |dir: &str, device: &str| ["unirdma", "--dir", dir, "cdi", "hook", device].map(String::from).to_vec();
        let hook = |args: &[String]| serde_json::json!({ "path": "/usr/bin/unirdma", "args": args });
        let config = serde_json::json!({
            "root": { "path": "rootfs" },
            "hooks": { "createRuntime": [
                hook(&args("/d", "unirdma.io/vrnic=b")),
                { "path": "/usr/bin/other" },
                hook(&args("/elsewhere", "unirdma.io/vrnic=c")),
                hook(&args("/d", "unirdma.io/group=blue")),
            ] },
        });
        let config: Config = serde_json::from_value(config).unwrap();
        let state = State { pid: 7, bundle: "/bundle".into() };
        let container = Container::of(&state, &config, &args("/d", "unirdma.io/group=blue"));
        let names: Vec<_> = container.devices.iter().map(|d| &*d.name).collect();
        assert_eq!((names, container.root), (vec!["b", "blue"], PathBuf::from("/bundle/rootfs")));
    }
}
