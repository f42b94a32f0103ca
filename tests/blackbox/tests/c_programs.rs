//! Our C programs: one loads the library as UCX and Python do and uses it from many threads, one uses queues in all
//! ways, one matches tags, one calls the newest functions, one calls all functions with random arguments.

use crate::support::*;

/// Seeds of the program that makes random calls, and its number of calls with each.
const RANDOM_SEEDS: std::ops::RangeInclusive<u64> = 1..=4;
const RANDOM_STEPS: u32 = 5000;

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::C_PROGRAMS]);
    let abc = &Shared::new(abc);
    t.on(abc, "dlopen, threads, fork (C program)", |lab| {
        let exe = compile(lab, "verbs-threads", &["-ldl", "-pthread"])?;
        for way in ["", "env UNIRDMA_MR=copy "] {
            let o = lab.spawn("a", &[], &format!("{way}{exe}"))?.finish();
            require(o.ok() && o.text.contains("all threads done"), o.text)?;
        }
        Ok(())
    });
    t.on(abc, "as many connections and objects as the device promises (C program)", |lab| {
        let exe = compile(lab, "many", &["-libverbs"])?;
        let o = lab.spawn("a", &[], &format!("{exe} 2000"))?.finish();
        require(o.ok() && o.text.contains("as many as promised"), o.text)
    });
    t.on(abc, "programs that drop their rights register memory (C program)", |lab| {
        let exe = compile(lab, "rights", &["-libverbs", "-pthread"])?;
        for way in ["", "env UNIRDMA_MR=copy "] {
            let o = lab.spawn("a", &[], &format!("{way}{exe}"))?.finish();
            require(o.ok() && o.text.contains("all rights were enough"), o.text)?;
        }
        Ok(())
    });
    t.on(abc, "queues that are resized, reset and shared, and the extended interfaces (C program)", |lab| {
        let exe = compile(lab, "queues", &["-libverbs", "-pthread"])?;
        let o = lab.spawn("a", &[], &exe)?.finish();
        require(o.ok() && o.text.contains("all queues worked"), o.text)
    });
    t.on(abc, "the newest calls of rdma-core work, or are refused as there (C program)", |lab| {
        let exe = compile(lab, "newest", &["-libverbs", "-ldl"])?;
        let o = lab.spawn("a", &[], &exe)?.finish();
        require(o.ok() && o.text.contains("all newer calls answered"), o.text)
    });
    t.on(abc, "waits for events and their descriptors (C program)", |lab| {
        let exe = compile(lab, "waits", &["-fexceptions", "-pthread", "-libverbs", "-lrdmacm"])?;
        let o = lab.spawn("a", &[], &exe)?.finish();
        require(o.ok() && o.text.contains("all waits ended"), o.text)
    });
    t.on(abc, "tag matching (C program)", |lab| {
        let exe = compile(lab, "tags", &["-libverbs"])?;
        let o = lab.spawn("a", &[], &exe)?.finish();
        require(o.ok() && o.text.contains("tags matched"), o.text)
    });
    for seed in RANDOM_SEEDS {
        t.on(abc, format!("random calls under valgrind, seed {seed} (C program)"), move |lab| {
            let exe = compile(lab, "verbs-random", &["-libverbs", "-lrdmacm"])?;
            let valgrind = format!(
                "env UNIRDMA_HEAP=system valgrind -q --error-exitcode=9 --leak-check=full --show-leak-kinds=definite \
                 --errors-for-leak-kinds=definite --suppressions={}",
                harness::root().join("tests/c/valgrind.supp").display()
            );
            let o = lab.spawn("a", &[], &format!("{valgrind} {exe} {seed} {RANDOM_STEPS}"))?.finish();
            require(o.ok() && o.text.contains("all objects destroyed"), o.text)
        });
    }
    t.on(abc, "ib_write_bw with UNIRDMA_MR=copy", |lab| {
        let p = "env UNIRDMA_MR=copy ib_write_bw -n 500";
        let (s, c) = lab.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?;
        require(s.ok() && c.ok(), format!("server: {}\nclient: {}", s.text, c.text))
    });
}
