//! The other centres of the fleet: the connections to them, and the exchange of news of hosts with them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::Status;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use unirdma_fleet::v1::centres_client::CentresClient;
use unirdma_fleet::{root_cause, v1};

use crate::shared::{Shared, now_ms};

/// Time limits for connecting to another centre, for its answer to a ping, and for its reading of a message.
const CONNECT: Duration = Duration::from_secs(3);
const PING: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval of news of hosts to other centres.
const NEWS: Duration = Duration::from_millis(500);

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
    /// Why there is none, in one line. Nothing was sent.
    pub async fn channel(&self, url: &str) -> Result<Channel, String> {
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

    async fn connect(&self, url: &str) -> Result<Channel, String> {
        let mut endpoint = Endpoint::from_shared(url.to_owned())
            .map_err(|e| e.to_string())?
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(CONNECT)
            .keep_alive_while_idle(true);
        if let Some(tls) = self.tls.clone().filter(|_| url.starts_with("https://")) {
            endpoint = endpoint.tls_config(tls).map_err(|e| e.to_string())?;
        }
        let connected = tokio::time::timeout(2 * CONNECT, endpoint.connect()).await;
        connected.map_err(|_| "it does not answer".to_owned())?.map_err(|e| root_cause(&e))
    }
}

/// Receives another centre's news of its hosts, until the task is aborted.
pub(crate) async fn listen(shared: Arc<Shared>, id: String, url: String) {
    loop {
        let why = hear(&shared, &id, &url).await;
        shared.centre().lose_centre(&id);
        shared.others.forget(&url);
        tracing::warn!("the centre at {url} is not heard: {why}");
        tokio::time::sleep(NEWS).await;
    }
}

async fn hear(shared: &Arc<Shared>, id: &str, url: &str) -> String {
    let channel = match shared.others.channel(url).await {
        Ok(channel) => channel,
        Err(e) => return e,
    };
    let mut client = CentresClient::new(channel).max_decoding_message_size(usize::MAX);
    let mut news = match client.live(v1::LiveRequest {}).await {
        Ok(news) => news.into_inner(),
        Err(e) => return e.message().to_owned(),
    };
    tracing::info!("the centre at {url} is here");
    loop {
        match news.message().await {
            Ok(Some(news)) => {
                let cut = shared.centre().hear_centre(id, news, now_ms());
                cut.iter().for_each(|host| shared.evict(host));
            }
            Ok(None) => return "it has ended the connection".into(),
            Err(e) => return e.message().to_owned(),
        }
    }
}

/// Sends news of this centre's hosts to another centre.
pub(crate) fn tell(shared: Arc<Shared>) -> mpsc::Receiver<Result<v1::LiveNews, Status>> {
    let (send, receive) = mpsc::channel(2);
    tokio::spawn(async move {
        let mut told = 0;
        let mut ticks = tokio::time::interval(NEWS);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = send.closed() => return,
            }
            let (now, news) = shared.centre().live_since(told, now_ms());
            told = now;
            if news.hosts.is_empty() && news.vrnics.is_empty() {
                continue;
            }
            if !matches!(tokio::time::timeout(PATIENCE, send.send(Ok(news))).await, Ok(Ok(()))) {
                return;
            }
        }
    });
    receive
}
