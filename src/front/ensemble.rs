//! Which runs can be one ensemble. Each run has its own tokenizer, image size and semantics. What cannot be followed is
//! refused: the runs would be asked about different targets, or about images unlike those of their training.

use crate::data::prepared::Intensity;
use crate::segment::setup::Description;
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::path::Path;

impl Description {
    /// Checks that another run can be in an ensemble with this one; `runs` are the names of both.
    ///
    /// # Errors
    /// [`Error::Config`] if their classes, their labels of foreground, or the window or the axis of their images from
    /// volumes differ.
    pub fn check_member(&self, other: &Self, runs: [&Path; 2]) -> Result<()> {
        let [own_name, other_name] = runs.map(|run| format!("`{}`", run.display()));
        let refused = |what: &str, own: String, theirs: String, hint: &str| {
            let reason = format!("the runs were trained {what}: {own_name} {own}, {other_name} {theirs}");
            Err(Error::argument("ensemble", reason, hint))
        };
        let classes = |of: &Self| of.modalities.iter().map(|class| format!("`{class}`")).collect::<BTreeSet<_>>();
        let [own, theirs] = [self, other].map(classes);
        if own != theirs {
            let list = |classes: BTreeSet<String>| classes.into_iter().collect::<Vec<_>>().join(", ");
            return refused("on other classes", list(own), list(theirs), "use runs of the same classes");
        }
        let labels = |of: &Self| match of.pixels.labels {
            labels if labels.is_empty() => "none".to_owned(),
            labels => format!("`{labels}`"),
        };
        if self.pixels.labels != other.pixels.labels {
            let [own, theirs] = [self, other].map(labels);
            return refused("with another argument `labels`", own, theirs, "use runs of the same labels");
        }
        for (class, own) in &self.intensity {
            let is_other = |theirs: &&Intensity| {
                (theirs.axis, theirs.context) != (own.axis, own.context) || !theirs.has_windows_of(own)
            };
            let Some(theirs) = other.intensity.get(class).filter(is_other) else { continue };
            let hint = "use runs that were trained on the same images, or ask them one by one";
            return refused(&format!("on other images of `{class}`"), own.to_string(), theirs.to_string(), hint);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::labels::Labels;
    use crate::data::volume::Neighbours;
    use crate::segment::setup::describe;

    fn run() -> Description {
        describe(&crate::fixture::checkout().join("tests/fixtures/old_names/run")).unwrap()
    }

    fn with(class: &str, axis: &str, window: &str) -> Description {
        let mut description = run();
        let (axis, window) = (axis.parse().unwrap(), window.parse().unwrap());
        let intensity = Intensity { axis, window, context: Neighbours::None, sequences: Vec::new() };
        description.intensity.insert(class.to_owned(), intensity);
        description
    }

    #[test]
    #[expect(clippy::large_stack_arrays, reason = "six pairs of descriptions")]
    fn runs_that_differ_in_what_an_ensemble_cannot_follow_are_refused_by_name() {
        let names = [Path::new("runs/a"), Path::new("runs/b")];
        let mut other_classes = run();
        other_classes.modalities[0] = "eye_OCT".to_owned();
        let mut more_classes = run();
        more_classes.modalities.push("eye_OCT".to_owned());
        let mut labels = run();
        labels.pixels.labels = Labels::new(&[2, 3]).unwrap();
        let class = run().modalities[0].clone();
        let of = |axis: &str, window: &str| with(&class, axis, window);
        for (first, second, expected) in [
            (run(), other_classes, "other classes: `runs/a`"),
            (run(), more_classes, "`eye_OCT`"),
            (run(), labels, "another argument `labels`: `runs/a` none, `runs/b` `2,3`"),
            (
                of("axial", "lung"),
                of("axial", "soft-tissue"),
                "`runs/a` axial slices with the window `lung`, `runs/b` axial",
            ),
            (of("axial", "lung"), of("coronal", "lung"), "`runs/b` coronal slices"),
            (of("axial", "1500/-600"), of("axial", "1400/-600"), "other images of"),
        ] {
            let error = first.check_member(&second, names).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected} is not in {error}");
        }
    }

    #[test]
    fn what_each_run_of_an_ensemble_has_for_itself_may_differ() {
        let names = [Path::new("a"), Path::new("b")];
        let class = run().modalities[0].clone();
        let mut others = [run(), run(), run()];
        others[0].modalities.reverse();
        others[1].model.image_size = 512;
        others[2].model.base = "another".to_owned();
        for other in others {
            run().check_member(&other, names).unwrap();
        }
        // a run that does not say how its images were made
        with(&class, "axial", "lung").check_member(&run(), names).unwrap();
        with(&class, "axial", "soft-tissue").check_member(&with(&class, "axial", "400/40"), names).unwrap();
        with(&class, "axial", "lung").check_member(&with("eye_OCT", "axial", "bone"), names).unwrap();
    }
}
