/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The uniRDMA virtio device as the driver sees it: docs/spec/virtio-rdma.md.
 * Every structure is little-endian and naturally aligned.
 */
#ifndef UNIRDMA_DEVICE_ABI_H
#define UNIRDMA_DEVICE_ABI_H

#include <linux/bits.h>
#include <linux/build_bug.h>
#include <linux/stddef.h>
#include <linux/types.h>

#define UNIRDMA_VIRTIO_ID	42

/* Virtqueues (section 3). */
enum {
	UNIRDMA_VQ_CONTROL,
	UNIRDMA_VQ_ASYNC,
	UNIRDMA_VQ_WAKE,
	UNIRDMA_VQ_COMP,		/* the first of several */
};

/* Configuration space (section 4). */
#define UNIRDMA_CONFIG_MAGIC	0x4d445275
#define UNIRDMA_CONFIG_VERSION	1

#define UNIRDMA_FEATURE_INVALIDATE	BIT_ULL(0)
#define UNIRDMA_FEATURE_GSI		BIT_ULL(1)
#define UNIRDMA_FEATURE_FAST_REG	BIT_ULL(2)

/* The part of the configuration space that QUERY_DEVICE repeats. */
struct unirdma_limits {
	__le32 magic;
	__le16 version;
	u8 phys_port_cnt;
	u8 atomic_cap;
	__le64 features;
	__le64 node_guid;
	__le64 sys_image_guid;
	__le64 device_cap_flags;
	__le64 max_mr_size;
	__le64 page_size_cap;
	__le32 max_qp;
	__le32 max_cq;
	__le32 max_mr;
	__le32 max_pd;
	__le32 max_qp_wr;
	__le32 max_cqe;
	__le32 max_sge;
	__le32 max_inline;
	__le32 max_qp_rd_atom;
	__le32 num_comp_queues;
	__le32 vendor_id;
	__le32 vendor_part_id;
	__le32 hw_ver;
	__le16 max_pkeys;
	u8 local_ca_ack_delay;
	u8 reserved;
	__le32 max_ah;
	__le32 max_srq;
	__le32 max_mcast_grp;
	__le32 max_mcast_qp_attach;
};

static_assert(sizeof(struct unirdma_limits) == 128);

struct unirdma_config {
	struct unirdma_limits limits;
	__le32 generation;
	__le32 max_doorbells;
	__le32 reserved[14];
};

static_assert(sizeof(struct unirdma_config) == 192);

/* Control commands (section 6). */
enum unirdma_command {
	UNIRDMA_QUERY_PORT = 1,
	UNIRDMA_CREATE_CQ = 2,
	UNIRDMA_DESTROY_CQ = 3,
	UNIRDMA_CREATE_PD = 4,
	UNIRDMA_DESTROY_PD = 5,
	UNIRDMA_GET_DMA_MR = 6,
	UNIRDMA_CREATE_MR = 7,
	UNIRDMA_DEREG_MR = 10,
	UNIRDMA_CREATE_QP = 11,
	UNIRDMA_MODIFY_QP = 12,
	UNIRDMA_QUERY_QP = 13,
	UNIRDMA_DESTROY_QP = 14,
	UNIRDMA_QUERY_PKEY = 15,
	UNIRDMA_QUERY_DEVICE = 19,
	UNIRDMA_QUERY_GID = 20,
	UNIRDMA_SET_DOORBELL = 21,
	UNIRDMA_CREATE_AH = 22,
	UNIRDMA_DESTROY_AH = 23,
	UNIRDMA_CREATE_SRQ = 24,
	UNIRDMA_DESTROY_SRQ = 25,
	UNIRDMA_MODIFY_SRQ = 26,
	UNIRDMA_QUERY_SRQ = 27,
	UNIRDMA_REREG_MR = 28,
	UNIRDMA_ATTACH_MCAST = 32,
	UNIRDMA_DETACH_MCAST = 33,
	UNIRDMA_ALLOC_MW = 34,
	UNIRDMA_DEALLOC_MW = 35,
	UNIRDMA_RESIZE_CQ = 36,
	UNIRDMA_CREATE_XRCD = 37,
	UNIRDMA_DESTROY_XRCD = 38,
	UNIRDMA_RESIZE_SRQ = 39,
	UNIRDMA_MODIFY_CQ = 40,
	UNIRDMA_NEW_SESSION = 45,
	UNIRDMA_CREATE_DOORBELL = 46,
	UNIRDMA_DESTROY_DOORBELL = 47,
	UNIRDMA_REG_MR_RUNS = 48,
	UNIRDMA_EXTEND_MR = 49,
	UNIRDMA_MAP_RUNS = 50,
	UNIRDMA_UNMAP_RUNS = 51,
	UNIRDMA_QUERY_COUNTERS = 52,
	UNIRDMA_QUERY_CLOCK = 53,
};

/* Longest request and longest response, with their headers. */
#define UNIRDMA_MAX_MESSAGE	1024

/* @code is the command of a request, and the status of a response. */
struct unirdma_header {
	u8 code;
	u8 reserved[7];
};

static_assert(sizeof(struct unirdma_header) == 8);

struct unirdma_handle {
	__le32 handle;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_handle) == 8);

struct unirdma_req_new_session {
	__le64 features;
	__le64 reserved;
};

static_assert(sizeof(struct unirdma_req_new_session) == 16);

struct unirdma_rsp_new_session {
	__le32 generation;
	__le32 reserved;
	__le64 features;
};

static_assert(sizeof(struct unirdma_rsp_new_session) == 16);

struct unirdma_rsp_query_device {
	struct unirdma_limits limits;
	char fw_ver[32];
	char name[32];
	__le32 max_mw;
	__le32 max_sge_rd;
	__le32 max_res_rd_atom;
	__le32 max_qp_init_rd_atom;
	__le32 max_srq_wr;
	__le32 max_srq_sge;
	__le32 max_total_mcast_qp_attach;
	__le32 rate_limit_qp_types;
	__le16 max_cq_count;
	__le16 max_cq_period_us;
	__le32 max_fast_reg_pages;
	/* For verbs programs of a process. */
	__le32 way;
	__le32 reserved[5];
};

static_assert(sizeof(struct unirdma_rsp_query_device) == 256);

/* In the order of the specification's table; see stats.c for their names. */
#define UNIRDMA_NUM_COUNTERS	29

struct unirdma_rsp_query_counters {
	__le64 counters[UNIRDMA_NUM_COUNTERS];
	__le64 reserved[48 - UNIRDMA_NUM_COUNTERS];
};

static_assert(sizeof(struct unirdma_rsp_query_counters) == 384);

struct unirdma_rsp_query_clock {
	__le64 now_ns;
};

static_assert(sizeof(struct unirdma_rsp_query_clock) == 8);

struct unirdma_req_query_port {
	__le32 port;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_req_query_port) == 8);

struct unirdma_rsp_query_port {
	u8 state;
	u8 max_mtu;
	u8 active_mtu;
	u8 phys_state;
	__le32 phys_mtu;
	__le32 gid_tbl_len;
	__le32 port_cap_flags;
	__le32 max_msg_sz;
	__le32 bad_pkey_cntr;
	__le32 qkey_viol_cntr;
	__le16 pkey_tbl_len;
	__le16 active_speed;
	u8 active_width;
	u8 link_layer;
	u8 reserved[30];
};

static_assert(sizeof(struct unirdma_rsp_query_port) == 64);

struct unirdma_req_query_pkey {
	__le32 port;
	__le16 index;
	__le16 reserved;
};

static_assert(sizeof(struct unirdma_req_query_pkey) == 8);

struct unirdma_rsp_query_pkey {
	__le16 pkey;
	__le16 reserved[3];
};

static_assert(sizeof(struct unirdma_rsp_query_pkey) == 8);

struct unirdma_req_query_gid {
	__le32 port;
	__le32 index;
};

static_assert(sizeof(struct unirdma_req_query_gid) == 8);

struct unirdma_rsp_query_gid {
	u8 gid[16];
	__le32 gid_type;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_rsp_query_gid) == 24);

struct unirdma_req_create_doorbell {
	__le64 addr;
};

static_assert(sizeof(struct unirdma_req_create_doorbell) == 8);

/* A piece of guest memory. */
struct unirdma_run {
	__le64 addr;
	__le64 length;
};

static_assert(sizeof(struct unirdma_run) == 16);

/* Most runs of one MAP_RUNS, and of one REG_MR_RUNS or EXTEND_MR. */
#define UNIRDMA_MAX_MAP_RUNS	512
#define UNIRDMA_MAX_MR_RUNS	65536

struct unirdma_req_map_runs {
	__le64 runs_addr;
	__le32 num_runs;
	__le32 reserved;
	__le64 length;
};

static_assert(sizeof(struct unirdma_req_map_runs) == 24);

struct unirdma_rsp_map_runs {
	__le32 handle;
	__le32 reserved;
	__le64 addr;
};

static_assert(sizeof(struct unirdma_rsp_map_runs) == 16);

struct unirdma_req_reg_mr_runs {
	__le32 pdn;
	__le32 access_flags;
	__le64 length;
	__le64 virt_addr;
	__le64 runs_addr;
	__le32 num_runs;
	__le32 note;
	__le64 reserved;
};

static_assert(sizeof(struct unirdma_req_reg_mr_runs) == 48);

struct unirdma_req_extend_mr {
	__le32 mrn;
	__le32 num_runs;
	__le64 runs_addr;
	__le64 length;
};

static_assert(sizeof(struct unirdma_req_extend_mr) == 24);

struct unirdma_rsp_mr {
	__le32 mrn;
	__le32 lkey;
	__le32 rkey;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_rsp_mr) == 16);

struct unirdma_req_rereg_mr {
	__le32 mrn;
	__le32 by;
};

static_assert(sizeof(struct unirdma_req_rereg_mr) == 8);

struct unirdma_req_alloc_mw {
	__le32 pdn;
	__le32 mw_type;
};

static_assert(sizeof(struct unirdma_req_alloc_mw) == 8);

struct unirdma_req_create_cq {
	__le32 cqe;
	__le32 entries;
	__le64 ring_addr;
	__le64 ctrl_addr;
	__le32 comp_queue;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_req_create_cq) == 32);

struct unirdma_req_resize_cq {
	__le32 cqn;
	__le32 cqe;
	__le32 entries;
	__le32 reserved;
	__le64 ring_addr;
	__le64 ctrl_addr;
};

static_assert(sizeof(struct unirdma_req_resize_cq) == 32);

struct unirdma_req_modify_cq {
	__le32 cqn;
	__le16 count;
	__le16 period_us;
};

static_assert(sizeof(struct unirdma_req_modify_cq) == 8);

struct unirdma_qp_cap {
	__le32 max_send_wr;
	__le32 max_recv_wr;
	__le32 max_send_sge;
	__le32 max_recv_sge;
	__le32 max_inline_data;
};

static_assert(sizeof(struct unirdma_qp_cap) == 20);

struct unirdma_req_create_qp {
	__le32 pdn;
	u8 qp_type;
	u8 sq_sig_all;
	u8 has_srq;
	u8 reserved;
	__le32 send_cqn;
	__le32 recv_cqn;
	struct unirdma_qp_cap cap;
	__le32 srqn;
	__le64 ctrl_addr;
	__le64 sq_addr;
	__le64 rq_addr;
	__le32 xrcdn;
	__le32 doorbell;
	__le64 reserved2;
};

static_assert(sizeof(struct unirdma_req_create_qp) == 80);

struct unirdma_rsp_create_qp {
	__le32 qpn;
	__le32 db_slot;
	struct unirdma_qp_cap cap;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_rsp_create_qp) == 32);

struct unirdma_route {
	u8 dgid[16];
	__le32 flow_label;
	u8 sgid_index;
	u8 hop_limit;
	u8 traffic_class;
	u8 reserved;
};

static_assert(sizeof(struct unirdma_route) == 24);

struct unirdma_ah_attr {
	struct unirdma_route route;
	__le16 dlid;
	u8 sl;
	u8 static_rate;
	u8 port_num;
	u8 is_global;
	u8 reserved2[2];
};

static_assert(sizeof(struct unirdma_ah_attr) == 32);

struct unirdma_qp_attr {
	u8 qp_state;
	u8 cur_qp_state;
	u8 path_mtu;
	u8 path_mig_state;
	__le32 qkey;
	__le32 rq_psn;
	__le32 sq_psn;
	__le32 dest_qp_num;
	__le32 qp_access_flags;
	__le16 pkey_index;
	__le16 alt_pkey_index;
	u8 en_sqd_async_notify;
	u8 sq_draining;
	u8 max_rd_atomic;
	u8 max_dest_rd_atomic;
	u8 min_rnr_timer;
	u8 port_num;
	u8 timeout;
	u8 retry_cnt;
	u8 rnr_retry;
	u8 alt_port_num;
	u8 alt_timeout;
	u8 reserved;
	__le32 rate_limit;
	struct unirdma_qp_cap cap;
	struct unirdma_ah_attr ah_attr;
	struct unirdma_ah_attr alt_ah_attr;
	__le32 reserved2[4];
};

static_assert(sizeof(struct unirdma_qp_attr) == 144);

struct unirdma_req_modify_qp {
	__le32 qpn;
	__le32 attr_mask;
	struct unirdma_qp_attr attr;
};

static_assert(sizeof(struct unirdma_req_modify_qp) == 152);

struct unirdma_req_query_qp {
	__le32 qpn;
	__le32 attr_mask;
};

static_assert(sizeof(struct unirdma_req_query_qp) == 8);

struct unirdma_req_create_ah {
	__le32 pdn;
	__le32 reserved;
	struct unirdma_ah_attr attr;
};

static_assert(sizeof(struct unirdma_req_create_ah) == 40);

struct unirdma_req_create_srq {
	__le32 pdn;
	__le32 max_wr;
	__le32 max_sge;
	__le32 limit;
	__le64 ctrl_addr;
	__le64 ring_addr;
	__le32 is_xrc;
	__le32 xrcdn;
	__le32 cqn;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_req_create_srq) == 48);

struct unirdma_rsp_create_srq {
	__le32 srqn;
	__le32 max_wr;
	__le32 number;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_rsp_create_srq) == 16);

/* Flags of CREATE_XRCD: the domain need not exist yet. */
#define UNIRDMA_XRCD_CREATE	2

struct unirdma_req_create_xrcd {
	__le64 dev;
	__le64 ino;
	__le32 flags;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_req_create_xrcd) == 24);

struct unirdma_req_resize_srq {
	__le32 srqn;
	__le32 max_wr;
	__le64 ctrl_addr;
	__le64 ring_addr;
	__le64 reserved;
};

static_assert(sizeof(struct unirdma_req_resize_srq) == 32);

struct unirdma_req_modify_srq {
	__le32 srqn;
	__le32 limit;
	__le32 reserved[2];
};

static_assert(sizeof(struct unirdma_req_modify_srq) == 16);

struct unirdma_rsp_query_srq {
	__le32 max_wr;
	__le32 max_sge;
	__le32 limit;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_rsp_query_srq) == 16);

struct unirdma_req_mcast {
	__le32 qpn;
	__le32 reserved;
	u8 gid[16];
};

static_assert(sizeof(struct unirdma_req_mcast) == 24);

struct unirdma_req_get_dma_mr {
	__le32 pdn;
	__le32 access_flags;
};

static_assert(sizeof(struct unirdma_req_get_dma_mr) == 8);

struct unirdma_req_create_mr {
	__le32 pdn;
	__le32 access_flags;		/* most access that it may grant */
	__le32 max_num_sg;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_req_create_mr) == 16);

/* Rings (section 7). */
#define UNIRDMA_CTRL_SIZE	128	/* control block of a QP, an SRQ or a CQ */
#define UNIRDMA_CQE_SIZE	64
#define UNIRDMA_SQ_HEAD		64
#define UNIRDMA_RQ_HEAD		16
#define UNIRDMA_SGE_SIZE	16
#define UNIRDMA_DB_SIZE		4096
#define UNIRDMA_DB_SLOTS	4096

/* For a QP, and for an SRQ, which uses the words of the RQ. */
struct unirdma_qp_ctrl {
	__le32 sq_prod;
	__le32 rq_prod;
	__le32 reserved[14];
	__le32 sq_cons;			/* written by the device from here on */
	__le32 rq_cons;
	__le32 rq_notify;
	__le32 reserved2[13];
};

static_assert(sizeof(struct unirdma_qp_ctrl) == UNIRDMA_CTRL_SIZE);

struct unirdma_cq_ctrl {
	__le32 cons;
	__le32 arm;
	__le32 reserved[14];
	__le32 prod;			/* written by the device from here on */
	__le32 error;
	__le32 reserved2[14];
};

static_assert(sizeof(struct unirdma_cq_ctrl) == UNIRDMA_CTRL_SIZE);

/* Flags of the arm word, beside its sequence number. */
#define UNIRDMA_ARM_SOLICITED	1
#define UNIRDMA_ARM_NEXT	2
#define UNIRDMA_ARM_FLAGS	4	/* number of values of the flags */

struct unirdma_sq_wqe {
	__le64 wr_id;
	u8 opcode;
	u8 num_sge;
	__le16 inline_len;
	__le32 send_flags;
	__le32 imm;
	__le32 rkey;
	union {
		struct {
			__le64 remote_addr;
			__le64 compare_add;
			__le64 swap;
		};
		struct unirdma_route route;	/* UNIRDMA_SEND_ADDRESS */
	};
	__le32 ah;
	__le32 dest_qpn;
	__le32 qkey;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_sq_wqe) == UNIRDMA_SQ_HEAD);

#define UNIRDMA_SEND_ADDRESS	BIT(30)

struct unirdma_rq_wqe {
	__le64 wr_id;
	__le32 num_sge;
	__le32 reserved;
};

static_assert(sizeof(struct unirdma_rq_wqe) == UNIRDMA_RQ_HEAD);

struct unirdma_sge {
	__le64 addr;
	__le32 length;
	__le32 lkey;
};

static_assert(sizeof(struct unirdma_sge) == UNIRDMA_SGE_SIZE);

struct unirdma_cqe {
	__le64 wr_id;
	u8 status;
	u8 opcode;
	__le16 wc_flags;
	__le32 vendor_err;
	__le32 byte_len;
	__le32 imm;
	__le32 qp_num;
	__le32 src_qp;
	__le16 pkey_index;
	u8 sl;
	u8 port_num;
	__le32 wqe_index;
	__le64 timestamp;
	__le32 staged;
	__le32 reserved[2];
	__le32 valid;
};

static_assert(sizeof(struct unirdma_cqe) == UNIRDMA_CQE_SIZE);

/* Opcodes in which the kernel and user space differ. */
#define UNIRDMA_WR_REG_MR	32
#define UNIRDMA_WC_REG_MR	32

/* Flags of a CQE. They are user space's, which differ from the kernel's. */
#define UNIRDMA_WC_GRH		BIT(0)
#define UNIRDMA_WC_WITH_IMM	BIT(1)
#define UNIRDMA_WC_WITH_INV	BIT(3)

/* @sl of a datagram's CQE says which header the datagram has. */
#define UNIRDMA_SL_IPV6		9
#define UNIRDMA_SL_IPV4		10

struct unirdma_doorbell {
	__le32 need_kick;
	__le32 reserved[15];
	__le64 summary;
	__le64 reserved2[7];
	__le64 bits[64];
};

static_assert(sizeof(struct unirdma_doorbell) <= UNIRDMA_DB_SIZE);
static_assert(offsetof(struct unirdma_doorbell, bits) == 128);

/*
 * Events (section 8). @kind of an asynchronous event is an enum ib_event_type.
 */
struct unirdma_event {
	__le32 kind;
	__le32 handle;
	__le64 reserved;
};

static_assert(sizeof(struct unirdma_event) == 16);

#define UNIRDMA_EVENT_COMPLETION	0x100

#endif
