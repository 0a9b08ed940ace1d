//! Small data roots and rows for tests. Those of `prsmed` compile this file too.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::image::{GrayImage, Luma, Rgb, RgbImage};

use prsmed_data::image::{Fit, MaskMode, PadOffset, PixelConfig};
use prsmed_data::labels::Labels;
use prsmed_data::manifest::{Presence, Row, Split, Target};
use prsmed_data::sample::{Pixels, Sample};

/// A data root in a temporary folder.
pub(crate) struct Root(tempfile::TempDir);

impl Root {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// The path of a file below the root; its folder exists afterwards.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        path
    }

    pub(crate) fn csv(&self, name: &str, text: &str) {
        std::fs::write(self.file(&format!("annotations/{name}")), text).expect("written");
    }

    pub(crate) fn mask(&self, name: &str, width: u32, height: u32, value: impl Fn(u32, u32) -> u8) {
        GrayImage::from_fn(width, height, |x, y| Luma([value(x, y)])).save(self.file(name)).expect("written");
    }

    /// A colour ramp whose first pixel is different for every name.
    pub(crate) fn image(&self, name: &str, width: u32, height: u32) {
        let tint = name.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(257).wrapping_add(u32::from(byte)));
        let byte = |value: u32| u8::try_from(value % 256).expect("below 256");
        let mut image = RgbImage::from_fn(width, height, |x, y| Rgb([byte(x * 9), byte(y * 7), byte(x + y)]));
        image.put_pixel(0, 0, Rgb([byte(tint), byte(tint >> 8), byte(tint >> 16)]));
        image.save(self.file(name)).expect("written");
    }

    /// `CLASS/SPLIT_images/NAME.png` (12x8) and its mask with a block in the upper left.
    pub(crate) fn pair(&self, class: &str, split: &str, name: &str) {
        self.image(&format!("{class}/{split}_images/{name}.png"), 12, 8);
        self.mask(&format!("{class}/{split}_masks/{name}.png"), 12, 8, |x, y| if x < 5 && y < 3 { 255 } else { 0 });
    }
}

/// A training row of the class `ct` whose files do not exist.
pub(crate) fn row(question: &str, answer: &str, position: Option<&str>) -> Row {
    Row {
        csv: PathBuf::from("a.csv"),
        line: 2,
        modality: "ct".into(),
        targets: Target::only(PathBuf::from("m.png"), Presence::Present),
        image_path: PathBuf::from("i.png"),
        question: question.into(),
        answer: answer.into(),
        position: position.map(str::to_owned),
        split: Split::Train,
        patient: None,
        spacing_mm: None,
        synthetic: false,
    }
}

/// The sides of [`sample`]'s images.
pub(crate) const SMALL: PixelConfig = PixelConfig {
    tower_size: 2,
    sam_size: 3,
    fit: Fit::Stretch,
    mask: MaskMode::Soft,
    pad_offset: PadOffset::Centre,
    labels: Labels::NONE,
    padding: [0; 3],
};

/// A sample with these ids, whose bytes say which row it is. Row 2 has no mask.
pub(crate) fn sample(row: usize, ids: &[i64]) -> Sample {
    let byte = u8::try_from(row).expect("small");
    let pixels = Pixels { tower: vec![byte; 12], sam: vec![byte; 27], mask: vec![byte + 50; 9], shown: (3, 3) };
    let (ids, has_mask, text) = (ids.to_vec(), vec![row != 2], self::row("", "", None));
    Sample {
        row,
        label: row + 1,
        ids,
        answer_start: 1,
        has_mask,
        pixels: Arc::new(pixels),
        geometry: Vec::new(),
        moved: Vec::new(),
        text,
        seen: None,
    }
}

/// The folder of the checkout.
pub(crate) fn checkout() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().find(|folder| folder.join("Cargo.lock").exists()).expect("a checkout")
}

/// A path of the folder that PRSMED_SHARED names (default: `shared` next to the checkout).
pub(crate) fn shared(name: &str) -> PathBuf {
    let root = std::env::var_os("PRSMED_SHARED").map_or_else(|| checkout().join("../shared"), PathBuf::from);
    let path = root.join(name);
    assert!(path.exists(), "`{}` does not exist (set PRSMED_SHARED)", path.display());
    path
}
