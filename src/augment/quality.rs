//! Quality numbers of a set of pictures.
