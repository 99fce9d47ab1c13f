//! Exit codes. Each command says its own at the end of its help, after `Exit codes:`; from there they are gathered.

use clap::Command;

use super::page::Page;
use super::visible;

/// What begins a command's exit codes in its help.
const MARK: &str = "Exit codes:";

/// A command's help after its options, without its exit codes, and these: code and meaning.
pub fn split(command: &Command) -> (String, Vec<(String, String)>) {
    let text = command.get_after_long_help().or_else(|| command.get_after_help());
    let text = text.map(ToString::to_string).unwrap_or_default();
    let Some((notes, codes)) = text.split_once(MARK) else { return (text.trim_end().to_owned(), Vec::new()) };
    let (codes, rest) = codes.split_once("\n\n").unwrap_or((codes, ""));
    let notes = [notes.trim_end(), rest.trim_end()].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>();
    (notes.join("\n\n"), parse(codes))
}

/// `0 shown; 1 refused`, or a line for each code.
fn parse(codes: &str) -> Vec<(String, String)> {
    let is_list = codes.starts_with('\n');
    let items: Vec<String> = match is_list {
        // A line that does not begin with a code goes on with the one before.
        true => codes.trim().split("\n").fold(Vec::new(), |mut items: Vec<String>, line| {
            let word = line.split_whitespace().next().unwrap_or_default();
            match items.last_mut() {
                Some(last) if !is_code(word) => *last += &format!(" {}", line.trim()),
                _ => items.push(line.trim().to_owned()),
            }
            items
        }),
        false => {
            let line = codes.split_whitespace().collect::<Vec<_>>().join(" ");
            line.trim_end_matches('.').split("; ").fold(Vec::new(), |mut items: Vec<String>, part| {
                match items.last_mut() {
                    Some(last) if !is_code(part.split(' ').next().unwrap_or_default()) => {
                        *last += &format!("; {part}");
                    }
                    _ => items.push(part.to_owned()),
                }
                items
            })
        }
    };
    let pairs = items.iter().filter_map(|item| item.split_once(' '));
    pairs.map(|(code, meaning)| (code.to_owned(), meaning.trim().to_owned())).collect()
}

/// A number, `N`, or a sum of the two.
fn is_code(word: &str) -> bool {
    word == "N" || word == "128+N" || (!word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The page on all commands.
pub fn page(root: &Command) -> Page {
    let mut page = Page::default();
    page.text(
        "0 is yes, or done. 1 is no: the command could be carried out, and that is its answer. 2 is a failure: bad \
         usage, no mount, a fault of the system; then stderr has one line that says what is wrong and what to do. \
         Commands that run another have its exit code, and codes of their own where env(1) and timeout(1) have them.",
    );
    page.text(
        "`leasefs | head`: a reader that has seen enough is no failure. The helper for mount(8) has that program's codes: \
         0, 1 for bad usage, 32 where it could not mount.",
    );
    for command in visible(root) {
        page.head(format!("leasefs {}", command.get_name()));
        for (code, meaning) in split(command).1 {
            page.entry(code, meaning);
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn both_forms_are_read() {
        let pairs = |codes: &str| parse(codes).into_iter().map(|(a, b)| format!("{a}={b}")).collect::<Vec<_>>();
        assert_eq!(
            pairs(" 0 shown; 1 no such key; 2 bad usage or failure."),
            ["0=shown", "1=no such key", "2=bad usage or failure"]
        );
        assert_eq!(
            pairs("\n  75   lost, and\n       ended\n  N    CMD's own; 128+N when killed"),
            ["75=lost, and ended", "N=CMD's own; 128+N when killed"]
        );
        assert_eq!(pairs(" 0 yes; or done; 1 no"), ["0=yes; or done", "1=no"]);
    }

    #[test]
    fn every_command_says_how_it_exits() {
        let mut root = crate::cli::Cli::command();
        root.build();
        for command in visible(&root) {
            let (_, codes) = split(command);
            let name = command.get_name();
            assert!(codes.len() >= 2, "{name}: its help must end with `Exit codes: 0 …; 2 …`: {codes:?}");
            assert!(codes.iter().all(|(code, meaning)| is_code(code) && !meaning.is_empty()), "{name}: {codes:?}");
        }
    }
}
