//! The worker: one thread answers the questions of all clients, one after the other.

use super::answer::{Answer, AnswerContent, LikelyClass, SliceAnswer, VolumeAnswer};
use super::failure::HttpFailure;
use super::intensities::Intensities;
use super::metrics::{Metrics, QuestionEnd};
use super::model::{Answerer, Question};
use super::picture::{ServedImage, SliceView};
use super::store::{ImageStore, no_image};
use crate::data::familiarity::Familiarity;
use crate::data::familiarity::questions::KnownQuestions;
use crate::data::sheet;
use crate::front::volume::{VolumePrediction, VolumeSettings};
use crate::front::{Prediction, Ready};
use crate::segment::calibration::Calibration;
use crate::{Error, Result, panics};
use axum::http::StatusCode;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Time between two looks at the interrupt flag.
const INTERVAL: Duration = Duration::from_millis(100);

/// Progress of a question.
#[derive(Debug)]
pub(super) enum QuestionProgress {
    /// The model begins with it.
    Started,
    /// The mask, before the first piece of the answer: an 8-bit PNG with 0 and 255, and its location in words.
    Mask {
        png: Vec<u8>,
        position: Option<String>,
    },
    /// The next piece of the answer.
    Text(String),
    /// Slices of a volume.
    Slices {
        done: u64,
        total: u64,
    },
    Done(Box<Answer>),
    Failed(HttpFailure),
}

/// What the model has to do.
pub(super) enum QuestionScope {
    /// A question about one slice.
    Slice(Question),
    /// A question about all slices of a volume.
    Volume(VolumeSettings),
}

/// A question in the queue.
pub(super) struct Queued {
    pub(super) image: String,
    pub(super) picture: Arc<ServedImage>,
    pub(super) task: QuestionScope,
    /// Whether the answer is stored.
    pub(super) keeps_answer: bool,
    /// Closed when the client has left. The number of its messages is bounded by the length of an answer, and by the
    /// number of slices.
    pub(super) progress: UnboundedSender<QuestionProgress>,
}

/// What the worker shares with the requests.
pub(super) struct ServerState {
    pub(super) store: ImageStore,
    pub(super) metrics: Metrics,
    /// Classes of the model.
    pub(super) classes: Vec<String>,
    /// Temperature and presence threshold, fitted on the validation rows.
    pub(super) calibration: Option<Calibration>,
    /// The questions of its training, if it knows them.
    pub(super) questions: Option<Arc<KnownQuestions>>,
    /// Whether the words of its answers follow masks.
    pub(super) reads_masks: bool,
    /// How volumes were shown in its training.
    pub(super) intensities: Intensities,
    pub(super) time_limit: Duration,
}

/// Answers questions until `interrupt` is set or nobody can ask any more.
pub(super) fn work(jobs: &Receiver<Queued>, answerer: &mut dyn Answerer, shared: &ServerState, interrupt: &AtomicBool) {
    while !interrupt.load(Ordering::SeqCst) {
        match jobs.recv_timeout(INTERVAL) {
            Ok(job) => {
                shared.metrics.waiting.fetch_sub(1, Ordering::Relaxed);
                shared.metrics.running.store(1, Ordering::Relaxed);
                run(&job, answerer, shared, interrupt);
                shared.metrics.running.store(0, Ordering::Relaxed);
                shared.metrics.encoded_bytes.store(answerer.encoded_bytes(), Ordering::Relaxed);
            }
            Err(RecvTimeoutError::Timeout) => shared.store.expire(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
    for job in jobs.try_iter() {
        send(&job, QuestionProgress::Failed(Error::Interrupted.into()));
    }
}

/// A client that has left needs no progress.
fn send(job: &Queued, progress: QuestionProgress) {
    let _ = job.progress.send(progress);
}

fn run(job: &Queued, answerer: &mut dyn Answerer, shared: &ServerState, interrupt: &AtomicBool) {
    let begin = Instant::now();
    let is_late = || begin.elapsed() > shared.time_limit;
    let is_removed = || !shared.store.has(&job.image);
    let go_on = || {
        let stops = job.progress.is_closed() || is_late() || is_removed() || interrupt.load(Ordering::SeqCst);
        if stops { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    if job.progress.is_closed() {
        return shared.metrics.add_question(QuestionEnd::Left, begin.elapsed());
    }
    if is_removed() {
        shared.metrics.add_question(QuestionEnd::Failed, begin.elapsed());
        return send(job, QuestionProgress::Failed(no_image()));
    }
    send(job, QuestionProgress::Started);
    let result = catch_unwind(AssertUnwindSafe(|| content_of(job, answerer, &go_on)))
        .unwrap_or_else(|panic| Err(Error::Internal { reason: panics::describe(&*panic) }));
    let result = result.map_err(|error| match error {
        Error::Interrupted if is_removed() => no_image(),
        Error::Interrupted if is_late() => late(shared.time_limit, &job.task),
        error => error.into(),
    });
    if job.progress.is_closed() {
        return shared.metrics.add_question(QuestionEnd::Left, begin.elapsed());
    }
    let seconds = begin.elapsed().as_secs_f64();
    // `None` as window or axis is that of the picture
    let (question, shown) = match &job.task {
        QuestionScope::Slice(question) => (question.text.clone(), (question.view.window, None)),
        QuestionScope::Volume(settings) => (settings.question.clone(), (Some(settings.window), Some(settings.axis))),
    };
    let answer = result.map(|(content, familiarity)| {
        let view_differs = shared.intensities.difference(&job.picture, &question, shown);
        Answer { id: String::new(), question, familiarity, view_differs, seconds, content }
    });
    let stored = |answer| if job.keeps_answer { shared.store.add_answer(&job.image, answer) } else { Ok(answer) };
    let (outcome, progress) = match answer.and_then(stored) {
        Ok(answer) => (QuestionEnd::Answered, QuestionProgress::Done(Box::new(answer))),
        Err(failure) => (QuestionEnd::Failed, QuestionProgress::Failed(failure)),
    };
    // counted before the client learns of it
    shared.metrics.add_question(outcome, begin.elapsed());
    send(job, progress);
}

/// Runs the model. `go_on` is asked before the work, after each token, and after each slice.
fn content_of(
    job: &Queued,
    answerer: &mut dyn Answerer,
    go_on: &(dyn Fn() -> ControlFlow<()> + Send + Sync),
) -> Result<(AnswerContent, Familiarity)> {
    match &job.task {
        QuestionScope::Slice(question) => {
            let mut on_ready = |ready: Ready| {
                match ready {
                    Ready::Text("") => {}
                    Ready::Text(text) => send(job, QuestionProgress::Text(text.to_owned())),
                    // a mask that cannot be encoded comes with the answer
                    Ready::Masks(prediction) => painted(prediction).into_iter().for_each(|mask| send(job, mask)),
                }
                go_on()
            };
            let prediction = answerer.answer(&job.picture, question, &mut on_ready)?;
            let familiarity = prediction.familiarity.clone();
            Ok((AnswerContent::Slice(slice_answer(job, question.view, prediction)?), familiarity))
        }
        QuestionScope::Volume(settings) => {
            let on_slice = |done, total| {
                send(job, QuestionProgress::Slices { done, total });
                go_on()
            };
            let prediction = answerer.segment(&job.picture, settings, &on_slice)?;
            let familiarity = prediction.familiarity.clone();
            Ok((AnswerContent::Volume(volume_answer(job, settings, prediction)?), familiarity))
        }
    }
}

fn late(limit: Duration, task: &QuestionScope) -> HttpFailure {
    let error = format!("the question took longer than {} s", limit.as_secs());
    let hint = match task {
        QuestionScope::Slice(_) => "start the server with a larger `--time-limit`",
        QuestionScope::Volume(_) => "ask about fewer slices, or start the server with a larger `--time-limit`",
    };
    HttpFailure::new(StatusCode::GATEWAY_TIMEOUT, error, hint)
}

/// The mask of a prediction that has no answer yet.
fn painted(prediction: &Prediction) -> Result<QuestionProgress> {
    let png = sheet::encode(&prediction.binary_mask()?.into(), Path::new("mask.png"))?;
    Ok(QuestionProgress::Mask { png, position: prediction.positions.mask_position.clone() })
}

/// The answer of a prediction.
fn slice_answer(job: &Queued, view: SliceView, prediction: Prediction) -> Result<SliceAnswer> {
    let (mask, mask_warning) = (prediction.binary_mask()?, prediction.mask_warning());
    let target = prediction.target();
    let area = target.num_foreground() as f64;
    Ok(SliceAnswer {
        view,
        new_tokens: prediction.new_tokens,
        mask_given: target.is_given,
        area_frac: target.area_frac(),
        area_mm2: job.picture.spacing_mm.map(|[across, down]| area * across * down),
        confidence: (!target.is_given).then_some(target.confidence),
        class: prediction.class.map(|(name, probability)| LikelyClass { name, probability }),
        answer: prediction.answer,
        corrected_answer: None,
        positions: prediction.positions,
        mask_warning,
        zones: prediction.zones,
        mask: Arc::new(mask),
        corrected: None,
    })
}

fn volume_answer(job: &Queued, settings: &VolumeSettings, prediction: VolumePrediction) -> Result<VolumeAnswer> {
    let num_found = prediction.num_found();
    let VolumePrediction {
        mask, slices, raw_ml, volume_ml, range, description, positions, mask_position_slice, ..
    } = prediction;
    Ok(VolumeAnswer {
        settings: settings.clone(),
        num_slices: slices.len(),
        num_found,
        slices,
        raw_volume_ml: raw_ml,
        volume_ml,
        range,
        largest_slice: job.picture.largest_slice(&mask)?,
        description,
        positions,
        mask_position_slice,
        mask: Arc::new(mask),
    })
}

#[cfg(test)]
mod tests {
    use super::super::model::OnSlice;
    use super::*;
    use crate::data::position::Zones;
    use crate::front::OnReady;
    use crate::segment::generate::Written;
    use image::{DynamicImage, GrayImage};
    use serde_json::Value;
    use std::sync::mpsc::sync_channel;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    /// Panics, or speaks until it is stopped, as the question says.
    struct Fake;

    impl Answerer for Fake {
        fn answer(&mut self, _: &Arc<ServedImage>, question: &Question, on_ready: &mut OnReady) -> Result<Prediction> {
            match question.text.as_str() {
                "panic" => panic!("number {} is impossible", 7),
                "endless" => loop {
                    std::thread::sleep(Duration::from_millis(5));
                    if on_ready(Ready::Text("on ")).is_break() {
                        return Err(Error::Interrupted);
                    }
                },
                text => {
                    let mask = if text == "absent" { vec![0.3; 4] } else { vec![0.9, 0.7, 0.2, 0.1] };
                    let calibration =
                        Calibration { temperature: 1.0, presence_threshold: Some(0.4), num_present: 1, num_absent: 1 };
                    let drawn = (vec![mask], Vec::new());
                    let mut painted = Prediction::painted(drawn, (2, 2), Zones::Grid, Some(&calibration), false);
                    if let Some(mask) = &question.mask {
                        painted = painted.with_mask(mask);
                    }
                    assert!(on_ready(Ready::Masks(&painted)).is_continue());
                    assert!(on_ready(Ready::Text("yes")).is_continue());
                    let painted = painted.with_answer(Written { answer: "yes".into(), new_tokens: 2 });
                    Ok(Prediction { class: Some(("mr".into(), 0.75)), ..painted })
                }
            }
        }

        /// Never ends: slices of 5 ms until it is stopped.
        fn segment(&mut self, _: &ServedImage, _: &VolumeSettings, on_slice: &OnSlice) -> Result<VolumePrediction> {
            for done in 0.. {
                std::thread::sleep(Duration::from_millis(5));
                if on_slice(done, u64::MAX).is_break() {
                    break;
                }
            }
            Err(Error::Interrupted)
        }

        fn encoded_bytes(&self) -> usize {
            5
        }
    }

    struct Server {
        shared: Arc<ServerState>,
        interrupt: Arc<AtomicBool>,
        image: String,
        jobs: std::sync::mpsc::SyncSender<Queued>,
        worker: std::thread::JoinHandle<()>,
    }

    fn server(time_limit: Duration) -> Server {
        let store = ImageStore::new(2, Duration::from_mins(1));
        let picture = ServedImage::new(DynamicImage::new_luma8(2, 2), Some([0.5, 2.0]));
        let image = store.add(picture);
        let classes = vec!["ct".into(), "mr".into()];
        let questions = Some(Arc::new(KnownQuestions::new(["is it?", "where?"], ["is it?"])));
        let metrics = Metrics::default();
        let shared = Arc::new(ServerState {
            store,
            metrics,
            classes,
            calibration: None,
            questions,
            reads_masks: true,
            intensities: Intensities::default(),
            time_limit,
        });
        let interrupt = Arc::new(AtomicBool::new(false));
        let (jobs, received) = sync_channel(8);
        let (worker_shared, worker_interrupt) = (Arc::clone(&shared), Arc::clone(&interrupt));
        let worker = std::thread::spawn(move || work(&received, &mut Fake, &worker_shared, &worker_interrupt));
        Server { shared, interrupt, image, jobs, worker }
    }

    fn question(text: &str) -> Question {
        Question { view: SliceView::default(), text: text.into(), max_new_tokens: 4, mask: None }
    }

    fn ask(server: &Server, text: &str) -> UnboundedReceiver<QuestionProgress> {
        enqueue(server, QuestionScope::Slice(question(text)), true)
    }

    fn ask_about_all_slices(server: &Server) -> UnboundedReceiver<QuestionProgress> {
        enqueue(server, QuestionScope::Volume(VolumeSettings::new("where?")), true)
    }

    fn enqueue(server: &Server, task: QuestionScope, keeps_answer: bool) -> UnboundedReceiver<QuestionProgress> {
        let (progress, receiver) = unbounded_channel();
        let picture = server.shared.store.picture(&server.image).unwrap();
        server.shared.metrics.waiting.fetch_add(1, Ordering::Relaxed);
        let image = server.image.clone();
        server.jobs.send(Queued { image, picture, task, keeps_answer, progress }).unwrap();
        receiver
    }

    fn answer(receiver: UnboundedReceiver<QuestionProgress>) -> SliceAnswer {
        let QuestionProgress::Done(answer) = last(receiver) else { panic!("no answer") };
        answer.of_slice().unwrap().clone()
    }

    fn last(mut receiver: UnboundedReceiver<QuestionProgress>) -> QuestionProgress {
        let mut last = None;
        while let Some(progress) = receiver.blocking_recv() {
            last = Some(progress);
        }
        last.unwrap()
    }

    fn failure(receiver: UnboundedReceiver<QuestionProgress>) -> HttpFailure {
        match last(receiver) {
            QuestionProgress::Failed(failure) => failure,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_worker_continues_after_a_panic() {
        let server = server(Duration::from_mins(1));
        let failure = failure(ask(&server, "panic"));
        assert_eq!(failure.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(failure.error.contains("number 7 is impossible"), "{}", failure.error);
        let found = answer(ask(&server, "is it?"));
        let expected = LikelyClass { name: "mr".into(), probability: 0.75 };
        assert_eq!((found.answer.as_str(), found.class.as_ref()), ("yes", Some(&expected)));
        assert_eq!(found.positions.mask_position.as_deref(), Some("upper center"));
        assert_eq!((found.area_frac, found.area_mm2), (0.5, Some(2.0)));
        let confidence = found.confidence.unwrap();
        assert!((confidence.foreground.unwrap() - 0.8).abs() < 1e-6 && confidence.is_found);
        assert_eq!(found.mask.as_raw(), &[255, 255, 0, 0]);
        assert_eq!(server.shared.store.image(&server.image).unwrap().1.len(), 1);
        let absent = answer(ask(&server, "absent"));
        assert_eq!((absent.confidence.unwrap().is_found, absent.area_frac), (false, 0.0));
        server.interrupt.store(true, Ordering::SeqCst);
        server.worker.join().unwrap();
    }

    #[test]
    fn the_mask_arrives_before_the_words() {
        let server = server(Duration::from_mins(1));
        for (text, expected, location) in [("is it?", [255, 255, 0, 0], Some("upper center")), ("absent", [0; 4], None)]
        {
            let mut receiver = ask(&server, text);
            assert!(matches!(receiver.blocking_recv(), Some(QuestionProgress::Started)));
            let Some(QuestionProgress::Mask { png, position }) = receiver.blocking_recv() else { panic!("no mask") };
            assert_eq!(image::load_from_memory(&png).unwrap().into_luma8().as_raw(), &expected);
            assert_eq!(position.as_deref(), location);
            assert!(matches!(receiver.blocking_recv(), Some(QuestionProgress::Text(text)) if text == "yes"));
            assert!(!answer(receiver).mask_given);
        }
    }

    #[test]
    fn an_answer_to_a_given_mask_has_that_mask_and_is_kept_if_asked_for() {
        let server = server(Duration::from_mins(1));
        let mask = Some(Arc::new(GrayImage::from_raw(2, 2, vec![0, 0, 0, 1]).unwrap()));
        for (keeps_answer, num_kept) in [(false, 0), (true, 1)] {
            let question = Question { mask: mask.clone(), ..question("is it?") };
            let receiver = enqueue(&server, QuestionScope::Slice(question), keeps_answer);
            let QuestionProgress::Done(done) = last(receiver) else { panic!("no answer") };
            assert_eq!((done.json()["mask_given"].as_bool(), done.json()["id"].is_null()), (Some(true), !keeps_answer));
            assert_eq!(done.json()["confidence"], Value::Null, "the model did not paint this mask");
            let found = done.of_slice().unwrap();
            assert_eq!((found.mask.as_raw().as_slice(), found.area_frac), (&[0, 0, 0, 255][..], 0.25));
            assert_eq!(server.shared.store.image(&server.image).unwrap().1.len(), num_kept);
        }
    }

    #[test]
    fn the_work_for_a_client_that_leaves_stops() {
        let server = server(Duration::from_mins(1));
        let mut leaves = ask(&server, "endless");
        while !matches!(leaves.blocking_recv(), Some(QuestionProgress::Text(_))) {}
        let waits = ask(&server, "endless");
        let mut volume = ask_about_all_slices(&server);
        drop((leaves, waits));
        while !matches!(volume.blocking_recv(), Some(QuestionProgress::Slices { done: 2, .. })) {}
        drop(volume);
        let begin = Instant::now();
        assert!(matches!(last(ask(&server, "next")), QuestionProgress::Done(_)));
        assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
        let gauges = super::super::metrics::Gauges { images: 0, image_bytes: 0, resident_bytes: 0, tensor_bytes: 0 };
        assert!(server.shared.metrics.text(&gauges).contains("{outcome=\"left\"} 3"));
    }

    #[test]
    fn a_question_has_a_time_limit() {
        let server = server(Duration::from_millis(30));
        let failure = failure(ask(&server, "endless"));
        assert_eq!(
            (failure.status, failure.error.as_str()),
            (StatusCode::GATEWAY_TIMEOUT, "the question took longer than 0 s")
        );
        let failure = self::failure(ask_about_all_slices(&server));
        assert_eq!(failure.status, StatusCode::GATEWAY_TIMEOUT);
        assert!(failure.hint.contains("fewer slices"), "{}", failure.hint);
    }

    #[test]
    fn a_removed_image_ends_its_running_and_waiting_questions() {
        let server = server(Duration::from_mins(1));
        let mut running = ask(&server, "endless");
        while !matches!(running.blocking_recv(), Some(QuestionProgress::Text(_))) {}
        let waiting = ask_about_all_slices(&server);
        let begin = Instant::now();
        server.shared.store.remove(&server.image).unwrap();
        for receiver in [running, waiting] {
            let failure = failure(receiver);
            assert_eq!((failure.status, failure.error.as_str()), (StatusCode::NOT_FOUND, "there is no such image"));
        }
        assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    }

    #[test]
    fn an_interrupt_ends_running_and_waiting_questions() {
        let server = server(Duration::from_mins(1));
        let mut running = ask(&server, "endless");
        while !matches!(running.blocking_recv(), Some(QuestionProgress::Text(_))) {}
        let waiting = ask_about_all_slices(&server);
        server.interrupt.store(true, Ordering::SeqCst);
        for receiver in [running, waiting] {
            assert_eq!(failure(receiver).status, StatusCode::SERVICE_UNAVAILABLE);
        }
        server.worker.join().unwrap();
    }
}
