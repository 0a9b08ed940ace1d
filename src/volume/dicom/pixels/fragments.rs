//! Fragments of compressed pixel data: which of them belong to a frame.

use dicom_core::Tag;
use dicom_core::value::Value;
use dicom_dictionary_std::tags;

use super::super::object::Object;

/// Extended offset table, for data that are longer than the offsets of 32 bits.
const EXTENDED_OFFSET_TABLE: Tag = Tag(0x7fe0, 0x0001);
/// Bytes before the value of a fragment.
const ITEM_HEADER: u64 = 8;

/// Joins the fragments of each frame, so that each fragment is a frame.
///
/// # Errors
/// The reason, if it is not known which fragments belong to a frame.
pub(super) fn join(object: &mut Object, num_frames: usize) -> Result<(), String> {
    let extended = object.get(EXTENDED_OFFSET_TABLE).and_then(|element| element.to_bytes().ok());
    let extended =
        extended.map(|bytes| bytes.as_chunks::<8>().0.iter().map(|eight| u64::from_le_bytes(*eight)).collect());
    let mut result = Ok(());
    object.update_value(tags::PIXEL_DATA, |value| {
        let Value::PixelSequence(sequence) = value else { return };
        let table: Vec<u64> = match &extended {
            Some(table) => Vec::clone(table),
            None => sequence.offset_table().iter().copied().map(u64::from).collect(),
        };
        let fragments = sequence.fragments_mut();
        match starts(fragments, &table, num_frames) {
            Some(starts) => *fragments = joined(std::mem::take(fragments).into_vec(), &starts).into(),
            None => {
                result = Err(format!(
                    "its {} fragments of compressed pixels are those of {num_frames} frames, and no offset table says where \
                     a frame begins",
                    fragments.len()
                ));
            }
        }
    });
    result
}

/// The first fragment of each frame: by the offset table, or by the first bytes of a compressed image.
fn starts(fragments: &[Vec<u8>], table: &[u64], num_frames: usize) -> Option<Vec<usize>> {
    if num_frames == 1 || fragments.len() == num_frames {
        return Some((0..num_frames).collect());
    }
    let (mut offsets, mut next) = (Vec::new(), 0);
    for fragment in fragments {
        offsets.push(next);
        next += ITEM_HEADER + fragment.len() as u64;
    }
    let by_table: Option<Vec<usize>> = table.iter().map(|offset| offsets.binary_search(offset).ok()).collect();
    let by_content = || (0..fragments.len()).filter(|index| begins_image(&fragments[*index])).collect();
    let is_valid = |starts: &Vec<usize>| {
        starts.len() == num_frames && starts.first() == Some(&0) && starts.is_sorted_by(|a, b| a < b)
    };
    by_table.filter(is_valid).or_else(|| Some(by_content()).filter(is_valid))
}

/// True for the first bytes of a JPEG, JPEG-LS or JPEG 2000 image.
fn begins_image(fragment: &[u8]) -> bool {
    [&[0xff, 0xd8, 0xff][..], &[0xff, 0x4f, 0xff, 0x51], &[0, 0, 0, 12, b'j', b'P']]
        .iter()
        .any(|start| fragment.starts_with(start))
}

fn joined(fragments: Vec<Vec<u8>>, starts: &[usize]) -> Vec<Vec<u8>> {
    let mut frames: Vec<Vec<u8>> = Vec::with_capacity(starts.len());
    for (index, fragment) in fragments.into_iter().enumerate() {
        match frames.last_mut() {
            Some(frame) if !starts.contains(&index) => frame.extend(fragment),
            _ => frames.push(fragment),
        }
    }
    frames
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_are_assigned_to_frames() {
        let (jpeg, next) = (vec![0xff, 0xd8, 0xff, 1], vec![1, 2]);
        let [one, two, three] = [1, 2, 3].map(|count| vec![next.clone(); count]);
        let images = vec![jpeg.clone(), next.clone(), jpeg.clone(), next.clone(), next.clone()];
        for (fragments, table, num_frames, wanted) in [
            (&one, &[][..], 1, Some(vec![0])),
            (&three, &[], 1, Some(vec![0])),
            (&two, &[], 2, Some(vec![0, 1])),
            // an offset table, also of one fragment for each frame
            (&three, &[0, 20], 2, Some(vec![0, 2])),
            (&three, &[0, 10], 2, Some(vec![0, 1])),
            (&three, &[0, 10, 20], 3, Some(vec![0, 1, 2])),
            // wrong offsets, and none
            (&three, &[0, 11], 2, None),
            (&three, &[10, 20], 2, None),
            (&three, &[0], 2, None),
            (&three, &[], 2, None),
            (&two, &[], 3, None),
            // the starts of images
            (&images, &[], 2, Some(vec![0, 2])),
            (&images, &[0, 1], 2, Some(vec![0, 2])),
            (&images, &[], 3, None),
        ] {
            assert_eq!(starts(fragments, table, num_frames), wanted, "{fragments:?} {table:?} {num_frames}");
        }
        assert_eq!(
            joined(images, &[0, 2]),
            [[jpeg.clone(), next.clone()].concat(), [jpeg, next.clone(), next].concat()]
        );
    }
}
