//! The terminal: taken while the program runs, and given back as it was.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;

use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

/// Control sequences: another screen, without a cursor, whose lines do not wrap; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

/// A terminal whose keys come one by one. It is restored on drop, and when the program panics.
pub(super) struct Terminal {
    before: Termios,
}

impl Terminal {
    pub fn open() -> io::Result<Self> {
        if !isatty(io::stdin()) || !io::stdout().is_terminal() {
            let text = "`unirdma top` needs a terminal; --once prints one table, --json the same for scripts";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let before = tcgetattr(io::stdin())?;
        let (saved, report) = (before.clone(), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |info| {
            give_back(&saved);
            report(info);
        }));
        let terminal = Terminal { before };
        terminal.take()?;
        Ok(terminal)
    }

    /// Takes the terminal. Also called again after another program had it.
    pub fn take(&self) -> io::Result<()> {
        let mut raw = self.before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        print(ENTER)
    }

    /// Draws the lines that `lines` returns for the screen's width and height.
    pub fn draw(&self, lines: impl FnOnce(usize, usize) -> Vec<String>) -> io::Result<()> {
        let size = tcgetwinsize(io::stdout()).ok().filter(|s| s.ws_col > 0 && s.ws_row > 0);
        let (width, height) = size.map_or((80, 24), |s| (s.ws_col.into(), s.ws_row.into()));
        let mut text = String::from("\x1b[H");
        for (i, line) in lines(width, height).iter().take(height).enumerate() {
            let _ = write!(text, "{}{line}\x1b[0m\x1b[K", if i > 0 { "\r\n" } else { "" });
        }
        print(&(text + "\x1b[J"))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        give_back(&self.before);
    }
}

fn give_back(before: &Termios) {
    let _ = print(LEAVE);
    let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
}

fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// A key that was pressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Escape,
    Backspace,
    /// Ctrl-C.
    Interrupt,
}

/// The keys that are waiting; `None` if the terminal is gone.
pub(super) fn keys(terminal: &impl AsFd) -> io::Result<Option<Vec<Key>>> {
    let mut buffer = [0; 256];
    match rustix::io::read(terminal, &mut buffer) {
        Ok(0) | Err(rustix::io::Errno::IO) => Ok(None),
        Ok(n) => Ok(Some(parse(&buffer[..n]))),
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Ok(Some(Vec::new())),
        Err(e) => Err(e.into()),
    }
}

/// Decodes keys as terminals send them (ECMA-48, and xterm's sequences).
fn parse(mut bytes: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    while let [first, rest @ ..] = bytes {
        bytes = rest;
        match first {
            0x1b => match rest {
                [b'[' | b'O', sequence @ ..] => {
                    // Parameters, then one byte that names the key.
                    let end = sequence.iter().position(|b| (0x40..=0x7e).contains(b));
                    let Some(end) = end else { break };
                    keys.extend(of_sequence(&sequence[..=end]));
                    bytes = &sequence[end + 1..];
                }
                _ => keys.push(Key::Escape),
            },
            3 => keys.push(Key::Interrupt),
            b'\r' | b'\n' => keys.push(Key::Enter),
            0x7f | 8 => keys.push(Key::Backspace),
            b if b.is_ascii_graphic() || *b == b' ' => keys.push(Key::Char(char::from(*b))),
            // Names are ASCII, so no other byte is of use.
            _ => {}
        }
    }
    keys
}

fn of_sequence(sequence: &[u8]) -> Option<Key> {
    Some(match sequence {
        [.., b'A'] => Key::Up,
        [.., b'B'] => Key::Down,
        [.., b'C'] => Key::Right,
        [.., b'D'] => Key::Left,
        [.., b'H'] | b"1~" | b"7~" => Key::Home,
        [.., b'F'] | b"4~" | b"8~" => Key::End,
        b"5~" => Key::PageUp,
        b"6~" => Key::PageDown,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_terminals_send_them() {
        let all = b"q\x1b[A\x1bOB\x1b[1;5C\x1b[D\x1b[5~\x1b[6~\x1b[H\x1b[4~\r\x7f\x03 /";
        use Key::*;
        let expected = [
            Char('q'),
            Up,
            Down,
            Right,
            Left,
            PageUp,
            PageDown,
            Home,
            End,
            Enter,
            Backspace,
            Interrupt,
            Char(' '),
            Char('/'),
        ];
        assert_eq!(parse(all), expected);
        assert_eq!(parse(b"\x1b"), [Escape]);
        assert_eq!(parse(b"\x1bx"), [Escape, Char('x')]);
        // An unknown key, a sequence that is cut off, and letters that no name has.
        assert_eq!(parse(b"\x1b[15~a"), [Char('a')]);
        assert_eq!(parse(b"a\x1b[1;"), [Char('a')]);
        assert_eq!(parse("\u{e9}z".as_bytes()), [Char('z')]);
    }
}
