//! Questions to the virtual layer whose answers are vRNICs.

use std::io;

use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_supervisor::Client;
use unirdma_supervisor::admin::{Request, Response};

/// Sends a request whose answer is a vRNIC.
pub(crate) fn ask(client: &mut Client, request: &Request) -> io::Result<VrnicInfo> {
    match client.ask(request, None)? {
        Response::Vrnic(info) => Ok(*info),
        _ => Err(io::Error::other("unexpected answer of the virtual layer")),
    }
}

/// A vRNIC, as the virtual layer shows it.
pub(crate) fn show(client: &mut Client, name: &str) -> io::Result<VrnicInfo> {
    ask(client, &Request::VrnicShow { name: name.into() })
}

/// The names of all vRNICs.
pub(crate) fn names(client: &mut Client) -> io::Result<Vec<String>> {
    match client.ask(&Request::VrnicList, None)? {
        Response::Vrnics(all) => Ok(all.into_iter().map(|v| v.name).collect()),
        _ => Err(io::Error::other("unexpected answer of the virtual layer")),
    }
}

/// All vRNICs, except those that are removed meanwhile.
pub(crate) fn all(client: &mut Client) -> io::Result<Vec<VrnicInfo>> {
    let names = names(client)?;
    Ok(names.iter().filter_map(|name| show(client, name).ok()).collect())
}
