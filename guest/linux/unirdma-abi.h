/* SPDX-License-Identifier: ((GPL-2.0 WITH Linux-syscall-note) OR MIT) */
/*
 * Answers of the kernel driver unirdma_rdma to its user-space provider, in
 * addition to the answers of the verbs commands themselves. Requests have no
 * data, except that of MODIFY_SRQ.
 *
 * An area is memory that the kernel allocates and the process maps: @offset and
 * @size are the arguments of mmap(2) on the command descriptor, with PROT_READ
 * | PROT_WRITE and MAP_SHARED. The other offsets count from the start of the
 * area. Rings, control blocks and doorbell page have the device's layout
 * (docs/spec/virtio-rdma.md, section 7).
 */
#ifndef UNIRDMA_ABI_H
#define UNIRDMA_ABI_H

#include <linux/types.h>

#define UNIRDMA_UVERBS_ABI_VERSION 1

/* Answer to GET_CONTEXT. */
struct unirdma_ucontext_resp {
	__aligned_u64 db_offset;	/* mmap: the process's doorbell page, 4096 bytes */
	__u32 max_inline;
	__u32 reserved;
};

/* Answer to the extended QUERY_DEVICE, if the process leaves room for it. */
struct unirdma_query_device_resp {
	__aligned_u64 clock_ns;		/* now, by the clock of completions */
};

/*
 * Answer to CREATE_CQ: an area with the control block at 0 and the ring. Answer
 * to RESIZE_CQ: another area, for the completions from now on.
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
 * Answer to CREATE_QP: an area with the control block at 0 and both rings. The
 * target of an XRC connection has no area: its answer is all zeros.
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

/* Answer to CREATE_SRQ: an area with the control block at 0 and the ring. */
struct unirdma_create_srq_resp {
	__aligned_u64 offset;
	__aligned_u64 size;
	__u32 ring_offset;
	__u32 entries;
	__u32 stride;
	__u32 srqn;
};

/*
 * The only request with data: MODIFY_SRQ, if it changes the size. @answer is
 * the address of an unirdma_resize_srq_resp in the memory of the process,
 * because the verbs command has no answer of its own.
 */
struct unirdma_modify_srq_req {
	__aligned_u64 answer;
};

/*
 * An area with another ring, in which the waiting WQEs are at their indices.
 * The control block stays where it is. Nothing may be posted meanwhile.
 */
struct unirdma_resize_srq_resp {
	__aligned_u64 offset;
	__aligned_u64 size;
	__u32 entries;
	__u32 reserved;
};

/* Answer to CREATE_AH. */
struct unirdma_create_ah_resp {
	__u32 ah;			/* the number for send WQEs */
	__u32 reserved;
};

#endif
