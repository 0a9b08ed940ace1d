//! Decompression of gzip files as Python's `gzip` does it: any number of members, and zeros after each.

use std::io::{self, BufRead, Read};

use flate2::bufread::GzDecoder;

/// Content of a gzip file. Bytes after a member that are neither zeros nor another member are an error.
pub(crate) struct Gunzip<R> {
    /// `None` at the end of the file.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> Gunzip<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self { member: Some(GzDecoder::new(reader)) }
    }
}

impl<R: BufRead> Read for Gunzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let count = member.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            let rest = self.member.take().map(GzDecoder::into_inner);
            self.member = rest.map(next_member).transpose()?.flatten();
        }
        Ok(0)
    }
}

/// The next member, after zeros that fill a block; `None` at the end of the file.
fn next_member<R: BufRead>(mut reader: R) -> io::Result<Option<GzDecoder<R>>> {
    loop {
        let bytes = reader.fill_buf()?;
        match bytes.iter().position(|byte| *byte != 0) {
            Some(0) if bytes[0] == 0x1f => return Ok(Some(GzDecoder::new(reader))),
            Some(0) => {
                let reason = "after its compressed content it has bytes that are neither zeros nor gzip";
                return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
            }
            Some(zeros) => reader.consume(zeros),
            None if bytes.is_empty() => return Ok(None),
            None => {
                let zeros = bytes.len();
                reader.consume(zeros);
            }
        }
    }
}
