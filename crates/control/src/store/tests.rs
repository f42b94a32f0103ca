use super::*;

fn put(key: &str, value: &str) -> Write {
    Write { key: key.into(), value: Some(value.into()) }
}

fn gone(key: &str) -> Write {
    Write { key: key.into(), value: None }
}

/// What every store does. `open` opens it anew; the one before is closed then.
fn a_store_keeps_what_it_is_given(open: &dyn Fn() -> Box<dyn Store>) {
    let store = open();
    assert_eq!(store.load().unwrap(), Snapshot::default());
    store.commit(1, &[put("meta", "m"), put("object/vrnic/a", "1"), put("object/vrnic/b", "2")]).unwrap();
    store.commit(2, &[gone("object/vrnic/a"), put("object/vrnic/b", "3"), gone("object/vrnic/never")]).unwrap();
    let e = store.commit(2, &[put("object/vrnic/c", "4")]).unwrap_err();
    assert!(matches!(e, StoreError::Moved { has: 2, expected: 1 }), "{e}");
    assert!(store.commit(4, &[]).is_err());
    drop(store);
    let store = open();
    assert_eq!(
        store.load().unwrap(),
        Snapshot { revision: 2, records: vec![put("meta", "m"), put("object/vrnic/b", "3")] }
    );
    let many: Vec<Write> = (0..1_000).map(|n| put(&format!("object/vrnic/n{n:04}"), "x")).collect();
    store.commit(3, &many).unwrap();
    drop(store);
    assert_eq!(open().load().unwrap().records.len(), 1_002);
}

fn dir() -> std::path::PathBuf {
    let mut random = [0; 8];
    getrandom::fill(&mut random).unwrap();
    let dir = std::env::temp_dir().join(format!("unirdma-store-{:016x}", u64::from_ne_bytes(random)));
    std::fs::create_dir(&dir).unwrap();
    dir
}

#[test]
fn a_file_keeps_what_it_is_given() {
    let dir = dir();
    a_store_keeps_what_it_is_given(&|| open(None, &dir).unwrap());
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_file_is_of_one_centre_and_only_its_owner_reads_it() {
    use std::os::unix::fs::PermissionsExt;
    let dir = dir();
    let store = open(None, &dir).unwrap();
    let text = open(None, &dir).err().unwrap().to_string();
    assert!(text.contains("fleet.redb is in use by another `unirdma control`"), "{text}");
    assert_eq!(std::fs::metadata(dir.join("fleet.redb")).unwrap().permissions().mode() & 0o777, 0o600);
    drop(store);
    std::fs::write(dir.join("junk"), "no store at all").unwrap();
    let text = open(dir.join("junk").to_str(), &dir).err().unwrap().to_string();
    assert!(text.contains("junk cannot be opened"), "{text}");
    assert!(open(Some("ftp://x"), &dir).err().unwrap().to_string().contains("`ftp://...` is of no kind"));
    std::fs::remove_dir_all(dir).unwrap();
}
