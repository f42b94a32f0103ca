//! The order of the sockets in each reuseport group, in a file. Only the kernel knows it otherwise, and does not reveal
//! it. The successor of a killed supervisor reads the file, and takes over the sockets that the workers still have.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::open::Kind;
use super::reuseport::ReuseportGroup;

/// Name of the file in the directory of the virtual layer. It is removed when the virtual layer ends with all its
/// workers.
pub(crate) const ORDER_FILE: &str = "sockets";

/// A reuseport group: its groups in the kernel's order, each with the inode of its socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Order {
    pub kind: Kind,
    pub address: IpAddr,
    pub sockets: Vec<(String, u64)>,
}

/// The file, and its content.
pub(super) struct Orders {
    file: PathBuf,
    written: Vec<Order>,
}

impl Orders {
    /// The file in a directory. Nothing is written yet.
    pub fn new(dir: &Path) -> Self {
        Orders { file: dir.join(ORDER_FILE), written: Vec::new() }
    }

    /// Reads the file.
    ///
    /// # Errors
    /// The file does not exist, or is damaged.
    pub fn read(&self) -> io::Result<Vec<Order>> {
        let text = std::fs::read_to_string(&self.file)?;
        serde_json::from_str(&text).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    /// Writes the order of these reuseport groups, if it has changed. The file is complete at any time.
    ///
    /// # Errors
    /// Errors of files.
    pub fn write(&mut self, reuseports: &[ReuseportGroup]) -> io::Result<()> {
        let order = |l: &ReuseportGroup| {
            let sockets = l.members().map(|m| (m.group.clone(), m.inode)).collect();
            Order { kind: l.kind, address: l.address, sockets }
        };
        let orders: Vec<Order> = reuseports.iter().map(order).collect();
        if orders == self.written {
            return Ok(());
        }
        let new = self.file.with_extension("new");
        std::fs::write(&new, serde_json::to_string(&orders).map_err(io::Error::other)?)?;
        std::fs::rename(&new, &self.file)?;
        self.written = orders;
        Ok(())
    }
}
