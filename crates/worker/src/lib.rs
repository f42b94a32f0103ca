//! A worker: the process that serves the vRNICs of one group. One thread owns the control path (vhost-user, control
//! queues, the supervisor's requests), one or more pollers execute work requests, and one thread switches Ethernet
//! frames.
//!
//! It may depend on the device and all layers below, and on the messages to and from a supervisor. It knows no
//! supervisor: it gets its configuration, its sockets and its listeners from whoever connects to it ([`work`]). One
//! vRNIC's frontend must never block another one's, and confinement ([`unirdma_confine`]) forbids it to open anything.

mod anti_spoof;
mod background;
mod cache_padded;
mod capture;
mod control;
mod encryption;
mod engine;
mod fault_injector;
mod liveness;
mod port;
mod rule_filter;
mod switch;
mod tunnel;
mod worker_net;

pub use control::{Alone, work};

// For tests of the supervisor's network: what a worker makes of the sockets that it gets.
pub use encryption::kind;
pub use port::Port;
pub use tunnel::{Tunnel, Tunneled};
pub use worker_net::open_worker;
