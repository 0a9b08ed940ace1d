//! The model of the server, with the encoded images of recent questions.

use super::options::MAX_ENCODED;
use super::picture::{ServedImage, SliceView};
use crate::Result;
use crate::error::Error;
use crate::event::{Event, Observer};
use crate::front::volume::{VolumePrediction, VolumeSettings};
use crate::front::{self, Ask, Encoded, Image, OnReady, Prediction, Ready};
use image::GrayImage;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// A question about a view of an image, which is one slice.
#[derive(Debug, Clone)]
pub(super) struct Question {
    pub(super) view: SliceView,
    pub(super) text: String,
    pub(super) max_new_tokens: usize,
    /// A mask of the size of the slice that the words follow in place of the painted one.
    pub(super) mask: Option<Arc<GrayImage>>,
}

/// Answers questions about images.
pub(super) trait Answerer {
    /// The answer. `on_ready` receives mask and words as they are ready, and can stop the work.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if `on_ready` stopped the work, and others.
    fn answer(&mut self, picture: &Arc<ServedImage>, question: &Question, on_ready: &mut OnReady)
    -> Result<Prediction>;

    /// The mask of a volume. `on_slice` receives the number of slices that are done, before the first slice and after each
    /// one, with the number of all slices, and can stop the work.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if `on_slice` stopped the work, and others.
    fn segment(&mut self, picture: &ServedImage, ask: &VolumeSettings, on_slice: &OnSlice) -> Result<VolumePrediction>;

    /// Bytes of encoded images that wait for another question.
    fn encoded_bytes(&self) -> usize;
}

/// Receives how many slices are done, and how many there are.
pub(super) type OnSlice<'a> = dyn Fn(u64, u64) -> ControlFlow<()> + Send + Sync + 'a;

/// A trained model.
pub(super) struct ServedModel<'a> {
    model: &'a front::Model,
    encoded: RecentImages<Encoded>,
}

impl<'a> ServedModel<'a> {
    pub(super) fn new(model: &'a front::Model) -> Self {
        Self { model, encoded: RecentImages::new(MAX_ENCODED) }
    }
}

impl Answerer for ServedModel<'_> {
    fn answer(
        &mut self,
        picture: &Arc<ServedImage>,
        question: &Question,
        on_ready: &mut OnReady,
    ) -> Result<Prediction> {
        self.encoded.forget_removed();
        if self.encoded.get(picture, question.view).is_none() {
            let encoded = self
                .model
                .encode(&Image::Pixels(&*picture.pixels_with(question.view, self.model.description().context())?))?;
            let bytes = encoded.bytes();
            self.encoded.put(picture, question.view, (encoded, bytes));
        }
        if on_ready(Ready::Text("")).is_break() {
            return Err(Error::Interrupted);
        }
        let encoded = self.encoded.get(picture, question.view);
        let encoded = encoded.ok_or_else(|| Error::Internal { reason: "an encoded image is missing".into() })?;
        let (max_new_tokens, mask) = (question.max_new_tokens, question.mask.as_deref());
        let ask = Ask { max_new_tokens, mask, ..Ask::new(&question.text) };
        self.model.ask_with(encoded, &ask, on_ready)
    }

    fn segment(&mut self, picture: &ServedImage, ask: &VolumeSettings, on_slice: &OnSlice) -> Result<VolumePrediction> {
        let (volume, _) = picture.volume()?;
        let progress = SliceProgress { on_slice, total: AtomicU64::new(0), stop: AtomicBool::new(false) };
        self.model.segment(volume, ask, &progress, &progress.stop, None)
    }

    fn encoded_bytes(&self) -> usize {
        self.encoded.bytes()
    }
}

/// The observer of a prediction on a volume; it also stops it.
struct SliceProgress<'a> {
    on_slice: &'a OnSlice<'a>,
    total: AtomicU64,
    stop: AtomicBool,
}

impl Observer for SliceProgress<'_> {
    fn on(&self, event: &Event) {
        let done = match event {
            Event::Started { total, .. } => {
                self.total.store(*total, Ordering::Relaxed);
                0
            }
            Event::Advanced { done } => *done,
            _ => return,
        };
        if (self.on_slice)(done, self.total.load(Ordering::Relaxed)).is_break() {
            self.stop.store(true, Ordering::SeqCst);
        }
    }
}

/// Values by image and view, the least recently used first. Keeps the newest one, and others within a limit.
struct RecentImages<T> {
    entries: VecDeque<Entry<T>>,
    max_bytes: usize,
}

struct Entry<T> {
    picture: Weak<ServedImage>,
    view: SliceView,
    value: T,
    bytes: usize,
}

impl<T> RecentImages<T> {
    fn new(max_bytes: usize) -> Self {
        Self { entries: VecDeque::new(), max_bytes }
    }

    fn get(&mut self, picture: &Arc<ServedImage>, view: SliceView) -> Option<&T> {
        let is_it = |entry: &Entry<T>| entry.view == view && Weak::as_ptr(&entry.picture) == Arc::as_ptr(picture);
        let at = self.entries.iter().position(is_it)?;
        let entry = self.entries.remove(at)?;
        self.entries.push_back(entry);
        self.entries.back().map(|entry| &entry.value)
    }

    fn put(&mut self, picture: &Arc<ServedImage>, view: SliceView, (value, bytes): (T, usize)) {
        self.entries.push_back(Entry { picture: Arc::downgrade(picture), view, value, bytes });
        while self.bytes() > self.max_bytes && self.entries.len() > 1 {
            self.entries.pop_front();
        }
    }

    /// Removes the values of images that exist no more.
    fn forget_removed(&mut self) {
        self.entries.retain(|entry| entry.picture.strong_count() > 0);
    }

    fn bytes(&self) -> usize {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::DynamicImage;

    #[test]
    fn recent_images_are_kept_within_a_limit_and_while_they_exist() {
        let picture = || Arc::new(ServedImage::new(DynamicImage::new_luma8(1, 1), None));
        let (a, b, c) = (picture(), picture(), picture());
        let view = SliceView::default();
        let other = SliceView { slice: 1, window: None };
        let mut recent = RecentImages::new(30);
        recent.put(&a, view, ("a", 10));
        recent.put(&b, view, ("b", 10));
        recent.put(&b, other, ("b1", 10));
        assert_eq!(recent.get(&a, view), Some(&"a"));
        assert_eq!(recent.get(&a, other), None);
        recent.put(&c, view, ("c", 10));
        assert_eq!(recent.get(&b, view), None);
        assert_eq!(recent.get(&b, other), Some(&"b1"));
        assert_eq!(recent.bytes(), 30);
        drop(b);
        recent.forget_removed();
        assert_eq!(recent.get(&a, view), Some(&"a"));
        assert_eq!(recent.get(&c, view), Some(&"c"));
        assert_eq!(recent.bytes(), 20);
        recent.put(&c, other, ("large", 100));
        assert_eq!(recent.get(&c, other), Some(&"large"));
        assert_eq!(recent.bytes(), 100);
    }
}
