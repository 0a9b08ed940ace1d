//! TensorBoard event files: scalars only, written without TensorFlow.
//!
//! Source: TensorFlow's `tfrecord` framing (length, masked CRC-32C, data, masked CRC-32C) and the messages `Event`,
//! `Summary` and `SessionLog` of `event.proto` and `summary.proto`. Read back with TensorBoard 2.21: values, steps, and
//! the restart of a resumed run.

use std::fs::File;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::log_file::LogFile;
use prsmed_base::error::{Error, Result};

/// TensorBoard event file. Each call appends one complete record.
#[derive(Debug)]
pub struct EventFile(LogFile);

impl EventFile {
    /// Creates a new file in `folder`. `continues_at` is the first step of this run when it resumes another:
    /// TensorBoard then ignores older files from that step on.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(folder: &Path, continues_at: Option<u64>) -> Result<Self> {
        let seconds = now().trunc();
        // Two runs may start in one second.
        let (file, path) = (0..)
            .map(|n| folder.join(format!("events.out.tfevents.{seconds:010}.prsmed.{}.{n}", std::process::id())))
            .find_map(|path| match File::options().write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => None,
                other => Some((other, path)),
            })
            .expect("the numbers do not run out");
        let mut this = Self(LogFile::new(file.map_err(Error::io(&path, "create"))?, path)?);
        this.append(&event(now(), 0, &bytes_field(3, b"brain.Event:2")))?;
        if let Some(step) = continues_at {
            const START: u64 = 1;
            this.append(&event(now(), step, &bytes_field(7, &varint_field(1, START))))?;
        }
        Ok(this)
    }

    /// Appends the scalars of one step as one record; returns `false` if the disk is full and the record waits.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn scalars(&mut self, step: u64, values: &[(String, f64)]) -> Result<bool> {
        let summary: Vec<u8> = values.iter().flat_map(|(tag, value)| bytes_field(1, &scalar(tag, *value))).collect();
        self.append(&event(now(), step, &bytes_field(5, &summary)))
    }

    /// Appends a picture with its name and size; `png` is the file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn picture(&mut self, step: u64, (tag, (width, height)): (&str, (u32, u32)), png: &[u8]) -> Result<bool> {
        // Summary.Image { height = 1, width = 2, colorspace = 3, encoded_image_string = 4 }
        const RGB: u64 = 3;
        let sizes = [varint_field(1, height.into()), varint_field(2, width.into()), varint_field(3, RGB)].concat();
        let image = [sizes, bytes_field(4, png)].concat();
        // Summary.Value { tag = 1, image = 4 }
        let value = [bytes_field(1, tag.as_bytes()), bytes_field(4, &image)].concat();
        self.append(&event(now(), step, &bytes_field(5, &bytes_field(1, &value))))
    }

    /// Writes the waiting records.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }

    fn append(&mut self, event: &[u8]) -> Result<bool> {
        self.0.append(&record(event))
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length).to_le_bytes(), data, &masked_crc(data).to_le_bytes()].concat()
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: records are a few hundred bytes.
fn crc32c(data: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

/// `Event { wall_time = 1, step = 2, rest }`.
fn event(wall_time: f64, step: u64, rest: &[u8]) -> Vec<u8> {
    const FIXED64: u8 = 1;
    [&[1 << 3 | FIXED64][..], &wall_time.to_le_bytes(), &varint_field(2, step), rest].concat()
}

/// `Summary.Value { tag = 1, simple_value = 2 }`.
#[expect(clippy::cast_possible_truncation, reason = "TensorBoard's scalars are fp32")]
fn scalar(tag: &str, value: f64) -> Vec<u8> {
    const FIXED32: u8 = 5;
    [&bytes_field(1, tag.as_bytes())[..], &[2 << 3 | FIXED32], &(value as f32).to_le_bytes()].concat()
}

fn bytes_field(number: u64, data: &[u8]) -> Vec<u8> {
    const LENGTH_DELIMITED: u64 = 2;
    [&varint(number << 3 | LENGTH_DELIMITED)[..], &varint(data.len() as u64), data].concat()
}

fn varint_field(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(2);
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads back the fields of one message: (number, payload).
    fn fields(mut data: &[u8]) -> Vec<(u64, Vec<u8>)> {
        fn take_varint(data: &mut &[u8]) -> u64 {
            let mut value = 0;
            for shift in (0..).step_by(7) {
                let byte = data[0];
                *data = &data[1..];
                value |= u64::from(byte & 0x7f) << shift;
                if byte < 0x80 {
                    break;
                }
            }
            value
        }
        let mut out = Vec::new();
        while !data.is_empty() {
            let key = take_varint(&mut data);
            let payload = match key & 7 {
                0 => take_varint(&mut data).to_le_bytes().to_vec(),
                kind => {
                    let length = match kind {
                        1 => 8,
                        5 => 4,
                        _ => usize::try_from(take_varint(&mut data)).unwrap(),
                    };
                    let (head, tail) = data.split_at(length);
                    data = tail;
                    head.to_vec()
                }
            };
            out.push((key >> 3, payload));
        }
        out
    }

    fn records(mut data: &[u8]) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        while !data.is_empty() {
            let length = usize::try_from(u64::from_le_bytes(data[..8].try_into().unwrap())).unwrap();
            assert_eq!(data[8..12], masked_crc(&data[..8]).to_le_bytes());
            let body = &data[12..12 + length];
            assert_eq!(data[12 + length..16 + length], masked_crc(body).to_le_bytes());
            out.push(body.to_vec());
            data = &data[16 + length..];
        }
        out
    }

    #[test]
    fn crc_matches_the_standard() {
        // RFC 3720, B.4, and the usual check value.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn written_records_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(folder.path(), Some(301)).unwrap();
        file.scalars(301, &[("train/loss".into(), 0.25), ("lr".into(), 1e-4)]).unwrap();
        let path = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let all = records(&std::fs::read(path).unwrap());
        assert_eq!(all.len(), 3);
        assert_eq!(fields(&all[0])[1], (2, 0_u64.to_le_bytes().to_vec()), "the version is no result of a step");
        assert_eq!(fields(&all[0])[2], (3, b"brain.Event:2".to_vec()));
        assert_eq!(fields(&all[1])[1].1, 301_u64.to_le_bytes());
        assert_eq!(fields(&fields(&all[1])[2].1), [(1, 1_u64.to_le_bytes().to_vec())]);
        let event = fields(&all[2]);
        assert_eq!(event.iter().map(|f| f.0).collect::<Vec<_>>(), [1, 2, 5]);
        let summary = fields(&event[2].1);
        assert_eq!(summary.len(), 2);
        assert_eq!(fields(&summary[1].1), [(1, b"lr".to_vec()), (2, 1e-4_f32.to_le_bytes().to_vec())]);
    }

    #[test]
    fn two_files_created_in_one_second_have_different_names() {
        let folder = tempfile::tempdir().unwrap();
        EventFile::create(folder.path(), None).unwrap();
        EventFile::create(folder.path(), None).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
