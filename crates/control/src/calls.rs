//! Changes. This centre makes them if it allocates; otherwise it passes them on to the centre that allocates.

use tonic::metadata::{AsciiMetadataValue, MetadataMap};
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use unirdma_fleet::v1::centres_client::CentresClient;
use unirdma_fleet::v1::fleet_client::FleetClient;
use unirdma_fleet::v1::hosts_client::HostsClient;
use unirdma_fleet::{Actor, Centre, Facts, Outcome, Planner, Refusal, v1};

use crate::pki::Authority;

/// Metadata key of a call that another centre passes on.
pub(crate) const PASSED_ON: &str = "unirdma-passed-on";
/// Metadata key of an answer: the revision of the state at that time.
pub(crate) const REVISION: &str = "unirdma-revision";
/// What a call needs when it is executed.
pub(crate) struct Context<'a> {
    pub planner: &'a mut Planner,
    pub facts: &'a dyn Facts,
    /// `None`: plain text. Then hosts get no certificates.
    pub authority: Option<&'a Authority>,
    pub now_ms: u64,
}

/// A change that somebody asks for.
#[tonic::async_trait]
pub(crate) trait Call: Clone + Send + Sync + 'static {
    type Answer: Send + 'static;

    /// True if a repeated call does no harm, because it describes the desired state.
    fn may_repeat(&self) -> bool;

    /// The queue in which the call waits for its turn: the name of a token or host. `None` for an administrator and for
    /// the centre itself. A caller without a valid token gets a refusal at once.
    fn line(&self, centre: &Centre, now_ms: u64) -> Result<Option<String>, Refusal>;

    /// Executes the call at this centre's planner.
    fn make(self, c: Context<'_>) -> Result<Outcome<Self::Answer>, Refusal>;

    /// Sends the call to the centre that allocates.
    async fn pass_on(self, channel: Channel) -> Result<Response<Self::Answer>, Status>;
}

/// A request marked as passed on by another centre.
fn passed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert(PASSED_ON, AsciiMetadataValue::from_static("1"));
    request
}

/// The revision in the metadata of an answer.
pub(crate) fn revision_of(metadata: &MetadataMap) -> u64 {
    metadata.get(REVISION).and_then(|v| v.to_str().ok()?.parse().ok()).unwrap_or(0)
}

/// A call of somebody with a token.
#[derive(Clone)]
pub(crate) struct ByToken<R> {
    pub token: String,
    pub request: R,
}

/// A request that needs a token.
#[tonic::async_trait]
pub(crate) trait OperatorCall: Clone + Send + Sync + 'static {
    type Answer: Send + 'static;
    fn may_repeat(&self) -> bool;
    fn make(self, c: Context<'_>, who: &Actor) -> Result<Outcome<Self::Answer>, Refusal>;
    async fn send(client: FleetClient<Channel>, request: Request<Self>) -> Result<Response<Self::Answer>, Status>;
}

#[tonic::async_trait]
impl<R: OperatorCall> Call for ByToken<R> {
    type Answer = R::Answer;

    fn may_repeat(&self) -> bool {
        self.request.may_repeat()
    }

    fn line(&self, centre: &Centre, now_ms: u64) -> Result<Option<String>, Refusal> {
        let actor = centre.actor(&self.token, now_ms)?;
        Ok((!actor.is_admin()).then(|| format!("token {}", actor.who())))
    }

    fn make(self, c: Context<'_>) -> Result<Outcome<R::Answer>, Refusal> {
        let actor = c.planner.actor(&self.token, c.now_ms)?;
        self.request.make(c, &actor)
    }

    async fn pass_on(self, channel: Channel) -> Result<Response<R::Answer>, Status> {
        let mut request = passed(self.request);
        let bearer = format!("Bearer {}", self.token).parse();
        request.metadata_mut().insert("authorization", bearer.map_err(|_| Status::unauthenticated("no token"))?);
        let client =
            FleetClient::new(channel).max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX);
        R::send(client, request).await
    }
}

/// Implements `OperatorCall` for: request, answer, gRPC method, whether it may be repeated, and the function that makes
/// it.
macro_rules! wishes {
    ($($request:ident $answer:ident $call:ident $repeat:expr, $make:expr;)*) => { $(
        #[tonic::async_trait]
        impl OperatorCall for v1::$request {
            type Answer = v1::$answer;

            fn may_repeat(&self) -> bool {
                let repeat: fn(&Self) -> bool = $repeat;
                repeat(self)
            }

            fn make(self, c: Context<'_>, who: &Actor) -> Result<Outcome<v1::$answer>, Refusal> {
                let make: fn(Self, Context<'_>, &Actor) -> Result<Outcome<v1::$answer>, Refusal> = $make;
                make(self, c, who)
            }

            async fn send(mut client: FleetClient<Channel>, r: Request<Self>) -> Result<Response<v1::$answer>, Status> {
                client.$call(r).await
            }
        }
    )* };
}

wishes! {
    ApplyRequest ApplyResponse apply |r| r.objects.iter().all(|o| o.revision == 0), |r, c, who| c.planner.apply(who, r, c.facts, c.now_ms);
    DeleteRequest ApplyResponse delete |_| false, |r, c, who| c.planner.delete(who, &r, c.facts, c.now_ms);
    MoveRequest ApplyResponse r#move |_| true, |r, c, who| c.planner.move_vrnic(who, &r, c.facts, c.now_ms);
    RotateSecretRequest RotateSecretResponse rotate_secret |_| false, |r, c, who| c.planner.rotate(who, &r.group, c.facts, c.now_ms);
    RevokeTokenRequest RevokeTokenResponse revoke_token |_| false, |r, c, who| c.planner.revoke_token(who, &r.id, c.facts, c.now_ms);
    CreateTokenRequest CreateTokenResponse create_token |_| false, create_token;
}

fn create_token(
    r: v1::CreateTokenRequest,
    c: Context<'_>,
    who: &Actor,
) -> Result<Outcome<v1::CreateTokenResponse>, Refusal> {
    let mut random = [0; 32];
    getrandom::fill(&mut random).map_err(|e| Refusal::unavailable(format_args!("there are no random bytes: {e}")))?;
    let mut made = c.planner.create_token(who, r.token.unwrap_or_default(), random, c.facts, c.now_ms)?;
    let joins = made.answer.token.as_ref().is_some_and(|t| t.role() == v1::Role::Join);
    if let Some(authority) = c.authority.filter(|_| joins) {
        // The pin lets the joining host authenticate the centre.
        made.answer.secret = format!("{}.{}", made.answer.secret, authority.pin());
    }
    Ok(made)
}

/// Strips the pin from a join token: `ID.SECRET` or `ID.SECRET.PIN`. Only the host uses the pin.
fn secret_of(token: &str) -> &str {
    match token.rsplit_once('.') {
        Some((secret, _)) if secret.contains('.') => secret,
        _ => token,
    }
}

/// Refuses a host that may not join.
///
/// # Errors
/// The token is unknown or does not let this host join, or the token or the host's name is too long.
pub(crate) fn may_join(r: &v1::JoinRequest, centre: &Centre, now_ms: u64) -> Result<(), Refusal> {
    if r.token.len() > 256 || r.host.len() > 64 {
        return Err(Refusal::invalid("the token or the host's name is too long"));
    }
    centre.may_join(secret_of(&r.token), &r.host, now_ms)
}

#[tonic::async_trait]
impl Call for v1::JoinRequest {
    type Answer = v1::JoinResponse;

    fn may_repeat(&self) -> bool {
        false
    }

    fn line(&self, centre: &Centre, now_ms: u64) -> Result<Option<String>, Refusal> {
        may_join(self, centre, now_ms)?;
        Ok(Some(format!("host {}", self.host)))
    }

    fn make(self, c: Context<'_>) -> Result<Outcome<v1::JoinResponse>, Refusal> {
        // The certificate is made first, so that an invalid certificate request uses up no token. If the token is
        // refused, the certificate is dropped.
        let answer = match c.authority {
            Some(a) => v1::JoinResponse { certificate: a.host(&self.host, &self.request)?, authority: a.pem().into() },
            None => v1::JoinResponse::default(),
        };
        let joined = c.planner.join(secret_of(&self.token), &self.host, c.facts, c.now_ms)?;
        Ok(Outcome { plan: joined.plan, answer })
    }

    async fn pass_on(self, channel: Channel) -> Result<Response<v1::JoinResponse>, Status> {
        HostsClient::new(channel).join(passed(self)).await
    }
}

#[tonic::async_trait]
impl Call for v1::HostHello {
    type Answer = v1::HostAnnounced;

    fn may_repeat(&self) -> bool {
        true
    }

    fn line(&self, _: &Centre, _: u64) -> Result<Option<String>, Refusal> {
        Ok(Some(format!("host {}", self.host)))
    }

    fn make(self, c: Context<'_>) -> Result<Outcome<v1::HostAnnounced>, Refusal> {
        let made = c.planner.announce(&self.host, &self.hello.unwrap_or_default(), c.facts, c.now_ms);
        Ok(Outcome { plan: made.plan, answer: v1::HostAnnounced { refused: made.answer } })
    }

    async fn pass_on(self, channel: Channel) -> Result<Response<v1::HostAnnounced>, Status> {
        CentresClient::new(channel).announce(passed(self)).await
    }
}

#[tonic::async_trait]
impl Call for v1::HostAsk {
    type Answer = v1::HostReply;

    /// A `Put` describes the desired state, so it may be repeated. A removal may not: the second one is refused,
    /// because the vRNIC is gone.
    fn may_repeat(&self) -> bool {
        self.ask.as_ref().is_some_and(|a| matches!(a.change, Some(v1::ask::Change::Put(_))))
    }

    fn line(&self, _: &Centre, _: u64) -> Result<Option<String>, Refusal> {
        Ok(Some(format!("host {}", self.host)))
    }

    fn make(self, c: Context<'_>) -> Result<Outcome<v1::HostReply>, Refusal> {
        let made = c.planner.ask(&self.host, self.ask.unwrap_or_default(), c.facts, c.now_ms)?;
        Ok(Outcome { plan: made.plan, answer: v1::HostReply { reply: Some(made.answer) } })
    }

    async fn pass_on(self, channel: Channel) -> Result<Response<v1::HostReply>, Status> {
        CentresClient::new(channel).ask(passed(self)).await
    }
}
