//! Counts and times of requests and questions, in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How a question ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum QuestionEnd {
    Answered,
    Failed,
    /// The client closed the connection.
    Left,
    /// The queue was full.
    Refused,
}

impl QuestionEnd {
    const ALL: [(Self, &'static str); 4] =
        [(Self::Answered, "answered"), (Self::Failed, "failed"), (Self::Left, "left"), (Self::Refused, "refused")];
}

#[derive(Debug, Default)]
struct Requests {
    count: u64,
    seconds: f64,
}

/// Counts and times since the server started.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    /// By method, route and status.
    requests: Mutex<BTreeMap<(String, String, u16), Requests>>,
    questions: [AtomicU64; 4],
    question_micros: AtomicU64,
    /// Questions in the queue, without the one that the model answers.
    pub(super) waiting: AtomicUsize,
    /// Questions that the model answers now: 0 or 1.
    pub(super) running: AtomicUsize,
    /// Bytes of encoded images that wait for another question.
    pub(super) encoded_bytes: AtomicUsize,
}

/// Numbers of the server at the moment of a report.
pub(super) struct Gauges {
    pub(super) images: usize,
    pub(super) image_bytes: usize,
    pub(super) resident_bytes: u64,
    pub(super) tensor_bytes: u64,
}

impl Metrics {
    pub(super) fn add_request(&self, method: &str, route: &str, status: u16, time: Duration) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = requests.entry((method.to_owned(), route.to_owned(), status)).or_default();
        entry.count += 1;
        entry.seconds += time.as_secs_f64();
    }

    /// Counts a question; `time` is that of the model.
    pub(super) fn add_question(&self, outcome: QuestionEnd, time: Duration) {
        self.questions[outcome as usize].fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.question_micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// Seconds until a full queue probably has room: the mean time of a question, 1 to 60.
    pub(super) fn retry_after_s(&self) -> u64 {
        let done: u64 = self.questions.iter().take(3).map(|count| count.load(Ordering::Relaxed)).sum();
        let mean_micros = self.question_micros.load(Ordering::Relaxed) / done.max(1);
        mean_micros.div_ceil(1_000_000).clamp(1, 60)
    }

    pub(super) fn text(&self, gauges: &Gauges) -> String {
        let mut out = String::new();
        self.write_requests(&mut out);
        family(&mut out, "prsmed_questions_total", "counter", "Questions by how they ended.");
        for (outcome, name) in QuestionEnd::ALL {
            let count = self.questions[outcome as usize].load(Ordering::Relaxed);
            line(&mut out, &format!("prsmed_questions_total{{outcome=\"{name}\"}}"), count);
        }
        family(&mut out, "prsmed_question_seconds_total", "counter", "Time of the model for questions.");
        let seconds = Duration::from_micros(self.question_micros.load(Ordering::Relaxed)).as_secs_f64();
        line(&mut out, "prsmed_question_seconds_total", seconds);
        let load = |value: &AtomicUsize| value.load(Ordering::Relaxed) as u64;
        for (name, help, value) in [
            ("prsmed_queue_length", "Questions that wait for the model.", load(&self.waiting)),
            ("prsmed_questions_running", "Questions that the model answers now.", load(&self.running)),
            ("prsmed_images", "Images in memory.", gauges.images as u64),
            ("prsmed_image_bytes", "Bytes of images and masks in memory.", gauges.image_bytes as u64),
            ("prsmed_encoded_image_bytes", "Bytes of the cache of encoded images.", load(&self.encoded_bytes)),
            ("prsmed_tensor_bytes", "Bytes of live tensors on the CPU.", gauges.tensor_bytes),
            ("process_resident_memory_bytes", "Resident memory of the process.", gauges.resident_bytes),
        ] {
            family(&mut out, name, "gauge", help);
            line(&mut out, name, value);
        }
        out
    }

    fn write_requests(&self, out: &mut String) {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let count = |of: &Requests| of.count.to_string();
        let seconds = |of: &Requests| of.seconds.to_string();
        for (name, help, value) in [
            ("prsmed_requests_total", "Requests by method, route and status.", &count as &dyn Fn(&Requests) -> String),
            ("prsmed_request_seconds_total", "Time of requests until the response began.", &seconds),
        ] {
            family(out, name, "counter", help);
            for ((method, route, status), entry) in requests.iter() {
                let labels = format!("{name}{{method=\"{method}\",route=\"{route}\",status=\"{status}\"}}");
                line(out, &labels, value(entry));
            }
        }
    }
}

fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n").expect("a string can be written to");
}

fn line(out: &mut String, name: &str, value: impl std::fmt::Display) {
    writeln!(out, "{name} {value}").expect("a string can be written to");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_questions_are_counted() {
        let metrics = Metrics::default();
        metrics.add_request("GET", "/", 200, Duration::from_millis(250));
        metrics.add_request("GET", "/", 200, Duration::from_millis(250));
        metrics.add_request("GET", "other", 404, Duration::ZERO);
        metrics.add_question(QuestionEnd::Answered, Duration::from_secs(5));
        metrics.add_question(QuestionEnd::Refused, Duration::ZERO);
        let gauges = Gauges { images: 3, image_bytes: 4, resident_bytes: 5, tensor_bytes: 6 };
        let text = metrics.text(&gauges);
        for expected in [
            "# TYPE prsmed_requests_total counter",
            "prsmed_requests_total{method=\"GET\",route=\"/\",status=\"200\"} 2",
            "prsmed_requests_total{method=\"GET\",route=\"other\",status=\"404\"} 1",
            "prsmed_request_seconds_total{method=\"GET\",route=\"/\",status=\"200\"} 0.5",
            "prsmed_questions_total{outcome=\"answered\"} 1",
            "prsmed_questions_total{outcome=\"refused\"} 1",
            "prsmed_question_seconds_total 5",
            "prsmed_images 3",
            "process_resident_memory_bytes 5",
        ] {
            assert!(text.lines().any(|line| line == expected), "{expected}: {text}");
        }
        assert_eq!(metrics.retry_after_s(), 5);
        assert_eq!(Metrics::default().retry_after_s(), 1);
    }
}
