//! Watching: all objects, then each change, and what hosts report. Nothing is queued for a watcher but the few messages under way; one that falls
//! behind what the centre remembers is cut off.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use unirdma_fleet::{Actor, Refusal, v1};

use crate::shared::{Shared, now_ms};

/// How long a watcher may take to read.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often states are told.
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
    let permit = shared.watchers.clone().try_acquire_owned();
    let permit = permit.map_err(|_| Refusal::full("too many watch already; end one of them"))?;
    let all = v1::GetRequest { kind: request.kind, group: request.group.clone(), limit: 1, ..Default::default() };
    shared.centre().get(&actor, &all, now_ms())?;
    let (send, receive) = mpsc::channel(4);
    let shared = shared.clone();
    tokio::spawn(async move {
        let _permit = permit;
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
            // Objects that change meanwhile are told again as changes.
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
                let centre = shared.centre();
                let Some(changes) = centre.changes_since(actor, request, told) else {
                    return Some(Refusal::full("too slow for the changes that came meanwhile; watch anew"));
                };
                told = centre.revision();
                m.changes = changes;
            }
            _ = states.tick() => {
                // A token that was revoked, or has expired, ends what was begun with it.
                if let Err(e) = shared.actor(Some(token)) {
                    return Some(e);
                }
                let centre = shared.centre();
                (reported, m.hosts, m.vrnics) = centre.states_since(actor, reported, now_ms());
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
