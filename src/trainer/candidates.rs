//! The best checkpoints of a run, for a choice after the training: `candidates/step-NNNNNN/`, each as complete as
//! `best/`.
//!
//! The list of the kept ones is part of the training state in `last/`. Folders that are no longer in the list are
//! deleted after `last/` has been saved. So after a crash, all checkpoints of the list in `last/` still exist.

pub use super::checkpoint::Candidate;

use super::checkpoint::{self, Progress};
use crate::tensor::weights;
use crate::{Result, files};
use std::io;
use std::path::{Path, PathBuf};

/// Folder of the candidates in a run folder.
pub const FOLDER: &str = "candidates";

impl Candidate {
    /// Name of its folder.
    pub fn name(&self) -> String {
        format!("step-{:06}", self.step)
    }

    /// Its folder in the run folder `run`.
    pub fn folder(&self, run: &Path) -> PathBuf {
        run.join(FOLDER).join(self.name())
    }
}

/// Adds `new` to the best `most` candidates, the best one first. Returns false if it is not among them. Of equal scores
/// the earlier one is better.
pub(super) fn add(kept: &mut Vec<Candidate>, new: Candidate, most: usize) -> bool {
    kept.retain(|other| other.step != new.step);
    let rank = kept.iter().filter(|other| other.score >= new.score).count();
    kept.insert(rank, new);
    kept.truncate(most);
    rank < most
}

/// The candidates of the run folder `run` whose checkpoints exist. A run that continues a copy of another run's
/// checkpoint does not have them.
pub(super) fn existing(kept: &[Candidate], run: &Path) -> Vec<Candidate> {
    kept.iter().filter(|one| weights::readable_folder(&one.folder(run)).is_ok()).copied().collect()
}

/// The kept candidates of the run folder `run`, the best one first, and the kind of their scores.
///
/// # Errors
/// [`crate::Error::Weights`] without a complete checkpoint in `last/`; [`crate::Error::Io`].
pub fn of_run(run: &Path) -> Result<(Vec<Candidate>, String)> {
    let progress = checkpoint::read_progress(&weights::readable_folder(&run.join("last"))?)?;
    Ok((existing(&progress.candidates, run), progress.score_kind))
}

/// Deletes the candidates in the run folder `run` that are not in `kept`.
pub(super) fn prune(kept: &[Candidate], run: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(run.join(FOLDER)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("step-") && kept.iter().all(|one| one.name() != *name) {
            files::discard(&path)?;
        }
    }
    Ok(())
}

/// Replaces `best/` in the run folder `run` by a copy of `candidate` that has another score: what chose it. Does nothing
/// if it is there already.
///
/// # Errors
/// [`crate::Error::Weights`] for a damaged candidate; [`crate::Error::Io`].
pub fn promote(run: &Path, candidate: &Candidate, score: f64, kind: &str) -> Result<()> {
    let (source, best) = (weights::readable_folder(&candidate.folder(run))?, run.join("best"));
    let chosen = |progress: Progress| Progress {
        best_score: Some(score),
        best_values: Vec::new(),
        score_kind: kind.to_owned(),
        ..progress
    };
    let progress = chosen(checkpoint::read_progress(&source)?);
    let is_there = weights::readable_folder(&best)
        .and_then(|best| checkpoint::read_progress(&best))
        .is_ok_and(|before| before == progress);
    if is_there {
        return Ok(());
    }
    weights::replace_folder(&source, &best, (checkpoint::PROGRESS, &progress.to_json()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_ones_are_kept_in_their_order() {
        let mut kept = Vec::new();
        let mut with = |step: u64, score: f64| {
            let is_kept = add(&mut kept, Candidate { step, score }, 3);
            (is_kept, kept.iter().map(|one| one.step).collect::<Vec<_>>())
        };
        assert_eq!(with(10, -3.0), (true, vec![10]));
        assert_eq!(with(20, -1.0), (true, vec![20, 10]));
        assert_eq!(with(30, -2.0), (true, vec![20, 30, 10]));
        assert_eq!(with(40, -4.0), (false, vec![20, 30, 10]));
        assert_eq!(with(50, -1.0), (true, vec![20, 50, 30]), "the earlier one of equal scores is better");
        assert_eq!(with(20, -5.0), (true, vec![50, 30, 20]), "a step that is validated again has its new score");
    }

    #[test]
    fn only_folders_of_candidates_are_deleted() {
        let run = tempfile::tempdir().unwrap();
        let folder = |name: &str, file: &str| {
            let folder = run.path().join(FOLDER).join(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(file), "{}").unwrap();
            folder
        };
        prune(&[], run.path()).expect("no candidates yet");
        let [kept, pruned] = ["step-000010", "step-000020"].map(|name| folder(name, files::CHECKSUMS));
        let [other, foreign] = [folder("notes", files::CHECKSUMS), folder("step-000030", "mine.txt")];
        let list = [Candidate { step: 10, score: 0.0 }, Candidate { step: 40, score: 0.0 }];
        prune(&list, run.path()).unwrap();
        assert_eq!([kept, pruned, other, foreign].map(|folder| folder.exists()), [true, false, true, true]);
        assert_eq!(existing(&list, run.path()), list[..1]);
    }
}
