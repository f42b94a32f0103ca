/*
 * Stands in for libibverbs and the kernel driver, as the provider sees them. Commands are answered from tables. The
 * memory that the device would offer for mapping is a memory file, through which the test plays the device.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define AREAS 64

/* State that the test reads and changes. */
int fake_fd = -1;
unsigned long fake_areas[AREAS];
int fake_num_areas;
int fake_notified;
int fake_destroyed;
/* If not 0, the next command fails with it. */
int fake_errno;
/* If not 0, answers make no sense. */
int fake_nonsense;
const void *fake_device_ops;
const void *fake_context_ops;

struct area {
	unsigned long offset, size;
};

static struct area area(unsigned long size)
{
	static unsigned long next;
	struct area a = { next, (size + 4095) & ~4095UL };

	next += a.size;
	if (fake_num_areas < AREAS)
		fake_areas[fake_num_areas++] = a.offset;
	if (ftruncate(fake_fd, next))
		abort();
	return a;
}

static int fails(void)
{
	int e = fake_errno;

	fake_errno = 0;
	return e;
}

void verbs_register_driver_34(const void *ops)
{
	fake_device_ops = ops;
}

void *_verbs_init_and_alloc_context(struct ibv_device *device, int fd, size_t size, void *offset, uint32_t driver)
{
	struct verbs_context *c = calloc(1, size);

	(void)fd, (void)offset, (void)driver;
	if (fake_fd < 0)
		fake_fd = memfd_create("fake", MFD_CLOEXEC);
	c->context.device = device;
	c->context.cmd_fd = fake_fd;
	c->context.async_fd = -1;
	return c;
}

void verbs_uninit_context(struct verbs_context *c)
{
	(void)c;
	fake_destroyed++;
}

void verbs_set_ops(struct verbs_context *c, const void *ops)
{
	(void)c;
	fake_context_ops = ops;
}

int ibv_cmd_get_context(struct verbs_context *c, void *cmd, size_t cmd_size, void *resp, size_t resp_size)
{
	struct {
		uint32_t async_fd, vectors;
		uint64_t db_offset;
		uint32_t max_inline, reserved;
	} *r = resp;

	(void)c, (void)cmd;
	if (cmd_size != 16 || resp_size != sizeof(*r))
		return EINVAL;
	if (fake_errno)
		return fails();
	r->db_offset = area(4096).offset;
	r->max_inline = 128;
	return 0;
}

int ibv_cmd_query_device_any(struct ibv_context *c, const void *input, struct ibv_device_attr_ex *attr, size_t size,
			     uint64_t *resp, size_t *resp_size)
{
	(void)c, (void)input, (void)size;
	if (*resp_size != 304 && *resp_size != 312)
		return EINVAL;
	if (*resp_size == 312)
		resp[38] = 5ULL << 32 | 7;
	resp[0] = 1ULL << 32 | 2 << 16 | 3;
	attr->orig_attr.max_qp = 17;
	return fails();
}

int ibv_cmd_query_port(struct ibv_context *c, uint8_t port, struct ibv_port_attr *attr, void *cmd, size_t cmd_size)
{
	(void)c, (void)cmd;
	attr->lid = port;
	return cmd_size == 24 ? fails() : EINVAL;
}

int ibv_cmd_alloc_pd(struct ibv_context *c, struct ibv_pd *pd, void *cmd, size_t cmd_size, void *resp, size_t resp_size)
{
	(void)cmd, (void)resp;
	pd->context = c;
	pd->handle = 3;
	return cmd_size == 16 && resp_size == 4 ? fails() : EINVAL;
}

int ibv_cmd_dealloc_pd(struct ibv_pd *pd)
{
	(void)pd;
	return fails();
}

struct verbs_mr {
	struct ibv_mr ibv_mr;
	int type, access;
};

int ibv_cmd_reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t va, int access,
		struct verbs_mr *mr, void *cmd, size_t cmd_size, void *resp, size_t resp_size)
{
	(void)pd, (void)addr, (void)length, (void)va, (void)cmd, (void)resp;
	mr->access = access;
	mr->ibv_mr.lkey = 0x55;
	return cmd_size == 48 && resp_size == 12 ? fails() : EINVAL;
}

int ibv_cmd_rereg_mr(struct verbs_mr *mr, uint32_t flags, void *addr, size_t length, uint64_t va, int access,
		struct ibv_pd *pd, void *cmd, size_t cmd_size, void *resp, size_t resp_size)
{
	(void)mr, (void)flags, (void)addr, (void)length, (void)va, (void)access, (void)pd, (void)cmd, (void)resp;
	return cmd_size == 56 && resp_size == 8 ? fails() : EINVAL;
}

int ibv_cmd_dereg_mr(struct verbs_mr *mr)
{
	(void)mr;
	return fails();
}

struct cq_resp {
	uint32_t handle, cqe;
	uint64_t offset, size;
	uint32_t ring_offset, entries, cqn, reserved;
};

static void new_cq(struct ibv_cq *cq, int cqe, struct cq_resp *r)
{
	struct area a;

	r->entries = 1;
	while ((int)r->entries < cqe)
		r->entries *= 2;
	a = area(4096 + r->entries * 64);
	r->offset = a.offset;
	r->size = a.size;
	r->ring_offset = fake_nonsense ? a.size : 4096;
	cq->cqe = r->entries;
}

int ibv_cmd_create_cq(struct ibv_context *c, int cqe, void *channel, int vector, struct ibv_cq *cq,
		void *cmd, size_t cmd_size, void *resp, size_t resp_size)
{
	(void)channel, (void)vector, (void)cmd;
	if (cmd_size != 40 || resp_size != sizeof(struct cq_resp))
		return EINVAL;
	if (fake_errno)
		return fails();
	cq->context = c;
	new_cq(cq, cqe, resp);
	return 0;
}

int ibv_cmd_resize_cq(struct ibv_cq *cq, int cqe, void *cmd, size_t cmd_size, void *resp, size_t resp_size)
{
	(void)cmd;
	if (cmd_size != 24 || resp_size != sizeof(struct cq_resp))
		return EINVAL;
	new_cq(cq, cqe, resp);
	return 0;
}

int ibv_cmd_req_notify_cq(struct ibv_cq *cq, int solicited)
{
	(void)cq, (void)solicited;
	fake_notified++;
	return fails();
}

int ibv_cmd_destroy_cq(struct ibv_cq *cq)
{
	(void)cq;
	fake_destroyed++;
	return fails();
}

/* 16 sends of 4 SGEs or 128 bytes, 16 receives of 4 SGEs. */
int ibv_cmd_create_qp_ex(struct ibv_context *c, struct ibv_qp *qp, struct ibv_qp_init_attr_ex *attr,
		void *cmd, size_t cmd_size, void *resp, size_t resp_size)
{
	static uint32_t number = 0x100;
	struct {
		uint32_t core[8];
		uint64_t offset, size;
		uint32_t sq_offset, rq_offset, sq_entries, sq_stride, rq_entries, rq_stride, slot;
		uint32_t max_inline, max_send_sge, max_recv_sge;
	} *r = resp;
	struct area a;

	(void)cmd;
	if (cmd_size != 64 || resp_size != sizeof(*r))
		return EINVAL;
	if (fake_errno)
		return fails();
	if (attr->comp_mask != (attr->qp_type == IBV_QPT_XRC_RECV ? IBV_QP_INIT_ATTR_XRCD : IBV_QP_INIT_ATTR_PD))
		return EINVAL;
	qp->context = c;
	qp->pd = attr->pd;
	qp->send_cq = attr->send_cq;
	qp->recv_cq = attr->recv_cq;
	qp->srq = attr->srq;
	qp->qp_type = attr->qp_type;
	qp->qp_num = number++;
	/* Nothing is posted to a target. */
	if (attr->qp_type == IBV_QPT_XRC_RECV)
		return 0;
	a = area(3 * 4096);
	r->offset = a.offset;
	r->size = a.size;
	r->sq_offset = 4096;
	r->rq_offset = 8192;
	r->sq_entries = 16;
	r->sq_stride = fake_nonsense ? 64 : 192;
	r->rq_entries = attr->srq ? 0 : 16;
	r->rq_stride = 80;
	r->slot = 70;
	r->max_inline = 128;
	r->max_send_sge = r->max_recv_sge = 4;
	return 0;
}

int ibv_cmd_open_qp(struct ibv_context *c, struct ibv_qp *qp, int size, struct ibv_qp_open_attr *attr,
		void *cmd, size_t cmd_size, void *resp, size_t resp_size)
{
	(void)cmd, (void)resp;
	if (size < 376 || cmd_size != 40 || resp_size != 32)
		return EINVAL;
	qp->context = c;
	qp->qp_type = attr->qp_type;
	qp->qp_num = attr->qp_num;
	return fails();
}

int ibv_cmd_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, void *cmd, size_t cmd_size)
{
	(void)qp, (void)attr, (void)mask, (void)cmd;
	return cmd_size == 120 ? fails() : EINVAL;
}

int ibv_cmd_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init,
		void *cmd, size_t cmd_size)
{
	(void)qp, (void)mask, (void)init, (void)cmd;
	attr->qkey = 9;
	return cmd_size == 24 ? fails() : EINVAL;
}

int ibv_cmd_destroy_qp(struct ibv_qp *qp)
{
	(void)qp;
	fake_destroyed++;
	return fails();
}

struct verbs_srq {
	struct ibv_srq srq;
	enum ibv_srq_type type;
	void *xrcd;
	struct ibv_cq *cq;
	uint32_t number;
};

int ibv_cmd_create_srq_ex(struct ibv_context *c, struct verbs_srq *srq, struct ibv_srq_init_attr_ex *attr, void *cmd,
			  size_t cmd_size, void *resp, size_t resp_size)
{
	struct {
		uint32_t core[4];
		uint64_t offset, size;
		uint32_t ring_offset, entries, stride, srqn;
	} *r = resp;
	struct area a;

	(void)cmd;
	if (cmd_size != 56 || resp_size != sizeof(*r))
		return EINVAL;
	a = area(8192);
	r->offset = a.offset;
	r->size = a.size;
	r->ring_offset = 4096;
	r->entries = 4;
	r->stride = 48;
	attr->attr.max_wr = 4;
	srq->srq.context = c;
	srq->type = attr->srq_type;
	srq->number = 0x33;
	return 0;
}

/* A larger SRQ has its ring where the command says. */
int ibv_cmd_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask, uint64_t *cmd, size_t cmd_size)
{
	struct {
		uint64_t offset, size;
		uint32_t entries, reserved;
	} *r = (void *)cmd[3];
	struct area a;

	(void)srq;
	if (cmd_size != 32 || mask == (IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT))
		return EINVAL;
	if (fake_errno || mask != IBV_SRQ_MAX_WR)
		return fails();
	a = area(4096);
	r->offset = a.offset;
	r->size = a.size;
	r->entries = attr->max_wr;
	return 0;
}

int ibv_cmd_open_xrcd(struct ibv_context *c, struct ibv_xrcd *xrcd, int size,
		struct ibv_xrcd_init_attr *attr, void *cmd, size_t cmd_size, void *resp, size_t resp_size)
{
	(void)attr, (void)cmd, (void)resp;
	if (size != 16 || cmd_size != 24 || resp_size != 4)
		return EINVAL;
	xrcd->context = c;
	return fails();
}

int ibv_cmd_close_xrcd(struct ibv_xrcd *xrcd)
{
	(void)xrcd;
	fake_destroyed++;
	return fails();
}

int ibv_cmd_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type, struct ibv_mw *mw, void *cmd, size_t cmd_size,
		void *resp, size_t resp_size)
{
	(void)cmd, (void)resp;
	if (cmd_size != 24 || resp_size != 8)
		return EINVAL;
	mw->context = pd->context;
	mw->pd = pd;
	mw->type = type;
	mw->rkey = 0x1ff;
	return fails();
}

int ibv_cmd_dealloc_mw(struct ibv_mw *mw)
{
	(void)mw;
	fake_destroyed++;
	return fails();
}

int ibv_cmd_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr, void *cmd, size_t cmd_size)
{
	(void)cq, (void)attr, (void)cmd;
	return cmd_size == 40 ? fails() : EINVAL;
}

int ibv_cmd_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, void *cmd, size_t cmd_size)
{
	(void)srq, (void)cmd;
	attr->srq_limit = 2;
	return cmd_size == 24 ? fails() : EINVAL;
}

int ibv_cmd_destroy_srq(struct ibv_srq *srq)
{
	(void)srq;
	fake_destroyed++;
	return fails();
}

int ibv_cmd_create_ah(struct ibv_pd *pd, struct ibv_ah *ah, struct ibv_ah_attr *attr, void *resp, size_t resp_size)
{
	struct {
		uint32_t handle, ah, reserved;
	} *r = resp;

	(void)pd, (void)attr;
	if (resp_size != sizeof(*r))
		return EINVAL;
	ah->handle = 1;
	r->ah = 0x77;
	return fails();
}

int ibv_cmd_destroy_ah(struct ibv_ah *ah)
{
	(void)ah;
	return fails();
}

int ibv_cmd_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)qp, (void)gid, (void)lid;
	return 0;
}

int ibv_cmd_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)qp, (void)gid, (void)lid;
	return 0;
}
