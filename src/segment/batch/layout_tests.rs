use super::read::ReadIndices;
use super::*;
use crate::data::geometry::Geometry;
use crate::models::decoder::AttentionPattern;
use crate::tensor::{Device, Tensor};
use image::{GrayImage, Luma};

const PACKED: [&[i64]; 3] = [&[1, IMAGE_TOKEN, 5, 6, 7], &[1, IMAGE_TOKEN, 8, 9], &[1, IMAGE_TOKEN, 5]];

/// Two tokens for each image.
fn spans(images: usize) -> Vec<ImageSpan> {
    vec![ImageSpan::in_a_row(2); images]
}

fn layout(semantics: Semantics, groups: &[usize]) -> Layout {
    let texts = PACKED.map(<[i64]>::to_vec).to_vec();
    Layout::new(texts, &[4, 3, 2], groups, semantics, spans(groups.len()))
}

#[test]
fn image_tokens_replace_their_id_and_rows_are_padded() {
    let layout = layout(Semantics::Corrected, &[1, 1, 1]);
    assert_eq!(layout.sizes(), Sizes { sequence: 6, supervised: 3, prompt: 5 });
    assert_eq!(layout.ids(), [1, 5, 6, 7, 1, 8, 9, 0, 1, 5, 0, 0]);
    let zero = 12 + 3 * 2;
    assert_eq!(
        layout.splice_index(),
        [0, 12, 13, 1, 2, 3, 4, 14, 15, 5, 6, zero, 8, 16, 17, 9, zero, zero].map(i64::from)
    );
    assert_eq!(layout.prompt_index(), [0, 1, 2, 3, 4, 6, 7, 8, 9, 6, 12, 13, 14, 12, 12]);
    assert_eq!(layout.supervised_targets(), (vec![4, 9, 14], vec![7, 9, 5]));
    assert!(!layout.is_packed());
}

#[test]
fn questions_of_an_image_share_its_tokens() {
    let layout = layout(Semantics::Corrected, &[2, 1]);
    assert_eq!((layout.sequences(), layout.images(), layout.is_packed()), (2, 2, true));
    assert_eq!(layout.sizes(), Sizes { sequence: 8, supervised: 3, prompt: 5 });
    assert_eq!(layout.ids(), [1, 5, 6, 7, 8, 9, 1, 5, 0, 0, 0, 0]);
    let (positions, blocks) = (layout.positions(), layout.blocks());
    assert_eq!(positions[..8], [0, 1, 2, 3, 4, 5, 3, 4]);
    assert_eq!(blocks[..8], [0, 0, 0, 1, 1, 1, 2, 2]);
    assert_eq!(blocks[8..], [0, 0, 0, 3, 4, 4, 4, 4]);
    assert_eq!(layout.prompt_index()[5..10], [0, 1, 2, 6, 0]);
    // the prefix predicts the first token of a question
    assert_eq!(layout.supervised_targets(), (vec![4, 6, 10], vec![7, 9, 5]));
}

#[test]
fn a_question_has_the_keys_of_its_prefix_and_its_own() {
    let layout = layout(Semantics::Corrected, &[2, 1]);
    // prefix, two questions, no padding; prefix, one question, padding
    let (lengths, keys) = layout.segments();
    assert_eq!(lengths, [[3, 3], [3, 6], [2, 5], [0, 0], [3, 3], [1, 4], [4, 4]]);
    let first = [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7];
    assert_eq!(keys, [&first[..], &[8, 9, 10, 8, 9, 10, 11, 12, 13, 14, 15]].concat());
    let on_device = layout.to_device(Device::Cpu);
    let AttentionPattern::Packed { segments, .. } = on_device.attention() else { panic!("packed") };
    assert_eq!(Vec::<i32>::try_from(&segments.starts[0]).unwrap(), [0, 3, 6, 8, 8, 11, 12, 16]);
    assert_eq!(Vec::<i32>::try_from(&segments.starts[1]).unwrap(), [0, 3, 9, 14, 14, 17, 21, 25]);
    let unused = |tensor: &Tensor| Vec::<i64>::try_from(tensor.narrow(0, 25, 6)).unwrap();
    assert_eq!((unused(&segments.from), unused(&segments.to)), (vec![0; 6], vec![16; 6]));
    // padding changes no other segment
    let padded = layout.padded_to(Sizes { sequence: 16, supervised: 4, prompt: 8 }).segments().0;
    assert_eq!(padded, [[3, 3], [3, 6], [2, 5], [8, 8], [3, 3], [1, 4], [12, 12]]);
}

#[test]
fn questions_with_different_prefixes_have_separate_sequences() {
    let texts = vec![vec![1, IMAGE_TOKEN, 5], vec![2, IMAGE_TOKEN, 5], vec![2, IMAGE_TOKEN, 6]];
    let layout = Layout::new(texts, &[2, 2, 2], &[3], Semantics::Corrected, spans(1));
    assert_eq!((layout.sequences(), layout.images()), (2, 1));
    assert_eq!(layout.splice_index()[..4], [0, 6, 7, 1].map(i64::from));
    assert_eq!(layout.questions.iter().map(|q| q.sequence).collect::<Vec<_>>(), [0, 1, 1]);
}

#[test]
fn reference_semantics_supervises_whole_texts() {
    let layout = layout(Semantics::Reference, &[1, 1, 1]);
    assert_eq!(layout.needed().supervised, 3 + 2 + 1);
    assert_eq!(layout.real().iter().filter(|real| **real).count(), 6 + 5 + 4);
}

#[test]
fn the_tensors_on_a_device_are_those_that_the_semantics_and_the_packing_need() {
    let sizes = |layout: &Layout| -> Vec<Vec<i64>> {
        layout.to_device(Device::Cpu).tensors().into_iter().map(Tensor::size).collect()
    };
    // ids, index; positions and blocks; keys and starts of 7 segments; prompts, their padding, images; supervised
    // tokens, labels
    let attention = [&[2_i64, 8][..], &[2, 8], &[31], &[31], &[8], &[8]];
    let packed = [&[&[12_i64][..], &[2, 8]], &attention[..], &[&[3, 5], &[3, 5], &[3], &[3], &[3]]].concat();
    assert_eq!(sizes(&layout(Semantics::Corrected, &[2, 1])), packed);
    let single = [&[12_i64][..], &[3, 6], &[3, 5], &[3, 5], &[3], &[3]];
    assert_eq!(sizes(&layout(Semantics::Corrected, &[1, 1, 1])), single);
    // ids, index; real tokens; supervised tokens, labels
    let reference = [&[12_i64][..], &[3, 6], &[3, 6], &[6], &[6]];
    assert_eq!(sizes(&layout(Semantics::Reference, &[1, 1, 1])), reference);
}

#[test]
fn parts_keep_whole_images_and_padding() {
    let whole = layout(Semantics::Corrected, &[2, 0, 1]);
    assert_eq!([0..1, 1..2, 1..3].map(|images| whole.questions_of(&images)), [0..2, 2..2, 2..3]);
    let texts = |of: &[&[i64]]| of.iter().map(|text| text.to_vec()).collect();
    let first = Layout::new(texts(&PACKED[..2]), &[4, 3], &[2], Semantics::Corrected, spans(1));
    assert_eq!(whole.part(&(0..1)), first);
    assert_eq!(whole.part(&(0..1)).tokens() + whole.part(&(1..3)).tokens(), whole.tokens());
    let sizes = whole.needed().rounded_up(Sizes { sequence: 16, supervised: 4, prompt: 8 });
    assert_eq!(whole.padded_to(sizes).part(&(1..3)).sizes(), sizes);
}

#[test]
fn padding_repeats_the_first_token_and_has_ignored_labels() {
    let plain = layout(Semantics::Corrected, &[2, 1]);
    let sizes = plain.needed().rounded_up(Sizes { sequence: 16, supervised: 4, prompt: 8 });
    assert_eq!(sizes, Sizes { sequence: 16, supervised: 4, prompt: 8 });
    let padded = plain.padded_to(sizes);
    assert_eq!((padded.ids().len(), padded.splice_index().len()), (2 * 14, 2 * 16));
    assert_eq!(padded.supervised_targets(), (vec![4, 6, 18, 0], vec![7, 9, 5, IGNORED]));
    assert_eq!(padded.prompt_keep().iter().filter(|keep| **keep).count(), 5 + 4 + 3);
    assert_eq!(padded.tokens(), 3);
}

#[test]
fn images_may_have_different_numbers_of_tokens() {
    let texts = vec![vec![1, IMAGE_TOKEN, 5], vec![1, IMAGE_TOKEN, 6, 7]];
    let spans = [3, 1].map(ImageSpan::in_a_row).to_vec();
    let layout = Layout::new(texts, &[2, 3], &[1, 1], Semantics::Corrected, spans);
    assert_eq!(layout.sizes(), Sizes { sequence: 5, supervised: 2, prompt: 4 });
    assert_eq!(layout.ids(), [1, 5, 0, 0, 1, 6, 7, 0]);
    let zero = 8 + 3 + 1;
    assert_eq!(layout.splice_index(), [0, 8, 9, 10, 1, 4, 11, 5, 6, zero].map(i64::from));
    assert_eq!(layout.part(&(1..2)).sizes(), Sizes { sequence: 4, supervised: 1, prompt: 3 });
}

#[test]
fn tokens_of_an_image_with_a_grid_have_positions_of_three_axes() {
    // the example of Qwen3-VL: three ids, an image of 2 x 3 tokens, three ids
    let text = vec![1, 2, 3, IMAGE_TOKEN, 4, 5, 6];
    let grid = ImageSpan { tokens: 6, grid: Some([2, 3]) };
    let layout = Layout::new(vec![text], &[7], &[1], Semantics::Corrected, vec![grid]);
    let expected = [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
    ];
    assert_eq!(layout.positions(), expected.concat());
    let positions = layout.to_device(Device::Cpu).positions.unwrap();
    assert_eq!((positions.size(), layout.position_shift()), (vec![3, 1, 12], -3));
}

#[test]
fn targets_are_found_among_the_masks_of_their_questions() {
    let layout = layout(Semantics::Corrected, &[2, 1]);
    let index = |layout: &Layout| {
        let device = layout.to_device(Device::Cpu);
        device.targets.map(|targets| Vec::<i64>::try_from(targets).unwrap())
    };
    assert_eq!((index(&layout), layout.targets()), (None, 3));
    let several = layout.with_targets(vec![2, 0, 1], 2);
    assert_eq!((index(&several), several.targets()), (Some(vec![0, 1, 4]), 3));
    let part = several.part(&(1..2));
    assert_eq!((index(&part), several.targets_of(&several.questions_of(&(1..2)))), (Some(vec![0]), 2..3));
    assert_eq!(index(&several.with_targets(vec![2; 3], 2)), None, "each mask has a target");
}

#[test]
fn words_follow_the_mask_of_their_question_and_moved_ones() {
    let geometry = |step: u32| Geometry::of(&GrayImage::from_fn(8, 8, |x, _| Luma([u8::from(x == step)])));
    let moved = |at: usize, id: i64| MovedMask { geometry: geometry(7), at, id };
    // the second question has two moved masks, the others have none
    let moved = vec![Vec::new(), vec![moved(3, 40), moved(3, 41)], Vec::new()];
    let layout = layout(Semantics::Corrected, &[2, 1]).with_read_masks(true).with_moved(moved);
    let ReadIndices { states, labels, masks } = layout.read();
    assert_eq!(states, [4, 6, 10, 0, 0, 6, 6, 0, 0]);
    assert_eq!(labels, [7, 9, 5, IGNORED, IGNORED, 40, 41, IGNORED, IGNORED]);
    assert_eq!(masks, [0, 3, 6, 1, 2, 4, 5, 7, 8]);
    let own: Vec<Geometry> = (0..3).map(geometry).collect();
    let all = layout.geometry(own.iter().map(Geometry::numbers)).unwrap();
    let rows: Vec<&[f32]> = all.chunks(Geometry::LEN).collect();
    let (unknown, elsewhere) = (Geometry::unknown(), geometry(7));
    let expected = [&own[0], &unknown, &unknown, &own[1], &elsewhere, &elsewhere, &own[2], &unknown, &unknown];
    assert!(rows.iter().zip(expected).all(|(row, expected)| *row == expected.numbers()));
    assert_eq!(layout.part(&(1..2)).read().masks, [0, 1, 2]);
    assert_eq!(layout.part(&(0..1)).read().labels[2..], [IGNORED, IGNORED, 40, 41]);
    // a head of two masks has room for two, and a target that a question lacks is not known
    let two = layout.clone().with_targets(vec![2, 1, 1], 2);
    let own: Vec<Geometry> = (0..4).map(geometry).collect();
    let rows = two.geometry(own.iter().map(Geometry::numbers)).unwrap();
    let row = |number: usize| &rows[number * 2 * Geometry::LEN..(number + 1) * 2 * Geometry::LEN];
    assert_eq!(row(0), [own[0].numbers(), own[1].numbers()].concat());
    assert_eq!(row(3), [own[2].numbers(), unknown.numbers()].concat());
    assert_eq!(layout.with_read_masks(false).geometry([]), None);
}
