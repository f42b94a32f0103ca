//! Watching: all objects, then each change, and the reports of hosts. Only the few messages under way are queued for a
//! watcher. A watcher that falls behind the centre's log of changes is cut off.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use unirdma_fleet::{Actor, Refusal, v1};

use crate::shared::{Shared, now_ms};

/// Time limit for a watcher's reading of a message.
const PATIENCE: Duration = Duration::from_secs(30);
/// Interval of reported states.
const STATES: Duration = Duration::from_secs(2);

type Sender = mpsc::Sender<Result<v1::WatchResponse, Refusal>>;

/// Begins to watch.
pub(crate) fn start(
    shared: &Arc<Shared>,
    token: Option<&str>,
    request: v1::WatchRequest,
) -> Result<ReceiverStream<Result<v1::WatchResponse, Refusal>>, Refusal> {
    let actor = shared.actor(token)?;
    let token = token.unwrap_or_default().to_owned();
    let place = shared.watchers.take(&actor)?;
    let all = v1::GetRequest { kind: request.kind, group: request.group.clone(), limit: 1, ..Default::default() };
    shared.centre().get(&actor, &all, now_ms())?;
    let (send, receive) = mpsc::channel(4);
    let shared = shared.clone();
    tokio::spawn(async move {
        let _place = place;
        if let Some(e) = run(&shared, &actor, &token, &request, &send).await {
            let _ = tokio::time::timeout(PATIENCE, send.send(Err(e))).await;
        }
    });
    Ok(ReceiverStream::new(receive))
}

async fn say(send: &Sender, m: v1::WatchResponse) -> bool {
    matches!(tokio::time::timeout(PATIENCE, send.send(Ok(m))).await, Ok(Ok(())))
}

async fn run(
    shared: &Arc<Shared>,
    actor: &Actor,
    token: &str,
    request: &v1::WatchRequest,
    send: &Sender,
) -> Option<Refusal> {
    let mut news = shared.revision.subscribe();
    let mut told = shared.centre().revision();
    for kind in [v1::Kind::Host, v1::Kind::Group, v1::Kind::Vrnic, v1::Kind::Rule] {
        if request.kind != i32::from(v1::Kind::Any) && request.kind != i32::from(kind) {
            continue;
        }
        let mut after = String::new();
        loop {
            // Objects that change meanwhile are sent again as changes.
            let q = v1::GetRequest {
                kind: kind.into(),
                group: request.group.clone(),
                after,
                limit: 500,
                ..Default::default()
            };
            let page = match shared.centre().get(actor, &q, now_ms()) {
                Ok(page) => page,
                Err(e) => return Some(e),
            };
            after =
                page.objects.last().and_then(|o| o.object.as_ref()).map(|o| o.name().to_owned()).unwrap_or_default();
            let changes = page.objects.into_iter().map(|o| v1::Change { before: None, after: Some(o) }).collect();
            if !say(send, v1::WatchResponse { revision: told, changes, ..Default::default() }).await {
                return None;
            }
            if !page.more {
                break;
            }
        }
    }
    if !say(send, v1::WatchResponse { revision: told, complete: true, ..Default::default() }).await {
        return None;
    }
    let mut states = tokio::time::interval(STATES);
    states.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut reported = 0;
    loop {
        let mut m = v1::WatchResponse::default();
        tokio::select! {
            changed = news.changed() => {
                if changed.is_err() {
                    return Some(Refusal::unavailable("the centre ends"));
                }
                let (changes, revision) = {
                    let centre = shared.centre();
                    (centre.changes_since(told), centre.revision())
                };
                let Some(changes) = changes else {
                    return Some(Refusal::full("too slow for the changes that came meanwhile; watch anew"));
                };
                told = revision;
                m.changes = changes.iter().filter_map(|c| c.told(actor, request)).collect();
            }
            _ = states.tick() => {
                // A revoked or expired token ends the watch that was begun with it.
                if let Err(e) = shared.actor(Some(token)) {
                    return Some(e);
                }
                let vrnics;
                (reported, m.hosts, vrnics) = shared.centre().states_since(actor, reported, now_ms());
                m.vrnics = vrnics.into_iter().map(Arc::unwrap_or_clone).collect();
            }
            () = send.closed() => return None,
        }
        m.revision = told;
        if m.changes.is_empty() && m.hosts.is_empty() && m.vrnics.is_empty() {
            continue;
        }
        if !say(send, m).await {
            return None;
        }
    }
}
