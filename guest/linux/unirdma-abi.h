/* SPDX-License-Identifier: ((GPL-2.0 WITH Linux-syscall-note) OR MIT) */
/*
 * What the kernel driver unirdma_rdma answers to its user-space provider,
 * beside the answers of the verbs commands themselves. Requests have no data.
 *
 * An area is memory that the kernel allocates and the process maps: @offset
 * and @size are the arguments of mmap(2) on the command descriptor, with
 * PROT_READ | PROT_WRITE and MAP_SHARED. The other offsets count from the
 * start of the area. The layout of rings, control blocks and doorbell page is
 * that of the device (docs/spec/virtio-rdma.md, section 7).
 */
#ifndef UNIRDMA_ABI_H
#define UNIRDMA_ABI_H

#include <linux/types.h>

#define UNIRDMA_UVERBS_ABI_VERSION 1

/* Of the command GET_CONTEXT. */
struct unirdma_ucontext_resp {
	__aligned_u64 db_offset;	/* mmap: the process's doorbell page, 4096 bytes */
	__u32 max_inline;
	__u32 reserved;
};

/* Of QUERY_DEVICE, its extended form, if the process leaves room for it. */
struct unirdma_query_device_resp {
	__aligned_u64 clock_ns;		/* now, by the clock of completions */
};

/*
 * Of CREATE_CQ: an area with the control block at 0 and the ring. Of RESIZE_CQ:
 * another area, which holds the completions from now on.
 */
struct unirdma_cq_resp {
	__aligned_u64 offset;
	__aligned_u64 size;
	__u32 ring_offset;
	__u32 entries;
	__u32 cqn;
	__u32 reserved;
};

/*
 * Of CREATE_QP: an area with the control block at 0 and both rings. The target
 * of an XRC connection has none: its answer is all zeros.
 */
struct unirdma_create_qp_resp {
	__aligned_u64 offset;
	__aligned_u64 size;
	__u32 sq_offset;
	__u32 rq_offset;
	__u32 sq_entries;
	__u32 sq_stride;
	__u32 rq_entries;
	__u32 rq_stride;
	__u32 db_slot;
	__u32 max_inline;
	__u32 max_send_sge;
	__u32 max_recv_sge;
};

/* Of CREATE_SRQ: an area with the control block at 0 and the ring. */
struct unirdma_create_srq_resp {
	__aligned_u64 offset;
	__aligned_u64 size;
	__u32 ring_offset;
	__u32 entries;
	__u32 stride;
	__u32 srqn;
};

/*
 * What MODIFY_SRQ takes in its request if it changes the size, and nothing else:
 * where the answer goes, an unirdma_resize_srq_resp in the memory of the process.
 * The verbs command has no answer of its own.
 */
struct unirdma_modify_srq_req {
	__aligned_u64 answer;
};

/*
 * An area with another ring, in which the WQEs that wait are at their indices.
 * The control block stays where it is. Nothing may be posted meanwhile.
 */
struct unirdma_resize_srq_resp {
	__aligned_u64 offset;
	__aligned_u64 size;
	__u32 entries;
	__u32 reserved;
};

/* Of CREATE_AH. */
struct unirdma_create_ah_resp {
	__u32 ah;			/* the number for send WQEs */
	__u32 reserved;
};

#endif
