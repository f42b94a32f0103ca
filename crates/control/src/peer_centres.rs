//! The exchange of news of hosts with the other centres of the fleet.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::Status;
use unirdma_fleet::v1;
use unirdma_fleet::v1::centres_client::CentresClient;

use crate::shared::{Shared, now_ms};

/// Time limit for another centre's reading of a message.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval of news of hosts to other centres.
const NEWS: Duration = Duration::from_millis(500);

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
        Err(e) => return e.to_string(),
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
