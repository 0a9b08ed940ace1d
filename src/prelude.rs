//! The types of the front door: `use prsmed::prelude::*;`

pub use crate::config::Sources;
pub use crate::data::manifest::{Manifest, Split};
pub use crate::data::phantom::{self, PhantomOptions};
pub use crate::event::{Event, Observer};
pub use crate::front::{Ask, Image, Model, OpenOptions, Prediction};
pub use crate::hub::HubOptions;
pub use crate::job::rows::Rows;
pub use crate::job::training::SegmenterTraining;
pub use crate::job::{self, How};
pub use crate::plan::dry_run::Job;
pub use crate::plan::machine::Machine;
pub use crate::plan::report::Plan;
pub use crate::runtime::Runtime;
pub use crate::segment::RunConfig;
pub use crate::tensor::Device;
pub use crate::trainer::{DryRunTask, Task, TrainConfig};
pub use crate::units::Bytes;
pub use crate::{Error, Result};
