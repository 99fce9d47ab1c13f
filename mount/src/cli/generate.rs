//! `leasefs generate`: man pages and shell completions, from the commands' own definitions and the pages of `leasefs help`.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use super::help::page::{self, Page};
use super::help::{exits, json, topics, visible};
use super::{Cli, completion, mount_helper};

/// The manual all pages are of.
const MANUAL: &str = "leasefs manual";

/// The longest line that fits into a page of 80 columns as it is.
const CODE_WIDTH: usize = 68;

/// Where to.
#[derive(clap::Args)]
pub struct Args {
    /// A directory; man1, man8 and completions are made in it
    dir: PathBuf,
}

/// Writes them.
///
/// # Errors
/// Those of writing files.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut root = Cli::command();
    root.build();
    let man = args.dir.join("man1");
    fs::create_dir_all(&man).with_context(|| man.display().to_string())?;
    write(&man.join("leasefs.1"), &main_page(&root)?)?;
    for command in visible(&root) {
        write(&man.join(format!("leasefs-{}.1", command.get_name())), &command_page(&root, command)?)?;
    }
    let man = args.dir.join("man8");
    fs::create_dir_all(&man).with_context(|| man.display().to_string())?;
    write(&man.join("mount.leasefs.8"), &mount_helper::man_page())?;
    let completions = args.dir.join("completions");
    fs::create_dir_all(&completions).with_context(|| completions.display().to_string())?;
    for (name, script) in completion::scripts()? {
        write(&completions.join(name), &String::from_utf8(script)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn version() -> String {
    format!("leasefs {}", env!("CARGO_PKG_VERSION"))
}

fn write(path: &Path, text: &str) -> Result<()> {
    let mut file = fs::File::create(path).with_context(|| path.display().to_string())?;
    file.write_all(text.as_bytes()).with_context(|| path.display().to_string())
}

/// The first line of a man page. The page has no date of its own: the version says what it is about.
pub fn title(name: &str, section: u8) -> String {
    let preamble = Roff::new().render();
    format!("{preamble}.TH \"{}\" \"{section}\" \"\" \"{}\" \"{MANUAL}\"\n", name.to_uppercase(), version())
}

/// The page of a section that `render` makes, without the preamble that the title's has.
fn part(render: impl FnOnce(&mut Vec<u8>) -> std::io::Result<()>) -> Result<String> {
    let mut bytes = Vec::new();
    render(&mut bytes)?;
    let text = String::from_utf8(bytes)?;
    let preamble = Roff::new().render();
    Ok(text.strip_prefix(&preamble).map(str::to_owned).unwrap_or(text))
}

/// How a command is called, as its help says: with what its arguments stand for, and without a list of its options.
fn synopsis(command: &Command) -> String {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").trim();
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_owned();
    let mut roff = Roff::new();
    roff.control("SH", ["SYNOPSIS"]);
    for (at, form) in usage.lines().map(str::trim).enumerate() {
        if at > 0 {
            roff.control("br", []);
        }
        match form.strip_prefix(&name) {
            Some(rest) => roff.text([bold(&name), roman(rest)]),
            None => roff.text([roman(form)]),
        };
    }
    roff.to_roff()
}

/// A command's options; words in backticks are bold, as in the rest of a page.
fn options(man: &Man) -> Result<String> {
    let text = part(|to| man.render_options_section(to))?;
    let pieces = text.split('`').enumerate();
    Ok(pieces.fold(String::with_capacity(text.len()), |text, (at, piece)| match at {
        0 => text + piece,
        at if at % 2 == 1 => text + "\\fB" + piece,
        _ => text + "\\fR" + piece,
    }))
}

fn section(title: &str, page: &Page) -> String {
    let mut roff = Roff::new();
    roff.control("SH", [title]);
    page::to_roff(page, &mut roff);
    roff.render().strip_prefix(&Roff::new().render()).unwrap_or_default().to_owned()
}

fn see_also(pages: &[&str]) -> String {
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    let mut line = Vec::new();
    for (at, name) in pages.iter().enumerate() {
        let (name, number) = name.split_once('(').unwrap_or((name, ""));
        line.extend([roman(if at > 0 { ", " } else { "" }), bold(name), roman(format!("({number}"))]);
    }
    roff.text(line);
    roff.to_roff()
}

/// Notes of a command, as its help has them: lines that are set in stay as they are, but for lists, of a term and its
/// meaning or of items after a dash, which are filled to the page's width.
fn notes(text: &str) -> Page {
    let mut page = Page::default();
    for paragraph in text.split("\n\n").filter(|paragraph| !paragraph.trim().is_empty()) {
        let (mut plain, mut code, mut items) = (String::new(), String::new(), Vec::<String>::new());
        for line in paragraph.lines() {
            if let Some(item) = line.trim_start().strip_prefix("- ") {
                items.push(item.trim().to_owned());
            } else if let Some(item) = items.last_mut() {
                *item += &format!(" {}", line.trim());
            } else if line.starts_with(' ') {
                code += &format!("{}\n", line.trim_end());
            } else {
                plain += &format!("{line} ");
            }
        }
        if !plain.is_empty() {
            page.text(plain.trim_end());
        }
        let pairs: Option<Vec<_>> = code.lines().map(|line| line.trim().split_once("  ")).collect();
        match pairs {
            _ if code.is_empty() => {}
            Some(pairs) => {
                for (term, meaning) in pairs {
                    page.entry(term, meaning.trim());
                }
            }
            // What would not fit as it is, is a list of sentences.
            None if code.lines().any(|line| line.len() > CODE_WIDTH) => {
                for line in code.lines() {
                    page.entry("\u{2022}", line.trim());
                }
            }
            None => {
                page.code(code);
            }
        }
        for item in items {
            page.entry(page::ITEM, item);
        }
    }
    page
}

fn main_page(root: &Command) -> Result<String> {
    let man = Man::new(root.clone());
    let mut text = title("leasefs", 1);
    text += &part(|to| man.render_name_section(to))?;
    text += &synopsis(root);
    text += &section("DESCRIPTION", &description());
    let mut commands = Page::default();
    for command in visible(root) {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        commands.entry(format!("leasefs-{}(1)", command.get_name()), format!("{about}."));
    }
    commands.0.extend(notes(&exits::split(root).0).0);
    text += &section("COMMANDS", &commands);
    text += &options(&man)?;
    text += &section("EXIT STATUS", &exits::page(root));
    text += &section("FILES", &topics::files());
    text += &section("ENVIRONMENT", &topics::environment());
    text += &section("JSON", &json::page());
    text += &section("METRICS", &topics::metrics());
    text += &section("DIAGNOSTICS", &topics::errors());
    text += &section("EXAMPLES", &examples());
    text += &see_also(&["flock(1)", "flock(2)", "fcntl(2)", "fuse(4)", "mount.leasefs(8)", "systemd.service(5)"]);
    Ok(text)
}

fn command_page(root: &Command, command: &Command) -> Result<String> {
    let man = Man::new(command.clone());
    let mut text = title(&format!("leasefs-{}", command.get_name()), 1);
    text += &part(|to| man.render_name_section(to))?;
    text += &synopsis(command);
    let (said, codes) = exits::split(command);
    let mut about = Page::default();
    if let Some(long) = command.get_long_about().or(command.get_about()) {
        about.text(format!("{}.", long.to_string().trim_end_matches('.')));
    }
    about.0.extend(notes(&said).0);
    text += &section("DESCRIPTION", &about);
    text += &options(&man)?;
    let mut exit = Page::default();
    for (code, meaning) in codes {
        exit.entry(code, meaning);
    }
    text += &section("EXIT STATUS", &exit);
    let mut also = vec!["leasefs(1)".to_owned()];
    // Those its notes speak of.
    let spoken_of = visible(root).map(Command::get_name).filter(|name| said.contains(&format!("leasefs {name}")));
    also.extend(spoken_of.filter(|name| *name != command.get_name()).map(|name| format!("leasefs-{name}(1)")));
    text += &see_also(&also.iter().map(String::as_str).collect::<Vec<_>>());
    Ok(text)
}

fn description() -> Page {
    let mut page = Page::default();
    page.text(
        "leasefs mounts a tree in which a key is a file, and holding the file is holding a lease. Open a key's file \
         exclusively, or lock it, with whatever a language already has: one process gets it. The kernel ends the lease \
         when the last copy of the handle is gone, so a holder that exits, crashes or is killed lets go at once. Each \
         attempt has a number, its epoch, that never comes again, and a result file that takes writes from that attempt \
         alone.",
    );
    page.text(
        "A key is a path below `claims/` of at most 1,024 bytes of UTF-8 without control characters, 255 for each part. \
         A directory there is a namespace; its owner, group and mode say who may claim in it. A key is claimed by \
         `open(2)` with O_CREAT and O_EXCL (do it once: EEXIST if it is held or finished), or by an exclusive lock on the \
         whole file with `flock(2)` or `fcntl(2)` (one at a time, waiting in line or not; a finished key can be locked \
         again), or by `leasefs run`.",
    );
    page.text(
        "Every lease ends after its TTL, 24 h unless said otherwise, if it is not renewed by a write to the handle. A \
         handle that lost its lease gets ESTALE for ever after. A committed result makes its key finished.",
    );
    page.text(
        "Two processes serve a mount. The keeper holds the connection to the kernel; the server answers, and is replaced \
         under its clients when it ends.",
    );
    page
}

fn examples() -> Page {
    let mut page = Page::default();
    page.text("Mount, hold a key, leave a result, look, unmount:");
    page.code(
        "mkdir -p ~/leases && leasefs mount ~/leases\n\
         exec 9<>~/leases/claims/report && flock -n 9 && read -r epoch <&9\n\
         cat ~/leases/status/report\n\
         echo done >~/leases/results/report/$epoch; exec 9>&-\n\
         leasefs unmount ~/leases",
    );
    page.text("A command that runs only while its key is held, for at most one process at a time:");
    page.code("leasefs run -n nightly -- ./nightly");
    page.text("As a service, on /srv/leases, for every user:");
    page.code(
        "echo 'MOUNTPOINT=/srv/leases' >/etc/leasefs/main.conf\n\
         echo 'OPTIONS=--allow-other' >>/etc/leasefs/main.conf\n\
         systemctl enable --now leasefs@main",
    );
    page.text("The same by /etc/fstab:");
    page.code("/var/lib/leasefs/main /srv/leases leasefs allow_other,nofail 0 0");
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_keep_what_is_set_in() {
        let page = notes("One\nline.\n\nA list:\n  a    b\n  c d  e\n\n  f g\n    h  i\n\nSo:\n  - j\n    k\n- l");
        let expected = [
            page::Block::Text("One line.".into()),
            page::Block::Text("A list:".into()),
            page::Block::Entry("a".into(), "b".into()),
            page::Block::Entry("c d".into(), "e".into()),
            page::Block::Code("  f g\n    h  i\n".into()),
            page::Block::Text("So:".into()),
            page::Block::Entry("-".into(), "j k".into()),
            page::Block::Entry("-".into(), "l".into()),
        ];
        assert_eq!(page.0, expected);
        let long = format!("  short\n  {}", "long ".repeat(20));
        assert!(notes(&long).0.iter().all(|block| matches!(block, page::Block::Entry(mark, _) if mark == "\u{2022}")));
    }
}
