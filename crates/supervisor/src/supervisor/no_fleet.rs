//! In the place of `centre_orders` in a build without the feature `fleet`: a host belongs to no fleet.

use std::convert::Infallible;

use super::error::Reply;
use super::*;
use crate::admin::Request;
use crate::centre_config::{CentreConfig, CentreInfo};

/// Nothing.
pub(super) struct Fleet;

impl Fleet {
    pub fn new(_: &[IpAddr]) -> Fleet {
        Fleet
    }

    pub fn info(&self) -> Option<CentreInfo> {
        None
    }

    pub fn stop(&self) {}
}

/// # Errors
/// Always.
pub(crate) fn identity(_: &CentreConfig) -> io::Result<Infallible> {
    let text = "this program was built without the feature `fleet`: build it with `cargo build --release`";
    Err(io::Error::new(io::ErrorKind::Unsupported, text))
}

impl Supervisor {
    pub fn join(&self, identity: Infallible) -> io::Result<()> {
        match identity {}
    }

    pub(super) fn url_of_centre(&self) -> Option<String> {
        None
    }

    pub(super) fn answer_of_fleet(&self, _: &Request) -> Option<Reply> {
        None
    }
}
