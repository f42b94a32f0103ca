//! The vRNICs whose programs may ask for VFs, and what is known of each before a program asks.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use unirdma_device::lock;
use unirdma_formats::Gid;
use unirdma_ipc::vrnic::{Way, WayInfo};
use unirdma_rnic::{Share, VfUse};
use unirdma_vf::{Purpose, Refusal, Request};

use super::Pool;

/// Answers programs until the lender is stopped.
pub(super) type Serve = Box<dyn FnOnce(Arc<Lender>) + Send>;

/// Bits a second in a Mbit/s.
const MBIT: u64 = 1_000_000;

/// A vRNIC whose programs may ask for VFs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Borrower {
    pub way: Way,
    /// The container or virtual machine that it belongs to.
    pub instance: String,
    pub group: String,
    /// The VLAN of its group; 0: none.
    pub vlan: u16,
    /// Its group has a secret.
    pub is_sealed: bool,
    pub share: Share,
    /// Programs that may use it at a time.
    pub max_programs: u32,
}

/// Why a vRNIC's programs get no VF, known before they ask, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LendError {
    #[error("this host has no pool of VFs; `unirdma host --vf-pf NETDEV,vfs=N,vlan,FIRST-ADDRESS/PREFIX` makes one")]
    NoPool,
    #[error("group {0} has a secret, and a VF does not encrypt; use a group without one, or the way soft")]
    Sealed(String),
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// The pool of VFs, for programs.
pub(crate) struct Lender {
    pub(super) pool: Option<Arc<Pool>>,
    pub(super) served: Mutex<BTreeMap<String, Served>>,
    /// The directory of all vRNICs' directories.
    pub(super) vrnics: PathBuf,
    /// Wakes the thread that answers programs.
    pub(super) wake: OwnedFd,
    /// The function of this thread, until it starts with the first vRNIC.
    serve: Mutex<Option<Serve>>,
    stopping: AtomicBool,
}

/// A vRNIC whose programs may ask, and the socket at which they do.
pub(super) struct Served {
    pub borrower: Borrower,
    pub listener: Arc<OwnedFd>,
}

impl Borrower {
    /// The request of a program of this vRNIC.
    pub(super) fn request(&self, vrnic: &str) -> Request {
        Request {
            instance: self.instance.clone(),
            vrnic: vrnic.into(),
            group: self.group.clone(),
            vlan: Some(self.vlan).filter(|v| *v != 0),
            rate_mbps: rate_mbps(&self.share),
            pf: None,
            purpose: Purpose::Verbs,
            when_dry: None,
        }
    }
}

/// A rate for a VF, which takes whole Mbit/s; 0: no limit.
pub(super) fn rate_mbps(share: &Share) -> u32 {
    u32::try_from(share.rate_bps.div_ceil(MBIT)).unwrap_or(u32::MAX)
}

impl Lender {
    /// `dir` is the virtual layer's.
    ///
    /// # Errors
    /// There is no descriptor.
    pub fn new(pool: Option<Arc<Pool>>, dir: &Path) -> io::Result<Lender> {
        Ok(Lender {
            pool,
            served: Mutex::default(),
            vrnics: dir.join("vrnics"),
            wake: super::event()?,
            serve: Mutex::default(),
            stopping: AtomicBool::new(false),
        })
    }

    /// Answers programs from now on. The thread for it starts with the first vRNIC whose programs may ask.
    pub(super) fn start(self: &Arc<Self>, serve: Serve) {
        *lock(&self.serve) = Some(serve);
        self.start_thread();
    }

    fn start_thread(self: &Arc<Self>) {
        let is_idle = lock(&self.served).is_empty();
        let Some(serve) = lock(&self.serve).take_if(|_| !is_idle) else { return };
        let me = self.clone();
        if let Err(e) = std::thread::Builder::new().name("leases".into()).spawn(move || serve(me)) {
            tracing::error!(error = %e, "no thread for leases, so programs get no VFs");
        }
    }

    /// Ends the thread.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        super::signal(&self.wake);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Serves the programs of a vRNIC that connect to this socket.
    pub fn add(self: &Arc<Self>, vrnic: &str, borrower: Borrower, listener: OwnedFd) {
        lock(&self.served).insert(vrnic.into(), Served { borrower, listener: Arc::new(listener) });
        self.start_thread();
        super::signal(&self.wake);
    }

    /// Ends what the programs of a vRNIC have, since it is removed.
    pub fn remove(&self, vrnic: &str) {
        lock(&self.served).remove(vrnic);
        super::signal(&self.wake);
    }

    /// Whether the programs of a vRNIC could have a VF if one is free.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, vrnic: &str, borrower: &Borrower) -> Result<(), LendError> {
        let pool = self.pool.as_ref().ok_or(LendError::NoPool)?;
        if borrower.is_sealed {
            return Err(LendError::Sealed(borrower.group.clone()));
        }
        Ok(pool.serves(&borrower.request(vrnic))?)
    }

    /// Changes what is known of a group.
    pub fn set_group(&self, group: &str, vlan: u16, is_sealed: bool) {
        for b in lock(&self.served).values_mut().map(|s| &mut s.borrower).filter(|b| b.group == group) {
            (b.vlan, b.is_sealed) = (vlan, is_sealed);
        }
    }

    /// Changes a vRNIC's share. A VF that its programs have gets the new rate, too.
    pub fn set_share(&self, vrnic: &str, share: Share) {
        if let Some(s) = lock(&self.served).get_mut(vrnic) {
            s.borrower.share = share;
        }
        if let Some(pool) = &self.pool {
            pool.set_rate(vrnic, rate_mbps(&share));
        }
    }

    /// The VF of a vRNIC, for its worker.
    pub fn vf_use(&self, vrnic: &str) -> VfUse {
        let asks = lock(&self.served).contains_key(vrnic);
        let vf = self.pool.as_ref().filter(|_| asks).and_then(|p| p.loan(vrnic)).map(|l| l.path);
        VfUse { asks, vf }
    }

    /// True if programs of a group have VFs.
    pub fn lends_to_group(&self, group: &str) -> bool {
        self.pool.as_ref().is_some_and(|p| p.lends_to_group(group))
    }

    /// The way of a vRNIC's programs.
    pub fn way(&self, vrnic: &str) -> WayInfo {
        let borrower = lock(&self.served).get(vrnic).map(|s| s.borrower.clone());
        let Some(borrower) = borrower else { return WayInfo::default() };
        let asked = borrower.way;
        if let Some(loan) = self.pool.as_ref().and_then(|p| p.loan(vrnic)) {
            let (vf, gid) = (Some(loan.vf.to_string()), Some(Gid(loan.path.gid).to_string()));
            let why = Some(not_held(&borrower.share));
            return WayInfo { asked, in_force: Way::Vf, why, vf, gid, contexts: loan.contexts };
        }
        let (in_force, why) = match self.check(vrnic, &borrower) {
            Ok(()) => (Way::Vf, Some(not_held(&borrower.share))),
            Err(e) => (Way::Soft, Some(e.to_string())),
        };
        WayInfo { asked, in_force, why, ..WayInfo::default() }
    }
}

/// The limits of a vRNIC that a VF does not hold.
fn not_held(share: &Share) -> String {
    let mut parts = vec!["limits of objects"];
    parts.extend((share.weight != Share::default().weight).then_some("--weight"));
    parts.extend((share.ops > 0).then_some("--ops"));
    format!("a VF does not hold {}", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use unirdma_vf::{Address, Config, Dry, Isolation, PfConfig};

    use super::super::tree::tests::Temporary;
    use super::*;

    fn borrower(group: &str, vlan: u16) -> Borrower {
        Borrower {
            way: Way::Auto,
            instance: "i".into(),
            group: group.into(),
            vlan,
            is_sealed: false,
            share: Share::default(),
            max_programs: 4,
        }
    }

    #[test]
    fn a_vrnic_without_a_vf_says_why() {
        let tree = Temporary::new();
        let addresses = vec![Address { addr: [10, 50, 0, 10].into(), prefix: 24 }];
        let pfs = vec![PfConfig { netdev: "lo".into(), vfs: 2, isolation: Isolation::Vlan, addresses, rxe: false }];
        let config = Config { pfs, when_dry: Dry::Soft, linger: Duration::ZERO };
        let (pool, _thread) = Pool::open_at(config, tree.0.sys.parent().unwrap(), tree.0.clone()).unwrap();
        let with = |pool: Option<Arc<Pool>>, borrower: Borrower| {
            let lender = Arc::new(Lender::new(pool, Path::new("/nowhere")).unwrap());
            let (listener, _) = std::os::unix::net::UnixStream::pair().unwrap();
            lender.add("a", borrower, listener.into());
            (lender.way("a"), lender.vf_use("a"))
        };
        let (way, vf_use) = with(None, borrower("blue", 7));
        assert_eq!((way.asked, way.in_force), (Way::Auto, Way::Soft));
        assert!(way.why.unwrap().starts_with("this host has no pool of VFs"));
        assert_eq!(vf_use, VfUse { asks: true, vf: None });
        let why = |b| with(Some(pool.clone()), b).0.why.unwrap_or_default();
        assert!(why(borrower("blue", 0)).starts_with("no PF serves the group `blue`"));
        assert!(why(Borrower { is_sealed: true, ..borrower("blue", 7) }).contains("does not encrypt"));
        let share = Share { ops: 5, weight: 7, ..Share::default() };
        assert_eq!(
            why(Borrower { share, ..borrower("blue", 7) }),
            "a VF does not hold limits of objects, --weight, --ops"
        );
        let (way, _) = with(Some(pool), borrower("blue", 7));
        assert_eq!(
            (way.in_force, way.why.as_deref(), way.vf),
            (Way::Vf, Some("a VF does not hold limits of objects"), None)
        );
        assert_eq!(Lender::new(None, Path::new("/nowhere")).unwrap().way("a"), WayInfo::default());
    }

    #[test]
    fn a_vf_has_whole_megabits() {
        let rate = |rate_bps| rate_mbps(&Share { rate_bps, ..Share::default() });
        assert_eq!((rate(0), rate(1), rate(1_000_000), rate(1_000_001)), (0, 1, 1, 2));
        assert_eq!(rate(u64::MAX), u32::MAX);
    }
}
