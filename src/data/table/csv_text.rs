//! CSV files as spreadsheet programs write them: the encoding of the text, and the separator of the cells.

use std::path::Path;

use crate::names::cleaned;
use prsmed_base::error::{Error, Result};

/// Remedy for text in another encoding.
pub const ENCODING_HINT: &str = "save the file as UTF-8: in Excel choose `CSV UTF-8` under `Save as`";

/// The UTF-8 text of a file without its byte order mark. Text in UTF-16 needs one. Other bytes stay as they are.
///
/// # Errors
/// [`Error::Data`] for damaged UTF-16.
pub fn utf8(path: &Path, bytes: Vec<u8>) -> Result<Vec<u8>> {
    let order = match bytes.as_slice() {
        [0xff, 0xfe, ..] => u16::from_le_bytes,
        [0xfe, 0xff, ..] => u16::from_be_bytes,
        [0xef, 0xbb, 0xbf, rest @ ..] => return Ok(rest.to_vec()),
        _ => return Ok(bytes),
    };
    let (units, rest) = bytes[2..].as_chunks::<2>();
    let text: Result<String, _> = char::decode_utf16(units.iter().map(|unit| order(*unit))).collect();
    match text {
        Ok(text) if rest.is_empty() && !text.contains('\0') => Ok(text.into_bytes()),
        _ => Err(Error::data(path, "it begins as UTF-16 text, and is damaged or has another encoding", ENCODING_HINT)),
    }
}

/// The separator of the cells: a semicolon or a tab if the header has more of the wanted columns with it than with
/// commas. Excel writes semicolons where the comma is the decimal separator.
pub fn separator(text: &[u8], wanted: &[&str]) -> u8 {
    let header = text.split(|byte| matches!(byte, b'\n' | b'\r')).find(|line| !line.is_empty()).unwrap_or_default();
    let num_found = |separator: u8| {
        let mut reader = csv::ReaderBuilder::new().delimiter(separator).from_reader(header);
        let Ok(names) = reader.byte_headers() else { return 0 };
        let names: Vec<String> = names.iter().map(|name| cleaned(&String::from_utf8_lossy(name))).collect();
        let is_there = |name: &&&str| names.iter().any(|found| found.eq_ignore_ascii_case(name));
        wanted.iter().filter(is_there).count()
    };
    let with_commas = num_found(b',');
    let others = [b';', b'\t'].into_iter().filter(|separator| num_found(*separator) > with_commas);
    others.max_by_key(|separator| num_found(*separator)).unwrap_or(b',')
}

/// Index of the column with this name; `None` if there is none. Blanks around a name, invisible letters and the case of letters do not
/// count.
///
/// # Errors
/// [`Error::Data`] if two columns have the name: one of them would be ignored.
pub fn column<'a>(path: &Path, header: impl IntoIterator<Item = &'a [u8]>, name: &str) -> Result<Option<usize>> {
    let is_it = |(_, found): &(usize, &[u8])| cleaned(&String::from_utf8_lossy(found)).eq_ignore_ascii_case(name);
    let mut found = header.into_iter().enumerate().filter(is_it).map(|(index, _)| index);
    match (found.next(), found.next()) {
        (Some(first), Some(second)) => Err(Error::data_line(
            path,
            1,
            format!("there are two columns `{name}`, number {} and number {}", first + 1, second + 1),
            "keep the right one, or rename the other",
        )),
        (first, _) => Ok(first),
    }
}

/// Says so if a text is not what was typed: spreadsheet programs show long numbers as `1.23457E+11` and cells that are too
/// narrow as `####`, and save what they show, so that different numbers become one.
pub fn spoiled(name: &str) -> Option<&'static str> {
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_rounded = name.split_once("E+").is_some_and(|(number, exponent)| {
        let (whole, rest) = number.split_once(['.', ',']).unwrap_or((number, "0"));
        whole.len() == 1 && is_digits(whole) && is_digits(rest) && exponent.len() == 2 && is_digits(exponent)
    });
    if is_rounded {
        return Some("is a number that a spreadsheet program has rounded");
    }
    let is_hidden = name.len() > 1 && name.bytes().all(|byte| byte == b'#');
    is_hidden.then_some("is what a spreadsheet program shows in a cell that is too narrow")
}

/// Remedy for [`spoiled`] texts.
pub const SPOILED_HINT: &str =
    "write the numbers again from their source, in a column with the format `Text`, and save the table as CSV";

/// The error of a file with these bytes that the reader cannot read, with the remedy for what is not its encoding.
pub fn error(path: &Path, bytes: &[u8], error: &csv::Error, hint: &str) -> Error {
    let line = |position: &Option<csv::Position>| Lines::new(bytes).at(position.as_ref());
    match error.kind() {
        csv::ErrorKind::Utf8 { pos, .. } => Error::data_line(path, line(pos), "the line is not UTF-8", ENCODING_HINT),
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            let remedy = cells_remedy(*len, *expected_len, "the separator");
            Error::data_line(path, line(pos), cells_reason(*len, *expected_len), remedy)
        }
        _ => Error::data(path, error.to_string(), hint),
    }
}

/// The reason of a line with a wrong number of cells.
pub fn cells_reason(found: u64, expected: u64) -> String {
    format!("{found} cell{}, but the header has {expected}", if found == 1 { "" } else { "s" })
}

/// The remedy for a line with a wrong number of cells.
pub fn cells_remedy(found: u64, expected: u64, separator: &str) -> String {
    if found < expected {
        return "add the missing cells, also empty ones, and their separators".to_owned();
    }
    format!("put a text with {separator} in double quotes")
}

/// Line numbers of records in their order, as an editor counts lines. The CSV reader's own numbers are too low after `\r\n` and
/// empty lines, because it counts the rest of a line end with the next record.
pub struct Lines<'a> {
    bytes: &'a [u8],
    byte: usize,
    line: u64,
}

impl<'a> Lines<'a> {
    /// The lines of a file with these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, byte: 0, line: 1 }
    }

    /// The line at which a record begins, which is not before that of the last call.
    pub fn at(&mut self, record: Option<&csv::Position>) -> u64 {
        let start = record.map_or(0, |position| usize::try_from(position.byte()).unwrap_or(usize::MAX));
        while self.byte < self.bytes.len() && (self.byte < start || matches!(self.bytes[self.byte], b'\r' | b'\n')) {
            self.line += u64::from(self.bytes[self.byte] == b'\n');
            self.byte += 1;
        }
        self.line
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Root;
    use crate::manifest::Manifest;

    /// A text as UTF-16 with a byte order mark.
    fn utf16(text: &str, order: fn(u16) -> [u8; 2]) -> Vec<u8> {
        std::iter::once(0xfeff).chain(text.encode_utf16()).flat_map(order).collect()
    }

    #[test]
    fn byte_order_marks_name_the_encoding() {
        let text = "image;question\na.png;Où est la lésion 🫁?\n";
        for bytes in [
            text.as_bytes().to_vec(),
            format!("\u{feff}{text}").into_bytes(),
            utf16(text, u16::to_le_bytes),
            utf16(text, u16::to_be_bytes),
        ] {
            assert_eq!(utf8(Path::new("a.csv"), bytes).expect("text"), text.as_bytes());
        }
        // Windows-1252 stays for the reader of the rows
        assert_eq!(utf8(Path::new("a.csv"), b"l\xe9sion".to_vec()).expect("bytes"), b"l\xe9sion");
        for bytes in [
            [utf16(text, u16::to_le_bytes), vec![0x41]].concat(),
            vec![0xff, 0xfe, 0x00, 0xd8, 0x41, 0x00],
            // UTF-32
            vec![0xff, 0xfe, 0, 0, 0x41, 0, 0, 0],
        ] {
            let error = utf8(Path::new("a.csv"), bytes).expect_err("damaged");
            assert!(error.hint().contains("`CSV UTF-8`"), "{error}");
        }
    }

    #[test]
    fn the_separator_is_the_one_that_gives_the_wanted_columns() {
        let wanted = ["image", "question"];
        for (text, expected) in [
            ("image,question\na;b,c\n", b','),
            ("image;question\na,b;c\n", b';'),
            ("\r\n Image ;\"question\";other,more\r\n", b';'),
            ("image\tquestion\n", b'\t'),
            ("image\n", b','),
            ("image;text\n", b';'),
            ("image,a;question\n", b','),
            ("file;name\n", b','),
            ("", b','),
            ("\u{feff}image\u{200b};\u{a0}question", b';'),
        ] {
            assert_eq!(char::from(separator(text.as_bytes(), &wanted)), char::from(expected), "{text}");
        }
    }

    #[test]
    fn two_columns_of_one_name_are_refused() {
        let find = |header: &[&str], name: &str| {
            let cells = header.iter().map(|cell| cell.as_bytes());
            column(Path::new("a.csv"), cells, name).map_err(|error| error.to_string())
        };
        assert_eq!(find(&["image", " Split "], "split"), Ok(Some(1)));
        assert_eq!(find(&["image", "note", "note"], "split"), Ok(None));
        assert_eq!(find(&["split2", "patient_id", "patient"], "patient"), Ok(Some(2)));
        for header in [["split", "image", "split"], ["split", "image", "SPLIT"], [" split", "image", "split "]] {
            let error = find(&header, "split").expect_err("two columns");
            assert!(error.ends_with("a.csv:1: there are two columns `split`, number 1 and number 3"), "{error}");
        }
        let root = Root::new();
        root.pair("ct", "train", "a");
        root.pair("ct", "train", "b");
        let table = |header: &str, end: &str| {
            root.csv(
                "a.csv",
                &format!("image_path,question,answer,split{header}\nct/train_masks/a.png,q,a,train{end}\n"),
            );
            Manifest::open(root.path(), None).map(|manifest| manifest.rows.len()).map_err(|error| error.to_string())
        };
        assert_eq!(table(",note,note", ",x,y"), Ok(1));
        for (header, end, name) in [
            (",Split", ",test", "split"),
            (",patient,patient", ",A1,B1", "patient"),
            (",spacing_x_mm,spacing_y_mm,spacing_x_mm", ",1,1,2", "spacing_x_mm"),
            (",present,position,present", ",1,left,0", "present"),
            (",answer", ",b", "answer"),
        ] {
            let error = table(header, end).expect_err(name);
            assert!(error.contains(&format!("there are two columns `{name}`, number")), "{error}");
        }
    }

    #[test]
    fn numbers_that_a_spreadsheet_has_rounded_are_no_patients() {
        for name in ["1.23457E+11", "1,23457E+11", "1E+11", "9.9E+15", "####", "########"] {
            assert!(spoiled(name).is_some(), "{name}");
        }
        for name in
            ["123456789012", "1E5", "12E3", "P1.2E+11", "E+11", "1.2E+1", "12.5E+11", "1.2e11", "1.E+11", "#", "1-Jan"]
        {
            assert_eq!(spoiled(name), None, "{name}");
        }
        let root = Root::new();
        root.pair("ct", "train", "a");
        let open = |patient: &str| {
            root.csv(
                "a.csv",
                &format!("image_path;question;answer;split;patient\nct/train_masks/a.png;q;a;train;{patient}\n"),
            );
            Manifest::open(root.path(), None).map(|manifest| manifest.rows[0].patient.clone())
        };
        assert_eq!(open("123456789012").expect("good"), Some("123456789012".to_owned()));
        for (patient, reason) in [
            (
                "1.23457E+11",
                "patient `1.23457E+11` is a number that a spreadsheet program has rounded: write the numbers",
            ),
            (" 1,23457E+11 ", "patient `1,23457E+11` is a number that a spreadsheet program has rounded"),
            ("#######", "patient `#######` is what a spreadsheet program shows in a cell that is too narrow"),
        ] {
            let error = open(patient).expect_err(patient).to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn files_of_excel_are_read_and_other_encodings_are_refused_by_name() {
        let root = Root::new();
        root.pair("ct", "train", "a");
        let text = "image_path;question;answer;split;spacing_x_mm;spacing_y_mm\r\n\
                    ct/train_masks/a.png;Où est la lésion, ici?;\"oui; là\";train;0.5;0.75\r\n";
        let reason = || Manifest::open(root.path(), None).expect_err("a bad row").to_string();
        root.csv("a.csv", &text.replace("; l", ", l").replace(';', ","));
        assert!(Manifest::open(root.path(), None).is_err(), "a comma in a text without quotes");
        for bytes in [
            text.as_bytes().to_vec(),
            format!("\u{feff}{text}").into_bytes(),
            text.replace("; l", ", l").replace(';', "\t").into_bytes(),
            utf16(text, u16::to_le_bytes),
            utf16(text, u16::to_be_bytes),
        ] {
            std::fs::write(root.file("annotations/a.csv"), bytes).expect("written");
            let row = Manifest::open(root.path(), None).expect("good").rows.remove(0);
            assert_eq!((row.question.as_str(), row.line), ("Où est la lésion, ici?", 2));
            assert!(row.answer.ends_with(" là"), "{}", row.answer);
            assert_eq!(row.spacing_mm, Some([0.5, 0.75]));
        }
        // Windows-1252, and a decimal comma
        let latin = text.chars().map(|letter| u8::try_from(letter).expect("Latin-1")).collect::<Vec<_>>();
        std::fs::write(root.file("annotations/a.csv"), latin).expect("written");
        assert!(
            reason().contains("column `question` is not UTF-8; save the file as UTF-8: in Excel choose `CSV UTF-8`")
        );
        root.csv("a.csv", &text.replace("0.5", "0,5"));
        assert!(reason().contains("spacing `0,5` is not a positive number"), "{}", reason());
        root.csv("a.csv", &text.replace("\"oui; là\"", "oui; là"));
        assert!(reason().contains("7 cells, but the header has 6; put a text with a semicolon"), "{}", reason());
    }
}
