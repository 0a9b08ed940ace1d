//! Imaging modalities.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Imaging modality. NIfTI files do not store it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Modality {
    /// Computed tomography; values are Hounsfield units.
    Ct,
    /// Magnetic resonance.
    Mr,
    /// Another DICOM modality code, for example `US`.
    Other(String),
    /// Not known.
    #[default]
    Unknown,
}

impl Modality {
    /// From the DICOM attribute Modality.
    pub fn from_code(code: &str) -> Self {
        match code.trim() {
            "CT" => Self::Ct,
            "MR" => Self::Mr,
            "" => Self::Unknown,
            // a code is at most 16 capital letters, digits, `_` and spaces; anything else could be any text
            code if code.len() <= 16 && code.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit()) => {
                Self::Other(code.to_owned())
            }
            _ => Self::Unknown,
        }
    }

    /// The DICOM code; `unknown` without one.
    pub fn code(&self) -> &str {
        match self {
            Self::Ct => "CT",
            Self::Mr => "MR",
            Self::Other(code) => code,
            Self::Unknown => "unknown",
        }
    }

    /// True for projection X-ray images, whose windows are set for reading.
    pub fn is_radiograph(&self) -> bool {
        matches!(self.code(), "CR" | "DX" | "MG" | "RF" | "XA" | "PX" | "IO" | "RG")
    }

    /// True for modalities whose values are measurements and not grey levels of a display.
    pub fn is_measured(&self) -> bool {
        matches!(self.code(), "CT" | "MR" | "PT" | "NM" | "unknown")
    }
}

impl fmt::Display for Modality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}
