//! Images and answers in memory, bounded in number, bytes and time. Nothing is written to disk.

use super::failure::{Failure, Reply};
use super::options::{MAX_ANSWERS, MAX_STORED};
use super::picture::{Picture, View};
use crate::segment::calibration::Confidence;
use axum::http::StatusCode;
use image::GrayImage;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A class and its probability.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Class {
    pub(super) name: String,
    pub(super) probability: f32,
}

/// An answered question.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Answer {
    /// Set by [`Store::add_answer`].
    pub(super) id: String,
    pub(super) question: String,
    #[serde(flatten)]
    pub(super) view: View,
    /// The model's answer.
    pub(super) answer: String,
    pub(super) new_tokens: usize,
    /// Time of the model.
    pub(super) seconds: f64,
    /// The most likely class.
    pub(super) class: Option<Class>,
    /// Fraction of the pixels in the model's mask.
    pub(super) area_frac: f64,
    /// Area of the model's mask, if the size of a pixel is known.
    pub(super) area_mm2: Option<f64>,
    /// How sure the model is.
    pub(super) confidence: Confidence,
    /// The answer for training, if a user changed it.
    pub(super) corrected_answer: Option<String>,
    /// The model's mask, 0 and 255; empty if the target is not found.
    #[serde(skip)]
    pub(super) mask: Arc<GrayImage>,
    /// The mask as a user corrected it, 0 and 255.
    #[serde(skip)]
    pub(super) corrected: Option<Arc<GrayImage>>,
}

impl Answer {
    /// The corrected mask, else the model's.
    pub(super) fn current_mask(&self) -> &Arc<GrayImage> {
        self.corrected.as_ref().unwrap_or(&self.mask)
    }

    /// The answer as clients see it.
    pub(super) fn json(&self) -> Value {
        let mut value = json!(self);
        value["corrected"] = json!(self.corrected.is_some());
        value
    }

    fn bytes(&self) -> usize {
        self.mask.len() + self.corrected.as_ref().map_or(0, |mask| mask.len())
    }
}

struct Entry {
    picture: Arc<Picture>,
    answers: Vec<Answer>,
    used: Instant,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.picture.bytes() + self.answers.iter().map(Answer::bytes).sum::<usize>()
    }
}

/// Images in memory, with the answers about each.
pub(super) struct Store {
    entries: Mutex<HashMap<String, Entry>>,
    max_images: usize,
    keep: Duration,
}

impl Store {
    pub(super) fn new(max_images: usize, keep: Duration) -> Self {
        Self { entries: Mutex::default(), max_images, keep }
    }

    /// Adds an image and returns its id. Removes the least recently used images that no longer fit.
    pub(super) fn add(&self, picture: Picture) -> String {
        let mut entries = self.lock();
        let id = new_id();
        let entry = Entry { picture: Arc::new(picture), answers: Vec::new(), used: Instant::now() };
        entries.insert(id.clone(), entry);
        self.shrink(&mut entries, &id);
        id
    }

    /// The image, which counts as used.
    pub(super) fn picture(&self, id: &str) -> Reply<Arc<Picture>> {
        self.with(id, |entry| Ok(Arc::clone(&entry.picture)))
    }

    /// The image and its answers, in the order of the questions.
    pub(super) fn image(&self, id: &str) -> Reply<(Arc<Picture>, Vec<Answer>)> {
        self.with(id, |entry| Ok((Arc::clone(&entry.picture), entry.answers.clone())))
    }

    /// Refuses another question about an image that has too many.
    pub(super) fn check_room(&self, id: &str) -> Reply<()> {
        self.with(id, |entry| if entry.answers.len() < MAX_ANSWERS { Ok(()) } else { Err(no_room()) })
    }

    /// Adds an answer and gives it an id.
    pub(super) fn add_answer(&self, id: &str, mut answer: Answer) -> Reply<Answer> {
        answer.id = new_id();
        let added = self.with(id, |entry| {
            if entry.answers.len() >= MAX_ANSWERS {
                return Err(no_room());
            }
            entry.answers.push(answer.clone());
            Ok(answer)
        })?;
        self.shrink(&mut self.lock(), id);
        Ok(added)
    }

    /// The image and one answer.
    pub(super) fn answer(&self, id: &str, answer: &str) -> Reply<(Arc<Picture>, Answer)> {
        self.with(id, |entry| {
            let found = entry.answers.iter().find(|found| found.id == answer).ok_or_else(no_answer)?;
            Ok((Arc::clone(&entry.picture), found.clone()))
        })
    }

    /// Changes an answer and returns it.
    pub(super) fn change(&self, id: &str, answer: &str, change: impl FnOnce(&mut Answer)) -> Reply<Answer> {
        let changed = self.with(id, |entry| {
            let found = entry.answers.iter_mut().find(|found| found.id == answer).ok_or_else(no_answer)?;
            change(found);
            Ok(found.clone())
        })?;
        self.shrink(&mut self.lock(), id);
        Ok(changed)
    }

    pub(super) fn remove_answer(&self, id: &str, answer: &str) -> Reply<()> {
        self.with(id, |entry| {
            let at = entry.answers.iter().position(|found| found.id == answer).ok_or_else(no_answer)?;
            entry.answers.remove(at);
            Ok(())
        })
    }

    pub(super) fn remove(&self, id: &str) -> Reply<()> {
        self.lock().remove(id).map(drop).ok_or_else(no_image)
    }

    /// Removes images that were not used for too long.
    pub(super) fn expire(&self) {
        self.lock().retain(|_, entry| entry.used.elapsed() < self.keep);
    }

    /// Number of images, and their bytes with all masks.
    pub(super) fn usage(&self) -> (usize, usize) {
        let entries = self.lock();
        (entries.len(), entries.values().map(Entry::bytes).sum())
    }

    fn with<T>(&self, id: &str, read: impl FnOnce(&mut Entry) -> Reply<T>) -> Reply<T> {
        let mut entries = self.lock();
        let entry = entries.get_mut(id).filter(|entry| entry.used.elapsed() < self.keep).ok_or_else(no_image)?;
        entry.used = Instant::now();
        read(entry)
    }

    /// Removes the least recently used images, but not `kept`.
    fn shrink(&self, entries: &mut HashMap<String, Entry>, kept: &str) {
        loop {
            let bytes: usize = entries.values().map(Entry::bytes).sum();
            if entries.len() <= self.max_images && bytes <= MAX_STORED {
                return;
            }
            let others = entries.iter().filter(|(id, _)| *id != kept);
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

fn no_image() -> Failure {
    let hint = "upload the image again; the server keeps images for a limited time";
    Failure::new(StatusCode::NOT_FOUND, "there is no such image", hint)
}

fn no_answer() -> Failure {
    Failure::new(StatusCode::NOT_FOUND, "there is no such answer", "ask the question again")
}

fn no_room() -> Failure {
    let error = format!("the image has {MAX_ANSWERS} answers, and more are not kept");
    Failure::new(StatusCode::CONFLICT, error, "delete an answer, or upload the image again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::DynamicImage;

    fn picture(width: u32) -> Picture {
        Picture::new(DynamicImage::new_luma8(width, 1), None)
    }

    fn answer() -> Answer {
        Answer {
            id: String::new(),
            question: "q".into(),
            view: View::default(),
            answer: "a".into(),
            new_tokens: 1,
            seconds: 0.0,
            class: None,
            area_frac: 0.0,
            area_mm2: None,
            confidence: Confidence::of(&[0.0], None),
            corrected_answer: None,
            mask: Arc::new(GrayImage::new(3, 1)),
            corrected: None,
        }
    }

    #[test]
    fn the_least_recently_used_image_is_removed_for_a_new_one() {
        let store = Store::new(2, Duration::from_mins(1));
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
    fn images_expire() {
        let store = Store::new(2, Duration::from_millis(20));
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
        let store = Store::new(2, Duration::from_mins(1));
        let id = store.add(picture(3));
        let ids: Vec<String> = (0..MAX_ANSWERS).map(|_| store.add_answer(&id, answer()).unwrap().id).collect();
        assert_eq!(store.check_room(&id).unwrap_err().status, StatusCode::CONFLICT);
        assert_eq!(store.add_answer(&id, answer()).unwrap_err().status, StatusCode::CONFLICT);
        let mask = Arc::new(GrayImage::from_pixel(3, 1, image::Luma([255])));
        let changed = store.change(&id, &ids[1], |answer| answer.corrected = Some(Arc::clone(&mask))).unwrap();
        assert_eq!((changed.current_mask(), changed.json()["corrected"].as_bool()), (&mask, Some(true)));
        assert_eq!(store.usage().1, 3 + 3 * MAX_ANSWERS + 3);
        store.remove_answer(&id, &ids[1]).unwrap();
        assert_eq!(store.answer(&id, &ids[1]).unwrap_err().error, "there is no such answer");
        assert_eq!(store.image(&id).unwrap().1.len(), MAX_ANSWERS - 1);
        store.check_room(&id).unwrap();
    }
}
