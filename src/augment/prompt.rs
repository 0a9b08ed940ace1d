//! Prompts from modality and text.
