//! A layout of tests: `P1/train/a.scan.png` and its mask of spots `P1/train/a.spot.png`.

use super::patterns::{Layout, NO_LAYOUT};

pub(super) const TOY: Layout = Layout {
    name: "toy",
    about: "`P1/train/a.scan.png`, `P1/train/a.spot.png`",
    masks: &[r"^(?<base>[^/]+)/(?<split>[^/]+)/(?<id>[^/]+)\.(?<target>spot)\.png$"],
    images: &[r"^(?<base>(?<patient>[^/]+))/(?<split>[^/]+)/(?<id>[^/]+)\.scan\.png$"],
    ..NO_LAYOUT
};
