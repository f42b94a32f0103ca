//! `unirdma top`: the present activity of vRNICs.

mod rates;
mod screen;
mod terminal;

use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyEvent};
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::io::Errno;
use unirdma_supervisor::Client;
use unirdma_supervisor::admin::{Request, Response};

use rates::{Column, Row, Sample};
use screen::View;
use terminal::Terminal;

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma top                                  until q or Ctrl-C
  unirdma top -d 5 --sort cpu                  every 5 seconds, who takes most time first
  unirdma top --once                           one interval as a table
  unirdma top --json -d 10 | jq .vrnics        and as JSON, of 10 seconds

Keys: left and right choose the column that sorts, r reverses it; / filters by what is typed, in names of vRNICs and groups; space pauses;
up, down, page up and page down scroll; h shows this; q ends.

SENT and RECEIVED are payload bytes a second, SENDS and RECVS completed work requests a second. ERRORS counts, a second, requests that
completed with an error and messages that were dropped. CPU is the time that the RNIC worked for the vRNIC, of one processor.";

#[derive(Args)]
pub(crate) struct TopArgs {
    /// Seconds from one table to the next
    #[arg(short = 'd', long, value_name = "SECONDS", default_value = "1", value_parser = crate::units::interval)]
    delay: Duration,
    /// Print the table of one interval and end
    #[arg(long)]
    once: bool,
    /// Print one interval as JSON and end
    #[arg(long)]
    json: bool,
    /// The column that sorts, largest first (names: first ones first)
    #[arg(long, value_name = "COLUMN", default_value = "sent")]
    sort: Column,
    /// Only vRNICs whose name or group contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
}

pub(crate) fn run(dir: &Path, args: TopArgs) -> io::Result<()> {
    if args.once || args.json {
        return once(dir, &args);
    }
    let signals = crate::host::signals(&[
        libc::SIGINT,
        libc::SIGTERM,
        libc::SIGHUP,
        libc::SIGQUIT,
        libc::SIGWINCH,
        libc::SIGCONT,
    ])?;
    // Asks once before the terminal is taken, so that an error is printed at once.
    let first = ask(&mut Client::connect(dir)?)?;
    watch(dir, args, first, &mut Terminal::open()?, &signals)
}

/// The output of `--json`.
#[derive(serde::Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Rates {
    /// How long was measured, seconds.
    interval_seconds: f64,
    /// The vRNICs in the order asked for.
    vrnics: Vec<Row>,
}

fn ask(client: &mut Client) -> io::Result<Sample> {
    match client.ask(&Request::VrnicList, None)? {
        Response::Vrnics(vrnics) => Ok(Sample::new(Instant::now(), vrnics)),
        _ => Err(io::Error::other("the virtual layer says something else than it was asked")),
    }
}

fn once(dir: &Path, args: &TopArgs) -> io::Result<()> {
    let mut client = Client::connect(dir)?;
    let before = ask(&mut client)?;
    std::thread::sleep(args.delay);
    let after = ask(&mut client)?;
    let mut rows = rates::rows(&before, &after);
    rows.retain(|r| r.matches(&args.filter));
    rates::sort(&mut rows, args.sort, false);
    let text = if args.json {
        let interval_seconds = after.at.duration_since(before.at).as_secs_f64();
        serde_json::to_string_pretty(&Rates { interval_seconds, vrnics: rows })?
    } else {
        let head = Column::ALL.iter().map(|c| c.head().to_string()).collect();
        let lines = rows.iter().map(|r| Column::ALL.iter().map(|&c| r.cell(c)).collect());
        crate::print::table(&std::iter::once(head).chain(lines).collect::<Vec<Vec<String>>>())
    };
    crate::print::line(&text)
}

/// A message from a thread.
enum News {
    /// An answer of the virtual layer.
    Answer(io::Result<Sample>),
    Key(KeyEvent),
}

/// Sends messages to the thread that draws, and wakes it.
#[derive(Clone)]
struct Sender {
    news: SyncSender<News>,
    wake: Arc<OwnedFd>,
}

impl Sender {
    /// Returns false if the receiver is gone.
    fn send(&self, news: News) -> bool {
        self.news.send(news).is_ok() && rustix::io::write(&*self.wake, &1u64.to_ne_bytes()).is_ok()
    }
}

/// Asks the virtual layer again and again, in a thread of its own so that a slow answer delays no key. Ends when the
/// receiver is gone.
fn read(dir: &Path, delay: Duration, to: &Sender) {
    let mut client = None;
    loop {
        std::thread::sleep(delay);
        let asked = match client.take() {
            Some(c) => Ok(c),
            None => Client::connect(dir),
        };
        let answer = asked.and_then(|mut c| Ok((ask(&mut c)?, c)));
        let news = answer.map(|(sample, c)| {
            client = Some(c);
            sample
        });
        if !to.send(News::Answer(news)) {
            return;
        }
    }
}

/// Reads keys, in a thread of its own: an unfinished sequence and a terminal that is gone block it.
fn keys(to: &Sender) {
    while let Ok(event) = event::read() {
        if let Event::Key(key) = event
            && !to.send(News::Key(key))
        {
            return;
        }
    }
}

fn watch(dir: &Path, args: TopArgs, first: Sample, terminal: &mut Terminal, signals: &OwnedFd) -> io::Result<()> {
    let (news, receiver) = sync_channel(16);
    let wake = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let to = Sender { news, wake: wake.clone() };
    let (theirs, place, delay) = (to.clone(), dir.to_path_buf(), args.delay);
    std::thread::Builder::new().name("read".into()).spawn(move || read(&place, delay, &theirs))?;
    std::thread::Builder::new().name("keys".into()).spawn(move || keys(&to))?;
    let mut view = View::new(args.sort, args.filter, args.delay);
    let mut last = first;
    loop {
        terminal.draw(|screen| view.render(screen))?;
        let stdin = io::stdin();
        let mut wait = [
            // Reports only that the terminal is gone.
            PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::empty()),
            PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN),
        ];
        match poll(&mut wait, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let came = wait.map(|w| w.revents());
        if !came[0].is_empty() || !came[1].is_empty() && ends(signals, terminal)? {
            return Ok(());
        }
        let _ = rustix::io::read(&*wake, &mut [0; 8]);
        while let Ok(news) = receiver.try_recv() {
            match news {
                News::Answer(Ok(sample)) => {
                    view.show(rates::rows(&last, &sample));
                    last = sample;
                }
                News::Answer(Err(e)) => view.fail(&e),
                News::Key(key) if view.key(key) => return Ok(()),
                News::Key(_) => {}
            }
        }
    }
}

/// Handles signals. Returns true if one of them ends the program.
fn ends(signals: &OwnedFd, terminal: &mut Terminal) -> io::Result<bool> {
    const SIZE: usize = size_of::<libc::signalfd_siginfo>();
    let mut info = [0; SIZE];
    while rustix::io::read(signals, &mut info).is_ok_and(|n| n == SIZE) {
        match i32::from_ne_bytes([info[0], info[1], info[2], info[3]]) {
            // The screen is drawn again in any case.
            libc::SIGWINCH => {}
            // The shell has had the terminal meanwhile.
            libc::SIGCONT => terminal.take()?,
            _ => return Ok(true),
        }
    }
    Ok(false)
}

/// A number of at most 6 characters, with K, M, G or T for powers of 1000.
fn short(n: f64) -> String {
    let mut text = String::new();
    let (mut n, mut unit) = (n, 0);
    while n >= 999.95 && unit + 1 < UNITS.len() {
        n /= 1000.0;
        unit += 1;
    }
    let _ = match (n, unit) {
        (0.0, _) => write!(text, "0"),
        // A small rate must not look like none.
        (n, 0) if n < 0.1 => write!(text, "<0.1"),
        (n, 0) if n.fract() == 0.0 => write!(text, "{n}"),
        _ => write!(text, "{n:.1}{}", UNITS[unit]),
    };
    text
}

const UNITS: [&str; 6] = ["", "K", "M", "G", "T", "P"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_nothing_is_lost() {
        for (n, text) in [
            (0.0, "0"),
            (0.01, "<0.1"),
            (0.5, "0.5"),
            (7.0, "7"),
            (999.0, "999"),
            (999.96, "1.0K"),
            (1500.0, "1.5K"),
            (2.5e9, "2.5G"),
            (1e18, "1000.0P"),
        ] {
            assert_eq!(short(n), text);
        }
    }
}
