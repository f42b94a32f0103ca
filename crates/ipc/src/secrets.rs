//! The secrets of a group. Processes pass them to each other as a memory file, so that they are in no message, log or
//! core dump.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ring::hkdf;
use rustix::fs::{FileType, MemfdFlags};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::vrnic::MAX_NAME_BYTES;

/// Bytes that sealing adds to a packet: a tag of 16 bytes, the index of the session at the receiver (4 bytes), and the
/// packet's number (8 bytes).
pub const TAIL_BYTES: usize = 16 + 4 + 8;
/// Bytes of a secret.
pub const SECRET_BYTES: usize = 32;
/// Most secrets that a group has at a time.
const MAX_SECRETS: usize = 3;
/// Most other groups with which a group has secrets.
const MAX_PAIRS: usize = 4096;
/// Longest file with the secrets of a group. Each set has the length of the other group's name (1 byte), the name, the
/// number of the secret to send with (1 byte), the count of secrets (1 byte), and each secret with its number.
const MAX_FILE_BYTES: usize = (1 + MAX_PAIRS) * (1 + MAX_NAME_BYTES + 2 + MAX_SECRETS * (1 + SECRET_BYTES));

/// A file that is no secret, or secrets that a group cannot have.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SecretError {
    #[error("the file of the secret: {0}")]
    Read(#[from] io::Error),
    #[error("a secret comes from an ordinary file")]
    NotRegular,
    /// Permissions of the file.
    #[error("others than its owner may use the file of the secret (mode {0:03o}); `chmod 600` it")]
    Mode(u32),
    #[error(
        "the file has no secret: that is 32 random bytes or 64 hexadecimal digits (`unirdma secret FILE` makes one)"
    )]
    NoSecret,
    #[error("a group has 1 to {MAX_SECRETS} secrets, not {0}")]
    Count(usize),
    #[error("two secrets of a group have the same number")]
    SameNumber,
    #[error("the group has no secret {0} to send with")]
    NoneToSend(u8),
    #[error(
        "the new secret has the number of one that the group has; make another one, since hosts could not tell them apart"
    )]
    NumberTaken,
    #[error("a group has secrets with {MAX_PAIRS} other groups at most")]
    TooManyPairs,
}

/// A secret and its number, by which hosts distinguish the secrets of a group.
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct Secret {
    id: u8,
    /// Allocated separately, so that a growing list leaves no copy in memory.
    key: Box<[u8; SECRET_BYTES]>,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret {}", self.id)
    }
}

impl Secret {
    /// A secret with a given number.
    pub fn new(id: u8, key: &[u8; SECRET_BYTES]) -> Secret {
        Secret { id, key: Box::new(*key) }
    }

    /// A secret whose number is derived from it, so that hosts that read the same file use the same number.
    pub fn numbered(key: &[u8; SECRET_BYTES]) -> Secret {
        let mut id = [0];
        // One byte can always be derived.
        let _ = hkdf::Salt::new(hkdf::HKDF_SHA256, b"unirdma number")
            .extract(key)
            .expand(&[], Length(1))
            .and_then(|okm| okm.fill(&mut id));
        Secret::new(id[0], key)
    }

    /// Its number.
    pub fn id(&self) -> u8 {
        self.id
    }

    /// Its bytes.
    pub fn key(&self) -> &[u8; SECRET_BYTES] {
        &self.key
    }

    /// Reads a secret from an administrator's file: 32 bytes, or 64 hexadecimal digits.
    ///
    /// # Errors
    /// Other users can read the file, or its content is no secret.
    pub fn read(file: BorrowedFd<'_>) -> Result<Secret, SecretError> {
        let stat = rustix::fs::fstat(file).map_err(io::Error::from)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(SecretError::NotRegular);
        }
        if stat.st_mode & 0o077 != 0 {
            return Err(SecretError::Mode(stat.st_mode & 0o777));
        }
        let mut bytes = Zeroizing::new([0; 2 * SECRET_BYTES + 2]);
        let n = read_at(file, &mut bytes[..])?;
        let mut key = Zeroizing::new([0; SECRET_BYTES]);
        if n == SECRET_BYTES {
            key.copy_from_slice(&bytes[..n]);
            return Ok(Secret::numbered(&key));
        }
        let text = bytes[..n].strip_suffix(b"\n").unwrap_or(&bytes[..n]);
        let digit = |b: u8| (b as char).to_digit(16).map(|d| d as u8);
        if text.len() == 2 * SECRET_BYTES {
            let pairs = text.chunks_exact(2).map(|p| Some(digit(p[0])? << 4 | digit(p[1])?));
            if key.iter_mut().zip(pairs).all(|(k, pair)| pair.map(|p| *k = p).is_some()) {
                return Ok(Secret::numbered(&key));
            }
        }
        Err(SecretError::NoSecret)
    }
}

struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// The secrets of a group, oldest first. This host sends with one of them and accepts packets sealed with any of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secrets {
    all: Vec<Secret>,
    send: u8,
}

impl Secrets {
    /// Up to `MAX_SECRETS` secrets, and the number of the one to send with. For a host that does not have that
    /// secret, the latest other secret that both hosts have is used.
    ///
    /// # Errors
    /// Too many secrets, two with one number, or the one to send with is missing.
    pub fn new(all: Vec<Secret>, send: u8) -> Result<Secrets, SecretError> {
        if all.is_empty() || all.len() > MAX_SECRETS {
            return Err(SecretError::Count(all.len()));
        }
        if (1..all.len()).any(|i| all[..i].iter().any(|s| s.id == all[i].id)) {
            return Err(SecretError::SameNumber);
        }
        if !all.iter().any(|s| s.id == send) {
            return Err(SecretError::NoneToSend(send));
        }
        Ok(Secrets { all, send })
    }

    /// One secret.
    pub fn one(secret: Secret) -> Secrets {
        let send = secret.id;
        Secrets { all: vec![secret], send }
    }

    /// Makes `secret` the one to send with. Earlier secrets stay accepted, except the oldest if there are too many.
    ///
    /// # Errors
    /// Another secret has the same number.
    pub fn rotate(&mut self, secret: Secret) -> Result<(), SecretError> {
        if self.all.iter().any(|s| s.id == secret.id && s.key != secret.key) {
            return Err(SecretError::NumberTaken);
        }
        self.send = secret.id;
        self.all.retain(|s| s.id != secret.id);
        self.all.push(secret);
        if self.all.len() > MAX_SECRETS {
            self.all.remove(0);
        }
        Ok(())
    }

    /// Accepts only the secret with which this host sends from now on.
    pub fn forget_others(&mut self) {
        self.all.retain(|s| s.id == self.send);
    }

    /// Numbers of all secrets.
    pub fn ids(&self) -> Vec<u8> {
        self.all.iter().map(|s| s.id).collect()
    }

    /// Number of the secret with which this host sends.
    pub fn sends_with(&self) -> u8 {
        self.send
    }

    /// The secrets with which this host may send, in order of preference.
    pub fn by_preference(&self) -> impl Iterator<Item = &Secret> {
        let first = self.all.iter().filter(|s| s.id == self.send);
        first.chain(self.all.iter().rev().filter(|s| s.id != self.send))
    }
}

/// All secrets of a group on a host: the group's own secrets, and the secrets of its pairs with joined groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupSecrets {
    /// For packets within the group. Without own secrets and without secrets of a pair, packets are not sealed.
    pub own: Option<Secrets>,
    /// For packets between the group and another one, by the other group's name. If the group has secrets of its own,
    /// no packets pass between it and a group that is missing here.
    pub with: BTreeMap<String, Secrets>,
}

impl GroupSecrets {
    /// True if there are none at all.
    pub fn is_empty(&self) -> bool {
        self.own.is_none() && self.with.is_empty()
    }

    /// The secrets of the group, or of its pair with another group.
    pub fn of(&self, with: Option<&str>) -> Option<&Secrets> {
        with.map_or(self.own.as_ref(), |other| self.with.get(other))
    }

    /// Replaces the secrets of the group, or of its pair with another group.
    ///
    /// # Errors
    /// There is no room for another pair.
    pub fn set(&mut self, with: Option<&str>, secrets: Option<Secrets>) -> Result<(), SecretError> {
        let Some(other) = with else {
            self.own = secrets;
            return Ok(());
        };
        match secrets {
            Some(s) => _ = self.with.insert(other.into(), s),
            None => _ = self.with.remove(other),
        }
        if self.with.len() > MAX_PAIRS {
            self.with.remove(other);
            return Err(SecretError::TooManyPairs);
        }
        Ok(())
    }

    /// Writes the secrets to a new memory file.
    ///
    /// # Errors
    /// Errors of `memfd_create(2)` and `pwrite(2)`.
    pub fn to_file(&self) -> io::Result<OwnedFd> {
        let all = self.own.iter().map(|s| ("", s)).chain(self.with.iter().map(|(name, s)| (name.as_str(), s)));
        let bytes_of = |(name, s): (&str, &Secrets)| 1 + name.len() + 2 + s.all.len() * (1 + SECRET_BYTES);
        // Allocated in full size, so that growing leaves no copy in memory.
        let mut bytes = Zeroizing::new(Vec::with_capacity(all.clone().map(bytes_of).sum()));
        for (name, s) in all {
            bytes.push(name.len() as u8);
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(&[s.send, s.all.len() as u8]);
            for secret in &s.all {
                bytes.push(secret.id);
                bytes.extend_from_slice(&secret.key[..]);
            }
        }
        let file = rustix::fs::memfd_create(c"unirdma secrets", MemfdFlags::CLOEXEC)?;
        let mut written = 0;
        while written < bytes.len() {
            match rustix::io::pwrite(&file, &bytes[written..], written as u64)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                n => written += n,
            }
        }
        Ok(file)
    }

    /// Reads the secrets from such a file.
    ///
    /// # Errors
    /// The file has no secrets, or is malformed.
    pub fn of_file(file: impl AsFd) -> io::Result<GroupSecrets> {
        let size = usize::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(usize::MAX);
        if size == 0 || size > MAX_FILE_BYTES {
            return Err(invalid("a file without secrets came"));
        }
        let mut bytes = Zeroizing::new(vec![0; size]);
        if read_at(file.as_fd(), &mut bytes[..])? != size {
            return Err(invalid("a file of secrets came that is shorter than it says"));
        }
        let mut found = GroupSecrets::default();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (name, secrets, after) = read_set(rest).ok_or_else(|| invalid("a file came that has no secrets"))?;
            found.set((!name.is_empty()).then_some(name), Some(secrets.map_err(invalid)?)).map_err(invalid)?;
            rest = after;
        }
        Ok(found)
    }
}

fn invalid(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// The set of secrets at the start of `bytes`: the other group's name, the secrets, and the remaining bytes; `None` if
/// there is no set.
fn read_set(bytes: &[u8]) -> Option<(&str, Result<Secrets, SecretError>, &[u8])> {
    let (&length, rest) = bytes.split_first()?;
    let (name, rest) = rest.split_at_checked(length.into())?;
    let (&[send, n], rest) = rest.split_first_chunk()?;
    let (secrets, rest) = rest.split_at_checked(usize::from(n) * (1 + SECRET_BYTES))?;
    let mut all = Vec::with_capacity(n.into());
    for s in secrets.chunks_exact(1 + SECRET_BYTES) {
        all.push(Secret::new(s[0], s[1..].first_chunk()?));
    }
    Some((std::str::from_utf8(name).ok()?, Secrets::new(all, send), rest))
}

/// Reads a file from its start; returns the number of bytes, at most the length of `bytes`.
fn read_at(file: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<usize> {
    let mut n = 0;
    while n < bytes.len() {
        match rustix::io::pread(file, &mut bytes[n..], n as u64) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt;

    fn secret(n: u8) -> Secret {
        Secret::numbered(&[n; SECRET_BYTES])
    }

    #[test]
    fn files_with_secrets_are_for_their_owner_only() {
        let path = std::env::temp_dir().join(format!("unirdma-secret-{}", std::process::id()));
        let read = |content: &[u8], mode: u32| {
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            Secret::read(File::open(&path).unwrap().as_fd())
        };
        assert_eq!(read(&[7; 32], 0o600).unwrap(), secret(7));
        assert_eq!(read("07".repeat(32).as_bytes(), 0o400).unwrap(), secret(7));
        assert_eq!(read(("aB".repeat(32) + "\n").as_bytes(), 0o600).unwrap(), secret(0xab));
        for mode in [0o640, 0o604, 0o610, 0o660] {
            let e = read(&[7; 32], mode).unwrap_err().to_string();
            assert!(e.contains(&format!("mode {mode:o}")) && e.contains("chmod 600"), "{e}");
        }
        for content in [&[7; 31][..], &[7; 33], b"", "0g".repeat(32).as_bytes(), "07".repeat(33).as_bytes()] {
            assert!(matches!(read(content, 0o600), Err(SecretError::NoSecret)));
        }
        std::fs::remove_file(&path).unwrap();
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(matches!(Secret::read(a.as_fd()), Err(SecretError::NotRegular)));
        assert_eq!(format!("{:?}", secret(7)), format!("Secret {}", secret(7).id()), "the key is not shown");
    }

    #[test]
    fn rotation_keeps_those_before() {
        let mut s = Secrets::one(secret(1));
        for n in 2..=4 {
            s.rotate(secret(n)).unwrap();
            assert_eq!(s.sends_with(), secret(n).id());
        }
        assert_eq!(s.ids(), [2, 3, 4].map(|n| secret(n).id()));
        let order = |s: &Secrets| s.by_preference().map(Secret::id).collect::<Vec<_>>();
        assert_eq!(order(&s), [4, 3, 2].map(|n| secret(n).id()));
        s.rotate(secret(2)).unwrap();
        assert_eq!(order(&s), [2, 4, 3].map(|n| secret(n).id()), "an old one is the current one again");
        s.forget_others();
        assert_eq!(s, Secrets::one(secret(2)));
        assert!(s.rotate(Secret::new(secret(2).id(), &[9; 32])).is_err());
        assert!(Secrets::new(vec![secret(1)], secret(2).id()).is_err() && Secrets::new(Vec::new(), 0).is_err());
        assert!(Secrets::new(vec![secret(1), secret(1)], secret(1).id()).is_err());
    }

    #[test]
    fn a_file_has_all_secrets_and_another_one_is_refused() {
        let mut two = Secrets::one(secret(1));
        two.rotate(secret(2)).unwrap();
        let with = |names: &[&str]| names.iter().map(|n| (n.to_string(), two.clone())).collect();
        let sets = [
            GroupSecrets { own: Some(two.clone()), with: BTreeMap::new() },
            GroupSecrets { own: None, with: with(&["red"]) },
            GroupSecrets { own: Some(Secrets::one(secret(3))), with: with(&["green", "red"]) },
        ];
        for set in sets {
            let file = set.to_file().unwrap();
            assert_eq!(GroupSecrets::of_file(&file).unwrap(), set);
            let size = rustix::fs::fstat(&file).unwrap().st_size as u64;
            rustix::fs::ftruncate(&file, size - 1).unwrap();
            assert!(GroupSecrets::of_file(&file).is_err(), "cut short");
            rustix::fs::ftruncate(&file, size + 1).unwrap();
            assert!(GroupSecrets::of_file(&file).is_err(), "too long");
        }
        assert!(GroupSecrets::of_file(rustix::fs::memfd_create(c"x", MemfdFlags::CLOEXEC).unwrap()).is_err());
    }
}
