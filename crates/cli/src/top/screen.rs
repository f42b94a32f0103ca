//! The contents of the screen, as lines of text.

use std::time::Duration;

use super::rates::{self, Column, Row};
use super::short;
use super::terminal::Key;

const BOLD: &str = "\x1b[1m";
const RED: &str = "\x1b[1;31m";
const REVERSE: &str = "\x1b[7m";
const PLAIN: &str = "\x1b[0m";

/// Lines above and below the rows.
const ABOVE: usize = 3;
const BELOW: usize = 1;

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

    /// Handles a key. Returns true if the program is to end.
    pub fn press(&mut self, key: Key) -> bool {
        if self.typing {
            match key {
                Key::Char(c) => self.filter.push(c),
                Key::Backspace => _ = self.filter.pop(),
                Key::Escape => (self.typing, self.filter) = (false, String::new()),
                Key::Enter => self.typing = false,
                _ => {}
            }
            self.offset = 0;
            return false;
        }
        match key {
            Key::Char('q') => return true,
            Key::Char('h' | '?') => self.help = !self.help,
            Key::Escape if self.help => self.help = false,
            Key::Escape => self.filter.clear(),
            Key::Char('/') => (self.typing, self.help) = (true, false),
            Key::Char(' ') => self.paused = !self.paused,
            Key::Char('r') => self.reversed = !self.reversed,
            Key::Left | Key::Char('<') => self.move_sort(Column::ALL.len() - 1),
            Key::Right | Key::Char('>') => self.move_sort(1),
            Key::Up => self.offset = self.offset.saturating_sub(1),
            Key::Down => self.offset += 1,
            Key::PageUp => self.offset = self.offset.saturating_sub(self.page),
            Key::PageDown => self.offset += self.page,
            Key::Home => self.offset = 0,
            Key::End => self.offset = usize::MAX,
            _ => {}
        }
        false
    }

    fn move_sort(&mut self, by: usize) {
        let at = Column::ALL.iter().position(|&c| c == self.sort).unwrap_or(0);
        self.sort = Column::ALL[(at + by) % Column::ALL.len()];
    }

    /// The lines of a screen of this size. No line is wider than `width`.
    pub fn lines(&mut self, width: usize, height: usize) -> Vec<String> {
        if self.help {
            return HELP.iter().map(|l| cut(l, width)).collect();
        }
        let mut rows: Vec<&Row> = self.rows.iter().filter(|r| r.matches(&self.filter)).collect();
        let mut all = Row::default();
        rows.iter().for_each(|r| all.add(r));
        let mut sorted: Vec<Row> = rows.drain(..).cloned().collect();
        rates::sort(&mut sorted, self.sort, self.reversed);
        self.page = height.saturating_sub(ABOVE + BELOW).max(1);
        self.offset = self.offset.min(sorted.len().saturating_sub(self.page));
        let widths = widths(width);
        let mut lines = vec![paint(BOLD, &cut(&self.title(sorted.len()), width)), cut(&totals(&all), width)];
        lines.push(self.heads(&widths, width));
        let shown = sorted.iter().skip(self.offset).take(self.page);
        lines.extend(shown.map(|r| line(r, &widths, width)));
        lines.resize(height.saturating_sub(BELOW).max(ABOVE), String::new());
        lines.push(cut(&self.foot(), width));
        lines
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

    fn heads(&self, widths: &[usize], width: usize) -> String {
        let mut left = width;
        let mut text = String::new();
        for (&column, &w) in Column::ALL.iter().zip(widths) {
            if left == 0 {
                break;
            }
            let mark = if self.reversed { "^" } else { "v" };
            let sorts = column == self.sort;
            let head = format!("{}{}", column.head(), if sorts { mark } else { "" });
            let cell = cut(&pad(&head, w, column.is_text()), left);
            left = left.saturating_sub(cell.chars().count() + 1);
            text += &if sorts { paint(REVERSE, &cell) } else { paint(BOLD, &cell) };
            text += if left > 0 { " " } else { "" };
        }
        text
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

fn line(r: &Row, widths: &[usize], width: usize) -> String {
    let cells: Vec<String> = Column::ALL.iter().zip(widths).map(|(&c, &w)| pad(&r.cell(c), w, c.is_text())).collect();
    let text = cut(&cells.join(" "), width);
    if r.errors > 0.0 { paint(RED, &text) } else { text }
}

fn paint(how: &str, text: &str) -> String {
    format!("{how}{text}{PLAIN}")
}

/// Cuts a text to `width` characters.
fn cut(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}

/// Brings a text to exactly `width` characters; a longer text ends with `~`.
fn pad(text: &str, width: usize, left: bool) -> String {
    match (text.chars().count() > width, left) {
        (true, _) => cut(text, width.saturating_sub(1)) + "~",
        (false, true) => format!("{text:width$}"),
        (false, false) => format!("{text:>width$}"),
    }
}

#[cfg(test)]
mod tests {
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

    /// A line without its colours.
    fn plain(line: &str) -> String {
        let mut text = String::new();
        let mut rest = line;
        while let Some((before, after)) = rest.split_once('\x1b') {
            text += before;
            rest = after.split_once('m').unwrap().1;
        }
        text + rest
    }

    fn names(view: &mut View, height: usize) -> Vec<String> {
        let lines = view.lines(80, height);
        let rows = lines.iter().map(|l| plain(l)).filter(|l| l.starts_with("vrnic-"));
        rows.map(|l| l[6..8].to_string()).collect()
    }

    #[test]
    fn every_size_of_screen_holds_all_lines_and_80_columns_show_every_column() {
        for width in [1, 10, 40, 79, 80, 81, 120, 300] {
            for height in [1, 4, 5, 24, 100] {
                let mut view = view(20);
                let lines = view.lines(width, height);
                assert!(lines.iter().all(|l| plain(l).chars().count() <= width), "{width}: {lines:?}");
                assert!(lines.len() <= height.max(ABOVE + BELOW), "{height}");
                view.help = true;
                assert!(view.lines(width, height).iter().all(|l| l.chars().count() <= width));
            }
        }
        let lines = view(20).lines(80, 24);
        let heads = plain(&lines[2]);
        assert!(Column::ALL.iter().all(|c| heads.contains(c.head())), "{heads}");
        // A row ends where the head of its last column ends.
        assert_eq!(heads.len(), plain(&lines[3]).len());
    }

    #[test]
    fn keys_sort_scroll_filter_pause_and_end() {
        let mut v = view(20);
        let press = |v: &mut View, keys: &[Key]| keys.iter().any(|&k| v.press(k));
        assert_eq!(names(&mut v, 7), ["19", "18", "17"]);
        press(&mut v, &[Key::Char('r')]);
        assert_eq!(names(&mut v, 7), ["00", "01", "02"]);
        press(&mut v, &[Key::Down, Key::PageDown]);
        assert_eq!(names(&mut v, 7), ["04", "05", "06"]);
        press(&mut v, &[Key::End]);
        assert_eq!(names(&mut v, 7), ["17", "18", "19"]);
        press(&mut v, &[Key::Home, Key::Char('r'), Key::Left, Key::Left]);
        assert_eq!(names(&mut v, 7), ["00", "01", "02"]);
        // While a filter is typed, letters go to the filter, also letters that are keys otherwise.
        let typed = [Key::Char('/'), Key::Char('R'), Key::Char('e'), Key::Char('q'), Key::Backspace];
        assert!(!press(&mut v, &typed));
        assert_eq!(names(&mut v, 7), ["01", "03", "05"]);
        assert!(plain(v.lines(80, 24).last().unwrap()).starts_with("filter: Re_"));
        press(&mut v, &[Key::Enter]);
        assert_eq!(names(&mut v, 7), ["01", "03", "05"]);
        press(&mut v, &[Key::Escape, Key::Char(' ')]);
        v.show(Vec::new());
        assert_eq!(names(&mut v, 24).len(), 20);
        press(&mut v, &[Key::Char(' ')]);
        v.show(Vec::new());
        assert_eq!(names(&mut v, 24).len(), 0);
        assert!(press(&mut v, &[Key::Char('q')]));
    }

    #[test]
    fn errors_stand_out_and_a_lost_virtual_layer_is_said() {
        let mut v = view(4);
        let red: Vec<String> = v.lines(80, 24).into_iter().filter(|l| l.starts_with(RED)).collect();
        assert!(red.len() == 1 && plain(&red[0]).starts_with("vrnic-03"));
        v.fail(&std::io::Error::other("gone"));
        assert!(plain(&v.lines(80, 24)[0]).ends_with("NO ANSWER: gone"));
        v.show(Vec::new());
        assert!(!plain(&v.lines(80, 24)[0]).contains("gone"));
    }

    #[test]
    fn a_long_name_is_cut_with_a_mark() {
        assert_eq!(
            (pad("abcdef", 4, true), pad("ab", 4, true), pad("ab", 4, false)),
            ("abc~".into(), "ab  ".into(), "  ab".into())
        );
    }
}
