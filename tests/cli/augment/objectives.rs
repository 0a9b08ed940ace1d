//! `prsmed augment finetune` with further objectives: region contrast, Siamese losses, prior preservation.

use super::finetuned::{finetune, interrupted_equals_undisturbed};
use crate::support::{done, error_text, folder, objects, path, phantoms, prsmed, run, tree};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const CONTRAST_AND_SIAMESE: [&str; 6] =
    ["--mode", "mask_to_image", "--set", "finetune.region_contrast=0.01", "--set", "finetune.siamese=1"];

/// The lines of `metrics.jsonl` of a kind.
fn lines(run: &Path, kind: &str) -> Vec<serde_json::Value> {
    let lines = objects(&fs::read_to_string(run.join("metrics.jsonl")).unwrap());
    lines.into_iter().filter(|line| line["kind"] == kind).collect()
}

fn validation_loss(run: &Path) -> f64 {
    lines(run, "validation").last().unwrap()["values"]["loss_denoising"].as_f64().unwrap()
}

/// Names and sizes of the tensors in a safetensors file.
fn header(path: &Path) -> serde_json::Value {
    let bytes = fs::read(path).unwrap();
    let length = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    serde_json::from_slice(&bytes[8..8 + length]).unwrap()
}

#[test]
fn losses_of_a_controlnet_are_repeatable_and_leave_an_ordinary_controlnet() {
    interrupted_equals_undisturbed("finetuned-contrast", &CONTRAST_AND_SIAMESE);
    let out = path("finetuned-contrast");
    for line in lines(&out, "step") {
        for name in ["denoising", "contrast", "siamese"] {
            let value = line["losses"][name].as_f64().unwrap_or_else(|| panic!("no {name}: {line}"));
            assert!(value > 0.0 && value.is_finite(), "{line}");
        }
    }
    let plain = path("finetuned-without-contrast");
    done(&mut finetune(&plain, &["--mode", "mask_to_image"]));
    let file = "last/controlnet/diffusion_pytorch_model.safetensors";
    assert_eq!(header(&out.join(file)), header(&plain.join(file)), "the ControlNet has other tensors");
    assert_ne!(fs::read(out.join(file)).unwrap(), fs::read(plain.join(file)).unwrap(), "the losses change nothing");
    assert!(tree(&out.join("cache")).keys().any(|name| name.starts_with("mask-and-image")));

    // a micro-batch changes rounding only, with blocks computed again or not
    let smaller = path("finetuned-contrast-1x4");
    let one_by_one = ["--set", "train.micro_batch=1", "--set", "train.accumulation=4", "--set", "train.ema_decay=0.9"];
    let recomputed = ["--set", "train.checkpointing=full"];
    done(&mut finetune(&smaller, &[&CONTRAST_AND_SIAMESE[..], &one_by_one, &recomputed].concat()));
    let (one, other) = (validation_loss(&out), validation_loss(&smaller));
    assert!((one - other).abs() < 1e-4 * one, "{one} {other}");
}

/// A folder with the first images of a data root.
fn prior_images(root: &Path, name: &str, count: usize) -> PathBuf {
    let to = folder(name);
    let images = tree(root).into_iter().filter(|(name, _)| name.contains("train_images"));
    // some phantoms have the same image
    let different: BTreeMap<Vec<u8>, String> = images.map(|(name, bytes)| (bytes, name)).collect();
    for (number, (bytes, name)) in different.into_iter().take(count).enumerate() {
        let extension = Path::new(&name).extension().unwrap().to_str().unwrap().to_owned();
        fs::write(to.join(format!("{number}.{extension}")), bytes).unwrap();
    }
    assert_eq!(fs::read_dir(&to).unwrap().count(), count);
    to
}

#[test]
fn prior_images_accompany_training_images() {
    let images = prior_images(phantoms(), "prior", 3);
    let prior = ["--set", &format!("finetune.prior_images={}", images.display()), "--set"].map(str::to_owned);
    let prior: Vec<&str> = prior.iter().map(String::as_str).chain(["finetune.prior_caption=a medical image"]).collect();
    interrupted_equals_undisturbed("finetuned-prior", &prior);
    let plain = path("finetuned-without-prior");
    done(&mut finetune(&plain, &["--set", "train.checkpoint_every_steps=2", "--set", "train.ema_decay=0.9"]));
    let encoded = |run: &Path| tree(&run.join("cache")).keys().filter(|name| name.starts_with("image")).count();
    let out = path("finetuned-prior");
    assert_eq!(encoded(&out), encoded(&plain) + 3);
    assert_ne!(validation_loss(&out), validation_loss(&plain), "prior images change nothing");
    // without weight they change rounding only
    let weightless = path("finetuned-prior-weightless");
    done(&mut finetune(
        &weightless,
        &[&prior[..], &["--set", "finetune.prior_weight=0", "--set", "train.ema_decay=0.9"]].concat(),
    ));
    let (one, other) = (validation_loss(&plain), validation_loss(&weightless));
    assert!((one - other).abs() < 1e-5 * one, "{one} {other}");
    // and the micro-batch does
    let smaller = path("finetuned-prior-1x4");
    let one_by_one = ["--set", "train.micro_batch=1", "--set", "train.accumulation=4", "--set", "train.ema_decay=0.9"];
    done(&mut finetune(&smaller, &[&prior[..], &one_by_one].concat()));
    let (one, other) = (validation_loss(&out), validation_loss(&smaller));
    assert!((one - other).abs() < 1e-4 * one, "{one} {other}");

    // a run resumes with its own prior images only
    fs::remove_file(fs::read_dir(&images).unwrap().next().unwrap().unwrap().path()).unwrap();
    let ran = run(&mut finetune(&out, &[&prior[..], &["--resume"]].concat()));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(error_text(&ran).contains("has other images than the run to resume"), "{}", ran.stderr);
}

#[test]
fn objectives_that_cannot_be_used_are_refused() {
    let empty = folder("no-prior-images");
    let given = format!("finetune.prior_images={}", empty.display());
    let caption = "finetune.prior_caption=an image";
    let cases: [(&[&str], &str); 8] = [
        (&["finetune.region_contrast=0.01"], "`finetune.region_contrast`: is a loss of a ControlNet"),
        (&["finetune.siamese=1"], "`finetune.siamese`: is a loss of a ControlNet"),
        (
            &["finetune.mode=mask_to_image", "finetune.siamese=1", "train.step_in_backward=true"],
            "Siamese losses use them twice",
        ),
        (&["finetune.prior_images=missing", caption], "`missing` is not a folder"),
        (&[&given, caption], "has no images"),
        (&[&given], "`finetune.prior_caption`: is empty"),
        (&[caption], "there are no prior images"),
        (&["finetune.mode=mask_to_image", &given, caption], "belongs to `finetune.mode=images`"),
    ];
    for (sets, expected) in cases {
        let out = path("refused-objective");
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        let ran = run(&mut finetune(&out, &sets));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(error_text(&ran).contains(expected), "{expected}\n{}", ran.stderr);
        assert!(!out.join("cache").exists(), "{expected}");
    }
}

/// Phantoms of 256x256, 256x128 and 128x256 pixels, and a folder with two of the first kind.
fn phantoms_of_several_shapes(name: &str) -> (PathBuf, PathBuf) {
    let root = path(name);
    done(prsmed().args(["data", "phantom", "--count", "12", "--image-size", "256", "--seed", "3"]).arg(&root));
    let prior = prior_images(&root, &format!("{name}-prior"), 2);
    let masks = tree(&root).into_keys().filter(|name| name.contains("_masks/"));
    let mut images: Vec<String> = masks.map(|name| name.replace("_masks/", "_images/")).collect();
    images.sort();
    for (number, image) in images.iter().enumerate() {
        let mask = root.join(image.replace("_images/", "_masks/"));
        let stem = root.join(image).with_extension("");
        let image =
            ["png", "jpg"].map(|kind| stem.with_extension(kind)).into_iter().find(|path| path.exists()).unwrap();
        for path in [image, mask] {
            let pixels = image::open(&path).unwrap();
            let (width, height) = (pixels.width(), pixels.height());
            let (width, height) = match number % 3 {
                0 => (width, height),
                1 => (width, height / 2),
                _ => (width / 2, height),
            };
            // two phantoms may share a file
            fs::remove_file(&path).unwrap();
            pixels.resize_exact(width, height, image::imageops::FilterType::Nearest).save(&path).unwrap();
        }
    }
    (root, prior)
}

#[test]
fn images_of_several_shapes_are_trained_in_buckets() {
    let (root, images) = phantoms_of_several_shapes("phantoms-of-several-shapes");
    let buckets = |out: &Path, more: &[&str]| {
        let mut command = prsmed();
        command.args(["augment", "finetune", "--preset", "tiny", "--data-root"]).arg(&root).arg("--out").arg(out);
        let sets = [
            "finetune.buckets=true",
            "finetune.image_size=128",
            "finetune.model=random:tiny-sdxl",
            "train.max_steps=6",
        ];
        command.args(sets.iter().flat_map(|set| ["--set", set])).args(more);
        command
    };
    let whole = path("finetuned-buckets");
    let ran = run(&mut buckets(&whole, &[]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    for shape in ["64x192", "128x128", "192x64"] {
        assert!(ran.stderr.contains(&format!(" of {shape}")), "{}", ran.stderr);
    }
    // latents have the shapes of the buckets
    let mut shapes: Vec<String> = Vec::new();
    for name in tree(&whole.join("cache")).into_keys().filter(|name| name.starts_with("image")) {
        shapes.push(header(&whole.join("cache").join(name))["mean"]["shape"].to_string());
    }
    shapes.sort();
    shapes.dedup();
    assert_eq!(shapes, ["[4,16,16]", "[4,24,8]", "[4,8,24]"]);
    // the same images in other micro-batches
    let smaller = path("finetuned-buckets-1x4");
    done(&mut buckets(&smaller, &["--set", "train.micro_batch=1", "--set", "train.accumulation=4"]));
    let (one, other) = (validation_loss(&whole), validation_loss(&smaller));
    assert!((one - other).abs() < 1e-4 * one, "{one} {other}");
    // the regions, masks and prior images have the shapes of their images
    for (name, mode) in [("inpaint", "inpaint"), ("masks", "mask_to_image")] {
        let more = ["--mode", mode, "--set", "train.max_steps=3", "--set", "finetune.model=random:tiny"];
        done(&mut buckets(&path(&format!("finetuned-buckets-{name}")), &more));
    }
    let prior = ["--set", &format!("finetune.prior_images={}", images.display()), "--set"].map(str::to_owned);
    let prior: Vec<&str> = prior.iter().map(String::as_str).chain(["finetune.prior_caption=a medical image"]).collect();
    done(&mut buckets(&path("finetuned-buckets-prior"), &[&prior[..], &["--set", "train.max_steps=3"]].concat()));

    let error = |sets: &[&str]| {
        let out = path("refused-buckets");
        let ran = run(&mut buckets(&out, &sets.iter().flat_map(|set| ["--set", *set]).collect::<Vec<_>>()));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(!out.join("cache").exists());
        error_text(&ran)
    };
    let text = error(&["finetune.image_size=512"]);
    assert!(text.contains("smaller than its bucket of") && text.contains("finetune.buckets=false"), "{text}");
    let text = error(&["finetune.samples=8"]);
    assert!(text.contains("not possible together with samples"), "{text}");
}
