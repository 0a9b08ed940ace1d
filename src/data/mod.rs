//! Files -> samples -> batches.
