//! The PRS-Med task.
