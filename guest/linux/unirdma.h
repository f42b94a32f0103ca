/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * Internals of the uniRDMA guest driver.
 *
 * main.c	binds the virtio device and registers the ib_device
 * control.c	control commands, and what happens when the device is lost
 * events.c	asynchronous and completion events
 * area.c	memory that the device shares with a process or the kernel
 * gid.c	the vRNIC's addresses and its network interface
 * device.c	device, port, process and PD verbs; address handles
 * cq.c qp.c srq.c mr.c		the verbs of these objects; XRC domains are in srq.c
 * stats.c	counters, and details of objects, for rdma(8)
 * post.c poll.c	work requests and completions of kernel users
 */
#ifndef UNIRDMA_H
#define UNIRDMA_H

#include <linux/completion.h>
#include <linux/llist.h>
#include <linux/notifier.h>
#include <linux/refcount.h>
#include <linux/semaphore.h>
#include <linux/virtio.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <rdma/ib_verbs.h>

#include "device-abi.h"
#include "unirdma-abi.h"

#define UNIRDMA_PORT		1
#define UNIRDMA_MAX_COMP	8	/* completion event queues that are used */

struct unirdma_control {
	struct virtqueue *vq;
	spinlock_t lock;		/* protects @vq and @pending */
	struct list_head pending;	/* commands that the device has */
	struct semaphore room;		/* for commands */
};

/*
 * An event queue. All its buffers are in one array. Only one context uses it.
 */
struct unirdma_event_queue {
	struct virtqueue *vq;
	struct unirdma_event *events;
};

struct unirdma_dev {
	struct ib_device ibdev;
	struct virtio_device *vdev;
	struct unirdma_rsp_query_device attr;
	u32 generation;
	u32 max_doorbells;
	u32 gid_tbl_len;
	bool has_gsi;
	bool has_fast_reg;

	struct unirdma_control control;
	struct unirdma_event_queue async;
	struct unirdma_event_queue comp[UNIRDMA_MAX_COMP];
	unsigned int num_comp;
	struct virtqueue *wake;
	struct unirdma_area *db;	/* the kernel's doorbell page */

	/* CQs, QPs and SRQs that events may name. */
	struct xarray cqs;
	struct xarray qps;
	struct xarray srqs;

	struct workqueue_struct *wq;
	struct work_struct async_work;
	struct work_struct config_work;
	struct delayed_work beat;
	struct work_struct netdev_work;
	unsigned long flags;

	/* Memory that a lost device may still write to; see control.c. */
	struct llist_head kept_areas;
	struct llist_head kept_mrs;

	/*
	 * Protects @port and @gids. AHs are made in contexts that must not
	 * sleep.
	 */
	spinlock_t port_lock;
	struct unirdma_rsp_query_port port;	/* as of the last command */
	union ib_gid *gids;
	struct notifier_block netdev_nb;
	/*
	 * The interface last given to the ib core, for comparison; the core
	 * holds the reference.
	 */
	struct net_device *netdev;
};

/* Bits of unirdma_dev.flags. */
enum {
	UNIRDMA_REGISTERED,	/* the ib core may be told of events */
	UNIRDMA_LOST,		/* the device does not answer; see control.c */
	UNIRDMA_LOST_TOLD,	/* DEVICE_FATAL was raised */
};

/*
 * The handler of an event holds a reference to the object. The object's
 * destruction removes it from its xarray and waits until other references are
 * gone.
 */
struct unirdma_target {
	refcount_t refs;
	struct completion idle;
};

/* Memory that the device shares with a process (by mmap) or with the kernel. */
struct unirdma_area {
	struct rdma_user_mmap_entry entry;	/* of a process's */
	void *ptr;				/* of the kernel's */
	struct llist_node kept;
	u64 addr;			/* bus address */
	u32 map;			/* handle of MAP_RUNS */
	bool mapped;			/* true if it has @map */
	unsigned int num_pages;
	struct page *pages[];
};

struct unirdma_ucontext {
	struct ib_ucontext ibuc;
	struct unirdma_area *db;
	u32 doorbell;
};

struct unirdma_pd {
	struct ib_pd ibpd;
	u32 pdn;
};

/*
 * An AH of a process is an object of the device; an AH of the kernel is @route.
 */
struct unirdma_ah {
	struct ib_ah ibah;
	bool is_user;
	u32 ahn;
	/*
	 * AHs of the kernel: the address, and the values that a WQE has with
	 * it.
	 */
	struct unirdma_route route;
	__le32 level_and_rate;
};

/* A ring to which the kernel posts: an SQ, an RQ or an SRQ. */
struct unirdma_ring {
	spinlock_t lock;		/* protects @prod, and the slots */
	void *slots;			/* NULL if there is no ring */
	__le32 *prod_word, *cons_word;	/* in the control block */
	u32 entries, stride, max_sge;
	u32 prod;
	u32 polled;	/* after the last WQE that poll_cq() has returned */
};

struct unirdma_cq {
	struct ib_cq ibcq;
	struct unirdma_target target;
	struct unirdma_area *area;
	struct mutex resize_lock;	/* protects @area */
	u32 cqn;

	/* CQs of the kernel. @lock protects all of these. */
	spinlock_t lock;
	struct unirdma_cq_ctrl *ctrl;	/* NULL for a process's CQ */
	struct unirdma_cqe *cqes;
	u32 cons;
	u32 arm_seq;
	struct list_head senders, receivers;	/* QPs that complete here */
};

struct unirdma_xrcd {
	struct ib_xrcd ibxrcd;
	u32 xrcdn;
};

struct unirdma_srq {
	struct ib_srq ibsrq;
	struct unirdma_target target;
	struct unirdma_area *area;	/* the control block, and the first ring */
	struct mutex resize_lock;	/* protects the next three */
	struct unirdma_area *ring;	/* after a resize, or NULL */
	u32 ring_offset;		/* in @ring, or else in @area */
	u32 entries;
	u32 stride;
	u32 srqn;
	struct unirdma_ring rq;
};

struct unirdma_qp {
	struct ib_qp ibqp;
	struct unirdma_target target;
	struct unirdma_area *area;
	u32 qpn;			/* the device's; the GSI QP's is not 1 */
	struct ib_qp_cap cap;
	enum ib_sig_type sig_type;
	u8 sgid_index;			/* the ib core's, of the address vector */

	/* QPs of the kernel. */
	struct unirdma_qp_ctrl *ctrl;	/* NULL for a process's QP */
	struct unirdma_ring sq, rq;
	u32 db_slot;
	struct list_head sender, receiver;	/* in its CQs */
};

struct unirdma_mr {
	struct ib_mr ibmr;
	struct llist_node kept;
	struct ib_umem *umem;		/* of a process's */
	int access;			/* of a process's */
	u32 mrn;

	/*
	 * MRs of the kernel: the pages that the next REG_MR names, by bus
	 * address.
	 */
	__le64 *pages;			/* NULL for other MRs */
	u32 max_pages, num_pages;
};

struct unirdma_mw {
	struct ib_mw ibmw;
	u32 mrn;
};

#define UNIRDMA_TO(type, member)					\
static inline struct unirdma_##type *to_unirdma_##type(struct ib_##type *p) \
{									\
	return container_of(p, struct unirdma_##type, member);		\
}

UNIRDMA_TO(pd, ibpd)
UNIRDMA_TO(ah, ibah)
UNIRDMA_TO(cq, ibcq)
UNIRDMA_TO(xrcd, ibxrcd)
UNIRDMA_TO(srq, ibsrq)
UNIRDMA_TO(qp, ibqp)
UNIRDMA_TO(mr, ibmr)
UNIRDMA_TO(mw, ibmw)
#undef UNIRDMA_TO

static inline struct unirdma_dev *to_unirdma_dev(struct ib_device *ibdev)
{
	return container_of(ibdev, struct unirdma_dev, ibdev);
}

static inline struct unirdma_ucontext *
to_unirdma_ucontext(struct ib_ucontext *ibuc)
{
	return container_of(ibuc, struct unirdma_ucontext, ibuc);
}

/*
 * Limits of this driver, if the device's limits are larger. With them no ring's
 * size overflows.
 */
#define UNIRDMA_MAX_ENTRIES	BIT(24)
#define UNIRDMA_MAX_SGE		255U	/* a WQE's number of SGEs is a u8 */
#define UNIRDMA_MAX_INLINE	65536U

/* True if @value is within a limit of the device and one of the driver. */
static inline bool unirdma_within(u32 value, __le32 limit, u32 most)
{
	return value <= min(le32_to_cpu(limit), most);
}

static inline bool unirdma_is_lost(struct unirdma_dev *dev)
{
	return test_bit(UNIRDMA_LOST, &dev->flags);
}

static inline const struct unirdma_limits *
unirdma_limits(struct unirdma_dev *dev)
{
	return &dev->attr.limits;
}

/* control.c */
void unirdma_control_init(struct unirdma_dev *dev);
void unirdma_control_done(struct virtqueue *vq);
void unirdma_beat(struct unirdma_dev *dev);
void unirdma_stop(struct unirdma_dev *dev);
int unirdma_cmd(struct unirdma_dev *dev, enum unirdma_command command,
		const void *req, size_t req_len, void *rsp, size_t rsp_len);
int unirdma_cmd_destroy(struct unirdma_dev *dev, enum unirdma_command command,
			u32 handle);
void unirdma_cmd_undo(struct unirdma_dev *dev, enum unirdma_command command,
		      u32 handle);
void unirdma_lost(struct unirdma_dev *dev, const char *why);

/* events.c */
void unirdma_events_init(struct unirdma_dev *dev);
int unirdma_event_queue_fill(struct unirdma_event_queue *q);
void unirdma_async_ready(struct virtqueue *vq);
void unirdma_comp_ready(struct virtqueue *vq);
int unirdma_target_add(struct xarray *xa, u32 number,
		       struct unirdma_target *target);
void unirdma_target_remove(struct xarray *xa, u32 number,
			   struct unirdma_target *target);

/* area.c */
struct unirdma_area *unirdma_area_create(struct unirdma_dev *dev,
					 struct ib_ucontext *ibuc, size_t size);
void unirdma_area_destroy(struct unirdma_dev *dev, struct unirdma_area *area);
void unirdma_area_copy(struct unirdma_area *to, size_t to_offset,
		       const struct unirdma_area *from, size_t from_offset,
		       size_t length);
void unirdma_free_kept_areas(struct unirdma_dev *dev);
int unirdma_mmap(struct ib_ucontext *ibuc, struct vm_area_struct *vma);
void unirdma_mmap_free(struct rdma_user_mmap_entry *entry);

static inline u64 unirdma_area_offset(const struct unirdma_area *area)
{
	return rdma_user_mmap_get_offset(&area->entry);
}

static inline u64 unirdma_area_size(const struct unirdma_area *area)
{
	return (u64)area->num_pages << PAGE_SHIFT;
}

static inline bool unirdma_is_user_area(const struct unirdma_area *area)
{
	return area->entry.ucontext;
}

/* gid.c */
int unirdma_read_gids(struct unirdma_dev *dev);
int unirdma_fill_route(struct unirdma_dev *dev, struct unirdma_route *to,
		       const struct rdma_ah_attr *from);
int unirdma_fill_ah(struct unirdma_dev *dev, struct unirdma_ah_attr *to,
		    const struct rdma_ah_attr *from);
void unirdma_netdev_init(struct unirdma_dev *dev);
void unirdma_netdev_pick(struct unirdma_dev *dev, bool rescan);

/* device.c */
int unirdma_check_udata(struct ib_udata *udata, size_t answer_len);
int unirdma_answer(struct ib_udata *udata, const void *answer, size_t len);
int unirdma_read_port(struct unirdma_dev *dev,
		      struct unirdma_rsp_query_port *port);
void unirdma_set_device_ops(struct ib_device *ibdev);

/* stats.c, cq.c, srq.c, qp.c, mr.c */
void unirdma_set_stats_ops(struct ib_device *ibdev);
void unirdma_set_cq_ops(struct ib_device *ibdev);
void unirdma_set_srq_ops(struct ib_device *ibdev);
void unirdma_set_qp_ops(struct ib_device *ibdev);
void unirdma_set_mr_ops(struct ib_device *ibdev);
void unirdma_free_kept_mrs(struct unirdma_dev *dev);

/* post.c */
void unirdma_ring_init(struct unirdma_ring *ring, void *slots, u32 entries,
		       u32 stride, u32 max_sge, __le32 *prod_word,
		       __le32 *cons_word);
int unirdma_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr,
		      const struct ib_send_wr **bad_wr);
int unirdma_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr,
		      const struct ib_recv_wr **bad_wr);
int unirdma_post_srq_recv(struct ib_srq *ibsrq, const struct ib_recv_wr *wr,
			  const struct ib_recv_wr **bad_wr);

/* poll.c */
int unirdma_poll_cq(struct ib_cq *ibcq, int num_entries, struct ib_wc *wc);
int unirdma_arm_cq(struct unirdma_cq *cq, enum ib_cq_notify_flags flags);
void unirdma_qp_enter(struct unirdma_qp *qp, struct ib_cq *send_cq,
		      struct ib_cq *recv_cq);
void unirdma_qp_leave(struct unirdma_qp *qp);
void unirdma_qp_reset(struct unirdma_qp *qp);

#endif
