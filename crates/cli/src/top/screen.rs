//! The contents of the screen.

use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::{Color, Style};

use super::rates::{self, Column, Row};
use super::short;

const PLAIN: Style = Style::new();
const BOLD: Style = PLAIN.bold();
const RED: Style = BOLD.fg(Color::Red);
const REVERSE: Style = PLAIN.reversed();

/// Lines above and below the rows.
const ABOVE: u16 = 3;
const BELOW: u16 = 1;

const KEYS: &str = "q quit  <- -> sort  r reverse  / filter  space pause  h help";
const HELP: [&str; 14] = [
    "Keys",
    "  left, right          the column that sorts",
    "  r                    sorts the other way round",
    "  / and text           only vRNICs whose name or group contains it; Enter keeps it, Esc drops it",
    "  space                stops the table, and lets it go on",
    "  up, down, page up, page down, Home, End",
    "  h, q                 this, and the end",
    "",
    "Columns",
    "  SENT, RECEIVED       payload bytes a second",
    "  SENDS, RECVS         work requests completed with success, a second",
    "  ERRORS               requests completed with an error and messages dropped, a second",
    "  CPU                  time that the RNIC worked for it, of one processor",
    "  QPS, MRS             queue pairs and memory regions",
];

/// The state of the screen.
pub(super) struct View {
    rows: Vec<Row>,
    sort: Column,
    reversed: bool,
    filter: String,
    /// True while letters go to the filter.
    typing: bool,
    paused: bool,
    help: bool,
    /// Rows that were scrolled away at the top.
    offset: usize,
    /// Rows that fit on the screen.
    page: usize,
    delay: Duration,
    /// True once there was a table.
    begun: bool,
    /// Why the last request failed.
    failed: Option<String>,
}

impl View {
    pub fn new(sort: Column, filter: String, delay: Duration) -> Self {
        View {
            rows: Vec::new(),
            sort,
            reversed: false,
            filter,
            typing: false,
            paused: false,
            help: false,
            offset: 0,
            page: 1,
            delay,
            begun: false,
            failed: None,
        }
    }

    /// Shows these rows, unless the screen is paused.
    pub fn show(&mut self, rows: Vec<Row>) {
        if !self.paused {
            (self.rows, self.failed, self.begun) = (rows, None, true);
        }
    }

    /// Notes that the virtual layer does not answer.
    pub fn fail(&mut self, why: &std::io::Error) {
        self.failed = Some(why.to_string());
    }

    /// Handles a key with its modifiers. Returns true if the program is to end.
    pub fn key(&mut self, key: KeyEvent) -> bool {
        match key.code {
            KeyCode::Char(c) if key.modifiers.contains(KeyModifiers::CONTROL) => match c {
                'c' => true,
                'h' => self.press(KeyCode::Backspace),
                'j' => self.press(KeyCode::Enter),
                _ => false,
            },
            // Escape and another key that came together.
            code if key.modifiers.contains(KeyModifiers::ALT) => self.press(KeyCode::Esc) || self.press(code),
            code => self.press(code),
        }
    }

    fn press(&mut self, key: KeyCode) -> bool {
        if self.typing {
            match key {
                KeyCode::Char(c) => self.filter.push(c),
                KeyCode::Backspace => _ = self.filter.pop(),
                KeyCode::Esc => (self.typing, self.filter) = (false, String::new()),
                KeyCode::Enter => self.typing = false,
                _ => {}
            }
            self.offset = 0;
            return false;
        }
        match key {
            KeyCode::Char('q') => return true,
            KeyCode::Char('h' | '?') => self.help = !self.help,
            KeyCode::Esc if self.help => self.help = false,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('/') => (self.typing, self.help) = (true, false),
            KeyCode::Char(' ') => self.paused = !self.paused,
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Left | KeyCode::Char('<') => self.move_sort(Column::ALL.len() - 1),
            KeyCode::Right | KeyCode::Char('>') => self.move_sort(1),
            KeyCode::Up => self.offset = self.offset.saturating_sub(1),
            KeyCode::Down => self.offset += 1,
            KeyCode::PageUp => self.offset = self.offset.saturating_sub(self.page),
            KeyCode::PageDown => self.offset += self.page,
            KeyCode::Home => self.offset = 0,
            KeyCode::End => self.offset = usize::MAX,
            _ => {}
        }
        false
    }

    fn move_sort(&mut self, by: usize) {
        let at = Column::ALL.iter().position(|&c| c == self.sort).unwrap_or(0);
        self.sort = Column::ALL[(at + by) % Column::ALL.len()];
    }

    /// Writes the whole screen. What does not fit is cut at the right.
    pub fn render(&mut self, screen: &mut Buffer) {
        let (width, height) = (screen.area.width, screen.area.height);
        if self.help {
            return HELP.iter().zip(0..height).for_each(|(l, y)| put(screen, y, l, PLAIN));
        }
        let mut rows: Vec<&Row> = self.rows.iter().filter(|r| r.matches(&self.filter)).collect();
        let mut all = Row::default();
        rows.iter().for_each(|r| all.add(r));
        let mut sorted: Vec<Row> = rows.drain(..).cloned().collect();
        rates::sort(&mut sorted, self.sort, self.reversed);
        self.page = usize::from(height.saturating_sub(ABOVE + BELOW)).max(1);
        self.offset = self.offset.min(sorted.len().saturating_sub(self.page));
        let widths = widths(width.into());
        put(screen, 0, &self.title(sorted.len()), BOLD);
        put(screen, 1, &totals(&all), PLAIN);
        self.heads(screen, 2, &widths);
        for (r, y) in sorted.iter().skip(self.offset).zip(ABOVE..height.saturating_sub(BELOW)) {
            put(screen, y, &line(r, &widths), if r.errors > 0.0 { RED } else { PLAIN });
        }
        put(screen, height.saturating_sub(BELOW).max(ABOVE), &self.foot(), PLAIN);
    }

    fn title(&self, shown: usize) -> String {
        let mut text =
            format!("unirdma top: {shown} of {} vRNICs, every {} s", self.rows.len(), self.delay.as_secs_f64());
        if self.paused {
            text += "  PAUSED";
        }
        match &self.failed {
            Some(why) => text += &format!("  NO ANSWER: {why}"),
            None if !self.begun => text += "  (the first table comes after one interval)",
            None => {}
        }
        text
    }

    fn heads(&self, screen: &mut Buffer, y: u16, widths: &[usize]) {
        let mut x = 0;
        for (&column, &w) in Column::ALL.iter().zip(widths) {
            let (mark, style) = match (column == self.sort, self.reversed) {
                (false, _) => ("", BOLD),
                (true, false) => ("v", REVERSE),
                (true, true) => ("^", REVERSE),
            };
            let cell = pad(&format!("{}{mark}", column.head()), w, column.is_text());
            put_at(screen, x, y, &cell, style);
            x += cell.len() as u16 + 1;
        }
    }

    fn foot(&self) -> String {
        match (self.typing, self.filter.as_str()) {
            (true, text) => format!("filter: {text}_   Enter keeps it, Esc drops it"),
            (false, "") => KEYS.into(),
            (false, text) => format!("filter: {text} (Esc drops it)   {KEYS}"),
        }
    }
}

fn totals(all: &Row) -> String {
    format!(
        "all: sent {}B/s, {}/s  received {}B/s, {}/s  errors {}/s  CPU {:.0}%",
        short(all.sent_bytes),
        short(all.sends),
        short(all.received_bytes),
        short(all.receives),
        short(all.errors),
        all.cpu * 100.0
    )
}

/// Widths of the columns. Names get the width that the other columns leave.
fn widths(width: usize) -> Vec<usize> {
    let fixed = |c: &Column| match c {
        Column::Name => 0,
        Column::Group => 8,
        Column::Sent => 7,
        Column::Received => 9,
        Column::Sends | Column::Recvs | Column::Errors => 7,
        Column::Cpu => 5,
        Column::Qps | Column::Mrs => 6,
    };
    let mut widths: Vec<usize> = Column::ALL.iter().map(fixed).collect();
    let left = width.saturating_sub(widths.iter().sum::<usize>() + widths.len() - 1);
    // Names and groups share the width beyond 24 characters.
    let (name, group) = if left > 24 { (24 + (left - 24) / 2, (left - 24) / 2) } else { (left.max(8), 0) };
    widths[0] = name.min(32);
    widths[1] = (widths[1] + group).min(32);
    widths
}

fn line(r: &Row, widths: &[usize]) -> String {
    let cells: Vec<String> = Column::ALL.iter().zip(widths).map(|(&c, &w)| pad(&r.cell(c), w, c.is_text())).collect();
    cells.join(" ")
}

/// Writes a line, if the screen has it.
fn put(screen: &mut Buffer, y: u16, text: &str, style: Style) {
    put_at(screen, 0, y, text, style);
}

fn put_at(screen: &mut Buffer, x: u16, y: u16, text: &str, style: Style) {
    if x < screen.area.width && y < screen.area.height {
        screen.set_string(x, y, text, style);
    }
}

/// Brings a text to exactly `width` characters; a longer text ends with `~`.
fn pad(text: &str, width: usize, left: bool) -> String {
    match (text.chars().count() > width, left) {
        (true, _) => text.chars().take(width.saturating_sub(1)).chain(['~']).collect(),
        (false, true) => format!("{text:width$}"),
        (false, false) => format!("{text:>width$}"),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::buffer::Cell;
    use ratatui::layout::Rect;

    use super::*;

    fn view(count: usize) -> View {
        let mut view = View::new(Column::Sent, String::new(), Duration::from_secs(1));
        let row = |i: usize| Row {
            name: format!("vrnic-{i:02}"),
            group: if i % 2 == 0 { "blue" } else { "red" }.into(),
            sent_bytes: i as f64 * 1e9,
            errors: if i == 3 { 1.0 } else { 0.0 },
            ..Row::default()
        };
        view.show((0..count).map(row).collect());
        view
    }

    fn screen(view: &mut View, width: u16, height: u16) -> Buffer {
        let mut screen = Buffer::empty(Rect::new(0, 0, width, height));
        view.render(&mut screen);
        screen
    }

    fn lines(view: &mut View, height: u16) -> Vec<String> {
        let line = |cells: &[Cell]| cells.iter().map(Cell::symbol).collect::<String>().trim_end().to_owned();
        screen(view, 80, height).content.chunks(80).map(line).collect()
    }

    fn names(view: &mut View, height: u16) -> Vec<String> {
        let rows = lines(view, height).into_iter().filter(|l| l.starts_with("vrnic-"));
        rows.map(|l| l[6..8].to_string()).collect()
    }

    #[test]
    fn every_size_of_screen_holds_its_lines_and_80_columns_show_every_column() {
        for (width, height) in
            [1, 10, 40, 79, 80, 81, 120, 300].into_iter().flat_map(|w| [1, 4, 5, 24, 100].map(|h| (w, h)))
        {
            let mut view = view(20);
            // A text outside of the screen panics.
            screen(&mut view, width, height);
            view.help = true;
            screen(&mut view, width, height);
        }
        let lines = lines(&mut view(20), 24);
        assert!(Column::ALL.iter().all(|c| lines[2].contains(c.head())), "{}", lines[2]);
        // A row ends where the head of its last column ends.
        assert_eq!((lines[2].len(), lines[3].len()), (80, 80));
        assert!(lines[23].starts_with("q quit"));
    }

    #[test]
    fn keys_sort_scroll_filter_pause_and_end() {
        let mut v = view(20);
        let press = |v: &mut View, keys: &[KeyCode]| keys.iter().any(|&k| v.press(k));
        assert_eq!(names(&mut v, 7), ["19", "18", "17"]);
        press(&mut v, &[KeyCode::Char('r')]);
        assert_eq!(names(&mut v, 7), ["00", "01", "02"]);
        press(&mut v, &[KeyCode::Down, KeyCode::PageDown]);
        assert_eq!(names(&mut v, 7), ["04", "05", "06"]);
        press(&mut v, &[KeyCode::End]);
        assert_eq!(names(&mut v, 7), ["17", "18", "19"]);
        press(&mut v, &[KeyCode::Home, KeyCode::Char('r'), KeyCode::Left, KeyCode::Left]);
        assert_eq!(names(&mut v, 7), ["00", "01", "02"]);
        // While a filter is typed, letters go to the filter, also letters that are keys otherwise.
        let typed =
            [KeyCode::Char('/'), KeyCode::Char('R'), KeyCode::Char('e'), KeyCode::Char('q'), KeyCode::Backspace];
        assert!(!press(&mut v, &typed));
        assert_eq!(names(&mut v, 7), ["01", "03", "05"]);
        assert!(lines(&mut v, 24)[23].starts_with("filter: Re_"));
        press(&mut v, &[KeyCode::Enter]);
        assert_eq!(names(&mut v, 7), ["01", "03", "05"]);
        press(&mut v, &[KeyCode::Esc, KeyCode::Char(' ')]);
        v.show(Vec::new());
        assert_eq!(names(&mut v, 24).len(), 20);
        press(&mut v, &[KeyCode::Char(' ')]);
        v.show(Vec::new());
        assert_eq!(names(&mut v, 24).len(), 0);
        assert!(press(&mut v, &[KeyCode::Char('q')]));
    }

    #[test]
    fn control_and_alt_are_as_in_a_terminal() {
        let mut v = view(20);
        let key = |c, modifiers| KeyEvent::new(KeyCode::Char(c), modifiers);
        "/x".chars().for_each(|c| _ = v.press(KeyCode::Char(c)));
        assert!(!v.key(key('h', KeyModifiers::CONTROL)) && v.typing && v.filter.is_empty());
        assert!(!v.key(key('q', KeyModifiers::CONTROL)) && v.filter.is_empty());
        assert!(!v.key(key('j', KeyModifiers::CONTROL)) && !v.typing);
        // Escape drops the filter, and q quits.
        "/x".chars().for_each(|c| _ = v.press(KeyCode::Char(c)));
        assert!(v.key(key('q', KeyModifiers::ALT)));
        assert!(v.key(key('c', KeyModifiers::CONTROL)));
    }

    #[test]
    fn errors_stand_out_and_a_lost_virtual_layer_is_said() {
        let mut v = view(4);
        let shown = screen(&mut v, 80, 24);
        let red: Vec<u16> = (0..24).filter(|&y| shown[(0, y)].fg == Color::Red).collect();
        assert!(red == [3] && lines(&mut v, 24)[3].starts_with("vrnic-03"));
        v.fail(&std::io::Error::other("gone"));
        assert!(lines(&mut v, 24)[0].ends_with("NO ANSWER: gone"));
        v.show(Vec::new());
        assert!(!lines(&mut v, 24)[0].contains("gone"));
    }

    #[test]
    fn a_long_name_is_cut_with_a_mark() {
        assert_eq!(
            (pad("abcdef", 4, true), pad("ab", 4, true), pad("ab", 4, false)),
            ("abc~".into(), "ab  ".into(), "  ab".into())
        );
    }
}
