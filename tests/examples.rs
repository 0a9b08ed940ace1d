//! Every example runs.

use std::sync::{Mutex, PoisonError};

#[path = "../examples/custom_task.rs"]
mod custom_task;
#[path = "../examples/plan_memory.rs"]
mod plan_memory;
#[path = "../examples/predict.rs"]
mod predict;
#[path = "../examples/train.rs"]
mod train;

/// The examples measure memory and seed generators of the whole process.
static TURN: Mutex<()> = Mutex::new(());

fn run(example: fn() -> Result<(), Box<dyn std::error::Error>>) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    example().expect("the example runs");
}

#[test]
fn a_training() {
    run(train::main);
}

#[test]
fn a_prediction() {
    run(predict::main);
}

#[test]
fn a_memory_plan() {
    run(plan_memory::main);
}

#[test]
fn a_custom_task() {
    run(custom_task::main);
}
