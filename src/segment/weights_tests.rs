use super::*;
use crate::tensor::Device;
use crate::tensor::weights::write_safetensors;

fn archive(folder: &Path, tensors: &[(&str, &[i64])]) -> PathBuf {
    let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let tensors: Vec<(&str, Tensor)> = tensors.iter().map(|(name, shape)| (*name, zeros(shape))).collect();
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let path = folder.join("x.safetensors");
    write_safetensors(&path, &tensors, &BTreeMap::new()).unwrap();
    path
}

#[test]
fn tensors_with_too_few_dimensions_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let names = [
        "embeddings.patch_embedding.weight",
        "embeddings.position_embedding.weight",
        "encoder.layers.0.mlp.fc1.bias",
        "encoder.layers.0.layer_norm1.weight",
    ]
    .map(|name| format!("{TOWER_PREFIX}vision_model.{name}"));
    let shapes: [&[i64]; 4] = [&[96, 3, 14, 14], &[37, 96], &[192], &[96]];
    let tensors: Vec<(&str, &[i64])> = names.iter().map(String::as_str).zip(shapes).collect();
    let sizes = tower_sizes(&Archive::open(&archive(folder.path(), &tensors)).unwrap()).unwrap();
    assert_eq!((sizes.image_size, sizes.patch_size, sizes.num_hidden_layers), (84, 14, 1));
    for wrong in 0..3 {
        for shape in [&[][..], &[7; 3]] {
            let mut tensors = tensors.clone();
            tensors[wrong].1 = shape;
            let error = tower_sizes(&Archive::open(&archive(folder.path(), &tensors)).unwrap()).unwrap_err();
            assert!(error.to_string().contains(&format!("has the shape {shape:?}, expected")), "{error}");
        }
    }
}

#[test]
fn a_class_head_with_another_number_of_classes_than_names_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let check = |shape: &[i64]| check_class_head(&archive(folder.path(), &[("2.bias", shape)]), 6);
    check(&[6]).unwrap();
    assert!(check(&[4]).unwrap_err().to_string().contains("has 4 classes, and the names of 6 are known"));
    assert!(check(&[]).unwrap_err().to_string().contains("expected 1 dimensions"));
}
