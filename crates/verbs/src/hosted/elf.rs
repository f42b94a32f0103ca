//! Entries of a loaded library that name symbols: its global offset table, its procedure linkage table, and pointers in
//! its data. The loader fills them in once; afterwards they can be set to other addresses.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// `Elf64_Dyn`.
#[repr(C)]
struct Dyn {
    tag: i64,
    value: usize,
}

/// `Elf64_Sym`.
#[repr(C)]
struct Sym {
    name: u32,
    info: u8,
    other: u8,
    shndx: u16,
    value: u64,
    size: u64,
}

/// `Elf64_Rela`.
#[repr(C)]
struct Rela {
    offset: u64,
    info: u64,
    addend: i64,
}

/// `Elf64_Verneed` and `Elf64_Verdef` begin with these; all offsets are from the structure itself.
#[repr(C)]
struct Verneed {
    version: u16,
    count: u16,
    file: u32,
    aux: u32,
    next: u32,
}

#[repr(C)]
struct Vernaux {
    hash: u32,
    flags: u16,
    other: u16,
    name: u32,
    next: u32,
}

#[repr(C)]
struct Verdef {
    version: u16,
    flags: u16,
    index: u16,
    count: u16,
    hash: u32,
    aux: u32,
    next: u32,
}

#[repr(C)]
struct Verdaux {
    name: u32,
    next: u32,
}

const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;
const DT_VERSYM: i64 = 0x6fff_fff0;
const DT_VERDEF: i64 = 0x6fff_fffc;
const DT_VERDEFNUM: i64 = 0x6fff_fffd;
const DT_VERNEED: i64 = 0x6fff_fffe;
const DT_VERNEEDNUM: i64 = 0x6fff_ffff;

/// Relocations whose entry is the address of a symbol: `GLOB_DAT`, `JUMP_SLOT`, and a plain pointer.
#[cfg(target_arch = "x86_64")]
const ADDRESSES: [u32; 3] = [6, 7, 1];
#[cfg(target_arch = "aarch64")]
const ADDRESSES: [u32; 3] = [1025, 1026, 257];

/// A loaded library.
pub(super) struct Object {
    base: usize,
    dynamic: *const Dyn,
    /// The part that the loader has filled in and made read-only; begin and end are page addresses.
    read_only: (usize, usize),
    pub path: String,
}

/// An entry.
pub(super) struct Entry {
    at: *const AtomicUsize,
    pub name: &'static CStr,
    pub version: Option<&'static CStr>,
    addend: usize,
}

impl Entry {
    /// The address that the entry has.
    #[cfg(test)]
    pub fn value(&self) -> usize {
        // SAFETY: an entry of a loaded library, which the loader has filled in.
        unsafe { &*self.at }.load(Ordering::Relaxed)
    }
}

/// The library in whose memory `address` lies.
pub(super) fn containing(address: usize) -> Option<Object> {
    struct Search {
        address: usize,
        found: Option<Object>,
    }
    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
        // SAFETY: the loader passes a description of a library, and the pointer that was given to it.
        let (info, search) = unsafe { (&*info, &mut *data.cast::<Search>()) };
        // SAFETY: the program headers of a loaded library.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let base = info.dlpi_addr as usize;
        let range = |h: &libc::Elf64_Phdr| (base + h.p_vaddr as usize, base + (h.p_vaddr + h.p_memsz) as usize);
        let has = |h: &libc::Elf64_Phdr| {
            let (begin, end) = range(h);
            h.p_type == libc::PT_LOAD && (begin..end).contains(&search.address)
        };
        if !headers.iter().any(has) {
            return 0;
        }
        let of = |kind| headers.iter().find(|h| h.p_type == kind).map(range);
        let Some((dynamic, _)) = of(libc::PT_DYNAMIC) else { return 1 };
        let page = page_size() - 1;
        let (begin, end) = of(libc::PT_GNU_RELRO).unwrap_or((0, 0));
        search.found = Some(Object {
            base,
            dynamic: dynamic as *const Dyn,
            read_only: (begin & !page, end & !page),
            // SAFETY: the name of a loaded library.
            path: unsafe { CStr::from_ptr(info.dlpi_name) }.to_string_lossy().into_owned(),
        });
        1
    }
    let mut search = Search { address, found: None };
    // SAFETY: the callback has the demanded form, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

fn page_size() -> usize {
    // SAFETY: reads a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

impl Object {
    fn dynamic(&self, tag: i64) -> Option<usize> {
        let mut at = self.dynamic;
        // SAFETY: the dynamic section of a loaded library ends with tag 0.
        unsafe {
            while (*at).tag != 0 {
                if (*at).tag == tag {
                    return Some((*at).value);
                }
                at = at.add(1);
            }
        }
        None
    }

    /// A table of the library. The loader of glibc has added the base to its address, other loaders have not.
    fn table(&self, tag: i64) -> Option<usize> {
        self.dynamic(tag).map(|at| if at < self.base { at + self.base } else { at })
    }

    fn string(&self, at: u32) -> &'static CStr {
        let Some(strings) = self.table(DT_STRTAB) else { return c"" };
        // SAFETY: offsets of a loaded library's tables lie in its table of strings. It is never unloaded: the real
        // library and its providers are kept for ever.
        unsafe { CStr::from_ptr((strings + at as usize) as *const c_char) }
    }

    /// The names of the versions that the library needs and has, by index.
    fn versions(&self) -> HashMap<u16, &'static CStr> {
        let mut all = HashMap::new();
        let needs = self.table(DT_VERNEED).zip(self.dynamic(DT_VERNEEDNUM));
        let has = self.table(DT_VERDEF).zip(self.dynamic(DT_VERDEFNUM));
        // SAFETY: tables of a loaded library, walked as their counts and offsets say.
        unsafe {
            if let Some((mut at, count)) = needs {
                for _ in 0..count {
                    let need = &*(at as *const Verneed);
                    let mut aux_at = at + need.aux as usize;
                    for _ in 0..need.count {
                        let aux = &*(aux_at as *const Vernaux);
                        all.insert(aux.other & !HIDDEN, self.string(aux.name));
                        aux_at += aux.next as usize;
                    }
                    at += need.next as usize;
                }
            }
            if let Some((mut at, count)) = has {
                for _ in 0..count {
                    let def = &*(at as *const Verdef);
                    let aux = &*((at + def.aux as usize) as *const Verdaux);
                    all.insert(def.index & !HIDDEN, self.string(aux.name));
                    at += def.next as usize;
                }
            }
        }
        all
    }

    /// All entries that are the address of a symbol.
    pub fn entries(&self) -> Vec<Entry> {
        let versions = self.versions();
        let Some(symbols) = self.table(DT_SYMTAB) else { return Vec::new() };
        let of_symbols = self.table(DT_VERSYM);
        let mut all = Vec::new();
        for (table, bytes) in [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)] {
            let Some((at, bytes)) = self.table(table).zip(self.dynamic(bytes)) else { continue };
            // SAFETY: a table of a loaded library, as long as the library says.
            let relocations = unsafe { std::slice::from_raw_parts(at as *const Rela, bytes / size_of::<Rela>()) };
            for r in relocations {
                let (symbol, kind) = ((r.info >> 32) as usize, r.info as u32);
                if symbol == 0 || !ADDRESSES.contains(&kind) {
                    continue;
                }
                // SAFETY: the index of a relocation is one of the table of symbols.
                let name = unsafe { &*(symbols as *const Sym).add(symbol) }.name;
                // SAFETY: that table has an index of a version for each symbol.
                let version = of_symbols.map(|v| unsafe { *(v as *const u16).add(symbol) } & !HIDDEN);
                all.push(Entry {
                    at: (self.base + r.offset as usize) as *const AtomicUsize,
                    name: self.string(name),
                    version: version.and_then(|v| versions.get(&v).copied()),
                    addend: r.addend as usize,
                });
            }
        }
        all
    }

    /// Sets entries to the addresses that `choose` names, and leaves the others as they are. Returns how many were set.
    ///
    /// # Errors
    /// The errno with which the kernel refused to make the memory writable.
    ///
    /// # Safety
    /// Each address is of a function or variable of the kind that the library expects there.
    pub unsafe fn set(&self, mut choose: impl FnMut(&Entry) -> Option<usize>) -> Result<usize, i32> {
        let chosen: Vec<(Entry, usize)> =
            self.entries().into_iter().filter_map(|e| choose(&e).map(|to| (e, to))).collect();
        self.protect(libc::PROT_READ | libc::PROT_WRITE)?;
        for (entry, to) in &chosen {
            // SAFETY: an aligned entry of the library's data, writable now; the new address is right by the contract.
            unsafe { &*entry.at }.store(to.wrapping_add(entry.addend), Ordering::Relaxed);
        }
        self.protect(libc::PROT_READ)?;
        Ok(chosen.len())
    }

    /// Changes the protection of what the loader has made read-only.
    fn protect(&self, protection: c_int) -> Result<(), i32> {
        let (begin, end) = self.read_only;
        // SAFETY: whole pages of the library that hold only what the loader has filled in.
        if begin < end && unsafe { libc::mprotect(begin as *mut c_void, end - begin, protection) } != 0 {
            return Err(super::errno());
        }
        Ok(())
    }
}

/// A bit of a version's index that concerns only the linker.
const HIDDEN: u16 = 0x8000;

#[cfg(test)]
mod tests {
    use super::*;

    fn library(symbol: &CStr) -> Object {
        // SAFETY: looks a name up.
        let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) };
        assert!(!at.is_null());
        containing(at as usize).unwrap()
    }

    #[test]
    fn entries_of_a_loaded_library_have_names_and_versions() {
        // SAFETY: a library of the system without constructors that matter.
        let handle = unsafe { libc::dlopen(c"libm.so.6".as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null());
        // SAFETY: looks a name up.
        let cos = unsafe { libc::dlsym(handle, c"cos".as_ptr()) };
        let libm = containing(cos as usize).unwrap();
        assert!(libm.path.contains("libm.so.6"), "{}", libm.path);
        let entries = libm.entries();
        let versioned = |e: &&Entry| e.version.is_some_and(|v| v.to_bytes().starts_with(b"GLIBC_"));
        assert!(entries.iter().any(|e| versioned(&e)), "no entry of {} has a version", entries.len());
    }

    #[test]
    fn an_entry_is_the_address_of_its_symbol_and_can_be_set() {
        fn here() {}
        // The test's own program calls `getppid` through its table.
        // SAFETY: no argument.
        let parent = unsafe { libc::getppid() };
        let own = containing(here as *const () as usize).unwrap();
        // SAFETY: looks a name up.
        let real = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"getppid".as_ptr()) } as usize;
        let entry = |o: &Object| o.entries().into_iter().find(|e| e.name == c"getppid").unwrap();
        assert_eq!(entry(&own).value(), real);
        extern "C" fn another() -> c_int {
            -7
        }
        let put = |to: usize| {
            // SAFETY: both are functions without arguments that return an int.
            unsafe { own.set(|e| (e.name == c"getppid").then_some(to)) }.unwrap()
        };
        assert!(put(another as *const () as usize) >= 1);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::getppid() }, -7);
        put(real);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::getppid() }, parent);
    }

    #[test]
    fn the_c_library_is_found_by_an_address_and_nothing_by_a_wild_one() {
        assert!(library(c"strlen").path.contains("libc"));
        assert!(containing(8).is_none());
    }
}
