//! Work of several processes on one job.

use crate::data::identity::{DataIdentity, content_marks};
use crate::data::manifest::Manifest;
use crate::trainer::Ranks;
use crate::{Error, Result};
use std::collections::HashSet;
use std::path::Path;

/// Work of the process that writes files; the others get `None`.
///
/// # Errors
/// Those of `work`.
pub fn main_only<T>(ranks: Ranks, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
    ranks.is_main().then(work).transpose()
}

/// Most bytes of images and masks that are compared.
const COMPARED: u64 = 1 << 30;

/// Refuses data that is not the same for all processes: rows, and the content of images and masks.
///
/// # Errors
/// [`Error::Data`] with the first row or file that differs from that of rank 0; [`Error::Io`].
pub fn check_data(ranks: Ranks, manifest: &Manifest) -> Result<()> {
    check_data_up_to(ranks, manifest, COMPARED)
}

fn check_data_up_to(ranks: Ranks, manifest: &Manifest, most: u64) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let differs = |what: String| {
        let reason = format!("rank {} has other data than rank 0: {what}", ranks.rank());
        Error::data(&manifest.root, reason, "give all processes the same data root, or equal copies of it")
    };
    let own = ranks.agree_on(DataIdentity::of(manifest))?;
    let first = ranks.gather_if_all(Ok(own.clone()))?.swap_remove(0);
    let difference = own.difference_from_first(&first, manifest);
    ranks.agree(difference.map_or(Ok(()), |difference| Err(differs(difference))))?;
    let own = ranks.agree_on(content_marks(manifest, most))?;
    let marks: Vec<u64> = own.iter().map(|(_, mark)| *mark).collect();
    let first = ranks.gather_if_all(Ok(marks))?.swap_remove(0);
    let other = own.iter().zip(first).find(|((_, mark), first)| mark != first);
    let changed = |path: &Path| {
        let all = manifest.rows.iter().flat_map(|row| [&row.image_path, &row.target().mask_path]);
        let count = all.filter(|path| path.exists()).collect::<HashSet<_>>().len();
        let sample = format!("; a sample was compared, {} of {count} images and masks", own.len());
        let sample = if own.len() < count { sample } else { String::new() };
        differs(format!("the content of {} is another{sample}", path.display()))
    };
    ranks.agree(other.map_or(Ok(()), |((path, _), _)| Err(changed(path))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::manifest::{Presence, Target};
    use crate::fixture::{self, Root};
    use crate::tensor::Device;
    use crate::trainer::distributed::{Rendezvous, World};
    use std::process::{Command, Stdio};

    /// Runs `work` as each of two ranks: processes that run the test `name` again.
    fn as_two_ranks(name: &str, work: impl Fn(Ranks)) {
        let var = |name: &str| std::env::var(format!("PRSMED_TEST_{name}")).ok();
        if let Some(joined) = Rendezvous::from_vars(var).unwrap() {
            let world = World::join(&joined, Device::Cpu, &false.into(), &|_| {}).unwrap();
            work(Ranks::of(&world));
            // the store must outlive the other process
            Ranks::of(&world).agree(Ok(())).unwrap();
            world.close().unwrap();
            return;
        }
        let port = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port().to_string();
        let test = format!("{}::{name}", module_path!().split_once("::").unwrap().1);
        let start = |rank: &str| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            let vars = [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
            for (name, value) in vars.into_iter().chain([("GLOO_SOCKET_IFNAME", "lo")]) {
                command.env(format!("PRSMED_TEST_{name}"), value);
            }
            command.args([&test, "--exact"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        for child in ["0", "1"].map(start) {
            let output = child.wait_with_output().unwrap();
            let [text, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
            assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
        }
    }

    #[test]
    fn the_first_process_decides_and_the_others_take_its_choice() {
        as_two_ranks("the_first_process_decides_and_the_others_take_its_choice", |ranks| {
            let choose = |outcome: Result<Vec<String>>| {
                let own = main_only(ranks, || outcome);
                assert!(ranks.is_main() || matches!(own, Ok(None)), "only the first process searches");
                ranks.gather_if_all(own.map(Option::unwrap_or_default)).map(|mut all| all.swap_remove(0))
            };
            let own = format!("train.micro_batch={}", ranks.rank() + 4);
            assert_eq!(choose(Ok(vec![own])).unwrap(), ["train.micro_batch=4"]);
            let error = choose(Err(Error::config("train", "nothing fits", "use a larger GPU"))).unwrap_err();
            let expected =
                if ranks.is_main() { "`train`: nothing fits" } else { "rank 0 failed: `train`: nothing fits" };
            assert_eq!((error.to_string().as_str(), error.hint().as_str()), (expected, "use a larger GPU"));
        });
    }

    #[test]
    fn a_difference_in_a_sample_of_the_data_says_so() {
        as_two_ranks("a_difference_in_a_sample_of_the_data_says_so", |ranks| {
            let root = Root::new();
            root.pair("ct", "train", "a");
            let image_path = root.path().join("ct/train_images/a.png");
            let mask_path = root.path().join("ct/train_masks/a.png");
            if ranks.rank() == 1 {
                let mut bytes = std::fs::read(&image_path).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(&image_path, bytes).unwrap();
            }
            let targets = Target::only(mask_path, Presence::Present);
            let row = crate::data::manifest::Row { targets, image_path, ..fixture::row("where", "here", None) };
            let manifest = Manifest {
                root: root.path().to_path_buf(),
                rows: vec![row],
                modalities: vec!["ct".into()],
                num_leaking: 0,
                skipped: Vec::new(),
                spellings: crate::data::patient::Spellings::default(),
            };
            let whole = check_data_up_to(ranks, &manifest, COMPARED).unwrap_err().to_string();
            assert!(whole.contains("rank 1 ") && whole.ends_with("ct/train_images/a.png is another"), "{whole}");
            let sample = check_data_up_to(ranks, &manifest, 1).unwrap_err().to_string();
            let expected = "ct/train_images/a.png is another; a sample was compared, 1 of 2 images and masks";
            assert!(sample.ends_with(expected), "{sample}");
        });
    }
}
