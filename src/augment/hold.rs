//! Which pixels stay: held regions, decoys, colour match, pasting back.
