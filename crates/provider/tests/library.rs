//! The built library: the libraries that it needs, and that libibverbs of this machine loads it.

mod common;

use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use unirdma_verbs_abi::*;

#[test]
fn it_needs_the_private_interface_of_libibverbs_and_the_c_library() {
    let Ok(o) = Command::new("readelf").args(["-W", "-d", "--dyn-syms"]).arg(common::provider()).output() else {
        return println!("skipped: no readelf");
    };
    let text = String::from_utf8_lossy(&o.stdout);
    let needed: Vec<&str> =
        text.lines().filter(|l| l.contains("(NEEDED)")).filter_map(|l| l.split(['[', ']']).nth(1)).collect();
    assert!(needed.contains(&"libibverbs.so.1"), "{needed:?}");
    let known = ["libibverbs.so", "libc.so", "libgcc_s.so", "ld-linux"];
    assert!(needed.iter().all(|n| known.iter().any(|k| n.starts_with(k))), "{needed:?}");
    let mut private = 0;
    for l in text.lines().filter(|l| l.contains(" UND ") && !l.contains(" WEAK ")) {
        let Some(symbol) = l.split_whitespace().nth(7) else { continue };
        let (name, version) = symbol.split_once('@').unwrap_or_else(|| panic!("{symbol} has no version"));
        if name.starts_with("ibv_") || name.contains("verbs_") {
            assert_eq!(version.trim_end_matches(|c: char| c != '4'), "IBVERBS_PRIVATE_34", "{name}");
            private += 1;
        } else {
            assert!(version.starts_with("GLIBC_") || version.starts_with("GCC_"), "{symbol}");
        }
    }
    assert!(private > 25, "{private} symbols of libibverbs");
    let defined = text.lines().filter(|l| l.contains(" GLOBAL ") && !l.contains(" UND "));
    assert_eq!(defined.count(), 0, "it shows nothing of its own");
}

#[test]
fn libibverbs_of_this_machine_loads_it() {
    if let Err(e) = common::load(Path::new("libibverbs.so.1")) {
        return println!("skipped: {e}");
    }
    // When it is loaded it calls verbs_register_driver_34; all its symbols are resolved then.
    if let Err(e) = common::load(&common::provider()) {
        // Other versions of libibverbs look for providers with another name.
        assert!(e.contains("IBVERBS_PRIVATE_34"), "{e}");
        println!("skipped: {e}");
    }
}

/// Each structure with its size, and members with their offsets.
macro_rules! layouts {
    ($($t:ident { $($f:ident),* })*) => {{
        let mut c = String::from("#include <infiniband/verbs.h>\n#include <stddef.h>\n");
        $(
            writeln!(c, "_Static_assert(sizeof(struct {0}) == {1}, \"{0}\");", stringify!($t), size_of::<$t>()).unwrap();
            $(let (t, f) = (stringify!($t), stringify!($f));
            writeln!(c, "_Static_assert(offsetof(struct {t}, {f}) == {}, \"{t}.{f}\");", offset_of!($t, $f)).unwrap();)*
        )*
        c
    }};
}

#[test]
fn structures_are_those_of_the_installed_headers() {
    let mut c = layouts! {
        ibv_device { name, dev_path }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        ibv_context_ops { poll_cq, req_notify_cq, post_srq_recv, post_send, post_recv }
        ibv_pd { context, handle }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_ah { context, pd, handle }
        ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed }
        ibv_cq_ex { status, wr_id, start_poll, next_poll, end_poll, read_opcode, read_dlid_path_bits, read_completion_wallclock_ns }
        ibv_srq { context, srq_context, pd, handle, mutex, cond, events_completed }
        ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, events_completed }
        ibv_sge { addr, length, lkey }
        ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_wc { wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits }
        ibv_ah_attr { grh, dlid, sl, static_rate, is_global, port_num }
        ibv_qp_cap { max_send_wr, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_qp_init_attr_ex { cap, qp_type, comp_mask, pd, create_flags, send_ops_flags }
        ibv_qp_attr { qp_state, qkey, qp_access_flags, cap, ah_attr, pkey_index, rate_limit }
        ibv_cq_init_attr_ex { cqe, cq_context, channel, comp_vector, wc_flags, comp_mask, flags }
        ibv_srq_init_attr { srq_context, attr }
        ibv_srq_attr { max_wr, max_sge, srq_limit }
        ibv_async_event { element, event_type }
        ibv_device_attr { fw_ver, node_guid, max_qp, phys_port_cnt }
    };
    // It has grown since the oldest version that the provider serves, so only its beginning is the same.
    c += &layouts! { ibv_qp_ex { qp_base, wr_id, wr_flags, wr_send, wr_set_sge, wr_start, wr_complete, wr_atomic_write } }
        .replace("_Static_assert(sizeof(struct ibv_qp_ex) == 360", "_Static_assert(sizeof(struct ibv_qp_ex) <= 360");
    c += "_Static_assert(offsetof(struct verbs_context, context) == 320, \"verbs_context\");\n";
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = dir.join("layouts.c");
    std::fs::write(&source, c).unwrap();
    common::compile(&["-c"], &source, &dir.join("layouts.o"));
}

#[test]
fn the_kernel_driver_has_the_same_structures() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/linux/unirdma-abi.h");
    if !header.exists() {
        return println!("skipped: no {}", header.display());
    }
    let c = format!("#include <stddef.h>\n#include \"{}\"\n", header.display())
        + r#"
        _Static_assert(UNIRDMA_UVERBS_ABI_VERSION == 1, "version");
        _Static_assert(sizeof(struct unirdma_ucontext_resp) == 16, "context");
        _Static_assert(sizeof(struct unirdma_cq_resp) == 32, "CQ");
        _Static_assert(offsetof(struct unirdma_cq_resp, ring_offset) == 16, "CQ");
        _Static_assert(sizeof(struct unirdma_create_qp_resp) == 56, "QP");
        _Static_assert(offsetof(struct unirdma_create_qp_resp, rq_entries) == 32, "QP");
        _Static_assert(offsetof(struct unirdma_create_qp_resp, max_recv_sge) == 52, "QP");
        _Static_assert(sizeof(struct unirdma_create_srq_resp) == 32, "SRQ");
        _Static_assert(offsetof(struct unirdma_create_srq_resp, stride) == 24, "SRQ");
        _Static_assert(sizeof(struct unirdma_create_ah_resp) == 8, "AH");
        _Static_assert(sizeof(struct unirdma_resize_srq_resp) == 24, "SRQ");
        _Static_assert(sizeof(struct unirdma_query_device_resp) == 8, "clock");
        "#;
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = dir.join("driver.c");
    std::fs::write(&source, c).unwrap();
    common::compile(&["-c"], &source, &dir.join("driver.o"));
}
