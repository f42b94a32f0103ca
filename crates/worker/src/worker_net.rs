//! A worker's port and tunnel, made from the descriptors that it has received.

use std::io;
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use unirdma_formats::net::FIRST_SOURCE_PORT;
use unirdma_ipc::network::{Enrolment, Role};

use crate::encryption::{Seals, SessionTable};
use crate::fault_injector::FaultyPort;
use crate::port::{PacketPort, Port, UdpPort};
use crate::tunnel::Tunnel;

/// Makes a worker's port and tunnel from the descriptors received with its configuration.
///
/// # Errors
/// The descriptors do not match the configuration.
pub fn open_worker(e: &Enrolment, sockets: Vec<OwnedFd>) -> io::Result<(Box<dyn Port>, Tunnel)> {
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    if sockets.len() != e.roles.len() {
        let text = format!("group {} has {} sockets, but {} came", e.group, e.roles.len(), sockets.len());
        return Err(wrong(text));
    }
    let table = Arc::new(SessionTable::default());
    let seals = Seals::new(table.clone(), &e.group);
    let mut port = UdpPort::new(e.first_port.unwrap_or(FIRST_SOURCE_PORT), e.icrc, seals);
    let (mut tunnel, mut packets) = (Vec::new(), Vec::new());
    for (&role, fd) in e.roles.iter().zip(sockets) {
        match role {
            Role::Roce(address) => port.add(address, fd.into()),
            Role::Tunnel(address) => {
                let udp = Arc::new(UdpSocket::from(fd));
                port.add_tunnel(address, udp.clone());
                tunnel.push((address, udp));
            }
            Role::Flow(address, flow) => {
                if !port.add_flow(address, flow, fd.into()) {
                    return Err(wrong(format!("there is no flow {flow} of {address}")));
                }
            }
            Role::Packets(address) => packets.push((address, fd)),
        }
    }
    let port: Box<dyn Port> =
        if packets.is_empty() { Box::new(port) } else { Box::new(PacketPort::new(port, packets)) };
    let port = match e.faults {
        Some(percent) => Box::new(FaultyPort::new(port, percent, 1)),
        None => port,
    };
    Ok((port, Tunnel::new(tunnel, table)?))
}
