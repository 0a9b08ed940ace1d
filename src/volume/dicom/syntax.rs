//! Transfer syntaxes: which of them can be decoded, and what to do with the others.
//!
//! | transfer syntax | decoded | by |
//! |---|---|---|
//! | Implicit VR Little Endian, Explicit VR Little Endian, Explicit VR Big Endian | yes | |
//! | Deflated Explicit VR Little Endian, Encapsulated Uncompressed, Deflated Image Frame | yes | flate2 |
//! | RLE Lossless | yes | dicom-rs |
//! | JPEG Baseline (8 bit) | yes | libjpeg |
//! | JPEG Extended (process 2 and 4) | 8 bit only | libjpeg |
//! | JPEG Lossless (processes 14 and 14 SV1) | yes | `lossless_jpeg` |
//! | JPEG 2000 (lossless only, lossy), JPEG 2000 Part 2 | yes, part 2 without its extensions | OpenJPEG |
//! | High-Throughput JPEG 2000 | yes | OpenJPEG 2.5 |
//! | JPEG-LS (lossless, near-lossless) | with the cargo feature `jpeg-ls` | CharLS 2.4 |
//! | JPEG XL, JPIP, MPEG-2, MPEG-4, HEVC, SMPTE ST 2110 | no | |

/// Syntaxes without a decoder: UID, name, remedy.
const UNDECODED: [(&str, &str, &str); 22] = [
    ("1.2.840.10008.1.2.4.80", "JPEG-LS Lossless", JPEG_LS),
    ("1.2.840.10008.1.2.4.81", "JPEG-LS Lossy (Near-Lossless)", JPEG_LS),
    ("1.2.840.10008.1.2.4.94", "JPIP Referenced", JPIP),
    ("1.2.840.10008.1.2.4.95", "JPIP Referenced Deflate", JPIP),
    ("1.2.840.10008.1.2.4.204", "JPIP HTJ2K Referenced", JPIP),
    ("1.2.840.10008.1.2.4.205", "JPIP HTJ2K Referenced Deflate", JPIP),
    ("1.2.840.10008.1.2.4.100", "MPEG2 Main Profile / Main Level", VIDEO),
    ("1.2.840.10008.1.2.4.100.1", "Fragmentable MPEG2 Main Profile / Main Level", VIDEO),
    ("1.2.840.10008.1.2.4.101", "MPEG2 Main Profile / High Level", VIDEO),
    ("1.2.840.10008.1.2.4.101.1", "Fragmentable MPEG2 Main Profile / High Level", VIDEO),
    ("1.2.840.10008.1.2.4.102", "MPEG-4 AVC/H.264 High Profile / Level 4.1", VIDEO),
    ("1.2.840.10008.1.2.4.103", "MPEG-4 AVC/H.264 BD-compatible High Profile / Level 4.1", VIDEO),
    ("1.2.840.10008.1.2.4.104", "MPEG-4 AVC/H.264 High Profile / Level 4.2 for 2D Video", VIDEO),
    ("1.2.840.10008.1.2.4.105", "MPEG-4 AVC/H.264 High Profile / Level 4.2 for 3D Video", VIDEO),
    ("1.2.840.10008.1.2.4.106", "MPEG-4 AVC/H.264 Stereo High Profile / Level 4.2", VIDEO),
    ("1.2.840.10008.1.2.4.107", "HEVC/H.265 Main Profile / Level 5.1", VIDEO),
    ("1.2.840.10008.1.2.4.108", "HEVC/H.265 Main 10 Profile / Level 5.1", VIDEO),
    ("1.2.840.10008.1.2.4.110", "JPEG XL Lossless", CONVERT),
    ("1.2.840.10008.1.2.4.111", "JPEG XL JPEG Recompression", CONVERT),
    ("1.2.840.10008.1.2.4.112", "JPEG XL", CONVERT),
    ("1.2.840.10008.1.2.7.1", "SMPTE ST 2110-20 Uncompressed Progressive Active Video", VIDEO),
    ("1.2.840.10008.1.2.7.2", "SMPTE ST 2110-20 Uncompressed Interlaced Active Video", VIDEO),
];

const CONVERT: &str = "decompress it first, for example with GDCM: `gdcmconv --raw IN OUT`, or with pydicom: \
                       `pydicom.pixels.decompress(dataset)`";
const JPEG_LS: &str = "decompress it first, for example with GDCM: `gdcmconv --raw IN OUT`, or build prsmed with the cargo \
                       feature `jpeg-ls`";
const VIDEO: &str = "export single frames of the video as DICOM, PNG or TIFF";
const JPIP: &str = "fetch the images from the server, and export them with their pixels";

/// What begins the UIDs of transfer syntaxes of the standard.
const STANDARD: &str = "1.2.840.10008.1.2";
/// What follows it in those of syntaxes with a decoder.
const DECODED: [&str; 18] = [
    "", ".1", ".1.98", ".1.99", ".2", ".4.50", ".4.51", ".4.57", ".4.70", ".4.90", ".4.91", ".4.92", ".4.93", ".4.201",
    ".4.202", ".4.203", ".5", ".8.1",
];

/// Fails for a syntax without a decoder, with the reason and the remedy.
pub(super) fn check(uid: &str) -> Result<(), (String, &'static str)> {
    let is_decoded = uid.strip_prefix(STANDARD).is_some_and(|rest| DECODED.contains(&rest));
    if is_decoded || (cfg!(feature = "jpeg-ls") && matches!(uid, "1.2.840.10008.1.2.4.80" | "1.2.840.10008.1.2.4.81")) {
        return Ok(());
    }
    if let Some((_, name, hint)) = UNDECODED.iter().find(|entry| entry.0 == uid) {
        return Err((format!("its pixels are compressed as {name}, which cannot be read"), hint));
    }
    // a private UID could lead to its owner; the standard ones are public
    let name = if uid.starts_with("1.2.840.10008.") && uid.len() < 64 { uid } else { "a private one" };
    Err((format!("its transfer syntax ({name}) is unknown"), CONVERT))
}

/// True if samples are stored as they are, one after the other.
pub(super) fn is_native(uid: &str) -> bool {
    matches!(uid, IMPLICIT | EXPLICIT | DEFLATED | BIG_ENDIAN)
}

/// Implicit VR Little Endian.
pub(super) const IMPLICIT: &str = "1.2.840.10008.1.2";
/// Explicit VR Little Endian.
pub(super) const EXPLICIT: &str = "1.2.840.10008.1.2.1";
/// Deflated Explicit VR Little Endian.
pub(super) const DEFLATED: &str = "1.2.840.10008.1.2.1.99";
/// Explicit VR Big Endian.
pub(super) const BIG_ENDIAN: &str = "1.2.840.10008.1.2.2";
/// RLE Lossless.
pub(super) const RLE: &str = "1.2.840.10008.1.2.5";

/// Encapsulated Uncompressed Explicit VR Little Endian.
pub(super) const ENCAPSULATED: &str = "1.2.840.10008.1.2.1.98";
/// Deflated Image Frame Compression.
pub(super) const DEFLATED_FRAME: &str = "1.2.840.10008.1.2.8.1";

/// True for JPEG 2000.
pub(super) fn is_jpeg_2000(uid: &str) -> bool {
    uid.strip_prefix("1.2.840.10008.1.2.4.")
        .is_some_and(|last| matches!(last, "90" | "91" | "92" | "93") || last.starts_with("20"))
}
