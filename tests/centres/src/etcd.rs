//! An etcd for the tests: one member in plain text, or three that require a certificate and a password.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use harness::{Output, Result, require};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

use super::{Process, free_ports, wait_until};

/// The user of the centres, who may use only [`PREFIX`], and the password.
const USER: &str = "unirdma";
pub(super) const PASSWORD: &str = "not-to-be-guessed";
/// The administrator of etcd, and the password.
const ROOT: &str = "root";

/// Key prefix of the centres' fleet.
pub(super) const PREFIX: &str = "fleet";

/// A process of etcd, with its ports for clients and for the other members.
struct Member {
    ports: [u16; 2],
    /// `None` after it was killed.
    process: Option<Process>,
}

impl Member {
    fn wait_up(&self) -> Result<()> {
        wait_until(|| TcpStream::connect(("127.0.0.1", self.ports[0])).is_ok(), "etcd does not answer")
    }
}

/// An etcd of its own.
pub struct Etcd {
    dir: PathBuf,
    members: Vec<Member>,
    /// Clients need a certificate and a password.
    secured: bool,
}

impl Etcd {
    /// Starts Debian's etcd with its data in `dir`.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start(dir: &Path) -> Result<Etcd> {
        Etcd::of(dir, 1, false)
    }

    /// Starts three members that speak TLS with clients who have a certificate and a password.
    ///
    /// # Errors
    /// If they do not come up.
    pub fn start_secured(dir: &Path) -> Result<Etcd> {
        certificates(dir).map_err(|e| format!("certificates of etcd: {e}"))?;
        let etcd = Etcd::of(dir, 3, true)?;
        wait_until(
            || etcd.ctl(false, &["user", "add", &format!("{ROOT}:{ROOT}")]).ok(),
            "etcd's members do not work together",
        )?;
        let keys = format!("/{PREFIX}/");
        for args in [
            &["role", "add", ROOT] as &[&str],
            &["user", "grant-role", ROOT, ROOT],
            &["user", "add", &format!("{USER}:{PASSWORD}")],
            &["role", "add", USER],
            &["role", "grant-permission", "--prefix=true", USER, "readwrite", &keys],
            &["user", "grant-role", USER, USER],
            &["auth", "enable"],
        ] {
            let o = etcd.ctl(false, args);
            require(o.ok(), format!("etcdctl {}: {}", args.join(" "), o.text))?;
        }
        Ok(etcd)
    }

    fn of(dir: &Path, members: usize, secured: bool) -> Result<Etcd> {
        let ports = free_ports(2 * members)?;
        let members = ports.chunks_exact(2).map(|p| Member { ports: [p[0], p[1]], process: None }).collect();
        let mut etcd = Etcd { dir: dir.into(), members, secured };
        for n in 0..etcd.members.len() {
            etcd.start_member(n)?;
        }
        etcd.members.iter().try_for_each(Member::wait_up)?;
        Ok(etcd)
    }

    /// Starts a member.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_member(&mut self, n: usize) -> Result<()> {
        let scheme = if self.secured { "https" } else { "http" };
        let peer = |m: &Member| format!("http://127.0.0.1:{}", m.ports[1]);
        let all: Vec<String> = self.members.iter().enumerate().map(|(n, m)| format!("e{n}={}", peer(m))).collect();
        let (clients, peers) = (format!("{scheme}://127.0.0.1:{}", self.members[n].ports[0]), peer(&self.members[n]));
        let mut c = Command::new("etcd");
        c.arg("--data-dir").arg(self.dir.join(format!("etcd{n}")));
        c.args(["--name", &format!("e{n}"), "--logger", "zap"]);
        c.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
        c.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        c.args(["--initial-cluster", &all.join(",")]);
        if self.secured {
            c.arg("--client-cert-auth").arg("--trusted-ca-file").arg(self.dir.join("etcd-ca.pem"));
            c.arg("--cert-file").arg(self.dir.join("etcd.pem")).arg("--key-file").arg(self.dir.join("etcd-key.pem"));
        }
        self.members[n].process = Some(Process::start(c, &self.dir.join(format!("etcd{n}.log")))?);
        Ok(())
    }

    /// `HOST:PORT` of each member, separated by commas.
    pub fn address(&self) -> String {
        self.addresses("")
    }

    /// The addresses of all members with a scheme, separated by commas.
    fn addresses(&self, scheme: &str) -> String {
        let all: Vec<String> = self.members.iter().map(|m| format!("{scheme}127.0.0.1:{}", m.ports[0])).collect();
        all.join(",")
    }

    /// Writes the credentials for etcd into a centre's directory.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn log_in_from(&self, centre: &Path, password: &str) -> std::io::Result<()> {
        for file in ["etcd-ca.pem", "etcd.pem", "etcd-key.pem"] {
            std::fs::copy(self.dir.join(file), centre.join(file))?;
        }
        let text = format!(
            "authority = \"etcd-ca.pem\"\ncertificate = \"etcd.pem\"\nkey = \"etcd-key.pem\"\nuser = \"{USER}\"\npassword = \"{password}\"\n"
        );
        std::fs::write(centre.join("etcd.toml"), text)
    }

    /// Runs `etcdctl`. `by_password`: as the administrator, which is necessary once passwords are set.
    fn ctl(&self, by_password: bool, args: &[&str]) -> Output {
        let mut c = Command::new("etcdctl");
        c.env("ETCDCTL_API", "3").args(["--endpoints", &self.addresses("https://")]);
        if by_password {
            c.args(["--user", &format!("{ROOT}:{ROOT}")]);
        }
        c.arg("--cacert").arg(self.dir.join("etcd-ca.pem"));
        c.arg("--cert").arg(self.dir.join("etcd.pem")).arg("--key").arg(self.dir.join("etcd-key.pem"));
        Output::of(c.args(args))
    }

    /// Number of members.
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// The process of the first member.
    pub fn process(&self) -> Option<&std::process::Child> {
        self.members[0].process.as_ref().map(|p| &p.0)
    }

    /// Kills a member by SIGKILL.
    pub fn kill(&mut self, member: usize) {
        self.members[member].process = None;
    }

    /// Restarts a killed member, and waits until all are up.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start_again(&mut self, member: usize) -> Result<()> {
        self.start_member(member)?;
        self.members[member].wait_up()?;
        if self.secured {
            wait_until(|| self.ctl(true, &["endpoint", "health"]).ok(), "etcd's members do not come together again")?;
        }
        Ok(())
    }
}

/// An authority, and a certificate that members and clients both use.
fn certificates(dir: &Path) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let authority = params.self_signed(&key)?;
    std::fs::write(dir.join("etcd-ca.pem"), authority.pem())?;
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(["127.0.0.1".to_owned()])?;
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    std::fs::write(dir.join("etcd.pem"), params.signed_by(&key, &issuer)?.pem())?;
    std::fs::write(dir.join("etcd-key.pem"), key.serialize_pem())?;
    Ok(())
}
