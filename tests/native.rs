//! No C++ exception leaves a function of the native layer's C ABI: Rust cannot handle one.

use std::fs;
use std::path::Path;

/// Text after the parameter list that begins at `open`.
fn after_parameters(text: &str, open: usize) -> &str {
    let mut depth = 0;
    for (at, c) in text[open..].char_indices() {
        depth += match c {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        if depth == 0 {
            return text[open + at + 1..].trim_start();
        }
    }
    panic!("a parameter list without an end: {}", &text[open..open + 40])
}

/// The functions `prsmed_*` that a C++ source declares or defines at the start of a line, each with the text after its
/// parameters.
fn functions(text: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let signature = line.strip_prefix("extern \"C\" ").unwrap_or(line);
        let is_signature = signature.starts_with(|c: char| c.is_ascii_alphabetic()) && !signature.starts_with("return");
        if let Some((head, _)) = line.split_once('(').filter(|_| is_signature)
            && let Some(name) = head.split([' ', '*']).next_back().filter(|name| name.starts_with("prsmed_"))
        {
            found.push((name, after_parameters(text, start + head.len())));
        }
        start += line.len();
    }
    found
}

/// True if the function is `noexcept`, or its whole body is in `PRSMED_TRY`, which catches everything.
fn lets_nothing_escape(rest: &str) -> bool {
    rest.starts_with("noexcept")
        || rest.strip_prefix('{').is_some_and(|body| body.trim_start().starts_with("PRSMED_TRY("))
}

#[test]
fn functions_of_the_c_abi_throw_nothing() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut count, mut wrong) = (0, Vec::new());
    for folder in ["src/tensor/native", "tests/native"] {
        for entry in fs::read_dir(root.join(folder)).unwrap() {
            let file = entry.unwrap().path();
            if !file.extension().is_some_and(|extension| extension == "cpp" || extension == "h") {
                continue;
            }
            for (name, rest) in functions(&fs::read_to_string(&file).unwrap()) {
                count += 1;
                if !lets_nothing_escape(rest) {
                    wrong.push(format!("{}: {name}", file.display()));
                }
            }
        }
    }
    assert!(count > 100, "only {count} functions were found");
    assert!(wrong.is_empty(), "neither `noexcept` nor in `PRSMED_TRY`:\n{}", wrong.join("\n"));
    let header = fs::read_to_string(root.join("src/tensor/native/native.h")).unwrap();
    assert!(header.contains("catch (...)"), "`PRSMED_TRY` catches everything");
}

#[test]
fn a_function_that_may_throw_is_found() {
    let text = "extern \"C\" {\nchar* prsmed_a(int (*f)(int),\n               int b) {\n  PRSMED_TRY(f(b))\n}\n\
                void prsmed_b() { f(); }\nint prsmed_c() noexcept { return 1; }\n  prsmed_b();\n}\n\
                extern \"C\" void prsmed_d(int);\n";
    let wrong = functions(text).into_iter().filter(|(_, rest)| !lets_nothing_escape(rest));
    assert_eq!(wrong.map(|(name, _)| name).collect::<Vec<_>>(), ["prsmed_b", "prsmed_d"]);
    assert_eq!(functions(text).len(), 4);
}
