//! The fixture of tests of hostile behaviour.

use std::path::PathBuf;

use unirdma_formats::WrOpcode;
use unirdma_supervisor::admin::Request;

use crate::{Program, TestHost, connect};

/// A virtual layer with two good programs that are connected, and a third vRNIC for a hostile one.
pub struct Scene {
    /// The virtual layer.
    pub host: TestHost,
    /// The good programs.
    pub good: (Program, Program),
    /// The socket of the third vRNIC, `evil`.
    pub evil: PathBuf,
}

impl Scene {
    /// Starts the virtual layer and the good programs.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn start() -> Self {
        let host = TestHost::start();
        let (a, b) = (host.add("a", "10.0.0.1"), host.add("b", "10.0.0.2"));
        let evil = host.add("evil", "10.0.0.3");
        let good = (Program::new(&a, 1 << 16), Program::new(&b, 1 << 16));
        connect(&good.0, &good.1);
        Scene { host, good, evil }
    }

    /// Checks that the good programs can still communicate and that the virtual layer still answers.
    ///
    /// # Panics
    /// If one of them fails.
    pub fn check(&self) {
        let (a, b) = &self.good;
        a.post(WrOpcode::Write, b, 0, 4096).expect("post");
        assert_eq!(a.wait().expect("a completion").status, 0);
        self.host.ask(&Request::Status).expect("the host answers");
    }
}
