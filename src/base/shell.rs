//! Commands that messages suggest, as they can be pasted into a shell.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;

/// Words of a command, quoted where a shell would change them.
pub fn command_line<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_./:=,@%+".contains(c);
    let quoted = |word: &str| {
        if !word.is_empty() && word.chars().all(is_plain) {
            return word.to_owned();
        }
        format!("'{}'", word.replace('\'', r"'\''"))
    };
    words.into_iter().map(quoted).collect::<Vec<_>>().join(" ")
}

/// A path as a word of a command. One that begins with `-` would be a flag.
pub fn path_word(path: &Path) -> String {
    let text = path.to_string_lossy();
    command_line([if text.starts_with('-') { format!("./{text}") } else { text.into_owned() }.as_str()])
}

/// A command, built word by word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShellCommand(String);

impl ShellCommand {
    /// A command without arguments, for example `prsmed train`.
    pub fn new(command: &str) -> Self {
        Self(command.to_owned())
    }

    /// Adds a path that is an argument of its own.
    #[must_use]
    pub fn path(self, path: &Path) -> Self {
        Self(format!("{} {}", self.0, path_word(path)))
    }

    /// Adds `flag` once for each value.
    #[must_use]
    pub fn flag(self, flag: &str, values: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        let mut text = self.0;
        for value in values {
            let value = value.as_ref().to_string_lossy();
            // a value that begins with `-` would be another flag
            let separator = if value.starts_with('-') { "=" } else { " " };
            text.extend([" ", flag, separator, &command_line([value.as_ref()])]);
        }
        Self(text)
    }

    /// Adds `flag` if `is_set`.
    #[must_use]
    pub fn switch(self, flag: &str, is_set: bool) -> Self {
        if is_set { Self(format!("{} {flag}", self.0)) } else { self }
    }
}

impl fmt::Display for ShellCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn flags_are_repeated_as_they_were_given() {
        let extra = [PathBuf::from("b c"), PathBuf::from("-d")];
        let command = ShellCommand::new("prsmed train").path(Path::new("-it's")).flag("--extra", &extra);
        let command = command.flag("--labels", None::<String>).switch("--allow-leak", true).switch("--no", false);
        assert_eq!(command.to_string(), r"prsmed train './-it'\''s' --extra 'b c' --extra=-d --allow-leak");
    }
}
