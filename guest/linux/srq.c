// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Shared receive queues, and XRC domains. */
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/uaccess.h>
#include <rdma/uverbs_ioctl.h>

#include "unirdma.h"

static int unirdma_create_srq(struct ib_srq *ibsrq,
			      struct ib_srq_init_attr *init,
			      struct ib_udata *udata)
{
	struct unirdma_srq *srq = to_unirdma_srq(ibsrq);
	struct unirdma_dev *dev = to_unirdma_dev(ibsrq->device);
	const struct unirdma_rsp_query_device *limits = &dev->attr;
	struct unirdma_create_srq_resp answer = {};
	struct unirdma_req_create_srq req = {};
	struct ib_srq_attr *attr = &init->attr;
	struct unirdma_rsp_create_srq rsp;
	struct ib_ucontext *ibuc = NULL;
	struct unirdma_qp_ctrl *ctrl;
	u32 entries, stride;
	int err;

	if (init->srq_type != IB_SRQT_BASIC &&
	    !(init->srq_type == IB_SRQT_XRC && udata))
		return -EOPNOTSUPP;
	err = unirdma_check_udata(udata, sizeof(answer));
	if (err)
		return err;
	if (!attr->max_wr ||
	    !unirdma_within(attr->max_wr, limits->max_srq_wr,
			    UNIRDMA_MAX_ENTRIES) ||
	    !unirdma_within(attr->max_sge, limits->max_srq_sge,
			    UNIRDMA_MAX_SGE))
		return -EINVAL;
	if (udata)
		ibuc = &rdma_udata_to_drv_context(udata, struct unirdma_ucontext,
						  ibuc)->ibuc;

	entries = roundup_pow_of_two(attr->max_wr);
	stride = UNIRDMA_RQ_HEAD + UNIRDMA_SGE_SIZE * max(attr->max_sge, 1U);
	srq->area = unirdma_area_create(dev, ibuc, UNIRDMA_CTRL_SIZE +
					(size_t)entries * stride);
	if (IS_ERR(srq->area))
		return PTR_ERR(srq->area);
	if (!udata) {
		ctrl = srq->area->ptr;
		unirdma_ring_init(&srq->rq, ctrl + 1, entries, stride,
				  attr->max_sge, &ctrl->rq_prod, &ctrl->rq_cons);
	}

	mutex_init(&srq->resize_lock);
	srq->ring_offset = UNIRDMA_CTRL_SIZE;
	srq->entries = entries;
	srq->stride = stride;
	if (init->srq_type == IB_SRQT_XRC) {
		req.is_xrc = cpu_to_le32(1);
		req.xrcdn = cpu_to_le32(to_unirdma_xrcd(init->ext.xrc.xrcd)->xrcdn);
		req.cqn = cpu_to_le32(to_unirdma_cq(init->ext.cq)->cqn);
	}
	req.pdn = cpu_to_le32(to_unirdma_pd(ibsrq->pd)->pdn);
	req.max_wr = cpu_to_le32(attr->max_wr);
	req.max_sge = cpu_to_le32(attr->max_sge);
	req.limit = cpu_to_le32(attr->srq_limit);
	req.ctrl_addr = cpu_to_le64(srq->area->addr);
	req.ring_addr = cpu_to_le64(srq->area->addr + UNIRDMA_CTRL_SIZE);
	err = unirdma_cmd(dev, UNIRDMA_CREATE_SRQ, &req, sizeof(req), &rsp,
			  sizeof(rsp));
	if (err)
		goto free;
	srq->srqn = le32_to_cpu(rsp.srqn);
	err = unirdma_target_add(&dev->srqs, srq->srqn, &srq->target);
	if (err)
		goto destroy;
	attr->max_wr = entries;
	if (init->srq_type == IB_SRQT_XRC)
		ibsrq->ext.xrc.srq_num = le32_to_cpu(rsp.number);
	if (!udata)
		return 0;

	answer.offset = unirdma_area_offset(srq->area);
	answer.size = unirdma_area_size(srq->area);
	answer.ring_offset = UNIRDMA_CTRL_SIZE;
	answer.entries = entries;
	answer.stride = stride;
	answer.srqn = srq->srqn;
	err = unirdma_answer(udata, &answer, sizeof(answer));
	if (err)
		goto remove;
	return 0;
remove:
	unirdma_target_remove(&dev->srqs, srq->srqn, &srq->target);
destroy:
	unirdma_cmd_undo(dev, UNIRDMA_DESTROY_SRQ, srq->srqn);
free:
	unirdma_area_destroy(dev, srq->area);
	return err;
}

static int unirdma_destroy_srq(struct ib_srq *ibsrq, struct ib_udata *udata)
{
	struct unirdma_srq *srq = to_unirdma_srq(ibsrq);
	struct unirdma_dev *dev = to_unirdma_dev(ibsrq->device);
	int err;

	err = unirdma_cmd_destroy(dev, UNIRDMA_DESTROY_SRQ, srq->srqn);
	if (err)
		return err;
	unirdma_target_remove(&dev->srqs, srq->srqn, &srq->target);
	if (srq->ring)
		unirdma_area_destroy(dev, srq->ring);
	unirdma_area_destroy(dev, srq->area);
	return 0;
}

/*
 * Copies the waiting WQEs to a ring of @entries. The process must post none
 * meanwhile, or they are lost. The device may take some WQEs meanwhile; their
 * copies are not used.
 */
static int unirdma_copy_wqes(struct unirdma_srq *srq, struct unirdma_area *to,
			     u32 entries)
{
	struct unirdma_area *from = srq->ring ?: srq->area;
	struct unirdma_qp_ctrl *ctrl = page_address(srq->area->pages[0]);
	u32 prod = le32_to_cpu(READ_ONCE(ctrl->rq_prod));
	u32 i = le32_to_cpu(READ_ONCE(ctrl->rq_cons));

	/* The process writes one of the two indices. */
	if (prod - i > min(srq->entries, entries))
		return -EINVAL;
	for (; i != prod; i++)
		unirdma_area_copy(to, (size_t)(i & (entries - 1)) * srq->stride,
				  from, srq->ring_offset +
				  (size_t)(i & (srq->entries - 1)) * srq->stride,
				  srq->stride);
	return 0;
}

/* Called with the lock held. Returns the area that is not used, or NULL. */
static int unirdma_switch_srq(struct unirdma_dev *dev, struct unirdma_srq *srq,
			      struct unirdma_area **area, u32 entries)
{
	struct unirdma_req_resize_srq req = {
		.srqn = cpu_to_le32(srq->srqn),
		.max_wr = cpu_to_le32(entries),
		.ctrl_addr = cpu_to_le64(srq->area->addr),
		.ring_addr = cpu_to_le64((*area)->addr),
	};
	int err;

	err = unirdma_copy_wqes(srq, *area, entries);
	if (err)
		return err;
	err = unirdma_cmd(dev, UNIRDMA_RESIZE_SRQ, &req, sizeof(req), NULL, 0);
	if (err)
		return err;
	swap(srq->ring, *area);
	srq->ring_offset = 0;
	srq->entries = entries;
	return 0;
}

/* The old ring stays in the process's mapping, but nobody reads it any more. */
static int unirdma_resize_srq(struct unirdma_dev *dev, struct unirdma_srq *srq,
			      u32 max_wr, struct ib_udata *udata)
{
	struct unirdma_resize_srq_resp answer = {};
	struct unirdma_modify_srq_req req;
	struct unirdma_ucontext *uc;
	struct unirdma_area *area;
	u32 entries;
	int err;

	/* SRQs of kernel users keep their size. */
	if (!udata)
		return -EOPNOTSUPP;
	if (udata->inlen < sizeof(req))
		return -EINVAL;
	if (udata->inlen > sizeof(req) &&
	    !ib_is_udata_cleared(udata, sizeof(req),
				 udata->inlen - sizeof(req)))
		return -EOPNOTSUPP;
	if (ib_copy_from_udata(&req, udata, sizeof(req)))
		return -EFAULT;
	if (!max_wr || !unirdma_within(max_wr, dev->attr.max_srq_wr,
				       UNIRDMA_MAX_ENTRIES))
		return -EINVAL;
	uc = rdma_udata_to_drv_context(udata, struct unirdma_ucontext, ibuc);

	entries = roundup_pow_of_two(max_wr);
	area = unirdma_area_create(dev, &uc->ibuc,
				   (size_t)entries * srq->stride);
	if (IS_ERR(area))
		return PTR_ERR(area);
	answer.offset = unirdma_area_offset(area);
	answer.size = unirdma_area_size(area);
	answer.entries = entries;
	/* Before the command, which cannot be undone. */
	if (copy_to_user(u64_to_user_ptr(req.answer), &answer, sizeof(answer))) {
		unirdma_area_destroy(dev, area);
		return -EFAULT;
	}
	mutex_lock(&srq->resize_lock);
	err = unirdma_switch_srq(dev, srq, &area, entries);
	mutex_unlock(&srq->resize_lock);
	if (area)
		unirdma_area_destroy(dev, area);
	return err;
}

static int unirdma_modify_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr,
			      enum ib_srq_attr_mask mask,
			      struct ib_udata *udata)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibsrq->device);
	struct unirdma_srq *srq = to_unirdma_srq(ibsrq);
	struct unirdma_req_modify_srq req = {
		.srqn = cpu_to_le32(srq->srqn),
		.limit = cpu_to_le32(attr->srq_limit),
	};

	/* Not both: a failure must say whether the ring was replaced. */
	if (mask == IB_SRQ_MAX_WR)
		return unirdma_resize_srq(dev, srq, attr->max_wr, udata);
	if (mask & ~IB_SRQ_LIMIT)
		return -EINVAL;
	if (!mask)
		return 0;
	return unirdma_cmd(dev, UNIRDMA_MODIFY_SRQ, &req, sizeof(req), NULL, 0);
}

static int unirdma_query_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr)
{
	struct unirdma_handle req = {
		.handle = cpu_to_le32(to_unirdma_srq(ibsrq)->srqn),
	};
	struct unirdma_rsp_query_srq rsp;
	int err;

	err = unirdma_cmd(to_unirdma_dev(ibsrq->device), UNIRDMA_QUERY_SRQ,
			  &req, sizeof(req), &rsp, sizeof(rsp));
	if (err)
		return err;
	attr->max_wr = le32_to_cpu(rsp.max_wr);
	attr->max_sge = le32_to_cpu(rsp.max_sge);
	attr->srq_limit = le32_to_cpu(rsp.limit);
	return 0;
}

/*
 * The ib core knows the file of each domain. The device gets a domain of its
 * own.
 */
static int unirdma_alloc_xrcd(struct ib_xrcd *ibxrcd, struct ib_udata *udata)
{
	struct unirdma_req_create_xrcd req = {
		.flags = cpu_to_le32(UNIRDMA_XRCD_CREATE),
	};
	struct unirdma_handle rsp;
	int err;

	err = unirdma_check_udata(udata, 0);
	if (err)
		return err;
	err = unirdma_cmd(to_unirdma_dev(ibxrcd->device), UNIRDMA_CREATE_XRCD,
			  &req, sizeof(req), &rsp, sizeof(rsp));
	if (!err)
		to_unirdma_xrcd(ibxrcd)->xrcdn = le32_to_cpu(rsp.handle);
	return err;
}

static int unirdma_dealloc_xrcd(struct ib_xrcd *ibxrcd, struct ib_udata *udata)
{
	return unirdma_cmd_destroy(to_unirdma_dev(ibxrcd->device),
				   UNIRDMA_DESTROY_XRCD,
				   to_unirdma_xrcd(ibxrcd)->xrcdn);
}

static const struct ib_device_ops unirdma_srq_ops = {
	.create_srq = unirdma_create_srq,
	.modify_srq = unirdma_modify_srq,
	.query_srq = unirdma_query_srq,
	.destroy_srq = unirdma_destroy_srq,
	.post_srq_recv = unirdma_post_srq_recv,
	.alloc_xrcd = unirdma_alloc_xrcd,
	.dealloc_xrcd = unirdma_dealloc_xrcd,

	INIT_RDMA_OBJ_SIZE(ib_srq, unirdma_srq, ibsrq),
	INIT_RDMA_OBJ_SIZE(ib_xrcd, unirdma_xrcd, ibxrcd),
};

void unirdma_set_srq_ops(struct ib_device *ibdev)
{
	ib_set_device_ops(ibdev, &unirdma_srq_ops);
}
