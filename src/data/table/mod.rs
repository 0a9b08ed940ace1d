//! Tables of questions and answers: their files, rows, names and patients.

pub mod annotation;
pub mod annotation_file;
pub mod csv_text;
pub mod held_out;
pub mod manifest;
pub mod names;
pub mod patient;
pub mod prepared;
