use std::path::Path;

use super::*;
use crate::phantom::PhantomOptions;
use crate::volume::{self, Axis, Cleanup, Voxels, labels};
use prsmed_base::event::Silent;

fn options(volumes: usize) -> PhantomVolumeOptions {
    PhantomVolumeOptions { volumes, seed: 5, image_size_px: 48, ..PhantomVolumeOptions::default() }
}

fn bytes(out: &Path, number: usize) -> [Vec<u8>; 2] {
    ["scans", "labels"].map(|folder| std::fs::read(out.join(folder).join(format!("P{number:04}.nii.gz"))).unwrap())
}

#[test]
fn a_volume_depends_on_the_seed_and_its_number_only() {
    let folder = tempfile::tempdir().unwrap();
    let make = |name: &str, options: &PhantomVolumeOptions| {
        let out = folder.path().join(name);
        generate_volumes(&out, options, &Silent).unwrap();
        out
    };
    let few = make("few", &options(2));
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let many = one_thread.install(|| make("many", &options(3)));
    let other = make("other", &PhantomVolumeOptions { seed: 6, ..options(1) });
    for number in [1, 2] {
        assert_eq!(bytes(&few, number), bytes(&many, number));
    }
    assert_ne!(bytes(&few, 1), bytes(&few, 2));
    assert_ne!(bytes(&few, 1)[0], bytes(&other, 1)[0]);
    // the same options change nothing, others are refused
    let before = std::fs::metadata(few.join("phantom.json")).unwrap().modified().unwrap();
    let again = generate_volumes(&few, &options(2), &Silent).unwrap();
    assert_eq!((again.volumes, before), (2, std::fs::metadata(few.join("phantom.json")).unwrap().modified().unwrap()));
    let refused = generate_volumes(&few, &options(3), &Silent).unwrap_err().to_string();
    assert!(refused.contains("other options"), "{refused}");
    let refused = super::super::generate(&few, &PhantomOptions::default(), &Silent).unwrap_err().to_string();
    assert!(refused.contains("other options"), "{refused}");
}

/// Number of connected components of the labels: the largest one is removed until nothing is left.
fn num_components(phantom: &PhantomVolume) -> usize {
    let largest = Cleanup { largest_component: true, ..Cleanup::default() };
    let (mut left, mut count) = (phantom.labels.clone(), 0);
    while left.contains(&1) {
        let mut component = left.clone();
        largest.apply(&mut component, &phantom.grid, 2).unwrap();
        left.iter_mut().zip(component).for_each(|(label, found)| *label -= found);
        count += 1;
    }
    count
}

#[test]
fn labels_lie_on_lesions_that_span_several_slices() {
    let options = options(20);
    let mut spacings = Vec::new();
    for index in 0..20 {
        let phantom = PhantomVolume::new(index, &options).unwrap();
        assert_eq!(phantom.lesions.len(), num_lesions(index, &options));
        let [size, _, num_slices] = phantom.grid.size;
        assert_eq!((size, phantom.values.len()), (48, phantom.labels.len()));
        spacings.push(phantom.grid.spacing().map(|mm| format!("{mm:.2}")));
        let mean = |label: u8| {
            let of: Vec<f64> = (phantom.values.iter().zip(&phantom.labels))
                .filter(|(_, found)| **found == label)
                .map(|(value, _)| f64::from(*value))
                .collect();
            of.iter().sum::<f64>() / of.len() as f64
        };
        if phantom.lesions.is_empty() {
            assert!(phantom.labels.iter().all(|label| *label == 0));
            continue;
        }
        // level 0.84 of the window, less at the blurred edge
        assert!((110.0..180.0).contains(&mean(1)) && mean(0) < 60.0, "{index}: {} {}", mean(1), mean(0));
        let per_slice = phantom.labels.chunks_exact(size * size).map(|slice| slice.contains(&1));
        let with_lesion: Vec<usize> =
            per_slice.enumerate().filter(|(_, found)| *found).map(|(slice, _)| slice).collect();
        assert!(with_lesion.len() >= 3, "{index}: {with_lesion:?}");
        assert!(with_lesion.len() < num_slices, "{index}: no slice without a lesion");
        assert_eq!(num_components(&phantom), phantom.lesions.len(), "{index}");
    }
    spacings.sort_unstable();
    spacings.dedup();
    assert!(spacings.len() > 15, "{spacings:?}");
    for [x, y, z] in spacings {
        let [pixel, slice] = [&x, &z].map(|text| text.parse::<f64>().unwrap());
        assert!(x == y && (0.6..=1.0).contains(&pixel) && (2.5..=5.0).contains(&slice), "{x} {y} {z}");
    }
}

#[test]
fn files_keep_the_values_and_the_spacing() {
    let folder = tempfile::tempdir().unwrap();
    generate_volumes(folder.path(), &options(1), &Silent).unwrap();
    let phantom = PhantomVolume::new(0, &options(1)).unwrap();
    let scan = volume::open(&folder.path().join("scans/P0001.nii.gz")).unwrap();
    assert_eq!(scan.voxels, Voxels::I16(phantom.values.clone()));
    assert_eq!((scan.grid.size, scan.grid.affine.orientation().as_str()), (phantom.grid.size, "LPS"));
    for (found, expected) in scan.grid.spacing().iter().zip(phantom.grid.spacing()) {
        assert!((found - expected).abs() < 1e-6);
    }
    // rows and columns of an axial slice are those that were drawn
    let plane = scan.plane(Axis::Axial);
    assert_eq!(plane.values(&phantom.labels, 7).unwrap(), phantom.labels[7 * 48 * 48..8 * 48 * 48]);
    let path = folder.path().join("labels/P0001.nii.gz");
    let labels = labels::open(&path).unwrap().on_grid(&path, &scan.grid, false).unwrap();
    assert_eq!(labels.mask(1), phantom.labels);
}

#[test]
fn numbers_of_lesions_are_exact_in_blocks() {
    for (absent_frac, two_lesion_frac, expected) in
        [(0.2, 0.25, [8, 24, 8]), (0.0, 0.0, [0, 40, 0]), (1.0, 0.5, [40, 0, 0])]
    {
        let options = PhantomVolumeOptions { two_lesion_frac, absent_frac, ..options(40) };
        let count = |lesions: usize| (0..40).filter(|index| num_lesions(*index, &options) == lesions).count();
        assert_eq!([count(0), count(1), count(2)], expected);
    }
}

#[test]
fn options_out_of_range_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let refuse = |options: PhantomVolumeOptions| {
        generate_volumes(&folder.path().join("new"), &options, &Silent).unwrap_err().to_string()
    };
    assert!(refuse(PhantomVolumeOptions { volumes: 0, ..options(1) }).contains("argument `volumes`"));
    assert!(refuse(PhantomVolumeOptions { image_size_px: 513, ..options(1) }).contains("argument `image_size`"));
    assert!(refuse(PhantomVolumeOptions { two_lesion_frac: -0.1, ..options(1) }).contains("argument `two_lesions`"));
    assert!(refuse(PhantomVolumeOptions { absent_frac: f64::NAN, ..options(1) }).contains("argument `negatives`"));
    assert!(!folder.path().join("new").exists());
}
