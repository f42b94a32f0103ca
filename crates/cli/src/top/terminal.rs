//! The terminal: taken while the program runs, and given back as it was.

use std::io::{self, IsTerminal, Stdout, stdin, stdout};
use std::mem::ManuallyDrop;

use ratatui::backend::CrosstermBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::layout::Rect;
use ratatui::{TerminalOptions, Viewport};

/// A terminal whose keys come one by one. It is restored on drop, and when the program panics.
/// ratatui's own drop is not used: it panics if standard error is the same terminal and has hung up.
pub(super) struct Terminal(ManuallyDrop<ratatui::Terminal<CrosstermBackend<Stdout>>>);

impl Terminal {
    pub fn open() -> io::Result<Self> {
        if !stdin().is_terminal() || !stdout().is_terminal() {
            let text = "`unirdma top` needs a terminal; --once prints one table, --json the same for scripts";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            give_back();
            report(info);
        }));
        let options = TerminalOptions { viewport: Viewport::Fixed(size()) };
        let screen = ratatui::Terminal::with_options(CrosstermBackend::new(stdout()), options)?;
        let mut terminal = Terminal(ManuallyDrop::new(screen));
        terminal.take()?;
        Ok(terminal)
    }

    /// Takes the terminal. Also called again after another program had it.
    pub fn take(&mut self) -> io::Result<()> {
        // Otherwise a terminal that was taken before counts as taken still.
        disable_raw_mode()?;
        enable_raw_mode()?;
        execute!(stdout(), EnterAlternateScreen, Hide)?;
        self.0.resize(size())
    }

    /// Draws what `render` writes to a buffer of the screen's size.
    pub fn draw(&mut self, render: impl FnOnce(&mut Buffer)) -> io::Result<()> {
        let size = size();
        if self.0.get_frame().area() != size {
            self.0.resize(size)?;
        }
        self.0.draw(|frame| render(frame.buffer_mut())).map(drop)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        give_back();
    }
}

fn give_back() {
    let _ = execute!(stdout(), Show, LeaveAlternateScreen);
    let _ = disable_raw_mode();
}

/// The size of the screen; 80 columns and 24 lines if the terminal does not know its size.
fn size() -> Rect {
    let size = rustix::termios::tcgetwinsize(stdout()).ok().filter(|s| s.ws_col > 0 && s.ws_row > 0);
    let (width, height) = size.map_or((80, 24), |s| (s.ws_col, s.ws_row));
    Rect::new(0, 0, width, height)
}
