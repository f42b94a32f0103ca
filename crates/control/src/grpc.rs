//! The calls as gRPC.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use unirdma_fleet::v1::centres_server::Centres;
use unirdma_fleet::v1::fleet_server::Fleet;
use unirdma_fleet::v1::hosts_server::Hosts;
use unirdma_fleet::{Actor, Refusal, v1};

use crate::admit;
use crate::calls::{self, ByToken, Call, OperatorCall};
use crate::errors::status;
use crate::rate_limits::Party;
use crate::shared::{Shared, now_ms};
use crate::{host, peer_centres, watch};

/// The services of a centre.
#[derive(Clone)]
pub(crate) struct Services(pub Arc<Shared>);

type Answer<T> = Result<Response<T>, Status>;

fn answer<T>(result: Result<T, Refusal>) -> Answer<T> {
    result.map(Response::new).map_err(|e| status(&e))
}

impl Services {
    /// Makes a change. The answer carries the revision of the state afterwards.
    async fn change<C: Call>(&self, call: C, passed_on: bool) -> Answer<C::Answer> {
        let mut answer = Response::new(self.0.run(call, passed_on).await?);
        let revision = self.0.centre().revision().to_string();
        if let Ok(revision) = revision.parse() {
            answer.metadata_mut().insert(calls::REVISION, revision);
        }
        Ok(answer)
    }

    /// Makes a change that a caller with a token asks for.
    async fn wish<R: OperatorCall>(&self, r: Request<R>) -> Answer<R::Answer> {
        let actor = self.actor(&r)?;
        let token = token(&r).unwrap_or_default().to_owned();
        let passed_on = is_passed_on(&r);
        let done = self.change(ByToken { token, request: r.into_inner() }, passed_on).await;
        done.map_err(|e| self.0.told(&actor, e))
    }

    fn actor<T>(&self, request: &Request<T>) -> Result<Actor, Status> {
        self.0.actor(token(request)).map_err(|e| status(&e))
    }
}

fn token<T>(request: &Request<T>) -> Option<&str> {
    admit::token(request.metadata().as_ref())
}

/// The party that calls, as [`crate::admit`] found it.
fn party<T>(request: &Request<T>) -> Option<&Party> {
    request.extensions().get::<Party>()
}

/// Refuses callers that are not centres.
fn needs_centre<T>(request: &Request<T>) -> Result<(), Status> {
    match party(request) {
        Some(Party::Centre) => Ok(()),
        _ => Err(status(&Refusal::denied("only another centre of the fleet, by its certificate, may call this"))),
    }
}

/// Whether another centre passes the call on.
fn is_passed_on<T>(request: &Request<T>) -> bool {
    request.metadata().contains_key(calls::PASSED_ON)
}

type Out<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Fleet for Services {
    async fn apply(&self, r: Request<v1::ApplyRequest>) -> Answer<v1::ApplyResponse> {
        self.wish(r).await
    }

    async fn get(&self, r: Request<v1::GetRequest>) -> Answer<v1::GetResponse> {
        let actor = self.actor(&r)?;
        answer(self.0.centre().get(&actor, r.get_ref(), now_ms()))
    }

    async fn delete(&self, r: Request<v1::DeleteRequest>) -> Answer<v1::ApplyResponse> {
        self.wish(r).await
    }

    type WatchStream = Out<v1::WatchResponse>;

    async fn watch(&self, r: Request<v1::WatchRequest>) -> Answer<Self::WatchStream> {
        let stream = watch::start(&self.0, token(&r), r.get_ref().clone()).map_err(|e| status(&e))?;
        Ok(Response::new(Box::pin(tokio_stream::StreamExt::map(stream, |m| m.map_err(|e| status(&e))))))
    }

    async fn r#move(&self, r: Request<v1::MoveRequest>) -> Answer<v1::ApplyResponse> {
        self.wish(r).await
    }

    async fn rotate_secret(&self, r: Request<v1::RotateSecretRequest>) -> Answer<v1::RotateSecretResponse> {
        self.wish(r).await
    }

    async fn create_token(&self, r: Request<v1::CreateTokenRequest>) -> Answer<v1::CreateTokenResponse> {
        self.wish(r).await
    }

    async fn list_tokens(&self, r: Request<v1::ListTokensRequest>) -> Answer<v1::ListTokensResponse> {
        let actor = self.actor(&r)?;
        answer(self.0.centre().tokens(&actor))
    }

    async fn revoke_token(&self, r: Request<v1::RevokeTokenRequest>) -> Answer<v1::RevokeTokenResponse> {
        self.wish(r).await
    }

    async fn audit(&self, r: Request<v1::AuditRequest>) -> Answer<v1::AuditResponse> {
        let actor = self.actor(&r)?;
        answer(self.0.centre().audit(&actor, r.into_inner()))
    }

    async fn status(&self, r: Request<v1::StatusRequest>) -> Answer<v1::StatusResponse> {
        let actor = self.actor(&r)?;
        Ok(Response::new(self.0.status(&actor)))
    }
}

#[tonic::async_trait]
impl Hosts for Services {
    async fn join(&self, r: Request<v1::JoinRequest>) -> Answer<v1::JoinResponse> {
        let passed_on = is_passed_on(&r);
        // Anybody may call this. A wrong token costs a look at the state, and does not take a turn from other callers.
        let may = calls::may_join(r.get_ref(), &self.0.centre(), now_ms());
        may.inspect_err(|e| self.0.metrics.refused(e)).map_err(|e| status(&e))?;
        self.change(r.into_inner(), passed_on).await
    }

    type AttachStream = Out<v1::ToHost>;

    async fn attach(&self, r: Request<tonic::Streaming<v1::FromHost>>) -> Answer<Self::AttachStream> {
        let Some(Party::Host(host)) = party(&r).cloned() else {
            return Err(Status::unauthenticated("only a host of the fleet, by its certificate, may call this"));
        };
        let (send, receive) = mpsc::channel(4);
        tokio::spawn(host::serve(self.0.clone(), host, r.into_inner(), send));
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }
}

#[tonic::async_trait]
impl Centres for Services {
    async fn announce(&self, r: Request<v1::HostHello>) -> Answer<v1::HostAnnounced> {
        needs_centre(&r)?;
        self.change(r.into_inner(), true).await
    }

    async fn ask(&self, r: Request<v1::HostAsk>) -> Answer<v1::HostReply> {
        needs_centre(&r)?;
        self.change(r.into_inner(), true).await
    }

    type LiveStream = Out<v1::LiveNews>;

    async fn live(&self, r: Request<v1::LiveRequest>) -> Answer<Self::LiveStream> {
        needs_centre(&r)?;
        Ok(Response::new(Box::pin(ReceiverStream::new(peer_centres::tell(self.0.clone())))))
    }
}
