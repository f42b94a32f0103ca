use std::collections::{BTreeMap, BTreeSet};

use super::etcd::{Lost, News};
use super::*;

fn put(key: &str, value: &str) -> Write {
    Write { key: key.into(), value: Some(value.into()) }
}

fn gone(key: &str) -> Write {
    Write { key: key.into(), value: None }
}

/// `n` records, larger than what a transaction of etcd takes.
fn many(n: usize) -> Vec<Write> {
    (0..n).map(|n| put(&format!("object/vrnic/n{n:05}"), &"x".repeat(200))).collect()
}

/// Tests any kind of store. `open` opens it again, after the former one was closed.
async fn a_store_keeps_what_it_is_given(open: &dyn Fn() -> Opened) {
    let opened = open();
    let store = opened.store();
    assert_eq!(store.load().await.unwrap(), Snapshot::default());
    store.commit(1, &[put("meta", "m"), put("object/vrnic/a", "1"), put("object/vrnic/b", "2")]).await.unwrap();
    let next = [gone("object/vrnic/a"), put("object/vrnic/b", "3"), gone("object/vrnic/never")];
    store.commit(2, &next).await.unwrap();
    let e = store.commit(2, &[put("object/vrnic/c", "4")]).await.unwrap_err();
    assert!(matches!(e, StoreError::Moved { has: 2, expected: 1 }), "{e}");
    assert!(store.commit(4, &[]).await.is_err());
    drop(opened);
    let opened = open();
    let store = opened.store();
    let records = vec![put("meta", "m"), put("object/vrnic/b", "3")];
    assert_eq!(store.load().await.unwrap(), Snapshot { revision: 2, records });
    store.commit(3, &many(20_000)).await.unwrap();
    drop(opened);
    let opened = open();
    let store = opened.store();
    assert_eq!(store.load().await.unwrap().records.len(), 20_002);
    let all: Vec<Write> = many(20_000).into_iter().map(|w| gone(&w.key)).collect();
    store.commit(4, &all).await.unwrap();
    assert!(store.commit(4, &many(1_000)).await.is_err());
    store.commit(5, &[put("object/vrnic/c", "5")]).await.unwrap();
    let records = vec![put("meta", "m"), put("object/vrnic/b", "3"), put("object/vrnic/c", "5")];
    assert_eq!(store.load().await.unwrap(), Snapshot { revision: 5, records });
    // A copy from another store sets the revision.
    let e = store.advance(0, 900, &[put("x", "1")]).await.unwrap_err();
    assert!(matches!(e, StoreError::Moved { has: 5, expected: 0 }), "{e}");
    store.advance(5, 900, &many(1_000)).await.unwrap();
    store.commit(901, &[gone("meta")]).await.unwrap();
    assert_eq!(opened.load_at_rest().await.unwrap().revision, 901);
    assert_eq!(store.load().await.unwrap().records.len(), 1_002);
}

fn dir() -> std::path::PathBuf {
    let mut random = [0; 8];
    getrandom::fill(&mut random).unwrap();
    let dir = std::env::temp_dir().join(format!("unirdma-store-{:016x}", u64::from_ne_bytes(random)));
    std::fs::create_dir(&dir).unwrap();
    dir
}

#[tokio::test]
async fn a_file_keeps_what_it_is_given() {
    let dir = dir();
    a_store_keeps_what_it_is_given(&|| open(None, &dir).unwrap()).await;
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

#[tokio::test]
async fn what_etcd_toml_says_is_checked() {
    let dir = dir();
    for (text, what) in [
        ("colour = 1", "unknown field `colour`"),
        ("user = \"u\"", "only one of user and password"),
        ("key = \"k.pem\"", "no authority"),
        ("authority = \"none.pem\"", "none.pem"),
    ] {
        std::fs::write(dir.join("etcd.toml"), text).unwrap();
        let e = open(Some("etcd://127.0.0.1:1"), &dir).err().unwrap().to_string();
        assert!(e.contains(what) && !e.contains('\n'), "{text}: {e}");
    }
    std::fs::write(dir.join("etcd.toml"), "user = \"u\"\npassword = \"p\"").unwrap();
    let store = open(Some("etcd://127.0.0.1:1"), &dir).unwrap();
    let e = store.store().load().await.unwrap_err().to_string();
    assert!(e.starts_with("the store etcd://127.0.0.1:1/unirdma does not answer: "), "{e}");
    std::fs::remove_dir_all(dir).unwrap();
}

/// The etcd that `cargo xtask test --only etcd` has started, with a separate prefix for this test.
fn etcd(prefix: &str) -> EtcdStore {
    let address = std::env::var("UNIRDMA_TEST_ETCD").expect("run this by `cargo xtask test --only etcd`");
    let none = std::env::temp_dir().join("unirdma-no-etcd-toml");
    EtcdStore::open(&format!("{address}/{prefix}"), &none).unwrap()
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test --only etcd"]
async fn etcd_keeps_what_it_is_given() {
    a_store_keeps_what_it_is_given(&|| Opened::Etcd(Arc::new(etcd("keeps")))).await;
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test --only etcd"]
async fn etcd_of_a_centre_that_was_replaced_takes_nothing_of_it() {
    let (a, b) = (etcd("fence"), etcd("fence"));
    a.commit(1, &[put("meta", "m")]).await.unwrap();
    let (first, _) = a.begin(5, "https://a").await.unwrap();
    let (second, _) = b.begin(5, "https://b").await.unwrap();
    let (office, head) = a.campaign(first, "https://a").await.unwrap().unwrap();
    assert_eq!(head, 1);
    assert_eq!(a.campaign(first, "https://a").await.unwrap(), Some((office, 1)));
    assert_eq!(b.campaign(second, "https://b").await.unwrap(), None);
    a.set_office(Some(office)).await;
    a.commit(2, &[put("meta", "n")]).await.unwrap();
    a.end(first).await.unwrap();
    assert!(!a.prolong(first).await.unwrap() && b.prolong(second).await.unwrap());
    assert!(matches!(a.commit(3, &[put("meta", "late")]).await, Err(StoreError::Deposed)));
    assert!(matches!(a.commit(3, &many(10_000)).await, Err(StoreError::Deposed)));
    let (office, head) = b.campaign(second, "https://b").await.unwrap().unwrap();
    assert_eq!(head, 2);
    b.set_office(Some(office)).await;
    b.commit(3, &[put("meta", "b")]).await.unwrap();
    assert!(matches!(a.commit(3, &[put("meta", "late")]).await, Err(StoreError::Deposed | StoreError::Moved { .. })));
    let end = b.load().await.unwrap();
    assert_eq!((end.revision, end.records), (3, vec![put("meta", "b")]));
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test --only etcd"]
async fn etcd_tells_followers_each_change_once_and_as_a_whole() {
    let (a, b) = (etcd("follow"), etcd("follow"));
    a.commit(1, &[put("meta", "m")]).await.unwrap();
    let (snapshot, news, mut follower) = b.list().await.unwrap();
    assert!(snapshot.revision == 1 && matches!(news.as_slice(), [News::Allocator { url: None, .. }]), "{news:?}");
    let (lease, _) = a.begin(5, "https://a").await.unwrap();
    let (office, _) = a.campaign(lease, "https://a").await.unwrap().unwrap();
    a.set_office(Some(office)).await;
    a.commit(2, &[put("x", "1"), gone("meta")]).await.unwrap();
    a.commit(3, &many(5_000)).await.unwrap();
    a.commit(4, &[put("y", "1")]).await.unwrap();
    a.end(lease).await.unwrap();
    // State of a follower: the records, the centre that allocates, and the centres that exist.
    let known =
        |records: Vec<Write>| -> BTreeMap<String, Write> { records.into_iter().map(|w| (w.key.clone(), w)).collect() };
    let (mut at, mut state) = (snapshot.revision, known(snapshot.records));
    let (mut allocators, mut centres, mut listed) = (Vec::new(), BTreeSet::new(), false);
    while at < 4 || !centres.is_empty() || !(listed || allocators.contains(&None)) {
        let news = match b.next(&mut follower).await {
            Ok(news) => news,
            // The pieces of the large change were removed before the follower read them. It reads everything, and knows
            // no more than that.
            Err(Lost::Forgotten) => {
                let (snapshot, news, again) = b.list().await.unwrap();
                assert!((3..=4).contains(&snapshot.revision));
                (at, state, listed) = (snapshot.revision, known(snapshot.records), true);
                centres.clear();
                follower = again;
                news
            }
            Err(Lost::Away(e)) => panic!("{e}"),
        };
        for n in news {
            match n {
                News::Change { revision, writes } => {
                    assert_eq!(revision, at + 1, "each once, and in their order");
                    at = revision;
                    for w in writes {
                        if w.value.is_some() {
                            state.insert(w.key.clone(), w);
                        } else {
                            state.remove(&w.key);
                        }
                    }
                }
                News::Allocator { url, .. } => allocators.push(url),
                News::Centre { id, url: Some(_) } => drop(centres.insert(id)),
                News::Centre { id, url: None } => drop(centres.remove(&id)),
            }
        }
    }
    let mut end = many(5_000);
    end.extend([put("x", "1"), put("y", "1")]);
    assert!(at == 4 && state == known(end), "revision {at}, {} records", state.len());
    assert_eq!(allocators.last(), Some(&None));
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test --only etcd"]
async fn etcd_keeps_a_large_change_whose_centre_died_before_or_after_it_held() {
    let (a, b) = (etcd("torn"), etcd("torn"));
    a.commit(1, &[put("meta", "m")]).await.unwrap();
    // The centre died before the change was made: no record of it is there, and its pieces are removed.
    a.stage_only(2, &many(300)).await;
    assert_eq!(b.load().await.unwrap().records, [put("meta", "m")]);
    b.commit(2, &[put("x", "1")]).await.unwrap();
    // The centre died after the change was made: all records are there, also for the next change.
    let pieces = a.stage_only(3, &many(300)).await;
    a.hold_only(3, pieces).await;
    let all = etcd("torn").load().await.unwrap();
    assert_eq!((all.revision, all.records.len()), (3, 302));
    let c = etcd("torn");
    c.commit(4, &[gone("object/vrnic/n00000")]).await.unwrap();
    let all = c.load().await.unwrap();
    assert_eq!((all.revision, all.records.len()), (4, 301));
}
