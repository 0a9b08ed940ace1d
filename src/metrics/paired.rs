//! Paired comparisons with intervals.
