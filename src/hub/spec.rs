//! What a user may write where weights are asked for.

use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Result};

/// A place of weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Spec {
    /// A path.
    Local(PathBuf),
    /// A repository of the hub.
    Hub {
        /// `owner/name`.
        repo: String,
        /// Branch, tag or commit; `None` for `main`.
        revision: Option<String>,
    },
}

impl Spec {
    /// Reads `hub:owner/name[@revision]`; anything without `hub:` is a path.
    ///
    /// # Errors
    /// [`Error::Config`] when what follows `hub:` is no repository.
    pub fn parse(text: &str) -> Result<Self> {
        let Some(rest) = text.strip_prefix("hub:") else { return Ok(Self::Local(text.into())) };
        let (repo, revision) = rest.split_once('@').map_or((rest, None), |(repo, revision)| (repo, Some(revision)));
        let named = repo.split_once('/').is_some_and(|(owner, name)| is_plain(owner) && is_plain(name));
        let revised = revision.is_none_or(|revision| revision.split('/').all(is_plain));
        if named && revised {
            return Ok(Self::Hub { repo: repo.to_owned(), revision: revision.map(str::to_owned) });
        }
        Err(Error::config(text, "is no repository of the hub", "write `hub:owner/name` or `hub:owner/name@revision`"))
    }
}

/// Whether `part` can be one component of a repository's name or revision, and so of a path in the cache.
pub(super) fn is_plain(part: &str) -> bool {
    !part.is_empty()
        && !part.starts_with(['.', '-'])
        && !part.contains("..")
        && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
}

/// Whether a file name of a repository stays in the folder it is joined to.
pub(super) fn stays_inside(name: &str) -> bool {
    !name.is_empty()
        && !name.contains(['\\', '\0'])
        && !name.ends_with('/')
        && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_and_paths_are_told_apart() {
        let hub =
            |repo: &str, revision: Option<&str>| Spec::Hub { repo: repo.into(), revision: revision.map(str::to_owned) };
        assert_eq!(Spec::parse("hub:o/n").unwrap(), hub("o/n", None));
        assert_eq!(Spec::parse("hub:o/n-1.5_x@refs/pr/1").unwrap(), hub("o/n-1.5_x", Some("refs/pr/1")));
        assert_eq!(Spec::parse("o/n").unwrap(), Spec::Local("o/n".into()));
        for wrong in [
            "hub:",
            "hub:n",
            "hub:o/n/m",
            "hub:../n",
            "hub:o/..",
            "hub:o/n@",
            "hub:o/n@a/../b",
            "hub:o/n@/a",
            "hub:o n/m",
        ] {
            let error = Spec::parse(wrong).unwrap_err();
            assert!(error.to_string().contains("no repository") && error.hint().contains("hub:owner/name"), "{wrong}");
        }
    }

    #[test]
    fn names_that_leave_their_folder_are_seen() {
        assert!(stays_inside("a.json") && stays_inside("a/b..c/d"));
        for wrong in ["", "../a", "a/../../b", "/etc/passwd", "a/", "..\\a", "a\0b", "./../a"] {
            assert!(!stays_inside(wrong), "{wrong:?}");
        }
    }
}
