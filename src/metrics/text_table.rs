//! Plain-text tables.

/// Lines of aligned columns, the first to the left, the others to the right.
pub fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cells = |column: usize| rows.iter().filter_map(move |row| row.get(column));
    let widths: Vec<usize> =
        (0..count).map(|column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0)).collect();
    let cell = |(column, (cell, &width)): (usize, (&String, &usize))| {
        if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
    };
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(&widths).enumerate().map(cell).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// A text table with [`columns`]. A rule is below the header and before row `rule`.
pub fn aligned(header: &[&str], rows: &[Vec<String>], rule: Option<usize>) -> String {
    let header: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    let text = columns(&[&[header], rows].concat());
    let ruler = "-".repeat(text.lines().map(|line| line.chars().count()).max().unwrap_or(0));
    let mut lines: Vec<&str> = text.lines().collect();
    if let Some(row) = rule.filter(|row| (1..rows.len()).contains(row)) {
        lines.insert(row + 1, &ruler);
    }
    lines.insert(1, &ruler);
    lines.join("\n") + "\n"
}
