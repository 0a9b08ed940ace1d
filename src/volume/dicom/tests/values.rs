//! Padding, rescale, windows and lookup tables.

use super::*;
use crate::{Axis, Voxels, Window};

fn greys(volume: &Volume, window: Window) -> Vec<u8> {
    let levels = window.levels(volume).expect("a window");
    volume.slice(&volume.plane(Axis::Axial), 0, &levels).expect("a slice").into_raw()
}

fn values(volume: &Volume) -> Vec<f32> {
    (0..volume.voxels.len()).map(|index| volume.voxels.get(index).expect("a voxel")).collect()
}

fn window(text: &str) -> Window {
    text.parse().expect("a window")
}

/// An MR slice with these values.
fn mr(values: &[i32], is_signed: bool) -> InMemDicomObject {
    let mut object = slice_of("MR", 0);
    set_pixels(&mut object, values, is_signed);
    object
}

#[test]
fn padding_is_black_and_not_part_of_percentiles() {
    let all = window("p0-p100");
    let anatomy = [100, 120, 140, 160, 180, 200, 220];
    let with = |padding: [i32; 5]| [padding.as_slice(), &anatomy].concat();
    let shown = [0, 0, 0, 0, 0, 0, 43, 85, 128, 170, 213, 255];
    // the smallest value of 16 bits
    let mut signed = mr(&with([-32768; 5]), true);
    set_i16(&mut signed, tags::PIXEL_PADDING_VALUE, -32768);
    // a range, whose ends are in any order
    let mut range = mr(&with([60000, 60001, 60005, 60008, 60010]), false);
    set_u16(&mut range, tags::PIXEL_PADDING_VALUE, 60010);
    set_u16(&mut range, tags::PIXEL_PADDING_RANGE_LIMIT, 60000);
    // a signed value that is stored as an unsigned one
    let mut other = mr(&with([-2000; 5]), true);
    set_u16(&mut other, tags::PIXEL_PADDING_VALUE, 63536);
    // stored values, before a rescale with fractions
    let mut scaled = mr(&with([0; 5]), false);
    set_u16(&mut scaled, tags::PIXEL_PADDING_VALUE, 0);
    set(&mut scaled, tags::RESCALE_SLOPE, "0.25");
    set(&mut scaled, tags::RESCALE_INTERCEPT, "-7");
    for object in [signed, range, other, scaled] {
        let volume = volume(vec![object]);
        assert_eq!(greys(&volume, all), shown);
        assert!(has_note(&volume, "5 of 12 pixels are padding"), "{:?}", volume.notes);
    }
    // dark values are bright, and padding stays black
    let mut inverted = mr(&with([0; 5]), false);
    set_u16(&mut inverted, tags::PIXEL_PADDING_VALUE, 0);
    set(&mut inverted, tags::PHOTOMETRIC_INTERPRETATION, "MONOCHROME1");
    assert_eq!(greys(&volume(vec![inverted]), all), [0, 0, 0, 0, 0, 255, 212, 170, 127, 85, 42, 0]);
    // without the attribute nothing is padding
    let plain = volume(vec![mr(&with([0; 5]), false)]);
    assert_eq!(all.levels(&plain).map(|levels| levels.low).expect("levels"), 0.0);
    assert_eq!(plain.notes, [""; 0]);
    // nothing but padding
    let mut empty = mr(&[9; 12], false);
    set_u16(&mut empty, tags::PIXEL_PADDING_VALUE, 9);
    assert_eq!(greys(&volume(vec![empty]), Window::Auto), [0; 12]);
}

#[test]
fn a_slice_without_the_rescale_of_the_others_is_named() {
    for tag in [tags::RESCALE_SLOPE, tags::RESCALE_INTERCEPT] {
        for (missing, others) in [(0, "1.dcm"), (1, "0.dcm"), (2, "0.dcm")] {
            let folder = changed(|index, object| {
                set(object, tags::RESCALE_SLOPE, "2");
                if index == missing {
                    object.remove_element(tag);
                }
            });
            let found = refused(folder.path());
            let name = if tag == tags::RESCALE_SLOPE { "RescaleSlope" } else { "RescaleIntercept" };
            assert!(found.contains(&format!("{missing}.dcm: it has no {name}, and {others} has")), "{found}");
        }
    }
    // an intercept that changes nothing may be missing
    let folder = changed(|index, object| {
        set(object, tags::MODALITY, "MR");
        if index == 1 {
            object.remove_element(tags::RESCALE_INTERCEPT);
            object.remove_element(tags::RESCALE_SLOPE);
        } else {
            set(object, tags::RESCALE_INTERCEPT, "0");
        }
    });
    assert!(open(folder.path()).is_ok());
    // frames of one file
    let mut object = frames(&[Some("-1000"), None, Some("-1000")]);
    let folder = super::folder(vec![object.clone()]);
    let found = refused(&folder.path().join("0.dcm"));
    assert!(found.contains("frame 2 of it has no RescaleIntercept, and frame 1 of 0.dcm has -1000"), "{found}");
    // of all frames
    let shared = item(&[(tags::RESCALE_SLOPE, "1"), (tags::RESCALE_INTERCEPT, "-900")]);
    let mut groups = InMemDicomObject::new_empty();
    set_items(&mut groups, tags::PIXEL_VALUE_TRANSFORMATION_SEQUENCE, vec![shared]);
    set_items(&mut object, tags::SHARED_FUNCTIONAL_GROUPS_SEQUENCE, vec![groups]);
    let volume = volume(vec![object]);
    assert_eq!(values(&volume)[0..36].iter().step_by(12).copied().collect::<Vec<_>>(), [0.0, 100.0, 0.0]);
}

/// An enhanced CT whose frames have these intercepts.
fn frames(intercepts: &[Option<&str>]) -> InMemDicomObject {
    let mut object = slice_of("CT", 0);
    object.remove_element(tags::IMAGE_POSITION_PATIENT);
    set(&mut object, tags::NUMBER_OF_FRAMES, &intercepts.len().to_string());
    let of = |(index, intercept): (usize, Option<&str>)| {
        let mut groups = InMemDicomObject::new_empty();
        let position = item(&[(tags::IMAGE_POSITION_PATIENT, &format!("0\\0\\{index}"))]);
        set_items(&mut groups, tags::PLANE_POSITION_SEQUENCE, vec![position]);
        if let Some(intercept) = intercept {
            let rescale = item(&[(tags::RESCALE_SLOPE, "1"), (tags::RESCALE_INTERCEPT, intercept)]);
            set_items(&mut groups, tags::PIXEL_VALUE_TRANSFORMATION_SEQUENCE, vec![rescale]);
        }
        groups
    };
    set_items(
        &mut object,
        tags::PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE,
        intercepts.iter().copied().enumerate().map(of).collect(),
    );
    let pixels: Vec<i32> = std::iter::repeat_n(1000..1012, intercepts.len()).flatten().collect();
    set_pixels(&mut object, &pixels, false);
    object
}

#[test]
fn a_ct_without_rescale_has_hounsfield_units_only_if_it_has_air() {
    let ct = |values: &[i32], is_signed: bool| {
        let mut object = slice_of("CT", 0);
        set_pixels(&mut object, values, is_signed);
        object
    };
    let tissue: Vec<i32> = (0..12).map(|value| 20 + value).collect();
    let unsigned = ct(&tissue.iter().map(|value| value + 1024).collect::<Vec<_>>(), false);
    let no_air = ct(&tissue, true);
    // an undeclared padding value is no air
    let padded = ct(&[&[-32768; 4], &tissue[4..]].concat(), true);
    let mut slope_only = unsigned.clone();
    set(&mut slope_only, tags::RESCALE_SLOPE, "1");
    for object in [unsigned, no_air, padded, slope_only] {
        let volume = volume(vec![object]);
        assert!(has_note(&volume, "the CT has no RescaleIntercept, and its values are not like"), "{:?}", volume.notes);
        for name in ["auto", "soft-tissue", "lung"] {
            let error = window(name).levels(&volume).expect_err(name);
            assert!(error.to_string().contains("window in Hounsfield units"), "{error}");
            assert!(error.hint().contains("p0.5-p99.5") && error.hint().contains("RescaleSlope"), "{error}");
        }
        for text in ["-300..300", "400/40", "p0-p100"] {
            assert!(window(text).levels(&volume).is_ok(), "{text}");
        }
    }
    let air = volume(vec![ct(&[&[-1000; 4], &tissue[4..]].concat(), true)]);
    assert!(has_note(&air, "look like Hounsfield units"), "{:?}", air.notes);
    assert_eq!(Window::Auto.levels(&air).map(|levels| [levels.low, levels.high]).expect("levels"), [-160.0, 240.0]);
    // other modalities have no units, and a complete CT has no notes
    assert_eq!(volume(vec![slice_of("MR", 0)]).notes, [""; 0]);
    assert_eq!(volume(vec![slice(0)]).notes, [""; 0]);
    let mut density = slice(0);
    set(&mut density, tags::RESCALE_TYPE, "MGML");
    let density = volume(vec![density]);
    assert!(Window::Auto.levels(&density).is_err() && has_note(&density, "RescaleType"), "{:?}", density.notes);
}

#[test]
fn every_slice_has_its_own_rescale() {
    let scaled = |index: i32, slope: &str, intercept: &str| {
        let mut object = slice_of("PT", index);
        set(&mut object, tags::RESCALE_SLOPE, slope);
        set(&mut object, tags::RESCALE_INTERCEPT, intercept);
        object
    };
    let volume = volume(vec![scaled(0, "0.5", "0"), scaled(1, "2", "1"), scaled(2, "1", "-1000")]);
    assert_eq!(values(&volume).into_iter().step_by(12).collect::<Vec<_>>(), [500.0, 2001.0, 0.0]);
}

#[test]
fn rescales_without_usable_values_are_refused() {
    for (modality, slope, intercept, part) in [
        ("PT", "1e300", "0", "RescaleSlope is 1e300, which is out of range"),
        ("PT", "1e37", "0", "RescaleSlope is 1e37"),
        ("MR", "-1e308", "0", "RescaleSlope is 1e308"),
        ("MR", "1e-40", "0", "RescaleSlope is 1e-40"),
        ("PT", "0", "0", "RescaleSlope is 0"),
        ("PT", "1", "1e308", "RescaleIntercept is 1e308, which is out of range"),
        // all values would be one number of 32 bits
        ("PT", "1", "1e9", "RescaleIntercept is 1e9"),
        ("CT", "1e6", "-1024", "RescaleSlope is 1e6"),
        ("CT", "1", "-1e7", "RescaleIntercept is 1e7"),
    ] {
        let folder = changed(|index, object| {
            set(object, tags::MODALITY, modality);
            if index == 1 {
                set(object, tags::RESCALE_SLOPE, slope);
                set(object, tags::RESCALE_INTERCEPT, intercept);
            }
        });
        let found = refused(folder.path());
        assert!(found.contains("1.dcm") && found.contains(part), "{slope} {intercept}: {found}");
    }
}

#[test]
fn numbers_of_32_bits_keep_their_sign() {
    for (is_signed, expected) in
        [(false, [0.0, 2_147_483_648.0, 4_294_967_295.0]), (true, [0.0, -2_147_483_648.0, -1.0])]
    {
        let mut object = slice_of("MR", 0);
        for (tag, value) in [(tags::BITS_ALLOCATED, 32), (tags::BITS_STORED, 32), (tags::HIGH_BIT, 31)] {
            set_u16(&mut object, tag, value);
        }
        set_u16(&mut object, tags::PIXEL_REPRESENTATION, u16::from(is_signed));
        let words = [0_u32, 1 << 31, u32::MAX].iter().cycle().take(12).flat_map(|word| word.to_le_bytes());
        let words = PrimitiveValue::from(words.collect::<Vec<u8>>());
        object.put(DataElement::new(tags::PIXEL_DATA, VR::OW, words));
        let volume = volume(vec![object]);
        #[expect(clippy::cast_possible_truncation, reason = "voxels are 32-bit numbers")]
        let expected = expected.map(|value: f64| value as f32);
        assert_eq!(values(&volume)[..3], expected);
        assert!(matches!(volume.voxels, Voxels::F32(_)));
    }
}

fn lookup(first: i16, entries: &[u16], bits: u16) -> InMemDicomObject {
    let mut item = InMemDicomObject::new_empty();
    let count = u16::try_from(entries.len()).expect("few entries");
    let descriptor = PrimitiveValue::U16([count, first.cast_unsigned(), bits].as_slice().into());
    item.put(DataElement::new(tags::LUT_DESCRIPTOR, VR::US, descriptor));
    item.put(DataElement::new(tags::LUT_DATA, VR::OW, PrimitiveValue::U16(entries.into())));
    item
}

#[test]
fn lookup_tables_and_sigmoids_of_radiographs_are_applied() {
    let radiograph = |values: &[i32], is_signed: bool, table: InMemDicomObject| {
        let mut object = slice_of("DX", 0);
        set_pixels(&mut object, values, is_signed);
        set_items(&mut object, tags::VOILUT_SEQUENCE, vec![table]);
        object
    };
    let ramp: Vec<i32> = (0..12).collect();
    // values outside have the first and the last grey
    let steps = [0, 0, 0, 64, 128, 255, 255, 255, 255, 255, 255, 255];
    let of_10_bits = radiograph(&ramp, false, lookup(2, &[0, 256, 512, 1023], 10));
    let of_8_bits = radiograph(&ramp, false, lookup(2, &[0, 64, 128, 255], 8));
    let negative: Vec<i32> = ramp.iter().map(|value| value - 6).collect();
    let signed = radiograph(&negative, true, lookup(-4, &[0, 16448, 32896, 65535], 16));
    for object in [of_10_bits.clone(), of_8_bits, signed] {
        let volume = volume(vec![object]);
        assert_eq!(greys(&volume, Window::Auto), steps);
        assert_eq!(greys(&volume, Window::File), steps);
        assert_eq!(volume.notes, [""; 0]);
    }
    let mut inverted = of_10_bits.clone();
    set(&mut inverted, tags::PHOTOMETRIC_INTERPRETATION, "MONOCHROME1");
    assert_eq!(greys(&volume(vec![inverted]), Window::Auto), steps.map(|grey| 255 - grey));
    // other modalities say that they have one
    let mut mr = of_10_bits.clone();
    set(&mut mr, tags::MODALITY, "MR");
    let mr = volume(vec![mr]);
    assert_eq!(greys(&mr, Window::File), steps);
    assert_ne!(greys(&mr, Window::Auto), steps);
    assert!(has_note(&mr, "lookup table (VOI LUT) for its grey values, which only the window `file` uses"));
    // a window comes first
    let windowed = |function: &str| {
        let mut object = of_10_bits.clone();
        set(&mut object, tags::WINDOW_WIDTH, "8");
        set(&mut object, tags::WINDOW_CENTER, "4");
        set(&mut object, tags::VOILUT_FUNCTION, function);
        object
    };
    let exact = volume(vec![windowed("LINEAR_EXACT")]);
    assert_eq!(greys(&exact, Window::Auto)[..9], [0, 32, 64, 96, 128, 159, 191, 223, 255]);
    assert!(has_note(&exact, "the table is ignored"));
    assert_eq!(greys(&volume(vec![windowed("SIGMOID")]), Window::Auto)[..9], [30, 47, 69, 96, 128, 159, 186, 208, 225]);
    let error = Window::Auto.levels(&volume(vec![windowed("GAMMA")])).expect_err("unknown").to_string();
    assert!(error.contains("its VOILUTFunction is unknown") && !error.contains("GAMMA"), "{error}");
    // tables that cannot be used
    let mut short = lookup(2, &[0, 256, 512, 1023], 10);
    short.put(DataElement::new(tags::LUT_DATA, VR::OW, PrimitiveValue::U16([1_u16].as_slice().into())));
    for table in [short, lookup(2, &[0, 1], 40), InMemDicomObject::new_empty()] {
        let volume = volume(vec![radiograph(&ramp, false, table)]);
        let error = Window::Auto.levels(&volume).expect_err("damaged").to_string();
        assert!(error.contains("0.dcm") && error.contains("lookup table (VOI LUT) is damaged"), "{error}");
        assert!(window("p0-p100").levels(&volume).is_ok());
    }
}

#[test]
fn every_slice_has_its_own_padding_value() {
    let object = |(index, padding): (i32, u16)| {
        let mut object = slice_of("MR", index);
        let pixels: Vec<i32> = (0..12).map(|at| if at < 4 { i32::from(padding) } else { 100 + at }).collect();
        set_pixels(&mut object, &pixels, false);
        set_u16(&mut object, tags::PIXEL_PADDING_VALUE, padding);
        object
    };
    let volume = volume([(0, 5), (1, 40_000), (2, 65_535)].map(object).into());
    assert!(has_note(&volume, "12 of 36 pixels are padding"), "{:?}", volume.notes);
    let levels = window("p0-p100").levels(&volume).expect("levels");
    assert_eq!([levels.low, levels.high], [104.0, 111.0]);
    assert_eq!(greys(&volume, window("p0-p100"))[..6], [0, 0, 0, 0, 0, 36]);
}

#[test]
fn padding_is_not_the_air_of_a_ct() {
    let mut object = slice_of("CT", 0);
    set_pixels(&mut object, &[-1000, -1000, -1000, -1000, 20, 21, 22, 23, 24, 25, 26, 27], true);
    let air = volume(vec![object.clone()]);
    assert!(has_note(&air, "look like Hounsfield units") && Window::Auto.levels(&air).is_ok(), "{:?}", air.notes);
    set_i16(&mut object, tags::PIXEL_PADDING_VALUE, -1000);
    let padded = volume(vec![object]);
    assert!(has_note(&padded, "its values are not like Hounsfield units"), "{:?}", padded.notes);
    assert!(Window::Auto.levels(&padded).is_err());
}

#[test]
fn an_empty_rescale_is_a_missing_one() {
    let mut object = slice_of("CT", 0);
    set(&mut object, tags::RESCALE_SLOPE, "");
    set(&mut object, tags::RESCALE_INTERCEPT, "");
    let whole = volume(vec![object]);
    assert!(has_note(&whole, "the CT has no RescaleIntercept, and its values are not like"), "{:?}", whole.notes);
    for (tag, part) in [
        (tags::RESCALE_INTERCEPT, "1.dcm: it has no RescaleIntercept, and 0.dcm has -1024"),
        (tags::RESCALE_SLOPE, "1.dcm: it has no RescaleSlope, and 0.dcm has 0.5"),
    ] {
        let folder = changed(|index, object| {
            set(object, tags::RESCALE_SLOPE, "0.5");
            if index == 1 {
                set(object, tag, "");
            }
        });
        let found = refused(folder.path());
        assert!(found.contains(part), "{found}");
    }
}

#[test]
fn tables_begin_at_values_after_the_rescale_and_the_first_of_several_counts() {
    let mut object = slice_of("DX", 0);
    set_pixels(&mut object, &(0..12).collect::<Vec<_>>(), false);
    set(&mut object, tags::RESCALE_SLOPE, "1");
    set(&mut object, tags::RESCALE_INTERCEPT, "-6");
    let tables = [[0, 256, 512, 1023], [1023, 512, 256, 0]].map(|entries| lookup(-4, &entries, 10));
    set_items(&mut object, tags::VOILUT_SEQUENCE, tables.into());
    let volume = volume(vec![object]);
    let steps = [0, 0, 0, 64, 128, 255, 255, 255, 255, 255, 255, 255];
    assert_eq!((greys(&volume, Window::Auto), greys(&volume, Window::File)), (steps.to_vec(), steps.to_vec()));
    assert_eq!(volume.notes, [""; 0]);
}

#[test]
fn a_table_of_65536_entries_has_the_count_0() {
    let mut object = slice_of("CR", 0);
    set_pixels(&mut object, &(0..12).map(|value| value * 5461).collect::<Vec<_>>(), false);
    let mut table = InMemDicomObject::new_empty();
    table.put(DataElement::new(tags::LUT_DESCRIPTOR, VR::US, PrimitiveValue::U16([0_u16, 0, 16].as_slice().into())));
    let bright: Vec<u16> = (0..=u16::MAX).map(|value| value.max(32_768)).collect();
    table.put(DataElement::new(tags::LUT_DATA, VR::OW, PrimitiveValue::U16(bright.into())));
    set_items(&mut object, tags::VOILUT_SEQUENCE, vec![table]);
    let found = greys(&volume(vec![object]), Window::Auto);
    assert_eq!((found[0], found[6], found[7], found[11]), (128, 128, 149, 234));
}

/// Stored values of air, fat and soft tissue for the intercept -1024.
const STORED: [i32; 12] = [20, 21, 22, 23, 24, 930, 1050, 1060, 1062, 1064, 1066, 1070];

#[test]
fn a_ct_whose_intercept_leaves_no_hounsfield_units_has_a_note() {
    let ct = |values: &[i32], is_signed: bool, intercept: &str| {
        let mut object = slice(0);
        set_pixels(&mut object, values, is_signed);
        set(&mut object, tags::RESCALE_INTERCEPT, intercept);
        volume(vec![object])
    };
    for intercept in ["0", "-1.024"] {
        let found = ct(&STORED, false, intercept);
        let note = format!(
            "the CT has RescaleIntercept {intercept}, but its values are not like Hounsfield units: less than 1 % of them are \
             those of air, lung and fat (-1100 to -20), and at least 10 % are above 700; check RescaleIntercept and \
             RescaleSlope"
        );
        assert_eq!(found.notes, [note]);
        assert!(Window::Auto.levels(&found).is_ok());
    }
    // with air, of soft tissue only, and mostly bone
    let bone = [-90, 30, 40, 50, 800, 850, 900, 950, 1000, 1100, 1200, 1300];
    for found in [ct(&STORED, false, "-1024"), ct(&[40; 12], true, "0"), ct(&bone, true, "0")] {
        assert_eq!(found.notes, [""; 0]);
    }
    // without a slope
    let folder = changed(|_, object| {
        set_pixels(object, &STORED, false);
        set(object, tags::RESCALE_INTERCEPT, "0");
        object.remove_element(tags::RESCALE_SLOPE);
    });
    let found = open(folder.path()).expect("a volume");
    assert!(has_note(&found, "the CT has RescaleIntercept 0, but") && has_note(&found, "no RescaleSlope"));
}

#[test]
fn slices_with_another_intercept_are_named_if_their_values_do_not_fit() {
    let with_zero = |slices: &[usize]| {
        let folder = changed(|index, object| {
            set_pixels(object, &STORED, false);
            if slices.contains(&index) {
                set(object, tags::RESCALE_INTERCEPT, "0");
            }
        });
        open(folder.path()).expect("a volume").notes
    };
    for (slices, of) in [(&[1][..], "in 1 of 3 slices (1.dcm): "), (&[0, 2], "in 2 of 3 slices (0.dcm, 2.dcm): ")] {
        let [note]: [String; 1] = with_zero(slices).try_into().expect("one note");
        let start = "RescaleIntercept differs between the slices of the CT, and values are not like Hounsfield units ";
        assert!(note.starts_with(&format!("{start}{of}less than 1 %")), "{note}");
    }
    // signed pixels that are Hounsfield units
    let folder = changed(|index, object| {
        set_pixels(object, &STORED, false);
        if index == 1 {
            set_pixels(object, &STORED.map(|value| value - 1024), true);
            set(object, tags::RESCALE_INTERCEPT, "0");
        }
    });
    assert_eq!(open(folder.path()).expect("a volume").notes, [""; 0]);
}

#[test]
fn the_rescale_type_of_every_slice_counts() {
    let with = |types: [&str; 3]| {
        let folder = changed(|index, object| set(object, tags::RESCALE_TYPE, types[index]));
        open(folder.path()).expect("a volume")
    };
    let mixed = with(["HU", "HU", "US"]);
    assert!(has_note(&mixed, "RescaleType is US (unspecified) in 1 of 3 slices (2.dcm); their values are used"));
    assert!(Window::Auto.levels(&mixed).is_ok());
    let other = with(["HU", "MGML", "HU"]);
    let reason = "RescaleType says that the values of the CT are not Hounsfield units in 1 of 3 slices (1.dcm)";
    assert_eq!(other.notes, [reason]);
    let error = Window::Auto.levels(&other).expect_err("another unit").to_string();
    assert!(error.contains(reason), "{error}");
    for same in [["HU"; 3], ["US"; 3], ["HU", "HU_MOD", "HU"]] {
        assert_eq!(with(same).notes, [""; 0], "{same:?}");
    }
}

#[test]
fn padding_that_other_slices_declare_is_padding() {
    let all = window("p0-p100");
    for of_one in [None, Some(-3000)] {
        let object = |index: i32| {
            let pixels: Vec<i32> = (0..12).map(|at| if at < 4 { -2000 } else { 100 + at }).collect();
            let mut object = mr(&pixels, true);
            set(&mut object, tags::SOP_INSTANCE_UID, &format!("1.2.3.{index}"));
            set(&mut object, tags::IMAGE_POSITION_PATIENT, &format!("0\\0\\{index}"));
            if let Some(padding) = if index == 0 { of_one } else { Some(-2000) } {
                set_i16(&mut object, tags::PIXEL_PADDING_VALUE, padding);
            }
            object
        };
        let volume = volume((0..3).map(object).collect());
        let note = "12 of 36 pixels are padding (PixelPaddingValue): they are black, and not part of percentiles; the slices \
                    of 4 of them do not declare the value, and other slices do";
        assert_eq!(volume.notes, [note]);
        assert_eq!(all.levels(&volume).map(|levels| [levels.low, levels.high]).expect("levels"), [104.0, 111.0]);
    }
    // the stored value of another rescale is water
    let folder = changed(|index, object| {
        if index == 1 {
            set_pixels(object, &[0, 0, 0, -30, -60, 10, 20, 30, 40, 50, 60, 70], true);
            set(object, tags::RESCALE_INTERCEPT, "0");
        } else {
            set_pixels(object, &[0, 0, 0, 900, 960, 1030, 1040, 1050, 1060, 1070, 1080, 1090], false);
            set_u16(object, tags::PIXEL_PADDING_VALUE, 0);
        }
    });
    let volume = open(folder.path()).expect("a volume");
    let note = "6 of 36 pixels are padding (PixelPaddingValue): they are black, and not part of percentiles";
    assert_eq!(volume.notes, [note]);
}

#[test]
fn air_of_a_ct_is_no_padding_because_another_slice_says_so() {
    let folder = changed(|index, object| {
        set_pixels(object, &[0, 0, 0, 900, 960, 1030, 1040, 1050, 1060, 1070, 1080, 1090], false);
        if index == 0 {
            set_u16(object, tags::PIXEL_PADDING_VALUE, 0);
        }
    });
    let volume = open(folder.path()).expect("a volume");
    let note = "3 of 36 pixels are padding (PixelPaddingValue): they are black, and not part of percentiles";
    assert_eq!(volume.notes, [note]);
}

#[test]
fn undeclared_padding_is_not_part_of_percentiles() {
    let object = |index: i32| {
        let mut object = slice_of("MR", index);
        let pixels: Vec<i32> = (0..12).map(|at| if at < 4 { -32768 } else { 100 + 12 * index + at }).collect();
        set_pixels(&mut object, &pixels, true);
        object
    };
    let volume = volume((0..3).map(object).collect());
    let note = "12 of 36 voxels have the value -32768.0, far from all others (104.0 to 135.0): they are taken for padding \
                that the file does not declare, are black, and are not part of percentiles";
    assert_eq!(volume.notes, [note]);
    let levels = window("p0-p100").levels(&volume).expect("levels");
    assert_eq!([levels.low, levels.high], [104.0, 135.0]);
    assert_eq!(greys(&volume, window("p0-p100"))[..6], [0, 0, 0, 0, 0, 8]);
}

#[test]
fn a_shape_that_contradicts_the_photometric_interpretation_has_a_note() {
    for (shape, photometric, is_noted) in
        [("INVERSE", "MONOCHROME2", true), ("INVERSE", "MONOCHROME1", false), ("IDENTITY", "MONOCHROME2", false)]
    {
        let mut object = slice_of("DX", 0);
        set(&mut object, tags::PHOTOMETRIC_INTERPRETATION, photometric);
        set(&mut object, tags::PRESENTATION_LUT_SHAPE, shape);
        let volume = volume(vec![object]);
        let note = "PresentationLUTShape is INVERSE, which contradicts MONOCHROME2: large values are bright, as MONOCHROME2 \
                    says";
        assert_eq!(volume.notes, [note][..usize::from(is_noted)]);
        assert_eq!(volume.inverted, photometric == "MONOCHROME1");
    }
}
