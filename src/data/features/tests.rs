use std::fs;

use super::*;

const SHAPE: FeatureShape = FeatureShape { tokens: 3, width: 5, dtype: Dtype::Bf16 };
const TOWER: TowerIdentity = [7; 32];
const LIMIT: u64 = 1 << 20;

fn features(number: u8) -> (Key, Vec<u8>) {
    (key_of(&[number]), vec![number; SHAPE.bytes()])
}

fn open(folder: &Path) -> Features {
    Features::on_disk(folder, &TOWER, SHAPE, LIMIT).unwrap()
}

/// The one file in `folder`.
fn file(folder: &Path) -> std::path::PathBuf {
    let mut files = fs::read_dir(folder).unwrap();
    let only = files.next().unwrap().unwrap().path();
    assert!(files.next().is_none());
    only
}

/// A cache file with the features of images 0..`count`.
fn filled(count: u8) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path());
    for number in 0..count {
        let (key, bytes) = features(number);
        assert_eq!(cache.put(&key, &bytes), None);
    }
    folder
}

/// Which of the images 0..10 are cached; checks their features.
fn served(cache: &Features) -> Vec<u8> {
    (0..10)
        .filter(|&number| {
            let (key, bytes) = features(number);
            cache.get(&key).is_some_and(|found| {
                assert_eq!(*found, *bytes, "image {number}");
                true
            })
        })
        .collect()
}

#[test]
fn memory_keeps_the_first_features_up_to_the_limit() {
    let cache = Features::in_memory(SHAPE, 2 * SHAPE.bytes() as u64 + 1);
    for number in 0..4 {
        let (key, bytes) = features(number);
        cache.put(&key, &bytes);
        cache.put(&key, &vec![99; SHAPE.bytes()]);
    }
    assert_eq!((served(&cache), cache.num_images()), (vec![0, 1], 2));
}

#[test]
fn a_later_run_reads_cached_features() {
    let folder = filled(3);
    let cache = open(folder.path());
    assert_eq!(served(&cache), [0, 1, 2]);
    let (key, bytes) = features(5);
    cache.put(&key, &bytes);
    drop(cache);
    assert_eq!(served(&open(folder.path())), [0, 1, 2, 5]);
}

#[test]
fn a_cache_file_behind_a_link_is_read_but_never_written() {
    let (real, folder) = (filled(3), tempfile::tempdir().unwrap());
    let path = file_of(folder.path(), &TOWER);
    std::os::unix::fs::symlink(file(real.path()), &path).unwrap();
    let whole = fs::read(&path).unwrap();
    let cache = open(folder.path());
    assert_eq!(served(&cache), [0, 1, 2]);
    let (key, bytes) = features(5);
    cache.put(&key, &bytes);
    drop(cache);
    assert!(fs::read(&path).unwrap() == whole);

    let precious = folder.path().join("thesis.txt");
    fs::write(&precious, "thesis").unwrap();
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&precious, &path).unwrap();
    assert!(open(folder.path()).num_images() == 0);
    assert_eq!(fs::read(&precious).unwrap(), b"thesis");
}

#[test]
fn another_tower_or_size_shares_no_features() {
    let folder = filled(3);
    let other = Features::on_disk(folder.path(), &[8; 32], SHAPE, LIMIT).unwrap();
    assert_eq!(served(&other), [0_u8; 0]);
    // also if the file has that name: the header identifies the tower
    let path = file_of(folder.path(), &TOWER);
    fs::copy(&path, file_of(folder.path(), &[8; 32])).unwrap();
    drop(other);
    assert!(Features::on_disk(folder.path(), &[8; 32], SHAPE, LIMIT).unwrap().num_images() == 0);
    let wide = FeatureShape { width: 6, ..SHAPE };
    assert!(Features::on_disk(folder.path(), &TOWER, wide, LIMIT).unwrap().num_images() == 0);
}

fn file_of(folder: &Path, identity: &TowerIdentity) -> std::path::PathBuf {
    folder.join(disk::name_of(identity))
}

#[test]
fn a_truncated_file_keeps_complete_records_and_is_appended_to() {
    let whole = fs::read(file(filled(3).path())).unwrap();
    for length in 0..whole.len() {
        let folder = tempfile::tempdir().unwrap();
        let path = file_of(folder.path(), &TOWER);
        fs::write(&path, &whole[..length]).unwrap();
        let cache = open(folder.path());
        let records = length.saturating_sub(64) / 128;
        assert_eq!(served(&cache).len(), records, "{length} bytes");
        for number in 0..3 {
            let (key, bytes) = features(number);
            assert_eq!(cache.put(&key, &bytes), None);
        }
        drop(cache);
        assert!(fs::read(&path).unwrap() == whole, "{length} bytes, written again");
    }
}

#[test]
fn a_damaged_record_is_a_miss_and_does_not_hide_others() {
    let folder = filled(3);
    let path = file(folder.path());
    let whole = fs::read(&path).unwrap();
    // the second record: its key, its checks, its features
    for at in [64 + 128, 64 + 128 + 40, 64 + 128 + 50, 64 + 128 + 64, 64 + 128 + 64 + 29] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&path, bytes).unwrap();
        let cache = open(folder.path());
        assert_eq!(served(&cache), [0, 2], "byte {at}");
        let (key, bytes) = features(1);
        cache.put(&key, &bytes);
        assert_eq!(served(&cache), [0, 1, 2]);
        drop(cache);
        assert_eq!(served(&open(folder.path())), [0, 1, 2]);
    }
    // zeros after a crash
    fs::write(&path, [&whole[..64 + 256], &[0; 128]].concat()).unwrap();
    assert_eq!(served(&open(folder.path())), [0, 1]);
}

#[test]
fn a_second_process_reads_but_does_not_write() {
    let folder = filled(2);
    let first = open(folder.path());
    // a lock belongs to the open file, so a second open file acts like another process
    let second = open(folder.path());
    assert!(second.describe().contains("only reads") && !first.describe().contains("only reads"));
    let (key, bytes) = features(4);
    second.put(&key, &bytes);
    assert_eq!((served(&first), served(&second)), (vec![0, 1], vec![0, 1]));
    first.put(&key, &bytes);
    assert_eq!((served(&first), served(&second)), (vec![0, 1, 4], vec![0, 1]));
    drop((first, second));
    let third = open(folder.path());
    assert_eq!(served(&third), [0, 1, 4]);
    assert!(!third.describe().contains("only reads"), "the lock ends with its owner");
}

#[test]
fn the_limit_is_respected_and_described() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Features::on_disk(folder.path(), &TOWER, SHAPE, 2 * SHAPE.bytes() as u64).unwrap();
    for number in 0..4 {
        let (key, bytes) = features(number);
        cache.put(&key, &bytes);
    }
    assert_eq!(served(&cache), [0, 1]);
    assert!(cache.describe().contains("2 images, room for 2 of 30 B"), "{}", cache.describe());
}

#[test]
fn a_full_disk_gives_one_message_and_keeps_stored_features() {
    let Ok(full) = fs::File::options().write(true).open("/dev/full") else { panic!("Linux has /dev/full") };
    let folder = filled(2);
    let cache = open(folder.path());
    let Storage::Disk(inner) = &cache.storage else { unreachable!() };
    let own = inner.lock().unwrap().swap_file(Arc::new(full));
    let (key, bytes) = features(4);
    let message = cache.put(&key, &bytes).expect("a note");
    assert!(message.contains("No space left"), "{message}");
    assert_eq!(cache.put(&key, &bytes), None, "once");
    inner.lock().unwrap().swap_file(own);
    assert_eq!(served(&cache), [0, 1]);
}
