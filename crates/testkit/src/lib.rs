//! Test kit: a virtual layer in this process, well-behaved programs on it, a hostile frontend, and queues without a
//! driver.
//!
//! May depend on all layers; only tests and measurements depend on it. It must never touch a virtual layer that neither
//! it nor `cargo xtask` has started.

pub mod fuse;
mod hostile;
mod program;
pub mod rfc;
mod scene;
mod scripted;

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use unirdma_ipc::config::EngineConfig;
use unirdma_ipc::vrnic::AddVrnic;
use unirdma_supervisor::admin::{Request, Response};
use unirdma_supervisor::{
    Client, HostConfig, Isolation, RFC_SOCKET, VHOST_SOCKET, WireConfig, serve, vrnic_dir, wait_ready,
};
use unirdma_worker::{Alone, work};

pub use hostile::Hostile;
pub use program::{Program, connect};
pub use scene::Scene;
pub use scripted::{Queue, Scripted};

/// Workers that are threads of the test's process.
pub const WORKER_THREADS: Isolation = Isolation::Threads(|door| work(door, Alone::Ends));

fn new_dir() -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("unirdma-test-{}-{n}", std::process::id()))
}

/// A virtual layer in a directory of its own. Dropping this value stops it.
pub struct TestHost {
    dir: PathBuf,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl TestHost {
    /// Starts it.
    ///
    /// # Panics
    /// If it does not come up in ten seconds.
    pub fn start() -> Self {
        TestHost::start_with(EngineConfig::default())
    }

    /// Starts it with this configuration. QPNs and keys are the same each time unless `engine` has another seed.
    ///
    /// # Panics
    /// If it does not come up in ten seconds.
    pub fn start_with(engine: EngineConfig) -> Self {
        TestHost::start_in(new_dir(), engine, None)
    }

    /// Starts it with a port to other hosts at this address, and with `peers` as its peers file.
    ///
    /// # Panics
    /// If it does not come up in ten seconds.
    pub fn start_wired(address: IpAddr, peers: &str) -> Self {
        let dir = new_dir();
        let file = dir.join("peers");
        std::fs::create_dir(&dir).expect("directory");
        std::fs::write(&file, peers).expect("peers file");
        let wire = WireConfig::new(vec![address], Some(file));
        TestHost::start_in(dir, EngineConfig::default(), Some(wire))
    }

    fn start_in(dir: PathBuf, engine: EngineConfig, wire: Option<WireConfig>) -> Self {
        let stop = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("eventfd"));
        let config = HostConfig {
            dir: dir.clone(),
            engine: EngineConfig { seed: engine.seed.or(Some(7)), ..engine },
            wire,
            centre: None,
            isolation: WORKER_THREADS,
            user: None,
            metrics: None,
            vfs: None,
            cdi: None,
            admin_group: None,
            ends_unused: false,
        };
        let s = stop.clone();
        let thread = std::thread::spawn(move || serve(&config, s.as_fd(), || (), || ()));
        wait_ready(&dir, Duration::from_secs(10)).expect("the virtual layer starts");
        TestHost { dir, stop, thread: Some(thread) }
    }

    /// Sends an administrative request to the virtual layer.
    ///
    /// # Errors
    /// The error line of the virtual layer.
    pub fn ask(&self, r: &Request) -> std::io::Result<Response> {
        Client::connect(&self.dir)?.ask(r, None)
    }

    /// Adds a vRNIC. Returns the path of its socket.
    ///
    /// # Panics
    /// If that fails.
    pub fn add(&self, name: &str, ip: &str) -> PathBuf {
        self.add_with(name, ip, |_| ())
    }

    /// As [`TestHost::add`], with the request as `f` changes it.
    ///
    /// # Panics
    /// If that fails.
    pub fn add_with(&self, name: &str, ip: &str, f: impl FnOnce(&mut AddVrnic)) -> PathBuf {
        let mut add = AddVrnic { name: name.into(), ips: vec![ip.parse().expect("address")], ..AddVrnic::default() };
        f(&mut add);
        self.ask(&Request::VrnicAdd(add)).expect("vRNIC");
        vrnic_dir(&self.dir, name).join(VHOST_SOCKET)
    }

    /// Adds a vRNIC. Returns the path of its RFC socket.
    ///
    /// # Panics
    /// If that fails.
    pub fn add_rfc(&self, name: &str, ip: &str) -> PathBuf {
        self.add(name, ip).with_file_name(RFC_SOCKET)
    }

    /// Directory of the virtual layer.
    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    /// Stops the virtual layer. Its programs see a crash.
    ///
    /// # Panics
    /// If it ended with an error.
    pub fn stop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(t) = self.thread.take() {
            t.join().expect("the virtual layer's thread").expect("the virtual layer ends well");
        }
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
