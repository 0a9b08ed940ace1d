//! CLIP's text towers.
