//! Images and answers in memory, bounded in number, bytes and time. Nothing is written to disk.

use super::answer::{Answer, SliceAnswer};
use super::failure::{HttpFailure, HttpResult};
use super::options::{MAX_ANSWERS, MAX_STORED};
use super::picture::ServedImage;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

struct Entry {
    picture: Arc<ServedImage>,
    answers: Vec<Answer>,
    used: Instant,
}

impl Entry {
    /// A question about it waits or runs.
    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.picture) > 1
    }

    fn is_kept(&self, keep: Duration) -> bool {
        self.used.elapsed() < keep || self.is_in_use()
    }

    fn bytes(&self) -> usize {
        self.picture.bytes() + self.answers.iter().map(Answer::bytes).sum::<usize>()
    }

    /// Refuses another answer with a mask of so many bytes.
    fn check_room(&self, bytes: usize) -> HttpResult<()> {
        let error = if self.answers.len() >= MAX_ANSWERS {
            format!("the image has {MAX_ANSWERS} answers, and more are not kept")
        } else if self.bytes().saturating_add(bytes) > MAX_STORED {
            format!("the image and its masks use more than {} MiB", MAX_STORED >> 20)
        } else {
            return Ok(());
        };
        Err(HttpFailure::conflict(error, "delete an answer, or upload the image again"))
    }
}

/// Images in memory, with the answers about each.
pub(super) struct ImageStore {
    entries: Mutex<HashMap<String, Entry>>,
    max_images: usize,
    keep: Duration,
}

impl ImageStore {
    pub(super) fn new(max_images: usize, keep: Duration) -> Self {
        Self { entries: Mutex::default(), max_images, keep }
    }

    /// Adds an image and returns its id. Removes the least recently used images that no longer fit.
    pub(super) fn add(&self, picture: ServedImage) -> String {
        let mut entries = self.lock();
        let id = new_id();
        let entry = Entry { picture: Arc::new(picture), answers: Vec::new(), used: Instant::now() };
        entries.insert(id.clone(), entry);
        self.shrink(&mut entries, &id);
        id
    }

    /// The image, which counts as used.
    pub(super) fn picture(&self, id: &str) -> HttpResult<Arc<ServedImage>> {
        self.with(id, |entry| Ok(Arc::clone(&entry.picture)))
    }

    /// The image and its answers, in the order of the questions.
    pub(super) fn image(&self, id: &str) -> HttpResult<(Arc<ServedImage>, Vec<Answer>)> {
        self.with(id, |entry| Ok((Arc::clone(&entry.picture), entry.answers.clone())))
    }

    /// Refuses another question about an image that has too many answers or too large masks. The next mask has `bytes`.
    pub(super) fn check_room(&self, id: &str, bytes: usize) -> HttpResult<()> {
        self.with(id, |entry| entry.check_room(bytes))
    }

    /// Adds an answer and gives it an id.
    pub(super) fn add_answer(&self, id: &str, mut answer: Answer) -> HttpResult<Answer> {
        answer.id = new_id();
        let added = self.with(id, |entry| {
            entry.check_room(answer.bytes())?;
            entry.answers.push(answer.clone());
            Ok(answer)
        })?;
        self.shrink(&mut self.lock(), id);
        Ok(added)
    }

    /// The image and one answer.
    pub(super) fn answer(&self, id: &str, answer: &str) -> HttpResult<(Arc<ServedImage>, Answer)> {
        self.with(id, |entry| {
            let found = entry.answers.iter().find(|found| found.id == answer).ok_or_else(no_answer)?;
            Ok((Arc::clone(&entry.picture), found.clone()))
        })
    }

    /// Changes an answer about one slice and returns it.
    pub(super) fn change(&self, id: &str, answer: &str, change: impl FnOnce(&mut SliceAnswer)) -> HttpResult<Answer> {
        let changed = self.with(id, |entry| {
            let found = entry.answers.iter_mut().find(|found| found.id == answer).ok_or_else(no_answer)?;
            let slice = found.of_slice_mut()?;
            change(slice);
            slice.compare();
            Ok(found.clone())
        })?;
        self.shrink(&mut self.lock(), id);
        Ok(changed)
    }

    pub(super) fn remove_answer(&self, id: &str, answer: &str) -> HttpResult<()> {
        self.with(id, |entry| {
            let at = entry.answers.iter().position(|found| found.id == answer).ok_or_else(no_answer)?;
            entry.answers.remove(at);
            Ok(())
        })
    }

    pub(super) fn remove(&self, id: &str) -> HttpResult<()> {
        self.lock().remove(id).map(drop).ok_or_else(no_image)
    }

    /// Removes images that were not used for too long.
    pub(super) fn expire(&self) {
        self.lock().retain(|_, entry| entry.is_kept(self.keep));
    }

    /// Whether the image is here. It does not count as used.
    pub(super) fn has(&self, id: &str) -> bool {
        self.lock().contains_key(id)
    }

    /// Number of images, and their bytes with all masks.
    pub(super) fn usage(&self) -> (usize, usize) {
        let entries = self.lock();
        (entries.len(), entries.values().map(Entry::bytes).sum())
    }

    fn with<T>(&self, id: &str, read: impl FnOnce(&mut Entry) -> HttpResult<T>) -> HttpResult<T> {
        let mut entries = self.lock();
        let entry = entries.get_mut(id).filter(|entry| entry.is_kept(self.keep)).ok_or_else(no_image)?;
        entry.used = Instant::now();
        read(entry)
    }

    /// Removes the least recently used images, but neither `kept` nor those that are asked about.
    fn shrink(&self, entries: &mut HashMap<String, Entry>, kept: &str) {
        loop {
            let bytes: usize = entries.values().map(Entry::bytes).sum();
            if entries.len() <= self.max_images && bytes <= MAX_STORED {
                return;
            }
            let others = entries.iter().filter(|(id, entry)| *id != kept && !entry.is_in_use());
            let Some(oldest) = others.min_by_key(|(_, entry)| entry.used).map(|(id, _)| id.clone()) else { return };
            entries.remove(&oldest);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// 128 random bits: nobody can guess the id of another user's image.
fn new_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

pub(super) fn no_image() -> HttpFailure {
    let hint = "upload the image again; the server keeps images for a limited time";
    HttpFailure::not_found("there is no such image", hint)
}

fn no_answer() -> HttpFailure {
    HttpFailure::not_found("there is no such answer", "ask the question again")
}

#[cfg(test)]
mod tests {
    use super::super::answer::AnswerContent;
    use super::super::picture::SliceView;
    use super::*;
    use crate::data::agreement::Positions;
    use crate::data::position::Zones;
    use crate::segment::calibration::Confidence;
    use axum::http::StatusCode;
    use image::{DynamicImage, GrayImage};

    fn picture(width: u32) -> ServedImage {
        ServedImage::new(DynamicImage::new_luma8(width, 1), None)
    }

    fn answer() -> Answer {
        let content = AnswerContent::Slice(SliceAnswer {
            view: SliceView::default(),
            answer: "a".into(),
            mask_given: false,
            new_tokens: 1,
            class: None,
            area_frac: 0.0,
            area_mm2: None,
            confidence: Some(Confidence::of(&[0.0], None)),
            corrected_answer: None,
            positions: Positions::default(),
            mask_warning: None,
            zones: Zones::default(),
            mask: Arc::new(GrayImage::new(3, 1)),
            corrected: None,
        });
        Answer {
            id: String::new(),
            question: "q".into(),
            familiarity: crate::data::familiarity::Familiarity::default(),
            view_differs: None,
            seconds: 0.0,
            content,
        }
    }

    #[test]
    fn the_least_recently_used_image_is_removed_for_a_new_one() {
        let store = ImageStore::new(2, Duration::from_mins(1));
        let [first, second] = [1, 2].map(|width| store.add(picture(width)));
        assert_ne!(first, second);
        store.picture(&first).unwrap();
        let third = store.add(picture(3));
        assert_eq!(store.picture(&second).unwrap_err().status, StatusCode::NOT_FOUND);
        assert_eq!(store.picture(&first).unwrap().size(), (1, 1));
        assert_eq!(store.picture(&third).unwrap().size(), (3, 1));
        assert_eq!(store.usage(), (2, 4));
        store.remove(&first).unwrap();
        assert_eq!(store.remove(&first).unwrap_err().error, "there is no such image");
        assert_eq!(store.usage(), (1, 3));
    }

    #[test]
    fn an_image_that_is_asked_about_stays() {
        let store = ImageStore::new(2, Duration::from_millis(20));
        let asked = store.add(picture(1));
        let held = store.picture(&asked).unwrap();
        let others: Vec<String> = (2..8).map(|width| store.add(picture(width))).collect();
        assert!(store.has(&asked) && store.has(&others[5]) && !others[..5].iter().any(|other| store.has(other)));
        std::thread::sleep(Duration::from_millis(40));
        store.expire();
        store.add_answer(&asked, answer()).unwrap();
        assert!(!store.has(&others[5]), "expired");
        drop(held);
        std::thread::sleep(Duration::from_millis(40));
        store.expire();
        assert!(!store.has(&asked));
    }

    #[test]
    fn images_expire() {
        let store = ImageStore::new(2, Duration::from_millis(20));
        let id = store.add(picture(1));
        store.picture(&id).unwrap();
        std::thread::sleep(Duration::from_millis(40));
        assert!(store.picture(&id).is_err());
        assert_eq!(store.usage().0, 1);
        store.expire();
        assert_eq!(store.usage(), (0, 0));
    }

    #[test]
    fn answers_are_bounded_changed_and_removed() {
        let store = ImageStore::new(2, Duration::from_mins(1));
        let id = store.add(picture(3));
        let ids: Vec<String> = (0..MAX_ANSWERS).map(|_| store.add_answer(&id, answer()).unwrap().id).collect();
        assert_eq!(store.check_room(&id, 1).unwrap_err().status, StatusCode::CONFLICT);
        assert_eq!(store.add_answer(&id, answer()).unwrap_err().status, StatusCode::CONFLICT);
        let mask = Arc::new(GrayImage::from_pixel(3, 1, image::Luma([255])));
        let changed = store.change(&id, &ids[1], |answer| answer.corrected = Some(Arc::clone(&mask))).unwrap();
        assert_eq!(
            (changed.of_slice().unwrap().current_mask(), changed.json()["corrected"].as_bool()),
            (&mask, Some(true))
        );
        assert_eq!(store.usage().1, 3 + 3 * MAX_ANSWERS + 3);
        store.remove_answer(&id, &ids[1]).unwrap();
        assert_eq!(store.answer(&id, &ids[1]).unwrap_err().error, "there is no such answer");
        assert_eq!(store.image(&id).unwrap().1.len(), MAX_ANSWERS - 1);
        store.check_room(&id, 1).unwrap();
        let full = store.check_room(&id, MAX_STORED).unwrap_err();
        assert_eq!(full.error, "the image and its masks use more than 2048 MiB");
    }
}
