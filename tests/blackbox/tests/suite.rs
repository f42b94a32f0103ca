//! A list of tests, what each needs, and values that several tests share.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use harness::Result;
use harness::packages::Needed;
use libtest_mimic::{Completion, Trial};

/// The result of a test.
pub(crate) type Check = Result<()>;

/// A test, with the packages that it uses.
pub(crate) struct Test {
    pub trial: Trial,
    pub packages: &'static [Needed],
}

/// The tests so far.
#[derive(Default)]
pub(crate) struct Tests {
    all: Vec<Test>,
    /// The name of the topic.
    name: &'static str,
    /// Packages that the following tests use.
    packages: &'static [Needed],
    /// Why the following tests are skipped.
    skipped: Option<&'static str>,
}

/// Tests run one at a time: many measure, fill queues, or look at all processes of this machine.
static ALONE: Mutex<()> = Mutex::new(());

/// How long the tests of each topic have taken so far.
static TIMES: Mutex<BTreeMap<&'static str, Duration>> = Mutex::new(BTreeMap::new());

/// How long the tests of each topic took, in a line.
pub(crate) fn times() -> String {
    let times: Vec<_> = lock(&TIMES).iter().map(|(topic, t)| format!("{topic} {} s", t.as_secs())).collect();
    times.join(", ")
}

/// Longest time for a test: several times what the slowest one takes, which runs in guests.
const LIMIT: Duration = Duration::from_secs(900);

/// Ends this process, and with it all that it has started, if the returned value lives longer than [`LIMIT`].
fn limit_time(test: String) -> mpsc::Sender<()> {
    let (ended, wait) = mpsc::channel();
    thread::spawn(move || {
        if wait.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            eprintln!("\nblackbox: `{test}` has not ended for {} s", LIMIT.as_secs());
            // The process that waits for this one then ends what the test has started.
            std::process::abort();
        }
    });
    ended
}

impl Tests {
    /// Gives the topic that begins its name.
    pub fn named(&mut self, topic: &'static str) {
        self.name = topic;
    }

    /// Begins a topic, whose tests use these packages.
    pub fn topic(&mut self, packages: &'static [Needed]) {
        (self.packages, self.skipped) = (packages, None);
    }

    /// The following tests of the topic take root. For other users they are skipped for this reason.
    pub fn need_root(&mut self, why: &'static str) {
        self.skipped = (harness::uid() != 0).then_some(why);
    }

    /// The following tests of the topic take no root.
    pub fn need_no_root(&mut self) {
        self.skipped = None;
    }

    /// Adds a test that has everything for itself.
    pub fn test(&mut self, name: impl Into<String>, f: impl FnOnce() -> Check + Send + 'static) {
        let (name, topic, skipped) = (name.into(), self.name, self.skipped);
        let of = name.clone();
        let run = move || {
            if let Some(why) = skipped {
                return Ok(Completion::ignored_with(why));
            }
            let _alone = lock(&ALONE);
            let _limit = limit_time(of.clone());
            let begin = Instant::now();
            let result = f();
            *lock(&TIMES).entry(topic).or_default() += begin.elapsed();
            // An error is printed at once, and by the library at the end. Its first line says what failed, and logs may
            // follow that fill a screen, so it is said again below them.
            let say = |e: &String| println!("\n{e}\n\n`{of}` failed: {}", e.lines().next().unwrap_or_default());
            result.map(|()| Completion::Completed).inspect_err(say).map_err(Into::into)
        };
        let packages = if skipped.is_some() { &[] } else { self.packages };
        self.all.push(Test { trial: Trial::ignorable_test(name, run), packages });
    }

    /// Adds a test that uses a shared value.
    pub fn on<T: Send + 'static>(
        &mut self,
        shared: &Shared<T>,
        name: impl Into<String>,
        f: impl FnOnce(&T) -> Check + Send + 'static,
    ) {
        self.on_mut(shared, name, |value: &mut T| f(value));
    }

    /// Adds a test that uses and changes a shared value. Other tests must still be able to use it.
    pub fn on_mut<T: Send + 'static>(
        &mut self,
        shared: &Shared<T>,
        name: impl Into<String>,
        f: impl FnOnce(&mut T) -> Check + Send + 'static,
    ) {
        let shared = shared.clone();
        self.test(name, move || shared.with(f));
    }

    /// All of them.
    pub fn into_list(self) -> Vec<Test> {
        self.all
    }
}

/// A value that several tests share. The first test that uses it makes it, and it ends after the last one: each test
/// holds a clone of this until it has run.
pub(crate) struct Shared<T>(Arc<Inner<T>>);

struct Inner<T> {
    make: Box<dyn Fn() -> Result<T> + Send + Sync>,
    value: Mutex<Option<Result<T>>>,
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Shared(self.0.clone())
    }
}

impl<T> Shared<T> {
    /// A value that `make` makes.
    pub fn new(make: impl Fn() -> Result<T> + Send + Sync + 'static) -> Self {
        Shared(Arc::new(Inner { make: Box::new(make), value: Mutex::new(None) }))
    }

    /// Calls `f` with the value. An error of `make` is an error of all tests that use the value.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
        let mut value = lock(&self.0.value);
        f(value.get_or_insert_with(|| (self.0.make)()).as_mut().map_err(|e| e.clone())?)
    }
}

/// Locks, also after a test that panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
