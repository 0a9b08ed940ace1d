//! Forms (`multipart/form-data`, RFC 7578), as `curl -F` sends them: their files and fields.

use memchr::memmem;
use std::ops::Range;

/// Most bytes of the headers of one part.
const MAX_HEAD: usize = 16 << 10;
/// Most parts of a form.
const MAX_PARTS: usize = 1000;

/// The line that separates the parts of a form, if a header `Content-Type` is that of a form.
pub(super) fn boundary(content_type: &str) -> Result<Option<String>, String> {
    let kind = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match (kind.as_str(), parameter(content_type, "boundary")) {
        ("multipart/form-data", Some(boundary)) if !boundary.is_empty() => Ok(Some(boundary)),
        ("multipart/form-data", _) => Err("the header `Content-Type` of the form has no `boundary`".into()),
        (other, _) if other.starts_with("multipart/") => Err(format!("the body is `{other}` and no form")),
        _ => Ok(None),
    }
}

/// A part of a form: a file, or a field of text.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) is_file: bool,
    /// Where its content is in the body.
    pub(super) content: Range<usize>,
}

/// Where the one file of a form is. Fields of text, such as the name of a button, are left out.
pub(super) fn file(body: &[u8], boundary: &str) -> Result<Range<usize>, String> {
    let mut files = parts(body, boundary)?.into_iter().filter(|part| part.is_file);
    match (files.next(), files.next()) {
        (Some(file), None) => Ok(file.content),
        (Some(_), Some(_)) => Err("the form has several files".into()),
        (None, _) => Err("the form has no file".into()),
    }
}

/// The parts of a form.
pub(super) fn parts(body: &[u8], boundary: &str) -> Result<Vec<Part>, String> {
    let line = [b"--", boundary.as_bytes()].concat();
    // a position and a line, with the line break before it, of every separator
    let mut separators = memmem::find_iter(body, &line).filter_map(|at| {
        let is_first_of_line = at == 0 || body[..at].ends_with(b"\r\n");
        let rest = &body[at + line.len()..];
        let end = rest.iter().position(|byte| !matches!(byte, b' ' | b'\t')).unwrap_or(rest.len());
        let is_last = rest.starts_with(b"--");
        let next = at + line.len() + end + 2;
        (is_first_of_line && (is_last || rest[end..].starts_with(b"\r\n"))).then_some((at, next, is_last))
    });
    let Some((_, mut begin, mut is_last)) = separators.next() else {
        return Err("the body does not have the `boundary` of its header `Content-Type`".into());
    };
    let mut found = Vec::new();
    while !is_last {
        let Some((at, next, last)) = separators.next() else {
            return Err("the form is incomplete: its last `boundary` is missing".into());
        };
        // without the line break before the separator
        found.extend(part_of(body, begin..at.saturating_sub(2).max(begin))?);
        if found.len() > MAX_PARTS {
            return Err(format!("the form has more than {MAX_PARTS} parts"));
        }
        (begin, is_last) = (next, last);
    }
    Ok(found)
}

/// A part, unless it is a file that was not chosen.
fn part_of(body: &[u8], part: Range<usize>) -> Result<Option<Part>, String> {
    let bytes = &body[part.clone()];
    let Some(length) = memmem::find(&bytes[..bytes.len().min(MAX_HEAD)], b"\r\n\r\n") else {
        return Err("a part of the form has no end of its headers".into());
    };
    let head = String::from_utf8_lossy(&bytes[..length]);
    let header = |name: &str| {
        let lines = head.split("\r\n").filter_map(|line| line.split_once(':'));
        lines.filter(|(key, _)| key.trim().eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()).next()
    };
    let disposition = header("content-disposition").unwrap_or_default();
    let name = parameter(disposition, "name").unwrap_or_default();
    let file = parameter(disposition, "filename").or_else(|| parameter(disposition, "filename*"));
    let content = part.start + length + 4..part.end;
    let Some(file) = file else { return Ok(Some(Part { name, is_file: false, content })) };
    // a browser sends an empty name and no content if no file is chosen
    if file.is_empty() && content.is_empty() {
        return Ok(None);
    }
    let encoding = header("content-transfer-encoding").unwrap_or("binary").to_ascii_lowercase();
    if !["binary", "8bit", "7bit"].contains(&encoding.as_str()) {
        let file: String = file.chars().filter(|c| !c.is_control()).take(100).collect();
        return Err(format!("the file `{file}` of the form is encoded (`Content-Transfer-Encoding: {encoding}`)"));
    }
    Ok(Some(Part { name, is_file: true, content }))
}

/// A parameter of a header, such as the name in `form-data; name="file"`, without its quotes.
fn parameter(header: &str, name: &str) -> Option<String> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    let mut fields = header.split(|character| {
        let was_escaped = std::mem::take(&mut is_escaped);
        match character {
            _ if was_escaped => {}
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            _ => return character == ';' && !is_quoted,
        }
        false
    });
    fields.find_map(|field| {
        let (key, value) = field.split_once('=')?;
        key.trim().eq_ignore_ascii_case(name).then(|| value.trim().trim_matches('"').to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(body: &str) -> Result<&str, String> {
        file(body.as_bytes(), "xx").map(|range| &body[range])
    }

    #[test]
    fn the_file_of_a_form_is_found_in_any_order_and_spelling() {
        let text = "--xx\r\nContent-Disposition: form-data; name=\"filename\"\r\n\r\na; filename=b\r\n";
        let file = "--xx\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.png\"\r\n\r\nPNG\r\n";
        let none = "--xx\r\nContent-Disposition: form-data; name=\"other\"; filename=\"\"\r\n\r\n\r\n";
        for body in [
            format!("{file}--xx--"),
            format!("{file}--xx--\r\nepilogue"),
            format!("{text}{file}--xx--\r\n"),
            format!("{file}{text}{none}--xx--\r\n"),
            format!("{none}{file}--xx--\r\n"),
            format!("preamble\r\n{file}--xx--\r\n"),
            format!("{file}--xx--\r\n").replace("--xx\r\n", "--xx \t\r\n"),
            format!("{file}--xx--\r\n").replace("filename=\"a.png\"", "FileName=a"),
            format!("{file}--xx--\r\n").replace("filename=\"a.png\"", "filename=\"a;\\\"b\""),
            format!("{file}--xx--\r\n").replace("filename=\"a.png\"", "filename*=UTF-8''%e2%82%ac"),
            format!("{file}--xx--\r\n").replace("name=\"file\"; ", ""),
            format!("{file}--xx--\r\n")
                .replace("Content-Disposition", "Content-Type: image/png\r\ncontent-disposition"),
        ] {
            assert_eq!(found(&body), Ok("PNG"), "{body}");
        }
        // what resembles a separator is content
        for content in ["a\r\n--xxy\r\n", "\r\n--x\r\n--", "a --xx\r\n", "\r\n\r\n", "\n--xx\n"] {
            let body = file.replace("PNG", content) + "--xx--\r\n";
            assert_eq!(found(&body), Ok(content), "{body}");
        }
    }

    #[test]
    fn fields_of_text_have_a_name_and_a_content() {
        let body = "--xx\r\nContent-Disposition: form-data; name=\"question\"\r\n\r\nWhere?\r\nHere?\r\n\
                    --xx\r\nContent-Disposition: form-data; name=mask; filename=\"a.png\"\r\n\r\nPNG\r\n\
                    --xx\r\nContent-Disposition: form-data; name=none; filename=\"\"\r\n\r\n\r\n\
                    --xx\r\nA: b\r\n\r\n\r\n--xx--";
        let parts = parts(body.as_bytes(), "xx").unwrap();
        let found: Vec<_> =
            parts.iter().map(|part| (part.name.as_str(), part.is_file, &body[part.content.clone()])).collect();
        assert_eq!(found, [("question", false, "Where?\r\nHere?"), ("mask", true, "PNG"), ("", false, "")]);
    }

    #[test]
    fn forms_without_one_file_say_why() {
        let file = "--xx\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nPNG\r\n";
        for (body, expected) in [
            ("--xx--\r\n".to_owned(), "has no file"),
            (format!("{file}{file}--xx--"), "several files"),
            (file.to_owned(), "incomplete"),
            (format!("{file}--yy--"), "incomplete"),
            (file[..60].to_owned(), "incomplete"),
            (String::new(), "does not have the `boundary`"),
            ("--yy\r\n\r\n--yy--".to_owned(), "does not have the `boundary`"),
            ("--xx\r\na\r\n--xx--".to_owned(), "no end of its headers"),
            (format!("--xx\r\nA: {}\r\n\r\n\r\n--xx--", "a".repeat(MAX_HEAD)), "no end of its headers"),
            (format!("{}--xx--", "--xx\r\nA: b\r\n\r\n\r\n".repeat(MAX_PARTS + 1)), "more than 1000 parts"),
            (file.replace("\r\n\r\n", "\r\nContent-Transfer-Encoding: base64\r\n\r\n") + "--xx--", "encoded (`"),
        ] {
            let error = found(&body).unwrap_err();
            assert!(error.contains(expected), "{expected} is not in {error}: {body}");
        }
    }

    #[test]
    fn only_the_type_of_a_form_has_a_boundary() {
        for (header, expected) in [
            ("multipart/form-data; boundary=aB", Some("aB")),
            ("Multipart/Form-Data;charset=utf-8; Boundary=\"a b\"", Some("a b")),
            ("image/png; boundary=a", None),
            ("", None),
        ] {
            assert_eq!(boundary(header), Ok(expected.map(str::to_owned)), "{header}");
        }
        for header in ["multipart/form-data", "multipart/form-data; boundary=", "multipart/related; boundary=a"] {
            boundary(header).unwrap_err();
        }
    }
}
