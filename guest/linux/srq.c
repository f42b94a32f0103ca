// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Shared receive queues. */
#include <linux/log2.h>
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

	if (init->srq_type != IB_SRQT_BASIC)
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
	unirdma_area_destroy(dev, srq->area);
	return 0;
}

static int unirdma_modify_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr,
			      enum ib_srq_attr_mask mask,
			      struct ib_udata *udata)
{
	struct unirdma_req_modify_srq req = {
		.srqn = cpu_to_le32(to_unirdma_srq(ibsrq)->srqn),
		.limit = cpu_to_le32(attr->srq_limit),
	};

	/* Its size stays. */
	if (mask & ~IB_SRQ_LIMIT)
		return -EOPNOTSUPP;
	if (!(mask & IB_SRQ_LIMIT))
		return 0;
	return unirdma_cmd(to_unirdma_dev(ibsrq->device), UNIRDMA_MODIFY_SRQ,
			   &req, sizeof(req), NULL, 0);
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

static const struct ib_device_ops unirdma_srq_ops = {
	.create_srq = unirdma_create_srq,
	.modify_srq = unirdma_modify_srq,
	.query_srq = unirdma_query_srq,
	.destroy_srq = unirdma_destroy_srq,
	.post_srq_recv = unirdma_post_srq_recv,

	INIT_RDMA_OBJ_SIZE(ib_srq, unirdma_srq, ibsrq),
};

void unirdma_set_srq_ops(struct ib_device *ibdev)
{
	ib_set_device_ops(ibdev, &unirdma_srq_ops);
}
