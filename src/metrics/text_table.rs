//! Plain-text tables.

/// A text table with aligned columns, the first to the left, the others to the right. A rule is below the header and
/// before row `rule`.
pub fn aligned(header: &[&str], rows: &[Vec<String>], rule: Option<usize>) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &[&str]| {
        let mut text = String::new();
        for (column, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
            if column == 0 {
                text.push_str(cell);
                text.extend(std::iter::repeat_n(' ', width - cell.chars().count()));
            } else {
                text.extend(std::iter::repeat_n(' ', 2 + width - cell.chars().count()));
                text.push_str(cell);
            }
        }
        text.trim_end().to_owned() + "\n"
    };
    let ruler = "-".repeat(widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1)) + "\n";
    let mut out = line(header) + &ruler;
    for (i, row) in rows.iter().enumerate() {
        if rule == Some(i) && i > 0 {
            out += &ruler;
        }
        out += &line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    out
}
