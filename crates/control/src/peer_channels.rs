//! Connections to the other centres of the fleet.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use unirdma_fleet::root_cause;

/// Time limits for connecting to another centre, and for its answer to a ping.
const CONNECT: Duration = Duration::from_secs(3);
const PING: Duration = Duration::from_secs(2);

/// Why there is no connection to another centre.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChannelError {
    /// The URL or the TLS settings are wrong, or the connection fails.
    #[error("{}", root_cause(.0))]
    Transport(#[from] tonic::transport::Error),
    /// There is no answer within the time limit.
    #[error("it does not answer")]
    Silent,
}

/// Connections to other centres, by their URLs.
pub(crate) struct Others {
    tls: Option<ClientTlsConfig>,
    channels: Mutex<HashMap<String, Channel>>,
}

impl Others {
    /// `tls`: the client certificate of this centre. `None`: plain text.
    pub fn new(tls: Option<ClientTlsConfig>) -> Others {
        Others { tls, channels: Mutex::default() }
    }

    /// A connection to a centre.
    ///
    /// # Errors
    /// Why there is none. Nothing was sent.
    pub async fn channel(&self, url: &str) -> Result<Channel, ChannelError> {
        let locked = || self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = locked().get(url) {
            return Ok(channel.clone());
        }
        let channel = self.connect(url).await?;
        locked().insert(url.into(), channel.clone());
        Ok(channel)
    }

    /// Drops a connection that was lost. The next call makes a new one.
    pub fn forget(&self, url: &str) {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).remove(url);
    }

    async fn connect(&self, url: &str) -> Result<Channel, ChannelError> {
        let mut endpoint = Endpoint::from_shared(url.to_owned())?
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(CONNECT)
            .keep_alive_while_idle(true);
        if let Some(tls) = self.tls.clone().filter(|_| url.starts_with("https://")) {
            endpoint = endpoint.tls_config(tls)?;
        }
        let connected = tokio::time::timeout(2 * CONNECT, endpoint.connect()).await;
        Ok(connected.map_err(|_| ChannelError::Silent)??)
    }
}
