//! Voxels of a text header (NRRD, MetaImage): behind it in the same file, or in files that it names.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Component, Path, PathBuf};

use flate2::bufread::ZlibDecoder;

use super::gunzip::Gunzip;
use super::limits::{MAX_FILE, MAX_VOXELS};
use super::stored::{Content, GZIP, Number, TRUNCATED, check_file};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

/// Most bytes of a header. Segmentations of 3D Slicer have some hundred bytes for each segment.
const MAX_HEADER: u64 = 4 << 20;
/// Most files with the voxels of one header.
const MAX_FILES: u16 = u16::MAX;
/// Most characters of a number in text.
const MAX_WORD: usize = 64;

/// How numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Raw,
    /// Compressed with gzip or zlib.
    Deflate,
    /// Decimal numbers with white space between them.
    Text,
}

/// What is before the first number in each file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Skip {
    /// Lines of the file, then bytes of its content (decompressed).
    Before { lines: usize, bytes: u64 },
    /// Bytes of the file as it is stored.
    Stored(u64),
    /// All but the numbers, of the content (decompressed).
    AllButLast,
}

/// The numbers of a header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) encoding: Encoding,
    pub(crate) skip: Skip,
    /// Of text [`Number::F64`].
    pub(crate) number: Number,
    /// How many there are in all files together.
    pub(crate) count: usize,
}

/// The lines of a header, up to the one for which `is_last` is true or the end of the file, and their bytes.
///
/// # Errors
/// [`Error::Data`] for a header without end, or that is no text; [`Error::Io`].
pub(crate) fn header_lines(content: &mut Content, is_last: impl Fn(&str) -> bool) -> Result<(Vec<String>, u64)> {
    let (mut lines, mut length) = (Vec::new(), 0);
    loop {
        let mut line = Vec::new();
        let read = (&mut content.bytes).take(MAX_HEADER - length).read_until(b'\n', &mut line);
        length += read.map_err(|error| content.unreadable(&error))? as u64;
        if line.is_empty() {
            return Ok((lines, length));
        }
        if length >= MAX_HEADER {
            let reason = format!("its header has more than {} MiB", MAX_HEADER >> 20);
            return Err(Error::data(&content.path, reason, TRUNCATED));
        }
        // names of segments and comments of old programs are not always UTF-8
        let line = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
        let is_end = is_last(&line);
        lines.push(line);
        if is_end {
            return Ok((lines, length));
        }
    }
}

/// Names of files by a pattern of C, its first and last number and the step: `slice%03d.raw 1 20 1`; `None` for another text.
pub(crate) fn names_of_pattern(header: &Path, text: &str) -> Result<Option<Vec<String>>> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let Some(at) = words.iter().position(|word| word.contains('%')) else { return Ok(None) };
    let wrong = |reason: &str| {
        let hint = "write `NAME%03d.raw FIRST LAST STEP`, or the names of the files in a list";
        Error::data(header, format!("its files are `{text}`: {reason}"), hint)
    };
    let numbers: Vec<i64> = words[at + 1..].iter().map_while(|word| word.parse().ok()).collect();
    let (Some(&[first, last, step]), true) = (numbers.first_chunk(), numbers.len() == words.len() - at - 1) else {
        return Err(wrong("the pattern is not followed by the first number, the last number and the step"));
    };
    let pattern = words[..=at].join(" ");
    let (prefix, rest) = pattern.split_once('%').unwrap_or_default();
    let length = rest.find('d').ok_or_else(|| wrong("it has no `%d`"))?;
    let (format, suffix) = (&rest[..length], &rest[length + 1..]);
    let width: usize = if format.is_empty() { 0 } else { format.parse().map_err(|_| wrong("it has no `%d`"))? };
    let num = if step == 0 { -1 } else { last.saturating_sub(first) / step };
    if num < 0 || num >= i64::from(MAX_FILES) || width > 20 || suffix.contains('%') || first < 0 || last < 0 {
        return Err(wrong("the numbers give no files, or far too many"));
    }
    let name = |at: i64| {
        let number = first + at * step;
        if format.starts_with('0') {
            format!("{prefix}{number:0width$}{suffix}")
        } else {
            format!("{prefix}{number:width$}{suffix}")
        }
    };
    Ok(Some((0..=num).map(name).collect()))
}

/// A file that a header names. It must be in the folder of the header, so that a header cannot show other files of the
/// machine.
fn resolved(header: &Path, name: &str) -> Result<PathBuf> {
    let refused = |reason: &str| {
        let reason = format!("its header points to the file `{name}`, {reason}");
        Error::data(header, reason, "put the file into the folder of the header, and write its name without a folder")
    };
    let is_below = |part: Component| matches!(part, Component::Normal(_) | Component::CurDir);
    if name.is_empty() || name.contains(['\0', '\\']) || !Path::new(name).components().all(is_below) {
        return Err(refused("which is not in the folder of the header"));
    }
    let folder = header.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let path = folder.join(name);
    let real = match path.canonicalize() {
        Ok(real) => real,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(refused("which is missing")),
        Err(error) => return Err(Error::io(&path, "read")(error)),
    };
    let folder = folder.canonicalize().map_err(Error::io(folder, "read"))?;
    if !real.starts_with(&folder) {
        return Err(refused("which is a link to a file outside of the folder of the header"));
    }
    Ok(path)
}

/// The numbers behind a header of `length` bytes in the same file.
pub(crate) fn attached(mut content: Content, length: u64, layout: Layout) -> Result<Content> {
    if content.is_compressed && layout.encoding == Encoding::Deflate {
        let reason = "the whole file is compressed, and its voxels once more";
        return Err(Error::data(&content.path, reason, "decompress the file once, for example with `gunzip`"));
    }
    let stored = content.num_bytes.saturating_sub(length);
    let decoded = decoded(content.bytes, layout, stored);
    content.bytes =
        decoded.map_err(|error| Error::data(&content.path, format!("it cannot be read: {error}"), TRUNCATED))?;
    content.is_compressed |= layout.encoding == Encoding::Deflate;
    Ok(content)
}

/// The numbers of files that a header names. Each file has the same number of them.
pub(crate) fn detached(header: &Path, names: &[String], layout: Layout) -> Result<Content> {
    let num_files = names.len();
    if num_files == 0 || num_files > MAX_FILES.into() || !layout.count.is_multiple_of(num_files) {
        let reason = format!("its header names {num_files} files for {} numbers", layout.count);
        return Err(Error::data(header, reason, "correct the list of files: each has the same number of voxels"));
    }
    let (mut paths, mut num_bytes) = (VecDeque::new(), 0_u64);
    for name in names {
        let path = resolved(header, name)?;
        let length = files::open(&path).and_then(|file| file.metadata()).map_err(Error::io(&path, "read"))?.len();
        num_bytes = num_bytes.saturating_add(length);
        paths.push_back((path, length));
    }
    check_file(header, num_bytes)?;
    let layout = Layout { count: layout.count / num_files, ..layout };
    let chain = FileChain { paths, current: None, name: String::new(), left: 0, layout };
    let is_compressed = layout.encoding == Encoding::Deflate;
    Ok(Content { path: header.to_owned(), bytes: Box::new(BufReader::new(chain)), is_compressed, num_bytes })
}

/// The numbers of a file of `length` bytes, in the type that the header says; of text in 64 bits.
fn decoded(mut file: Box<dyn BufRead>, layout: Layout, length: u64) -> io::Result<Box<dyn BufRead>> {
    let size = (layout.count as u64).saturating_mul(layout.number.size() as u64);
    let skip = |file: &mut dyn BufRead, bytes: u64| io::copy(&mut file.take(bytes), &mut io::sink()).map(drop);
    match layout.skip {
        Skip::Before { lines, .. } => {
            for _ in 0..lines {
                let mut line = Vec::new();
                file.by_ref().take(MAX_HEADER).read_until(b'\n', &mut line)?;
            }
        }
        Skip::Stored(bytes) => skip(&mut file, bytes)?,
        Skip::AllButLast if layout.encoding == Encoding::Deflate => {}
        Skip::AllButLast => skip(&mut file, length.saturating_sub(size))?,
    }
    let mut content: Box<dyn BufRead> = match layout.encoding {
        Encoding::Raw => file,
        Encoding::Deflate if file.fill_buf()?.starts_with(GZIP) => Box::new(BufReader::new(Gunzip::new(file))),
        Encoding::Deflate => Box::new(BufReader::new(ZlibDecoder::new(file))),
        Encoding::Text => Box::new(BufReader::new(TextNumbers { text: file, number: [0; 8], used: 8 })),
    };
    match layout.skip {
        Skip::Before { bytes, .. } => skip(&mut content, bytes)?,
        Skip::AllButLast if layout.encoding == Encoding::Deflate => {
            content = Box::new(BufReader::new(LastBytes { content: Some(content), size, last: io::Cursor::default() }));
        }
        _ => {}
    }
    Ok(content)
}

/// The last bytes of a compressed content, whose length is known only at its end. Nothing is read before it is asked for,
/// since sizes are compared with the file before.
struct LastBytes {
    content: Option<Box<dyn BufRead>>,
    size: u64,
    last: io::Cursor<Vec<u8>>,
}

impl Read for LastBytes {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(content) = self.content.take() {
            let most = self.size.saturating_add(MAX_HEADER);
            let mut bytes = Vec::new();
            content.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
            if bytes.len() as u64 > most {
                let reason = format!("it has more than {} MiB before its voxels", MAX_HEADER >> 20);
                return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
            }
            let before = (bytes.len() as u64).saturating_sub(self.size);
            self.last = io::Cursor::new(bytes);
            self.last.set_position(before);
        }
        self.last.read(buffer)
    }
}

/// The numbers of several files, one after the other.
struct FileChain {
    /// With their sizes.
    paths: VecDeque<(PathBuf, u64)>,
    current: Option<Box<dyn BufRead>>,
    /// Of the current file.
    name: String,
    /// Bytes that are still to be read of the current file.
    left: u64,
    /// Of each file.
    layout: Layout,
}

impl Read for FileChain {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            if let Some(mut last) = self.current.take().filter(|_| self.layout.encoding == Encoding::Deflate) {
                // to the end, so that its checksum is compared
                io::copy(&mut last.by_ref().take(8 * MAX_VOXELS as u64), &mut io::sink())?;
            }
            let Some((path, length)) = self.paths.pop_front() else { return Ok(0) };
            self.name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let named = |error: io::Error| io::Error::new(error.kind(), format!("`{}`: {error}", self.name));
            let file = files::open(&path).map_err(named)?.take(MAX_FILE);
            self.left = (self.layout.count as u64).saturating_mul(self.layout.number.size() as u64);
            self.current = Some(decoded(Box::new(BufReader::new(file)), self.layout, length).map_err(named)?);
        }
        let Some(current) = &mut self.current else { return Ok(0) };
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = current.read(&mut buffer[..most])?;
        if read == 0 && most > 0 {
            let reason = format!("`{}` has fewer voxels than the header promises", self.name);
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        self.left -= read as u64;
        Ok(read)
    }
}

/// Numbers in text, as floating-point numbers of 64 bits (little-endian).
struct TextNumbers<R> {
    text: R,
    number: [u8; 8],
    /// Bytes of the number that were read.
    used: usize,
}

impl<R: BufRead> TextNumbers<R> {
    fn next(&mut self) -> io::Result<Option<f64>> {
        let mut word = String::new();
        while let Some(&byte) = self.text.fill_buf()?.first() {
            self.text.consume(1);
            match byte {
                b',' | b' ' | b'\t'..=b'\r' if word.is_empty() => {}
                b',' | b' ' | b'\t'..=b'\r' => break,
                _ if word.len() == MAX_WORD => break,
                _ => word.push(char::from(byte)),
            }
        }
        if word.is_empty() {
            return Ok(None);
        }
        let wrong =
            |_| io::Error::new(io::ErrorKind::InvalidData, format!("`{}` is not a number", word.escape_debug()));
        word.parse().map(Some).map_err(wrong)
    }
}

impl<R: BufRead> Read for TextNumbers<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.used == 8 && !buffer.is_empty() {
            let Some(number) = self.next()? else { return Ok(0) };
            (self.number, self.used) = (number.to_le_bytes(), 0);
        }
        let count = buffer.len().min(8 - self.used);
        buffer[..count].copy_from_slice(&self.number[self.used..self.used + count]);
        self.used += count;
        Ok(count)
    }
}
