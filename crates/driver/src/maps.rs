//! The process's own address space, as `/proc/self/maps` shows it: the only truth about what lies where.

/// One mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Vma {
    pub start: u64,
    pub end: u64,
    pub read: bool,
    pub write: bool,
    pub exec: bool,
    pub shared: bool,
    pub offset: u64,
    pub inode: u64,
    pub path: String,
}

impl Vma {
    fn parse(line: &str) -> Option<Vma> {
        // start-end perms offset dev inode [path]
        let mut it = line.splitn(6, ' ');
        let (start, end) = it.next()?.split_once('-')?;
        let perms = it.next()?.as_bytes();
        let offset = it.next()?;
        let _dev = it.next()?;
        let inode = it.next()?;
        let hex = |s: &str| u64::from_str_radix(s, 16).ok();
        Some(Vma {
            start: hex(start)?,
            end: hex(end)?,
            read: perms.first() == Some(&b'r'),
            write: perms.get(1) == Some(&b'w'),
            exec: perms.get(2) == Some(&b'x'),
            shared: perms.get(3) == Some(&b's'),
            offset: hex(offset)?,
            inode: inode.trim().parse().ok()?,
            path: it.next().unwrap_or("").trim().to_string(),
        })
    }

    /// Private anonymous memory that may be moved into a memory file: heap, bss and plain mappings, not
    /// a stack, not code.
    pub fn is_movable(&self) -> bool {
        let named = self.path.is_empty() || self.path == "[heap]" || self.path.starts_with("[anon:");
        !self.shared && self.inode == 0 && self.read && self.write && !self.exec && named
    }

    /// Memory that was moved by this library.
    pub fn is_ours(&self) -> bool {
        self.shared && self.path.starts_with("/memfd:unirdma-mr")
    }

    /// A shared mapping of a memory file.
    pub fn is_shared_memory(&self) -> bool {
        self.shared
            && self.read
            && self.write
            && (self.path.starts_with("/memfd:") || self.path.starts_with("/dev/shm/"))
    }
}

/// Mappings that intersect `[lo, hi)`, in order.
pub(crate) fn vmas(lo: u64, hi: u64) -> std::io::Result<Vec<Vma>> {
    let text = std::fs::read("/proc/self/maps")?;
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().filter_map(Vma::parse).filter(|v| v.start < hi && v.end > lo).collect())
}

/// Threads of this process.
pub(crate) fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(usize::MAX, |d| d.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_every_form_are_understood() {
        let heap =
            Vma::parse("55d0c6a00000-55d0c6a21000 rw-p 00000000 00:00 0                          [heap]").unwrap();
        assert!(heap.is_movable() && !heap.is_shared_memory());
        let lib = Vma::parse("7f00a000-7f00b000 r-xp 00026000 fe:01 1234  /usr/lib/my lib.so").unwrap();
        assert_eq!((lib.inode, lib.path.as_str(), lib.offset), (1234, "/usr/lib/my lib.so", 0x26000));
        assert!(!lib.is_movable());
        let own = Vma::parse("7f00a000-7f00b000 rw-s 00001000 00:01 77 /memfd:unirdma-mr (deleted)").unwrap();
        assert!(own.is_ours() && own.is_shared_memory());
        let stack = Vma::parse("7ffc0000-7ffc2000 rw-p 00000000 00:00 0 [stack]").unwrap();
        assert!(!stack.is_movable());
    }

    #[test]
    fn own_memory_is_found() {
        let v = vec![1u8; 1 << 20];
        let at = v.as_ptr() as u64;
        let found = vmas(at, at + v.len() as u64).unwrap();
        assert!(found.first().unwrap().start <= at && found.last().unwrap().end >= at + v.len() as u64);
        assert!(threads() >= 1);
    }
}
