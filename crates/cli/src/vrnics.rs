//! Questions to the virtual layer whose answers are vRNICs.

use std::io;
use std::sync::mpsc::channel;
use std::time::Duration;

use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_supervisor::Client;
use unirdma_supervisor::admin::{Names, Request, Response};

/// Whether the error of a request means that the virtual layer has ended, or closed the connection.
pub(crate) fn has_ended(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

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

/// The names of all vRNICs and groups.
pub(crate) fn all_names(client: &mut Client) -> io::Result<Names> {
    match client.ask(&Request::Names, None)? {
        Response::Names(all) => Ok(all),
        _ => Err(io::Error::other("unexpected answer of the virtual layer")),
    }
}

/// The names of all vRNICs.
pub(crate) fn names(client: &mut Client) -> io::Result<Vec<String>> {
    Ok(all_names(client)?.vrnics)
}

/// All vRNICs, except those that are removed meanwhile.
pub(crate) fn all(client: &mut Client) -> io::Result<Vec<VrnicInfo>> {
    let names = names(client)?;
    Ok(names.iter().filter_map(|name| show(client, name).ok()).collect())
}

/// The result of a question, if it comes in time. A question that takes longer goes on until this process ends.
pub(crate) fn in_time<T: Send + 'static>(limit: Duration, question: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (answer, answers) = channel();
    std::thread::spawn(move || answer.send(question()));
    answers.recv_timeout(limit).ok()
}
