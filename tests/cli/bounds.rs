//! Resource bounds: hostile files given to the program under a limit of its address space. It exits with an error that
//! names the file, needs less than 1 GiB of memory, and less than 10 s of CPU time on a slow core.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::json;

use crate::support::{Ran, copy, folder, path, phantoms, prsmed, train, trained};
use crate::warm::limit;

/// Address space of a child. Ordinary commands need 3 GiB on two CPU cores, most of it for libtorch and its threads.
const ADDRESS_SPACE: u64 = 8 << 30;
/// Limit of the resident memory of a child.
const MAX_MEMORY: u64 = 1 << 30;
/// Limit of the CPU time of a child, all threads together.
const MAX_TIME: Duration = Duration::from_secs(10);

/// Resources that a command took.
#[derive(Debug)]
struct Usage {
    peak: u64,
    time: Duration,
}

/// Runs a command under the limit of the address space.
fn limited(command: &mut Command) -> (Ran, Usage) {
    // one after the other, so that time and memory of the machine are enough for each
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    limit(command, libc::RLIMIT_AS, ADDRESS_SPACE);
    let (stdout, stderr) = (path("bounds.stdout"), path("bounds.stderr"));
    command.stdout(Stdio::from(File::create(&stdout).unwrap())).stderr(Stdio::from(File::create(&stderr).unwrap()));
    #[expect(clippy::zombie_processes, reason = "`wait` below waits for it, to read its resources")]
    let child = command.spawn().unwrap();
    let (status, usage) = wait(libc::pid_t::try_from(child.id()).unwrap());
    let text = |path: &Path| String::from_utf8(fs::read(path).unwrap()).unwrap();
    let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
    (Ran { code, stdout: text(&stdout), stderr: text(&stderr) }, usage)
}

/// Waits for a child and returns its status and resources.
fn wait(child: libc::pid_t) -> (i32, Usage) {
    let mut status = 0;
    // SAFETY: a structure of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: it writes to the two variables. Nobody else waits for this child.
    assert_eq!(unsafe { libc::wait4(child, &raw mut status, 0, &raw mut usage) }, child);
    let time =
        |time: libc::timeval| Duration::new(time.tv_sec.unsigned_abs(), 1000 * u32::try_from(time.tv_usec).unwrap());
    let peak = 1024 * usage.ru_maxrss.unsigned_abs();
    (status, Usage { peak, time: time(usage.ru_utime) + time(usage.ru_stime) })
}

/// Checks that a command fails with an error that contains `expected`, within the limits.
fn bounded(command: &mut Command, expected: &[&str]) {
    let (ran, usage) = limited(command);
    let text = format!("{}{}", ran.stdout, ran.stderr);
    let shown: String = text.chars().take(2000).collect();
    assert!(matches!(ran.code, Some(1 | 2)), "{:?}, {usage:?}: {shown}", ran.code);
    assert!(!text.contains("panicked") && !text.contains("internal error"), "{shown}");
    for part in expected {
        assert!(text.contains(part), "no `{part}` in: {shown}");
    }
    assert!(text.len() < 20_000, "an error of {} bytes: {shown}", text.len());
    assert!(usage.peak < MAX_MEMORY && usage.time < MAX_TIME, "{usage:?}: {shown}");
}

/// `data check` of a root with this image.
fn check_image(name: &str, bytes: &[u8]) -> Command {
    let root = folder(&format!("bounds-{name}"));
    for inside in ["ct/train_images", "ct/train_masks", "annotations"] {
        fs::create_dir_all(root.join(inside)).unwrap();
    }
    fs::write(root.join("ct/train_images/bomb.png"), bytes).unwrap();
    image::GrayImage::from_pixel(8, 8, image::Luma([255])).save(root.join("ct/train_masks/bomb.png")).unwrap();
    let row = "image_path,question,answer,split\nct/train_masks/bomb.png,Where?,There.,train\n";
    fs::write(root.join("annotations/a.csv"), row).unwrap();
    let mut command = prsmed();
    command.args(["data", "check"]).arg(root);
    command
}

/// `data check` of the phantoms with this table.
fn check_table(name: &str, bytes: &[u8]) -> Command {
    let table = path(name);
    fs::write(&table, bytes).unwrap();
    let mut command = prsmed();
    command.args(["data", "check"]).arg(phantoms()).arg("--annotations").arg(table);
    command
}

/// `train` with this file as image encoder.
fn train_on_encoder(file: &Path) -> Command {
    train(phantoms(), &path("bounds-never"), &[&format!("model.image_encoder={}", file.display()), "train.max_steps=1"])
}

/// `train` on a base with this file in place of its own.
fn train_on_base(name: &str, file: &str, bytes: &[u8]) -> Command {
    let last = trained().0.join("last");
    let base = copy(&last.join("base"), name);
    for entry in fs::read_dir(last.join("tokenizer")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), base.join(entry.file_name())).unwrap();
    }
    fs::write(base.join(file), bytes).unwrap();
    let sets = [&format!("model.base={}", base.display()), "model.train_base=false", "train.max_steps=1"];
    train(phantoms(), &path("bounds-never"), &sets)
}

/// `predict` with a checkpoint in which one file is replaced.
fn predict_with(name: &str, file: &str, bytes: &[u8]) -> Command {
    let run = copy(&trained().0.join("best"), name);
    fs::write(run.join(file), bytes).unwrap();
    if file != "checksums.json" {
        let path = run.join("checksums.json");
        let mut sums: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let sum = prsmed::tensor::weights::sha256(&run.join(file)).unwrap();
        sums["files"][file] = json!({ "bytes": bytes.len(), "sha256": sum });
        fs::write(path, sums.to_string()).unwrap();
    }
    let image = fs::read_dir(phantoms().join("brain_MRI/train_images")).unwrap().next().unwrap().unwrap().path();
    let mut command = prsmed();
    command.arg("predict").arg(run).arg("--image").arg(image).args(["--question", "Where?", "--max-new-tokens", "1"]);
    command
}

fn be32(number: u32) -> [u8; 4] {
    number.to_be_bytes()
}

/// A PNG file of zeros: `colour` 0 is grey, 2 is RGB, 6 is RGB with alpha.
fn png(side: u32, colour: u8, depth: u8) -> Vec<u8> {
    let samples = match colour {
        0 => 1,
        2 => 3,
        _ => 4,
    };
    let row = vec![0; side as usize * samples * usize::from(depth) / 8 + 1];
    let mut pixels = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    for _ in 0..side {
        pixels.write_all(&row).unwrap();
    }
    let header = [&be32(side)[..], &be32(side), &[depth, colour, 0, 0, 0]].concat();
    let mut bytes = b"\x89PNG\r\n\x1a\n".to_vec();
    for (name, content) in [(b"IHDR", header), (b"IDAT", pixels.finish().unwrap()), (b"IEND", Vec::new())] {
        let chunk = [&name[..], &content].concat();
        bytes.extend(be32(u32::try_from(content.len()).unwrap()));
        bytes.extend(&chunk);
        bytes.extend(be32(crc32fast::hash(&chunk)));
    }
    bytes
}

/// The header of a PNG file that claims this size.
fn png_header(side: u32) -> Vec<u8> {
    let mut bytes = png(1, 0, 8);
    bytes[16..20].copy_from_slice(&be32(side));
    bytes[20..24].copy_from_slice(&be32(side));
    let sum = crc32fast::hash(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&be32(sum));
    bytes
}

#[test]
fn an_ordinary_command_is_within_the_limits() {
    let (ran, usage) = limited(prsmed().args(["data", "check"]).arg(phantoms()));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(usage.peak < MAX_MEMORY / 2 && usage.time < MAX_TIME, "{usage:?}");
}

#[test]
fn image_bombs_are_bounded() {
    for (name, bytes) in [
        ("grey", png(16_000, 0, 8)),
        ("rgba", png(8_000, 6, 8)),
        ("rgb16", png(6_600, 2, 16)),
        ("rgba16", png(5_700, 6, 16)),
    ] {
        bounded(&mut check_image(name, &bytes), &["bomb.png: the mask is 8x8 pixels but its image is "]);
    }
    for (name, bytes) in [("large", png(22_000, 0, 8)), ("header", png_header(100_000))] {
        bounded(&mut check_image(name, &bytes), &["bomb.png: has more than "]);
    }
}

/// A JPEG of `side x side` pixels in three colours, with comments of `size` bytes. `scans` is the number of scans of a
/// progressive JPEG; 0 is a sequential one.
fn jpeg(side: u16, size: usize, scans: usize) -> Vec<u8> {
    let progressive = scans > 0;
    let mut bytes = vec![0xFF, 0xD8];
    let mut segment = |marker: u8, content: &[u8]| {
        bytes.extend([0xFF, marker]);
        bytes.extend(u16::try_from(content.len() + 2).unwrap().to_be_bytes());
        bytes.extend(content);
    };
    for _ in 0..size / 65_000 {
        segment(0xFE, &vec![b'x'; 65_000]);
    }
    segment(0xDB, &[&[0][..], &[1; 64]].concat());
    let [high, low] = side.to_be_bytes();
    let frame = if progressive { 0xC2 } else { 0xC0 };
    let components = [1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0];
    segment(frame, &[&[8, high, low, high, low, 3][..], &components].concat());
    for table in [0x00, 0x10] {
        // 15 codes of 4 bits: for a difference a number of bits, for other coefficients the end of 2^n blocks
        let counts = [0, 0, 0, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let codes: Vec<u8> = (0..15).map(|code| if table == 0 { code.min(11) } else { code << 4 }).collect();
        segment(0xC4, &[&[table][..], &counts, &codes].concat());
    }
    if progressive {
        segment(0xDA, &[3, 1, 0, 2, 0, 3, 0, 0, 0, 0]);
    } else {
        segment(0xDA, &[3, 1, 0, 2, 0, 3, 0, 0, 63, 0]);
    }
    let blocks = usize::from(side).div_ceil(8).pow(2);
    // all differences are 0, and all blocks are empty
    bytes.resize(bytes.len() + blocks * 3 * if progressive { 1 } else { 2 } / 2 + 1, 0);
    // Every coefficient in a scan of its own, of a few bytes: first its high bits, then one bit after the other.
    let bits = (0..14_u8).rev().map(|low| if low == 13 { low } else { (low + 1) << 4 | low });
    let all = bits.flat_map(|bits| (1..=3_u8).flat_map(move |part| (1..64_u8).map(move |at| (bits, part, at))));
    for (bits, part, at) in all.take(scans.saturating_sub(1)) {
        bytes.extend([0xFF, 0xDA, 0, 8, 1, part, 0, at, at, bits]);
        // codes of 15 bits: "the next 2^14 blocks are empty", and how many more
        let mut left = blocks;
        let mut scan = Vec::new();
        while left > 0 {
            let count = left.min((1 << 15) - 1);
            let width = count.ilog2();
            scan.push((width, count - (1 << width)));
            left -= count;
        }
        bytes.extend(end_of_blocks(&scan));
    }
    bytes.extend([0xFF, 0xD9]);
    bytes
}

/// The codes of ends of blocks: the width in 4 bits, then so many bits of the number.
fn end_of_blocks(codes: &[(u32, usize)]) -> Vec<u8> {
    let bits = codes.iter().flat_map(|&(width, rest)| {
        let code = (0..4).rev().map(move |bit| width >> bit & 1 == 1);
        code.chain((0..width).rev().map(move |bit| rest >> bit & 1 == 1))
    });
    let bits: Vec<bool> = bits.collect();
    let bytes = bits.chunks(8).map(|bits| {
        // the last byte is filled with ones
        (0..8).fold(0, |byte: u8, at| byte << 1 | u8::from(bits.get(at).copied().unwrap_or(true)))
    });
    // a byte of ones is followed by a zero
    bytes.flat_map(|byte| if byte == 0xFF { vec![byte, 0] } else { vec![byte] }).collect()
}

#[test]
fn jpeg_bombs_are_bounded() {
    for (name, bytes) in [
        ("few-bytes", jpeg(65_000, 0, 0)),
        ("comment", jpeg(23_000, 2 << 20, 0)),
        ("progressive", jpeg(23_000, 2 << 20, 2)),
        ("scans", jpeg(6_600, 0, 2600)),
    ] {
        bounded(&mut check_image(name, &bytes), &["bomb.png: cannot be decoded: ", " are too many"]);
    }
    for (name, bytes) in [("sequential", jpeg(9_400, 0, 0)), ("100-scans", jpeg(6_600, 0, 100))] {
        bounded(&mut check_image(name, &bytes), &["bomb.png: the mask is 8x8 pixels but its image is "]);
    }
}

#[test]
fn tables_are_bounded() {
    let header = "image_path,question,answer,split\n";
    let endless = [header.as_bytes(), b"ct/train_masks/a.png,", &vec![b'q'; 64 << 20]].concat();
    bounded(&mut check_table("endless.csv", &endless), &["endless.csv:2"]);
    let short = [header.as_bytes(), &b"a\n".repeat(16 << 20)].concat();
    bounded(&mut check_table("short-rows.csv", &short), &["short-rows.csv"]);
    let wide = b",".repeat(32 << 20);
    bounded(&mut check_table("wide.csv", &wide), &["wide.csv:1: the line has 33554432 bytes"]);
    let wide = [header.as_bytes(), &b"\"\n\",".repeat(8 << 20)].concat();
    bounded(&mut check_table("quoted.csv", &wide), &["quoted.csv:2: "]);
}

/// A stored zip archive.
fn archive(file: &Path, entries: &[(&str, &[u8])]) {
    let mut zip = zip::ZipWriter::new(File::create(file).unwrap());
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, content) in entries {
        zip.start_file(*name, stored).unwrap();
        zip.write_all(content).unwrap();
    }
    zip.finish().unwrap();
}

fn text(text: &str) -> Vec<u8> {
    [b"X".as_slice(), &u32::try_from(text.len()).unwrap().to_le_bytes(), text.as_bytes()].concat()
}

/// A PyTorch file with tensors over one storage of four numbers. `shape` and `strides` are pickled tuples.
fn pth(name: &str, num_tensors: usize, shape: &[u8], strides: &[u8]) -> PathBuf {
    let file = path(name);
    let storage =
        [b"(".as_slice(), &text("storage"), b"ctorch\nFloatStorage\n", &text("0"), &text("cpu"), b"K\x04tQq\x020"];
    let mut pickle = [b"\x80\x02".as_slice(), shape, b"q\x010", strides, b"q\x030", &storage.concat(), b"}("].concat();
    for number in 0..num_tensors {
        pickle.extend(text(&format!("w{number}")));
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n(h\x02K\0h\x01h\x03tR");
    }
    pickle.extend(b"u.");
    archive(&file, &[("a/data.pkl", &pickle), ("a/data/0", &[0; 16])]);
    file
}

#[test]
fn pytorch_files_are_bounded() {
    let ones = [b"(".as_slice(), &b"K\x01".repeat(100_000), b"t"].concat();
    let many = pth("shapes.pth", 10_000, &ones, &ones);
    bounded(&mut train_on_encoder(&many), &["shapes.pth"]);
    // 2^40 elements that are all the same one
    let expanded = pth("expanded.pth", 1, b"\x8a\x06\0\0\0\0\0\x01\x85", b"K\0\x85");
    bounded(&mut train_on_encoder(&expanded), &["expanded.pth"]);
    let names = pth("names.pth", 200_000, b"K\x04\x85", b"K\x01\x85");
    bounded(&mut train_on_encoder(&names), &["names.pth"]);
    let empty = path("zeros.pth");
    File::create(&empty).unwrap().set_len(4 << 30).unwrap();
    bounded(&mut train_on_encoder(&empty), &["zeros.pth"]);
}

/// A safetensors file with this header.
fn safetensors(header: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header].concat()
}

#[test]
fn safetensors_files_are_bounded() {
    let file = path("bounds.safetensors");
    let nested = b"[".repeat(1 << 20);
    let mut many = b"{".to_vec();
    for number in 0..200_000 {
        many.extend(format!("\"w{number}\":{{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}},").bytes());
    }
    many.pop();
    many.push(b'}');
    for header in [nested, many] {
        fs::write(&file, safetensors(&header)).unwrap();
        bounded(&mut train_on_encoder(&file), &["bounds.safetensors"]);
    }
    fs::write(&file, (1_u64 << 60).to_le_bytes()).unwrap();
    bounded(&mut train_on_encoder(&file), &["bounds.safetensors"]);
}

#[test]
fn a_shard_index_of_a_million_names_is_bounded() {
    for one_shard in [false, true] {
        let mut index = b"{\"weight_map\":{".to_vec();
        for number in 0..1_000_000 {
            let shard = if one_shard { 0 } else { number };
            write!(index, "\"w{number}\":\"{shard}.safetensors\",").unwrap();
        }
        index.pop();
        index.extend(b"}}");
        let file = path(if one_shard { "one-shard.index.json" } else { "shards.index.json" });
        fs::write(&file, index).unwrap();
        if one_shard {
            fs::write(path("0.safetensors"), safetensors(b"{}")).unwrap();
        }
        let name = if one_shard { "one-shard.index.json" } else { "shards.index.json" };
        bounded(&mut train_on_encoder(&file), &[name]);
    }
}

#[test]
fn descriptions_of_checkpoints_are_bounded() {
    let nested = b"[".repeat(32 << 20);
    let flat = [b"[".as_slice(), &b"0,".repeat(31 << 20), b"0]"].concat();
    for (name, bytes) in [("nested", &nested), ("flat", &flat)] {
        for file in ["model.json", "checksums.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"] {
            let folder = format!("bounds-{name}-{}", file.replace('/', "-"));
            let last = file.rsplit('/').next().unwrap();
            bounded(&mut predict_with(&folder, file, bytes), &[last]);
        }
    }
    let mut checksums = b"{\"files\":{".to_vec();
    for number in 0..500_000 {
        write!(checksums, "\"f{number}\":{{\"bytes\":0,\"sha256\":\"\"}},").unwrap();
    }
    checksums.pop();
    checksums.extend(b"}}");
    bounded(&mut predict_with("bounds-many-sums", "checksums.json", &checksums), &["bounds-many-sums"]);
}

#[test]
fn absurd_sizes_of_a_model_are_bounded() {
    let description: serde_json::Value =
        serde_json::from_slice(&fs::read(trained().0.join("best/model.json")).unwrap()).unwrap();
    for (number, (pointer, value)) in [
        ("/sizes/encoder/window_sizes", json!([7, 4096, 14, 7])),
        ("/sizes/encoder/window_sizes", json!([7, 7, 14, 100])),
        ("/sizes/encoder/depths", json!([4096, 4096, 4096, 4096])),
        ("/sizes/llm/num_hidden_layers", json!(4096)),
        ("/sizes/llm/intermediate_size", json!(1_u64 << 40)),
        ("/sizes/llm/vocab_size", json!(1 << 22)),
        ("/sizes/clip/num_hidden_layers", json!(4096)),
        ("/sizes/decoder/hidden_dim", json!(1 << 18)),
        ("/sizes/decoder/feed_forward_dim", json!(1 << 18)),
        ("/sizes/lora/rank", json!(1 << 18)),
    ]
    .into_iter()
    .enumerate()
    {
        let mut changed = description.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        let name = format!("bounds-sizes-{number}");
        let expected = if pointer == "/sizes/llm/intermediate_size" { "out of memory" } else { name.as_str() };
        bounded(&mut predict_with(&name, "model.json", changed.to_string().as_bytes()), &[expected]);
    }
}

#[test]
fn configs_are_bounded() {
    let file = path("bounds.toml");
    let mut keys = "preset = \"tiny\"\n[model.sizes.llm]\n".to_owned();
    for number in 0..50_000 {
        writeln!(keys, "key{number} = 1").unwrap();
    }
    let nested = format!("a = {}", "[".repeat(8 << 20));
    let flat = format!("a = [{}]", "0,".repeat(8 << 20));
    for text in [keys, nested, flat] {
        fs::write(&file, text).unwrap();
        let mut command = prsmed();
        command.args(["train", "--print-config", "--config"]).arg(&file);
        bounded(&mut command, &["bounds.toml"]);
    }
}

#[test]
fn journals_of_pairs_are_bounded() {
    let root = copy(phantoms(), "bounds-extra");
    for entry in fs::read_dir(root.join("annotations")).unwrap() {
        let csv = entry.unwrap().path();
        let text = fs::read_to_string(&csv).unwrap();
        fs::write(csv, text.replace(",val\n", ",train\n").replace(",test\n", ",train\n")).unwrap();
    }
    let nested = [b"[".repeat(32 << 20).as_slice(), b"\n{}\n"].concat();
    let pair = b"{\"name\":\"a\",\"class\":\"c\",\"source_sha256\":\"\"}\n";
    let many = [pair.repeat(500_000).as_slice(), b"{}\n{}\n"].concat();
    for bytes in [nested, many] {
        fs::write(root.join("manifest.jsonl"), bytes).unwrap();
        let mut command = train(phantoms(), &path("bounds-never"), &["train.max_steps=1"]);
        bounded(command.arg("--extra").arg(&root), &["manifest.jsonl"]);
    }
}

#[test]
fn tokenizers_of_a_base_are_bounded() {
    let nested = [b"{\"added_tokens\":".as_slice(), &b"[".repeat(32 << 20)].concat();
    bounded(&mut train_on_base("bounds-tokenizer", "tokenizer.json", &nested), &["tokenizer.json"]);
    let config = [b"{\"a\":[".as_slice(), &b"0,".repeat(31 << 20), b"0]}"].concat();
    bounded(&mut train_on_base("bounds-base-config", "config.json", &config), &["config.json"]);
    let mut pieces = b"{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{\"\":0".to_vec();
    for number in 1..1_300_000 {
        write!(pieces, ",\"{number}\":{number}").unwrap();
    }
    pieces.extend(b"}}}");
    bounded(&mut train_on_base("bounds-vocabulary", "tokenizer.json", &pieces), &["tokenizer.json"]);
}
