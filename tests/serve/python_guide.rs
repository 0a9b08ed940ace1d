//! The examples of docs/guides/python.md, as they are printed there.

use std::path::Path;
use std::process::Command;

use crate::support::{Server, home, image_file, trained};

/// The Python examples of the guide.
fn examples() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = std::fs::read_to_string(root.join("docs/guides/python.md")).expect("the guide");
    let blocks = guide.split("```python\n").skip(1);
    blocks.map(|block| block.split("```").next().expect("the end of the example").to_owned()).collect()
}

const OTHER_WAYS: &str = r#"
import urllib.request
with open("large.png", "rb") as file:
    content = file.read()
pieces = (content[at:at + 50_000] for at in range(0, len(content), 50_000))
for way in [{"files": {"file": content}}, {"files": {"image": ("a.png", content)}, "data": {"note": "first"}},
            {"data": content}, {"data": pieces}]:
    assert requests.post(f"{base}/api/images", **way).json()["width"] == 64
assert json.load(urllib.request.urlopen(f"{base}/api/images", data=content))["width"] == 64
"#;

#[test]
#[ignore = "needs scripts/setup --checks"]
fn python_reads_what_the_guide_shows() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = home().join("notebook");
    std::fs::create_dir_all(folder.join("runs")).unwrap();
    std::os::unix::fs::symlink(trained(), folder.join("runs/a")).unwrap();
    std::fs::copy(image_file(), folder.join("scan.png")).unwrap();
    let server = Server::start(&["--max-new-tokens", "4"]);
    let [program, client] = examples().try_into().unwrap();
    // other ways to send a file, with a large one
    std::fs::write(folder.join("large.png"), crate::sizes::image_of(1 << 20)).unwrap();
    let client = client + OTHER_WAYS;
    let client = client.replace("127.0.0.1:8080", &server.address);
    // the notebook would show the masks
    for (name, code) in [("program", program + "\nprint(mask.size)"), ("client", client + "\nprint(mask[1:4])")] {
        let bin = Path::new(env!("CARGO_BIN_EXE_prsmed")).parent().unwrap();
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let mut python = Command::new(root.join(".venv/bin/python"));
        python.current_dir(&folder).env("PATH", path).env("PYTHONPATH", root.join(".tools/medical"));
        let output = python.args(["-c", &code]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{name}: {said}{}", String::from_utf8_lossy(&output.stderr));
        let last = said.trim_end().lines().last().unwrap();
        assert_eq!(last, if name == "program" { "(64, 64)" } else { "b'PNG'" }, "{name}: {said}");
    }
}
