//! CLIP's tokenizer.
