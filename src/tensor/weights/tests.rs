use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::*;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("tests/fixtures/pth").join(name)
}

fn shared(name: &str) -> PathBuf {
    let root = std::env::var_os("PRSMED_SHARED")
        .map_or_else(|| Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("../shared"), PathBuf::from);
    let path = root.join(name);
    assert!(path.exists(), "`{}` does not exist (set PRSMED_SHARED)", path.display());
    path
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).contiguous().view(-1)).unwrap()
}

fn write(path: &Path, tensors: &[(&str, &Tensor)]) {
    write_safetensors(path, tensors, &BTreeMap::new()).unwrap();
}

fn message(result: Result<Archive>) -> String {
    let error = result.unwrap_err();
    assert!(!error.hint().is_empty(), "no hint: {error}");
    error.to_string()
}

const KINDS: [Kind; 10] = [
    Kind::Double,
    Kind::Float,
    Kind::Half,
    Kind::BFloat16,
    Kind::Int64,
    Kind::Int,
    Kind::Int16,
    Kind::Int8,
    Kind::Uint8,
    Kind::Bool,
];

#[test]
fn safetensors_round_trip_in_every_kind() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.safetensors");
    let tensors: Vec<(String, Tensor)> = KINDS
        .iter()
        .map(|&kind| (format!("{kind:?}"), Tensor::from_slice(&[0_i64, 1, 3, 0, 1, 2]).to_kind(kind).view([2, 3])))
        .chain([("strided".to_owned(), Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]).tr())])
        .chain([("empty".to_owned(), Tensor::zeros([0, 4], (Kind::Float, Device::Cpu)))])
        .chain([("scalar".to_owned(), Tensor::from(1.5_f32))])
        .collect();
    let pairs: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_safetensors(&file, &pairs, &BTreeMap::from([("step".to_owned(), "7".to_owned())])).unwrap();

    let archive = Archive::open(&file).unwrap();
    assert_eq!(archive.names().len(), tensors.len());
    assert_eq!(archive.metadata()["format"], "pt");
    assert_eq!(archive.metadata()["step"], "7");
    for (name, tensor) in &tensors {
        let read = archive.read(name).unwrap();
        assert_eq!((read.kind(), read.size()), (tensor.kind(), tensor.size()), "{name}");
        assert_eq!(values(&read), values(tensor), "{name}");
    }
    // the `safetensors` crate reads the same
    let bytes = fs::read(&file).unwrap();
    assert_eq!(::safetensors::SafeTensors::deserialize(&bytes).unwrap().len(), tensors.len());
    assert!(write_safetensors(&file, &[("a", &tensors[0].1), ("a", &tensors[1].1)], &BTreeMap::new()).is_err());
}

#[test]
fn a_copy_converts_dtypes_and_fills_leaves_and_strided_targets() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.safetensors");
    let count = i64::try_from(CHUNK / 4).unwrap() * 2 + 5;
    let long = Tensor::arange(count, (Kind::Int, Device::Cpu));
    let square = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
    write(&file, &[("long", &long), ("square", &square)]);
    let archive = Archive::open(&file).unwrap();

    let mut wide = Tensor::zeros([count], (Kind::Int64, Device::Cpu));
    archive.copy_into("long", &mut wide).unwrap();
    assert!(wide.equal(&long.to_kind(Kind::Int64)));

    let mut leaf = Tensor::zeros([2, 3], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
    archive.copy_into("square", &mut leaf).unwrap();
    assert_eq!(values(&leaf.detach()), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert!(leaf.requires_grad() && leaf.is_leaf());

    let mut turned = Tensor::zeros([3, 2], (Kind::Float, Device::Cpu)).tr();
    archive.copy_into("square", &mut turned).unwrap();
    assert!(turned.equal(&square));

    let error = archive.copy_into("square", &mut wide).unwrap_err().to_string();
    assert!(error.contains("`square` has shape [2, 3], expected"), "{error}");
    assert!(archive.read("none").unwrap_err().to_string().contains("no tensor `none`"));
}

/// Loads the tensors of a file into zeros of the same names and shapes in `kind`.
fn load_as(file: &Path, kind: Kind) -> Result<LoadReport> {
    let archive = Archive::open(file)?;
    let zeros = |name: &String| Tensor::zeros(&archive.info(name).unwrap().shape, (kind, Device::Cpu));
    let mut targets: Vec<(String, Tensor)> = archive.names().iter().map(|name| (name.clone(), zeros(name))).collect();
    archive.load(&mut targets, |_| false)
}

#[test]
fn integers_are_not_loaded_as_floating_point_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.safetensors");
    for kind in [Kind::Int8, Kind::Uint8, Kind::Int64, Kind::Bool] {
        write(&file, &[("a", &Tensor::ones([3], (kind, Device::Cpu)))]);
        let error = load_as(&file, Kind::BFloat16).unwrap_err().to_string();
        assert!(error.contains(&format!("x.safetensors: `a` has the dtype {kind:?}")), "{error}");
        load_as(&file, kind).unwrap();
    }
    write(&file, &[("a", &Tensor::ones([64, 64], (Kind::Int8, Device::Cpu)))]);
    let matrix = Shared::new(Nf4::empty([64, 64], false, Device::Cpu));
    let mut none: [(String, Tensor); 0] = [];
    let loaded = Archive::open(&file).unwrap().load_with(&mut none, &[("a".to_owned(), matrix)], |_| false);
    assert!(loaded.unwrap_err().to_string().contains("`a` has the dtype Int8"));
}

#[test]
fn values_that_are_not_finite_are_refused_with_the_name_of_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.safetensors");
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for kind in [Kind::Float, Kind::Half, Kind::BFloat16, Kind::Double] {
            write(&file, &[("good", &Tensor::from(1.0_f32)), ("bad", &Tensor::from_slice(&[1.0, bad]).to_kind(kind))]);
            for target in [Kind::Float, Kind::Half] {
                let error = load_as(&file, target).unwrap_err().to_string();
                let expected = format!("x.safetensors: `bad` has values that are not finite in the dtype {target:?}");
                assert!(error.ends_with(&expected), "{error}");
            }
        }
    }
    // finite until they are narrowed
    write(&file, &[("large", &Tensor::from_slice(&[1e6_f32]))]);
    load_as(&file, Kind::BFloat16).unwrap();
    assert!(load_as(&file, Kind::Half).unwrap_err().to_string().contains("`large` has values"));
    let mut turned = Tensor::zeros([2, 2], (Kind::Half, Device::Cpu)).tr();
    write(&file, &[("large", &Tensor::from_slice(&[0.0_f32, 1e6, 0.0, 0.0]).view([2, 2]))]);
    assert!(Archive::open(&file).unwrap().copy_into("large", &mut turned).is_err());
}

#[test]
fn repeated_names_in_a_header_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.safetensors");
    let entry = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let header = format!(r#"{{"a":{entry},"__metadata__":{{}}}}"#);
    fs::write(&file, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[7]].concat()).unwrap();
    Archive::open(&file).unwrap();
    let header = format!(r#"{{"a":{entry},"a":{entry}}}"#);
    fs::write(&file, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[7]].concat()).unwrap();
    assert!(message(Archive::open(&file)).contains("the key `a` is there twice"));
}

#[test]
fn tensors_at_odd_offsets_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.safetensors");
    let header = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
        "b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.push(9);
    bytes.extend([1.5_f32.to_le_bytes(), (-2.0_f32).to_le_bytes()].concat());
    fs::write(&file, bytes).unwrap();
    assert_eq!(values(&Archive::open(&file).unwrap().read("b").unwrap()), [1.5, -2.0]);
}

#[test]
fn damaged_safetensors_give_clear_errors() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.safetensors");
    write(&file, &[("a", &Tensor::zeros([100], (Kind::Float, Device::Cpu)))]);
    let whole = fs::read(&file).unwrap();
    for end in 0..whole.len() {
        fs::write(&file, &whole[..end]).unwrap();
        let text = message(Archive::open(&file));
        let said = if end < 8 { "is not a readable safetensors file" } else { "is truncated: expected" };
        assert!(text.contains(said) && text.contains("x.safetensors"), "{end}: {text}");
    }
    fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    let text = message(Archive::open(&file));
    assert!(text.contains(&format!("expected {} bytes", whole.len())), "{text}");
    assert!(text.contains(&format!("found {} (", whole.len() - 1)), "{text}");

    fs::write(&file, [&whole[..], &[0]].concat()).unwrap();
    let error = Archive::open(&file).unwrap_err();
    assert!(error.to_string().contains("bytes after its last tensor"), "{error}");
    assert!(!error.hint().contains("incomplete"), "{}", error.hint());
    fs::write(&file, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n").unwrap();
    assert!(message(Archive::open(&file)).contains("Git LFS pointer"));
    fs::write(&file, [0xff; 64]).unwrap();
    assert!(message(Archive::open(&file)).contains("not a readable safetensors file"));
}

fn sharded(folder: &Path) -> (Tensor, Tensor) {
    let (a, b) = (Tensor::from_slice(&[1.0_f32, 2.0]), Tensor::from_slice(&[3.0_f32]));
    write(&folder.join("model-1.safetensors"), &[("a", &a)]);
    write(&folder.join("model-2.safetensors"), &[("b", &b)]);
    let index = r#"{"metadata":{"total_size":12},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}"#;
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    (a, b)
}

#[test]
fn a_sharded_folder_is_one_archive_and_every_shard_is_checked() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path();
    assert!(message(Archive::open(folder)).contains("holds none of"));
    let (a, b) = sharded(folder);
    let archive = Archive::open(folder).unwrap();
    assert_eq!(archive.names(), ["a", "b"]);
    assert!(archive.read("a").unwrap().equal(&a) && archive.read("b").unwrap().equal(&b));

    let shard = folder.join("model-2.safetensors");
    let whole = fs::read(&shard).unwrap();
    fs::write(&shard, &whole[..whole.len() - 2]).unwrap();
    let text = message(Archive::open(folder));
    assert!(text.contains("model-2.safetensors: is truncated"), "{text}");

    write(&shard, &[("c", &b)]);
    let text = message(Archive::open(folder));
    assert!(text.contains("model-2.safetensors: lacks 1 tensors that the index lists: `b`"), "{text}");

    write(&shard, &[("b", &b), ("a", &a)]);
    assert!(message(Archive::open(folder)).contains("`a` is already in"));

    fs::remove_file(&shard).unwrap();
    assert!(message(Archive::open(folder)).contains("1 of 2 shards are missing: `model-2.safetensors`"));

    for evil in ["../x.safetensors", "/etc/passwd", "a/b", ""] {
        let index = format!(r#"{{"weight_map":{{"a":"{evil}"}}}}"#);
        fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
        assert!(message(Archive::open(folder)).contains("not a file in the folder of the index"), "{evil}");
    }
    fs::write(folder.join("model.safetensors.index.json"), "{").unwrap();
    assert!(message(Archive::open(folder)).contains("is not a shard index"));
}

#[test]
fn views_in_a_pth_file_keep_their_strides() {
    let archive = Archive::open(&fixture("views.pth")).unwrap();
    let base = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([4, 6]);
    assert!(archive.read("whole").unwrap().equal(&base));
    assert!(archive.read("transposed").unwrap().equal(&base.tr()));
    assert!(archive.read("inner").unwrap().equal(&base.narrow(0, 1, 2).narrow(1, 2, 3)));
    assert!(archive.read("every_second").unwrap().equal(&base.slice(1, 0, 6, 2)));
    assert_eq!(values(&archive.read("expanded").unwrap()), [7.0; 6]);
    assert_eq!(values(&archive.read("scalar").unwrap()), [2.5]);
    assert_eq!(archive.read("empty").unwrap().size(), [0, 3]);
    assert_eq!(values(&archive.read("parameter").unwrap()), [1.0, -1.0]);
    assert_eq!(archive.names()[0], "whole");
    let mut target = Tensor::zeros([6, 4], (Kind::Double, Device::Cpu));
    archive.copy_into("transposed", &mut target).unwrap();
    assert_eq!(values(&target), values(&base.tr()));
}

#[test]
fn a_pth_file_may_have_every_dtype() {
    let archive = Archive::open(&fixture("kinds.pth")).unwrap();
    let kinds: Vec<Kind> = archive.names().iter().map(|name| archive.info(name).unwrap().kind).collect();
    assert_eq!(kinds, KINDS);
    for (name, kind) in archive.names().iter().zip(kinds) {
        let last = if kind == Kind::Bool { 1.0 } else { 3.0 };
        assert_eq!(values(&archive.read(name).unwrap()), [0.0, 1.0, last], "{name}");
    }
}

#[test]
fn the_state_dict_of_a_training_checkpoint_is_found() {
    let archive = Archive::open(&fixture("nested.pth")).unwrap();
    assert_eq!(archive.names(), ["weight", "bias"]);
    assert_eq!(values(&archive.read("bias").unwrap()), [10.0, 20.0]);
}

#[test]
fn files_from_before_the_zip_format_are_read() {
    let archive = Archive::open(&fixture("legacy.pth")).unwrap();
    assert_eq!(archive.names(), ["weight", "bias"]);
    assert_eq!(archive.info("weight").unwrap().shape, [2, 3]);
    assert_eq!(values(&archive.read("weight").unwrap()), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(values(&archive.read("bias").unwrap()), [10.0, 20.0]);

    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("x.pth");
    let whole = fs::read(fixture("legacy.pth")).unwrap();
    for length in 2..whole.len() {
        fs::write(&file, &whole[..length]).unwrap();
        assert!(Archive::open(&file).is_err(), "{length} of {} bytes", whole.len());
    }
    fs::write(&file, b"\x80\x02}q\x00.").unwrap();
    assert!(message(Archive::open(&file)).contains("is a bare pickle or a tar archive"));
}

#[test]
fn pth_files_with_other_objects_than_tensors_are_errors() {
    let text = message(Archive::open(&fixture("malicious.pth")));
    assert!(text.contains("refuses to execute `posix.system`"), "{text}");
    assert!(!Path::new("/tmp/prsmed_was_executed").exists());
    let text = message(Archive::open(&fixture("module.pth")));
    assert!(text.contains("refuses to execute `torch.nn.modules.linear.Linear`"), "{text}");
    let text = message(Archive::open(&fixture("no_tensors.pth")));
    assert!(text.contains("contains no state dict (its keys: `epoch`, `note`)"), "{text}");
}

#[test]
fn damaged_pth_files_are_errors_without_a_panic() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("x.pth");
    let whole = fs::read(fixture("views.pth")).unwrap();
    for end in (0..whole.len()).step_by(7) {
        fs::write(&file, &whole[..end]).unwrap();
        assert!(Archive::open(&file).is_err(), "{end} bytes");
    }
    fs::write(&file, "").unwrap();
    assert!(message(Archive::open(&file)).contains("is not a PyTorch file (0 bytes)"));
    // one changed byte of the pickle does not match its checksum
    let at = whole.windows(2).position(|pair| pair == b"K\x18").unwrap();
    let mut changed = whole.clone();
    changed[at + 1] = 0x17;
    fs::write(&file, &changed).unwrap();
    let text = message(Archive::open(&file));
    assert!(text.contains("data.pkl` has a wrong checksum"), "{text}");
}

#[test]
fn a_load_report_lists_every_kind_of_mismatch() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("x.safetensors");
    let one = Tensor::ones([2], (Kind::Float, Device::Cpu));
    write(&file, &[("used", &one), ("wrong", &one), ("dead", &one), ("known.dead", &one)]);
    let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let mut targets = [("used", zeros(&[2])), ("wrong", zeros(&[3])), ("absent", zeros(&[1]))];
    let report = Archive::open(&file).unwrap().load(&mut targets, |name| name.starts_with("known.")).unwrap();
    assert_eq!(report.loaded, ["used"]);
    assert_eq!(report.missing, ["absent"]);
    assert_eq!(report.unexpected, ["dead"]);
    assert_eq!(report.ignored, ["known.dead"]);
    assert_eq!(report.mis_shaped, [MisShaped { name: "wrong".into(), expected: vec![3], got: vec![2] }]);
    assert_eq!(values(&targets[0].1), [1.0, 1.0]);
    assert!(report.into_result(&file).is_err());
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_the_reference_run_folder_is_read() {
    let run = shared("reference/oracle/run");
    let counts = [("image_encoder.pth", 741), ("mask_decoder.pth", 70), ("cls.pth", 2)];
    for (name, count) in counts {
        assert_eq!(Archive::open(&run.join(name)).unwrap().names().len(), count, "{name}");
    }
    let encoder = Archive::open(&run.join("image_encoder.pth")).unwrap();
    let twice: Vec<&String> = encoder.names().iter().filter(|name| name.starts_with("image_encoder.")).collect();
    assert_eq!(twice.len(), 302);
    for name in twice {
        let (one, other) = (encoder.read(name).unwrap(), encoder.read(&format!("sam.{name}")).unwrap());
        assert!(one.equal(&other), "{name}");
    }
    let decoder = Archive::open(&run.join("mask_decoder.pth")).unwrap();
    assert_eq!(decoder.info("attn.in_proj_weight").unwrap().shape, [768, 256]);
    let class = Archive::open(&run.join("cls.pth")).unwrap();
    assert_eq!(class.info("2.weight").unwrap(), &TensorInfo { kind: Kind::Float, shape: vec![6, 256] });
    assert!(class.read("2.weight").unwrap().abs().sum(Kind::Double).double_value(&[]) > 0.0);
    assert_eq!(Archive::open(&run.join("lora_adapter")).unwrap().names().len(), 56);
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_the_reference_shards_are_read() {
    let base = shared("reference/oracle/base");
    let archive = Archive::open(&base.join("llava-med-v1.5-mistral-7b")).unwrap();
    assert_eq!(archive.info("lm_head.weight").unwrap().kind, Kind::BFloat16);
    for name in archive.names() {
        let tensor = archive.read(name).unwrap();
        assert!(tensor.isfinite().all().int64_value(&[]) == 1, "{name}");
    }
    assert!(
        Archive::open(&base.join("clip-vit-large-patch14-336"))
            .unwrap()
            .contains("vision_model.embeddings.class_embedding")
    );
}

#[test]
#[ignore = "needs scripts/setup --checks"]
fn python_reads_the_written_files() {
    let python = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(".venv/bin/python");
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("x.safetensors");
    let wide = Tensor::from_slice(&[1.5_f32, -2.0, 3.0, 4.0]).view([2, 2]);
    let (narrow, flag) = (wide.to_kind(Kind::BFloat16).tr(), wide.gt(0.0));
    write(&file, &[("flag", &flag), ("narrow", &narrow), ("wide", &wide)]);
    let code = "import sys\nfrom safetensors import safe_open\nf = safe_open(sys.argv[1], 'pt')\n\
                ts = [(k, f.get_tensor(k)) for k in sorted(f.keys())]\n\
                print(f.metadata(), [(k, str(t.dtype), t.tolist()) for k, t in ts])";
    let output = std::process::Command::new(python).args(["-c", code]).arg(&file).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        "{'format': 'pt'} [('flag', 'torch.bool', [[True, False], [True, True]]), \
         ('narrow', 'torch.bfloat16', [[1.5, 3.0], [-2.0, 4.0]]), \
         ('wide', 'torch.float32', [[1.5, -2.0], [3.0, 4.0]])]",
        "{error}"
    );
}

/// Resident bytes of this process that are mapped from files.
#[cfg(target_os = "linux")]
fn resident_file_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssFile")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[cfg(target_os = "linux")]
#[test]
fn a_copy_releases_its_mapped_pages() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("x.safetensors");
    let size = 192_i64 << 20;
    write(&file, &[("a", &Tensor::ones([size], (Kind::Uint8, Device::Cpu)))]);
    let mut target = Tensor::zeros([size], (Kind::Uint8, Device::Cpu));
    let archive = Archive::open(&file).unwrap();
    let before = resident_file_bytes();
    archive.copy_into("a", &mut target).unwrap();
    let grown = resident_file_bytes().saturating_sub(before);
    // other tests of this process map files too, but none of this size
    assert!(grown < 120 << 20, "{grown} bytes of the file stay resident");
    assert_eq!(target.sum(Kind::Int64).int64_value(&[]), size);
}
