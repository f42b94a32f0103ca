//! The calls as gRPC.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use unirdma_fleet::v1::fleet_server::Fleet;
use unirdma_fleet::v1::hosts_server::Hosts;
use unirdma_fleet::{Actor, Refusal, RefusalKind, v1};

use crate::serve::Caller;
use crate::shared::{Shared, now_ms};
use crate::{host, watch};

/// The services of a centre.
#[derive(Clone)]
pub(crate) struct Services(pub Arc<Shared>);

/// A refusal as gRPC says it.
pub(crate) fn status(e: &Refusal) -> Status {
    let code = match e.kind {
        RefusalKind::Invalid => tonic::Code::InvalidArgument,
        RefusalKind::NotFound => tonic::Code::NotFound,
        RefusalKind::Conflict => tonic::Code::FailedPrecondition,
        RefusalKind::Stale => tonic::Code::Aborted,
        RefusalKind::Unknown => tonic::Code::Unauthenticated,
        RefusalKind::Denied => tonic::Code::PermissionDenied,
        RefusalKind::Full => tonic::Code::ResourceExhausted,
        RefusalKind::Unavailable => tonic::Code::Unavailable,
    };
    Status::new(code, e.what.clone())
}

type Answer<T> = Result<Response<T>, Status>;

fn answer<T>(result: Result<T, Refusal>) -> Answer<T> {
    result.map(Response::new).map_err(|e| status(&e))
}

impl Services {
    fn actor<T>(&self, request: &Request<T>) -> Result<Actor, Status> {
        self.0.actor(token(request)).map_err(|e| status(&e))
    }
}

fn token<T>(request: &Request<T>) -> Option<&str> {
    let text = request.metadata().get("authorization").and_then(|v| v.to_str().ok());
    text.and_then(|t| t.strip_prefix("Bearer "))
}

type Out<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Fleet for Services {
    async fn apply(&self, r: Request<v1::ApplyRequest>) -> Answer<v1::ApplyResponse> {
        let actor = self.actor(&r)?;
        let r = r.into_inner();
        answer(self.0.change(move |c, now| c.apply(&actor, r, now)).await)
    }

    async fn get(&self, r: Request<v1::GetRequest>) -> Answer<v1::GetResponse> {
        let actor = self.actor(&r)?;
        answer(self.0.centre().get(&actor, r.get_ref(), now_ms()))
    }

    async fn delete(&self, r: Request<v1::DeleteRequest>) -> Answer<v1::ApplyResponse> {
        let actor = self.actor(&r)?;
        let r = r.into_inner();
        answer(self.0.change(move |c, now| c.delete(&actor, &r, now)).await)
    }

    type WatchStream = Out<v1::WatchResponse>;

    async fn watch(&self, r: Request<v1::WatchRequest>) -> Answer<Self::WatchStream> {
        let stream = watch::start(&self.0, token(&r), r.get_ref().clone()).map_err(|e| status(&e))?;
        Ok(Response::new(Box::pin(tokio_stream::StreamExt::map(stream, |m| m.map_err(|e| status(&e))))))
    }

    async fn r#move(&self, r: Request<v1::MoveRequest>) -> Answer<v1::ApplyResponse> {
        let actor = self.actor(&r)?;
        let r = r.into_inner();
        answer(self.0.change(move |c, now| c.move_vrnic(&actor, &r, now)).await)
    }

    async fn rotate_secret(&self, r: Request<v1::RotateSecretRequest>) -> Answer<v1::RotateSecretResponse> {
        let actor = self.actor(&r)?;
        let r = r.into_inner();
        answer(self.0.change(move |c, now| c.rotate(&actor, &r.group, now)).await)
    }

    async fn create_token(&self, r: Request<v1::CreateTokenRequest>) -> Answer<v1::CreateTokenResponse> {
        let actor = self.actor(&r)?;
        answer(self.0.create_token(actor, r.into_inner()).await)
    }

    async fn list_tokens(&self, r: Request<v1::ListTokensRequest>) -> Answer<v1::ListTokensResponse> {
        let actor = self.actor(&r)?;
        answer(self.0.centre().tokens(&actor))
    }

    async fn revoke_token(&self, r: Request<v1::RevokeTokenRequest>) -> Answer<v1::RevokeTokenResponse> {
        let actor = self.actor(&r)?;
        let r = r.into_inner();
        answer(self.0.change(move |c, now| c.revoke_token(&actor, &r.id, now)).await)
    }

    async fn audit(&self, r: Request<v1::AuditRequest>) -> Answer<v1::AuditResponse> {
        let actor = self.actor(&r)?;
        answer(self.0.centre().audit(&actor, r.into_inner()))
    }

    async fn status(&self, r: Request<v1::StatusRequest>) -> Answer<v1::StatusResponse> {
        self.actor(&r)?;
        Ok(Response::new(self.0.status()))
    }
}

#[tonic::async_trait]
impl Hosts for Services {
    async fn join(&self, r: Request<v1::JoinRequest>) -> Answer<v1::JoinResponse> {
        answer(self.0.join(r.into_inner()).await)
    }

    type AttachStream = Out<v1::ToHost>;

    async fn attach(&self, r: Request<tonic::Streaming<v1::FromHost>>) -> Answer<Self::AttachStream> {
        let host = match r.extensions().get::<Caller>() {
            Some(Caller { host: Some(host), .. }) => host.clone(),
            // Without TLS, which is on loopback only, a host says who it is.
            _ if self.0.authority.is_none() => {
                let name = r.metadata().get("unirdma-host").and_then(|v| v.to_str().ok());
                name.ok_or_else(|| Status::unauthenticated("a host without TLS says its name as `unirdma-host: NAME`"))?
                    .to_owned()
            }
            _ => {
                return Err(Status::unauthenticated(
                    "a host needs the certificate that it gets when it joins: `unirdma host --centre --token`",
                ));
            }
        };
        let (send, receive) = mpsc::channel(4);
        tokio::spawn(host::serve(self.0.clone(), host, r.into_inner(), send));
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }
}
