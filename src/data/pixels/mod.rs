//! Pixels of images and masks: scaling, augmentation, and pictures for people.

pub mod bit_depth;
pub mod classical;
pub mod flip_rotate;
pub mod image;
pub mod resample;
pub mod sheet;
