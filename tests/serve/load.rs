//! Many clients at the same time.

use std::time::{Duration, Instant};

use crate::alone;
use crate::support::{Server, image_file};

const CLIENTS: usize = 8;
const REQUESTS: usize = 200;

/// The requests of one client: questions, pixels, masks, uploads. Returns the time of each.
fn client(server: &Server) -> Vec<Duration> {
    let mut image = server.upload(&image_file());
    let mut times = Vec::new();
    for number in 0..REQUESTS {
        let begin = Instant::now();
        match number % 10 {
            0 => {
                server.send("DELETE", &format!("/api/images/{image}"), &[], &[]).ok();
                image = server.upload(&image_file());
            }
            5 => {
                let result = server.result(&image, "Where is the lesion?", 2);
                assert!(result["answer"].is_string(), "{result}");
            }
            1 | 6 => drop(server.get("/api/model").ok()),
            2 | 7 => drop(server.get(&format!("/api/images/{image}")).ok()),
            _ => drop(server.get(&format!("/api/images/{image}/pixels")).ok()),
        }
        times.push(begin.elapsed());
    }
    times
}

/// Runs all clients; the times of all requests, ascending.
fn run(server: &Server) -> Vec<Duration> {
    let mut times: Vec<Duration> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| client(server))).collect();
        clients.into_iter().flat_map(|client| client.join().expect("a client without a panic")).collect()
    });
    times.sort_unstable();
    times
}

#[test]
#[expect(clippy::print_stdout, reason = "the measured times")]
fn eight_clients_lose_no_request_and_memory_stays_flat() {
    let _alone = alone();
    let server = Server::start(&[]);
    // the first half fills caches of libtorch and the allocator
    let resident = || server.metric("process_resident_memory_bytes") / f64::from(1 << 20);
    let mut times = run(&server);
    let before = resident();
    let again = run(&server);
    let after = resident();
    assert_eq!((times.len(), again.len()), (CLIENTS * REQUESTS, CLIENTS * REQUESTS));
    times.extend(again);
    times.sort_unstable();
    let at = |percent: usize| times[percent * (times.len() - 1) / 100].as_millis();
    println!(
        "{} requests: p50 {} ms, p95 {} ms; resident {before:.0} MiB, then {after:.0} MiB",
        times.len(),
        at(50),
        at(95)
    );
    assert!(after < before + 40.0, "{before} MiB, then {after} MiB");
    assert_eq!(server.metric("prsmed_questions_total{outcome=\"answered\"}"), (2 * CLIENTS * REQUESTS / 10) as f64);
    for bad in ["failed", "left", "refused"] {
        assert_eq!(server.metric(&format!("prsmed_questions_total{{outcome=\"{bad}\"}}")), 0.0, "{bad}");
    }
}
