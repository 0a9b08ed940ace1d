//! Location of weights or data as the user writes it: `hub:owner/name[/INSIDE][@revision]`, `dataset:owner/name...` or a
//! path.

use std::path::{Component, Path, PathBuf};

use prsmed_base::error::{Error, Result};

/// Location of weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Spec {
    /// A local path.
    Local(PathBuf),
    /// A repository of the hub, or a file or folder inside one.
    Hub(HubSource),
}

/// Kind of a repository. Each has its own names: a model and a data set may both be called `owner/name`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// Weights: `hub:owner/name`.
    Model,
    /// Data: `dataset:owner/name`.
    Dataset,
}

impl RepoKind {
    /// Prefix of a spec.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Self::Model => "hub:",
            Self::Dataset => "dataset:",
        }
    }
}

/// A repository of the hub at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubSource {
    /// Model or data set.
    pub kind: RepoKind,
    /// `owner/name`.
    pub repo: String,
    /// A file or folder inside the repository; empty for the whole repository.
    pub inside: String,
    /// Branch, tag or commit; `None` for `main`.
    pub revision: Option<String>,
}

impl Spec {
    /// Parses `hub:owner/name[/INSIDE][@revision]`, or the same with `dataset:`. Any other text is a path.
    ///
    /// # Errors
    /// [`Error::Config`] if the text after `hub:` or `dataset:` is not a repository.
    pub fn parse(text: &str) -> Result<Self> {
        let kinds = [RepoKind::Model, RepoKind::Dataset];
        let Some((kind, rest)) = kinds.into_iter().find_map(|kind| Some((kind, text.strip_prefix(kind.prefix())?)))
        else {
            return Ok(Self::Local(text.into()));
        };
        let (name, revision) = rest.split_once('@').map_or((rest, None), |(name, revision)| (name, Some(revision)));
        let mut parts = name.splitn(3, '/');
        let repo = [parts.next(), parts.next()].map(Option::unwrap_or_default);
        let inside = parts.next();
        let revised = revision.is_none_or(|revision| revision.split('/').all(is_plain));
        if repo.iter().all(|part| is_plain(part)) && inside.is_none_or(stays_inside) && revised {
            let inside = inside.unwrap_or_default().to_owned();
            return Ok(Self::Hub(HubSource {
                kind,
                repo: repo.join("/"),
                inside,
                revision: revision.map(str::to_owned),
            }));
        }
        let hub = kind.prefix();
        let hint =
            format!("write `{hub}owner/name`, `{hub}owner/name/FILE`, or one of them with `@revision` at the end");
        Err(Error::config(text, "does not name a hub repository", hint))
    }
}

impl HubSource {
    /// The same repository and revision with another file or folder inside.
    #[must_use]
    pub fn with_inside(&self, inside: &str) -> Self {
        Self { inside: inside.to_owned(), ..self.clone() }
    }
}

impl std::fmt::Display for HubSource {
    /// In the syntax of [`Spec::parse`].
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let slash = if self.inside.is_empty() { "" } else { "/" };
        write!(f, "{}{}{slash}{}", self.kind.prefix(), self.repo, self.inside)?;
        self.revision.as_ref().map_or(Ok(()), |revision| write!(f, "@{revision}"))
    }
}

/// True if `part` is valid as one component of a repository name, a revision, or a path in the cache.
pub(super) fn is_plain(part: &str) -> bool {
    !part.is_empty()
        && !part.starts_with(['.', '-'])
        && !part.contains("..")
        && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
}

/// True if a file name of a repository does not leave the folder that it is joined to.
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
    fn a_spec_is_a_path_or_a_repository_with_an_optional_file_and_revision() {
        let spec = |kind, repo: &str, inside: &str, revision: Option<&str>| {
            Spec::Hub(HubSource {
                kind,
                repo: repo.into(),
                inside: inside.into(),
                revision: revision.map(str::to_owned),
            })
        };
        let hub = |repo: &str, inside: &str, revision| spec(RepoKind::Model, repo, inside, revision);
        for (text, spec) in [
            ("hub:o/n", hub("o/n", "", None)),
            ("hub:o/n-1.5_x@refs/pr/1", hub("o/n-1.5_x", "", Some("refs/pr/1"))),
            ("hub:o/n/tinysam.pth", hub("o/n", "tinysam.pth", None)),
            ("hub:o/n/runs/a@v1", hub("o/n", "runs/a", Some("v1"))),
            ("dataset:o/n/a.zip@v1", spec(RepoKind::Dataset, "o/n", "a.zip", Some("v1"))),
            ("o/n", Spec::Local("o/n".into())),
        ] {
            let parsed = Spec::parse(text).unwrap();
            assert_eq!(parsed, spec);
            if let Spec::Hub(source) = parsed {
                assert_eq!(source.to_string(), text);
            }
        }
        for wrong in [
            "hub:", "hub:n", "hub:o/n/", "hub:o/n/../x", "hub:o/n//etc", "hub:../n", "hub:o/..", "hub:o/n@",
            "hub:o/n@a/../b", "hub:o/n@/a", "hub:o n/m", "dataset:n",
        ] {
            let error = Spec::parse(wrong).unwrap_err();
            let (prefix, _) = wrong.split_once(':').unwrap();
            let hint = error.hint();
            assert!(
                error.to_string().contains("repository") && hint.contains(&format!("{prefix}:owner/name")),
                "{wrong}"
            );
        }
    }

    #[test]
    fn names_that_leave_their_folder_are_detected() {
        assert!(stays_inside("a.json") && stays_inside("a/b..c/d"));
        for wrong in ["", "../a", "a/../../b", "/etc/passwd", "a/", "..\\a", "a\0b", "./../a"] {
            assert!(!stays_inside(wrong), "{wrong:?}");
        }
    }
}
