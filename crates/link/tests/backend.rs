//! Every vhost-user message number: the served ones are answered, the others refused, and the session goes on.
#![allow(missing_docs)]

use std::cell::RefCell;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{EventfdFlags, eventfd};
use unirdma_link::{
    Backend, BlockingFd, CLOSE_CHANNEL, ChannelError, Handler, Ledger, MAX_FDS, MAX_PAYLOAD, MAX_REGIONS, Memory,
    OPEN_CHANNEL, Progress, RETURN_EVENTS, Receiver, Refusal, Resource, VHOST_USER_F_PROTOCOL_FEATURES,
    VIRTIO_F_VERSION_1, Vring, send,
};
use unirdma_mem::MemFd;
use vhost::vhost_user::message::FrontendReq as R;
use zerocopy::IntoBytes;

const QUEUES: u64 = 4;
const CONFIG: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const NEED_REPLY: u32 = 8;
const REGION: [u64; 5] = [0, 1 << 50, 4096, 1 << 40, 0];

/// A device that records the calls that it gets.
#[derive(Default)]
struct Noted {
    log: RefCell<Vec<String>>,
}

impl Noted {
    fn note(&self, what: String) {
        self.log.borrow_mut().push(what);
    }
}

impl Handler for Noted {
    fn config(&self) -> Vec<u8> {
        CONFIG.to_vec()
    }
    fn memory_changed(&mut self, memory: &Memory, removed: &[u64]) {
        self.note(format!("memory {} -{}", memory.regions().len(), removed.len()));
    }
    fn vring_changed(&mut self, index: usize, _: &Vring) {
        self.note(format!("vring {index}"));
    }
    fn stop_vring(&mut self, index: usize) -> Option<u16> {
        self.note(format!("stop {index}"));
        Some(7)
    }
    fn reset(&mut self) {
        self.note("reset".into());
    }
    fn open_channel(&mut self, number: u32) -> Result<OwnedFd, ChannelError> {
        if number == 0 { Ok(event()) } else { Err(ChannelError::Unknown(number)) }
    }
    fn close_channel(&mut self, number: u32) -> Result<(), ChannelError> {
        if number == 0 { Ok(()) } else { Err(ChannelError::Unknown(number)) }
    }
    fn return_events(&mut self, number: u32, events: &[u8]) -> Result<(), ChannelError> {
        if number == 0 && events.len() % 16 == 0 { Ok(()) } else { Err(ChannelError::PartialEvent) }
    }
    fn refused(&self, _: u32, _: &str) {}
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn foreign(fd: OwnedFd) -> BlockingFd {
    BlockingFd::refused(fd, &Ledger::default())
}

fn file() -> OwnedFd {
    MemFd::new(c"backend", 4096).unwrap().fd().try_clone_to_owned().unwrap()
}

fn null() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

/// A session, seen from its frontend.
struct Session {
    backend: Backend,
    noted: Noted,
    front: UnixStream,
    rx: Receiver,
}

/// An answer.
#[derive(Debug, PartialEq)]
enum Answer {
    Nothing,
    /// This payload, and this number of descriptors.
    Reply(Vec<u8>, usize),
}

fn number(n: u64) -> Answer {
    Answer::Reply(n.to_ne_bytes().to_vec(), 0)
}

const REFUSED: u64 = Refusal::Other as u64;

impl Session {
    fn new() -> Self {
        Self::with(|sock| Backend::new(foreign(sock), QUEUES as usize, Ledger::default()))
    }

    fn with(make: impl FnOnce(OwnedFd) -> Backend) -> Self {
        let (front, back) = UnixStream::pair().unwrap();
        back.set_nonblocking(true).unwrap();
        front.set_nonblocking(true).unwrap();
        Session { backend: make(back.into()), noted: Noted::default(), front, rx: Receiver::default() }
    }

    /// Sends one message; returns the answer.
    fn ask(&mut self, request: u32, flags: u32, payload: &[u8], fds: &[OwnedFd]) -> Answer {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        send(self.front.as_fd(), request, flags, payload, &fds).unwrap();
        assert_eq!(self.backend.on_readable(&mut self.noted, 16).unwrap(), Progress::Open, "the session goes on");
        match self.rx.receive(self.front.as_fd()) {
            Ok(Some(m)) => {
                assert_eq!((m.request, m.flags), (request, 1 | 4), "a reply to this request");
                Answer::Reply(m.payload, m.fds.len())
            }
            Ok(None) => panic!("the backend has closed"),
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::WouldBlock);
                Answer::Nothing
            }
        }
    }

    /// Sends a message with a request for an acknowledgement.
    fn tell(&mut self, r: R, payload: &[u8], fds: &[OwnedFd]) -> Answer {
        self.ask(r as u32, NEED_REPLY, payload, fds)
    }

    fn region(&mut self) {
        assert_eq!(self.tell(R::ADD_MEM_REG, REGION.as_bytes(), &[file()]), number(0));
    }

    /// The session still answers, and accepts a correct request.
    fn check(&mut self) {
        assert_eq!(self.ask(R::GET_QUEUE_NUM as u32, 0, &[], &[]), number(QUEUES));
        assert_eq!(self.tell(R::SET_VRING_NUM, [0u32, 64].as_bytes(), &[]), number(0));
    }
}

/// One correct message.
struct Case {
    request: u32,
    payload: Vec<u8>,
    fds: fn() -> Vec<OwnedFd>,
    /// The answer to a request that asks for something; `None` if the request is only acknowledged, when the frontend
    /// wants that.
    reply: Option<Answer>,
    /// The payload must have exactly this length. Otherwise, surplus bytes are ignored.
    exact: bool,
    /// A descriptor of the right kind is needed.
    needs_fd: bool,
    /// The call that the device gets.
    noted: &'static [&'static str],
}

fn case(request: u32, payload: impl IntoBytes + zerocopy::Immutable) -> Case {
    let payload = payload.as_bytes().to_vec();
    let exact = !payload.is_empty();
    Case { request, payload, fds: Vec::new, reply: None, exact, needs_fd: false, noted: &[] }
}

impl Case {
    fn replies(self, reply: Answer) -> Self {
        Case { reply: Some(reply), ..self }
    }
    fn fds(self, fds: fn() -> Vec<OwnedFd>) -> Self {
        Case { fds, needs_fd: true, ..self }
    }
    fn notes(self, noted: &'static [&'static str]) -> Self {
        Case { noted, ..self }
    }
}

fn protocol_features() -> u64 {
    use vhost::vhost_user::message::VhostUserProtocolFeatures as P;
    (P::MQ | P::REPLY_ACK | P::CONFIG | P::CONFIGURE_MEM_SLOTS | P::RESET_DEVICE | P::STATUS).bits()
}

/// A correct message for every number that is served, for a session that has [`REGION`].
fn cases() -> Vec<Case> {
    let features = VIRTIO_F_VERSION_1 | VHOST_USER_F_PROTOCOL_FEATURES;
    let nothing: [u8; 0] = [];
    let config = [0u32, 4, 0, 0];
    let config_answer = [config[..3].as_bytes(), &CONFIG[..4]].concat();
    let table = [1, REGION[1], REGION[2], REGION[3], REGION[4]];
    let base = [2u32, 7].as_bytes().to_vec();
    vec![
        case(R::GET_FEATURES as u32, nothing).replies(number(features)),
        case(R::SET_FEATURES as u32, features),
        case(R::SET_OWNER as u32, nothing),
        case(R::RESET_OWNER as u32, nothing),
        case(R::SET_MEM_TABLE as u32, table).fds(|| vec![file()]).notes(&["memory 1 -1"]),
        case(R::SET_VRING_NUM as u32, [2u32, 256]).notes(&["vring 2"]),
        case(R::SET_VRING_ADDR as u32, [3u64, REGION[3], REGION[3] + 1024, REGION[3] + 2048, 0]).notes(&["vring 3"]),
        case(R::SET_VRING_BASE as u32, [2u32, 7]).notes(&["vring 2"]),
        case(R::GET_VRING_BASE as u32, [2u32, 0]).replies(Answer::Reply(base, 0)).notes(&["stop 2"]),
        case(R::SET_VRING_KICK as u32, 1u64).fds(|| vec![event()]).notes(&["vring 1"]),
        case(R::SET_VRING_CALL as u32, 1u64).fds(|| vec![event()]).notes(&["vring 1"]),
        case(R::SET_VRING_ERR as u32, 1u64).fds(|| vec![event()]),
        case(R::GET_PROTOCOL_FEATURES as u32, nothing).replies(number(protocol_features())),
        case(R::SET_PROTOCOL_FEATURES as u32, protocol_features()),
        case(R::GET_QUEUE_NUM as u32, nothing).replies(number(QUEUES)),
        case(R::SET_VRING_ENABLE as u32, [2u32, 1]).notes(&["vring 2"]),
        case(R::GET_CONFIG as u32, config).replies(Answer::Reply(config_answer, 0)),
        case(R::RESET_DEVICE as u32, nothing).notes(&["reset"]),
        case(R::GET_MAX_MEM_SLOTS as u32, nothing).replies(number(MAX_REGIONS as u64)),
        case(R::ADD_MEM_REG as u32, [0, 1u64 << 51, 4096, 1 << 41, 0]).fds(|| vec![file()]).notes(&["memory 2 -0"]),
        case(R::REM_MEM_REG as u32, REGION).notes(&["memory 0 -1"]),
        case(R::SET_STATUS as u32, 15u64),
        case(R::GET_STATUS as u32, nothing).replies(number(0)),
        case(OPEN_CHANNEL, [0u32, 0]).replies(Answer::Reply(vec![0; 8], 1)),
        case(CLOSE_CHANNEL, [0u32, 0]),
        case(RETURN_EVENTS, [0u32, 0, 1, 2, 3, 4]),
    ]
}

/// Numbers of vhost-user, and some that it does not have.
fn numbers() -> impl Iterator<Item = u32> {
    (0..=64).chain(OPEN_CHANNEL - 2..=RETURN_EVENTS + 2).chain([u32::MAX, 1 << 31])
}

#[test]
fn what_is_right_is_done_and_answered_as_its_frontend_expects() {
    for c in cases() {
        for flags in [0, NEED_REPLY] {
            let mut s = Session::new();
            s.region();
            s.noted.log.take();
            let expected = match &c.reply {
                Some(Answer::Reply(bytes, fds)) => Answer::Reply(bytes.clone(), *fds),
                _ if flags == NEED_REPLY => number(0),
                _ => Answer::Nothing,
            };
            assert_eq!(s.ask(c.request, flags, &c.payload, &(c.fds)()), expected, "request {}", c.request);
            assert_eq!(s.noted.log.take(), c.noted, "request {}", c.request);
            s.check();
        }
    }
}

#[test]
fn a_payload_of_another_size_is_refused_and_changes_nothing() {
    for c in cases() {
        let mut s = Session::new();
        s.region();
        s.noted.log.take();
        let full = &c.payload;
        let longer = [&full[..], &[0]].concat();
        let shorter: &[u8] = if full.is_empty() { &[] } else { &full[..full.len() - 1] };
        for payload in [shorter, &longer, &[0; MAX_PAYLOAD], &[0; MAX_PAYLOAD + 1], &[]] {
            let what = format!("request {} with {} bytes", c.request, payload.len());
            let answer = s.ask(c.request, NEED_REPLY, payload, &(c.fds)());
            if c.exact || payload.len() > MAX_PAYLOAD {
                // An empty answer says that a range of the configuration space is wrong.
                let empty = c.request == R::GET_CONFIG as u32 && payload.len() <= MAX_PAYLOAD;
                let refused = if empty { Answer::Reply(Vec::new(), 0) } else { number(REFUSED) };
                assert_eq!(answer, refused, "{what}");
                assert!(s.noted.log.take().is_empty(), "{what}");
            } else {
                assert!(matches!(answer, Answer::Reply(_, 0)) && answer != number(REFUSED), "{what}");
                s.noted.log.take();
            }
        }
        s.check();
    }
}

#[test]
fn descriptors_that_lack_or_are_of_another_kind_are_refused_and_too_many_are_closed() {
    for c in cases() {
        let mut s = Session::new();
        s.region();
        s.noted.log.take();
        if c.needs_fd {
            for fds in [vec![], vec![null()]] {
                let what = format!("request {} with {} descriptors", c.request, fds.len());
                assert_eq!(s.ask(c.request, NEED_REPLY, &c.payload, &fds), number(REFUSED), "{what}");
                assert!(s.noted.log.take().is_empty(), "{what}");
            }
        }
        // The most descriptors of a message. Each is closed again or refused with the message.
        let (watched, end) = UnixStream::pair().unwrap();
        let many = (0..MAX_FDS).map(|_| end.as_fd().try_clone_to_owned().unwrap()).collect::<Vec<_>>();
        let answer = s.ask(c.request, NEED_REPLY, &c.payload, &many);
        assert_ne!(answer, Answer::Nothing, "request {}", c.request);
        assert_eq!(answer == number(REFUSED), c.needs_fd, "request {}", c.request);
        drop((many, end));
        watched.set_nonblocking(true).unwrap();
        assert_eq!(rustix::io::read(&watched, &mut [0]), Ok(0), "request {} keeps no descriptor", c.request);
        s.check();
    }
}

#[test]
fn a_header_of_another_version_or_of_a_reply_is_refused() {
    for c in cases() {
        let mut s = Session::new();
        s.region();
        s.noted.log.take();
        // `send` adds version 1: 2 makes it 3, and 4 is a reply.
        for flags in [NEED_REPLY | 2, NEED_REPLY | 4] {
            assert_eq!(s.ask(c.request, flags, &c.payload, &(c.fds)()), number(REFUSED), "request {}", c.request);
        }
        assert!(s.noted.log.take().is_empty(), "request {}", c.request);
        s.check();
    }
}

#[test]
fn numbers_that_are_not_served_are_refused() {
    let served: Vec<u32> = cases().iter().map(|c| c.request).collect();
    for n in numbers().filter(|n| !served.contains(n)) {
        let mut s = Session::new();
        for payload in [&[][..], &[0; 8], &[0; 40]] {
            assert_eq!(s.ask(n, NEED_REPLY, payload, &[]), number(REFUSED), "request {n:#x}");
            assert_eq!(s.ask(n, 0, payload, &[event()]), Answer::Nothing, "request {n:#x}");
        }
        assert!(s.noted.log.take().is_empty());
        s.check();
    }
}

#[test]
fn values_out_of_range_are_refused() {
    let mut s = Session::new();
    s.region();
    s.noted.log.take();
    let user = REGION[3];
    let refused: Vec<(R, Vec<u8>, Vec<OwnedFd>)> = vec![
        (R::SET_FEATURES, u64::MAX.as_bytes().to_vec(), vec![]),
        (R::SET_PROTOCOL_FEATURES, u64::MAX.as_bytes().to_vec(), vec![]),
        (R::SET_VRING_NUM, [0u32, 0].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_NUM, [0u32, 3].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_NUM, [0u32, 2048].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_NUM, [QUEUES as u32, 64].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_BASE, [0u32, 65_536].as_bytes().to_vec(), vec![]),
        (R::GET_VRING_BASE, [u32::MAX, 0].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_ENABLE, [0u32, 2].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_ADDR, [0u64, user + 8, user, user, 0].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_ADDR, [0u64, user, user + 2, user, 0].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_ADDR, [0u64, user, user, user + 1, 0].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_ADDR, [1u64 << 32, user, user, user, 0].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_ADDR, [0u64, user + 4096, user, user, 0].as_bytes().to_vec(), vec![]),
        (R::SET_VRING_KICK, QUEUES.as_bytes().to_vec(), vec![event()]),
        (R::ADD_MEM_REG, REGION.as_bytes().to_vec(), vec![file()]),
        (R::ADD_MEM_REG, [0, 1u64 << 51, 8192, 0, 0].as_bytes().to_vec(), vec![file()]),
        (R::ADD_MEM_REG, [0, u64::MAX, 4096, 0, 0].as_bytes().to_vec(), vec![file()]),
        (R::REM_MEM_REG, [0, 1u64 << 51, 4096, 0, 0].as_bytes().to_vec(), vec![]),
        (R::SET_MEM_TABLE, [u64::from(u32::MAX)].as_bytes().to_vec(), vec![]),
    ];
    for (r, payload, fds) in refused {
        assert_eq!(s.tell(r, &payload, &fds), number(REFUSED), "{r:?} {payload:?}");
    }
    assert!(s.noted.log.take().is_empty(), "nothing has changed");
    // A vring may lose its descriptors.
    assert_eq!(s.tell(R::SET_VRING_CALL, (1u64 << 8).as_bytes(), &[]), number(0));
    // If one region of a table is refused, the regions before the request stay.
    let two = [&2u32.to_ne_bytes()[..], &[0; 4], REGION[1..].as_bytes(), REGION[1..].as_bytes()].concat();
    assert_eq!(s.tell(R::SET_MEM_TABLE, &two, &[file(), file()]), number(REFUSED));
    assert_eq!(s.backend.memory().regions().len(), 1);
    s.check();
}

/// QEMU disables a vring first, and asks for its index then.
#[test]
fn a_vring_that_is_disabled_is_stopped_and_keeps_its_place() {
    let mut s = Session::new();
    for (on, notes) in [(1u32, "vring 2"), (0, "stop 2, vring 2"), (0, "vring 2")] {
        assert_eq!(s.tell(R::SET_VRING_ENABLE, [2, on].as_bytes(), &[]), number(0));
        assert_eq!(s.noted.log.take().join(", "), notes);
    }
    let base = s.ask(R::GET_VRING_BASE as u32, 1, [2u32, 0].as_bytes(), &[]);
    assert_eq!(base, Answer::Reply([2u32, 7].as_bytes().to_vec(), 0));
    s.check();
}

/// The limit of a vRNIC shrinks when others take more.
#[test]
fn who_holds_too_much_may_give_it_up() {
    let ledger = Ledger::default();
    let held = || ledger.usage(Resource::Descriptors).0;
    let mut s = Session::with(|sock| Backend::new(foreign(sock), QUEUES as usize, ledger.clone()));
    assert_eq!(s.tell(R::SET_VRING_CALL, 1u64.as_bytes(), &[event()]), number(0));
    ledger.set_limits([Some(0), None, None, None, None, None]);
    assert_eq!(held(), 1);
    assert_eq!(s.tell(R::SET_VRING_CALL, (1u64 | 1 << 8).as_bytes(), &[]), number(0));
    assert_eq!(held(), 0);
}

#[test]
fn a_session_too_many_may_look_at_the_device_only() {
    let looks = [
        R::GET_FEATURES,
        R::SET_FEATURES,
        R::SET_OWNER,
        R::GET_PROTOCOL_FEATURES,
        R::SET_PROTOCOL_FEATURES,
        R::GET_QUEUE_NUM,
        R::GET_CONFIG,
    ];
    let mut s = Session::with(|sock| Backend::look_only(foreign(sock), Ledger::default(), Refusal::TooManyUsers));
    for c in cases() {
        let answer = s.ask(c.request, NEED_REPLY, &c.payload, &(c.fds)());
        let refused = answer == number(Refusal::TooManyUsers as u64);
        assert_eq!(refused, !looks.iter().any(|l| *l as u32 == c.request), "request {}", c.request);
    }
    assert!(s.noted.log.take().is_empty());
}

#[test]
fn a_message_may_come_in_pieces_and_a_stream_that_cannot_be_followed_ends() {
    let mut s = Session::new();
    let whole = [R::GET_QUEUE_NUM as u32, 1, 8, 0, 0];
    for byte in whole.as_bytes() {
        assert_eq!(s.rx.receive(s.front.as_fd()).unwrap_err().kind(), ErrorKind::WouldBlock);
        (&s.front).write_all(&[*byte]).unwrap();
        assert_eq!(s.backend.on_readable(&mut s.noted, 16).unwrap(), Progress::Open);
    }
    assert_eq!(s.rx.receive(s.front.as_fd()).unwrap().unwrap().payload, QUEUES.to_ne_bytes());
    let endless = [R::GET_QUEUE_NUM as u32, 1, u32::MAX];
    (&s.front).write_all(endless.as_bytes()).unwrap();
    assert_eq!(s.backend.on_readable(&mut s.noted, 16).unwrap_err().kind(), ErrorKind::InvalidData);

    let mut s = Session::new();
    (&s.front).write_all(whole[..2].as_bytes()).unwrap();
    s.front.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(s.backend.on_readable(&mut s.noted, 16).unwrap(), Progress::Closed, "an end within a message");
}
