//! "owner/name[@rev]" or a folder -> local files.
