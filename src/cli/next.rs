//! Names that do not exist yet, for the commands of `next:` lines.

use std::path::{Path, PathBuf};

/// `NAME` and `ending`, or `NAME-2`, `NAME-3`, ... with it: the first that does not exist in the current folder.
pub(super) fn free(name: &str, ending: &str) -> PathBuf {
    let later = (2_u64..).map(|number| PathBuf::from(format!("{name}-{number}{ending}")));
    let mut all = std::iter::once(PathBuf::from(format!("{name}{ending}"))).chain(later);
    all.find(|path| path.symlink_metadata().is_err()).unwrap_or_default()
}

/// A free folder for a command whose default is `default`; `None` if the default is free.
pub(super) fn free_instead_of(default: &str) -> Option<PathBuf> {
    Some(free(default, "")).filter(|free| free != Path::new(default))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_exists_gets_a_number() {
        let folder = tempfile::tempdir().expect("a folder");
        let name = folder.path().join("settings");
        let name = name.to_str().expect("UTF-8");
        for expected in ["", "-2", "-3"] {
            let path = free(name, ".toml");
            assert_eq!(path, Path::new(&format!("{name}{expected}.toml")));
            assert_eq!(free_instead_of(&format!("{name}.toml")).is_none(), expected.is_empty());
            std::fs::write(path, "").expect("written");
        }
    }
}
