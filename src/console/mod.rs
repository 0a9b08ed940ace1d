//! Output of a program on its terminal: data on standard output, progress on standard error.

mod output;
mod progress;

pub use output::{DataOutput, printable};
pub use progress::{ProgressDisplay, Style, memory_text, shares_text};
