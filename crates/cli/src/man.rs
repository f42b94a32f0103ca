//! Manual pages, one for each command, from the same tree that parses the command line. `cargo xtask package man` and
//! packages ask for them.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use crate::errors::context;

/// Writes the pages of a command and of its subcommands into a directory.
pub(crate) fn write(mut command: clap::Command, dir: &Path) -> io::Result<()> {
    std::fs::create_dir_all(dir).map_err(context(dir.display()))?;
    command = command.disable_help_subcommand(true);
    command.build();
    write_built(&command, dir)
}

fn write_built(command: &clap::Command, dir: &Path) -> io::Result<()> {
    for below in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        write_built(below, dir)?;
    }
    let man = Man::new(command.clone());
    let file = man.get_filename();
    let path = dir.join(&file);
    let mut page = Vec::new();
    // The crate leaves an empty date out, and all that follows would be taken for another thing. Pages have no date, so
    // that two builds of one version are the same.
    let (title, version) = (file.trim_end_matches(".1"), env!("CARGO_PKG_VERSION"));
    writeln!(page, ".TH {title} 1 \"\" \"unirdma {version}\" uniRDMA")?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().any(|a| !a.is_hide_set()) {
        man.render_options_section(&mut page)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(text) = command.get_after_help() {
        notes(&text.to_string()).to_writer(&mut page)?;
    }
    File::create(&path).and_then(|mut file| file.write_all(&page)).map_err(context(path.display()))
}

/// The text below the options in `--help`. Lines that are indented stay as they are.
fn notes(text: &str) -> Roff {
    let mut roff = Roff::new();
    let mut section = "";
    for paragraph in text.split("\n\n") {
        let (head, rest) = match paragraph.split_once('\n') {
            Some((first, rest)) if first.starts_with("Example") => ("EXAMPLES", rest),
            _ => ("NOTES", paragraph),
        };
        if head != section {
            roff.control("SH", [head]);
            section = head;
        } else {
            roff.control("PP", []);
        }
        let mut is_kept = false;
        for line in rest.lines() {
            if line.starts_with("  ") != is_kept {
                is_kept = !is_kept;
                roff.control(if is_kept { "nf" } else { "fi" }, []);
            }
            roff.text([roman(line.trim())]);
        }
        if is_kept {
            roff.control("fi", []);
        }
    }
    roff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_kept_and_text_is_filled() {
        let page = notes("Examples:\n  unirdma a\n  .b\n\nText that\ngoes on:\n  kept\n\nMore.").to_roff();
        let wanted =
            ".SH EXAMPLES\n.nf\nunirdma a\n\\&.b\n.fi\n.SH NOTES\nText that\ngoes on:\n.nf\nkept\n.fi\n.PP\nMore.\n";
        assert_eq!(page, wanted);
    }
}
