// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Completion queues. */
#include <linux/log2.h>
#include <rdma/uverbs_ioctl.h>

#include "unirdma.h"

/* The control block is at the start of the area, the ring follows. */
static size_t unirdma_cq_size(u32 entries)
{
	return UNIRDMA_CTRL_SIZE + (size_t)entries * UNIRDMA_CQE_SIZE;
}

static bool unirdma_cqe_ok(struct unirdma_dev *dev, unsigned int cqe)
{
	return cqe && unirdma_within(cqe, unirdma_limits(dev)->max_cqe,
				     UNIRDMA_MAX_ENTRIES);
}

/* Initializes the part of a CQ that kernel users poll. */
static void unirdma_kernel_cq(struct unirdma_cq *cq)
{
	spin_lock_init(&cq->lock);
	INIT_LIST_HEAD(&cq->senders);
	INIT_LIST_HEAD(&cq->receivers);
	cq->ctrl = cq->area->ptr;
	cq->cqes = cq->area->ptr + UNIRDMA_CTRL_SIZE;
}

static int unirdma_create_cq(struct ib_cq *ibcq,
			     const struct ib_cq_init_attr *attr,
			     struct ib_udata *udata)
{
	struct unirdma_cq *cq = to_unirdma_cq(ibcq);
	struct unirdma_dev *dev = to_unirdma_dev(ibcq->device);
	struct unirdma_cq_resp answer = {};
	struct unirdma_req_create_cq req = {};
	struct ib_ucontext *ibuc = NULL;
	struct unirdma_handle rsp;
	u32 entries;
	int err;

	/* Completions always have a timestamp. */
	if (attr->flags & ~IB_UVERBS_CQ_FLAGS_TIMESTAMP_COMPLETION)
		return -EOPNOTSUPP;
	err = unirdma_check_udata(udata, sizeof(answer));
	if (err)
		return err;
	if (!unirdma_cqe_ok(dev, attr->cqe) || attr->comp_vector >= dev->num_comp)
		return -EINVAL;
	if (udata)
		ibuc = &rdma_udata_to_drv_context(udata, struct unirdma_ucontext,
						  ibuc)->ibuc;

	entries = roundup_pow_of_two(attr->cqe);
	mutex_init(&cq->resize_lock);
	cq->area = unirdma_area_create(dev, ibuc, unirdma_cq_size(entries));
	if (IS_ERR(cq->area))
		return PTR_ERR(cq->area);
	if (!udata)
		unirdma_kernel_cq(cq);

	req.cqe = cpu_to_le32(attr->cqe);
	req.entries = cpu_to_le32(entries);
	req.ctrl_addr = cpu_to_le64(cq->area->addr);
	req.ring_addr = cpu_to_le64(cq->area->addr + UNIRDMA_CTRL_SIZE);
	req.comp_queue = cpu_to_le32(attr->comp_vector);
	err = unirdma_cmd(dev, UNIRDMA_CREATE_CQ, &req, sizeof(req), &rsp,
			  sizeof(rsp));
	if (err)
		goto free;
	cq->cqn = le32_to_cpu(rsp.handle);
	ibcq->cqe = entries;
	err = unirdma_target_add(&dev->cqs, cq->cqn, &cq->target);
	if (err)
		goto destroy;
	if (!udata)
		return 0;

	answer.offset = unirdma_area_offset(cq->area);
	answer.size = unirdma_area_size(cq->area);
	answer.ring_offset = UNIRDMA_CTRL_SIZE;
	answer.entries = entries;
	answer.cqn = cq->cqn;
	err = unirdma_answer(udata, &answer, sizeof(answer));
	if (err)
		goto remove;
	return 0;
remove:
	unirdma_target_remove(&dev->cqs, cq->cqn, &cq->target);
destroy:
	unirdma_cmd_undo(dev, UNIRDMA_DESTROY_CQ, cq->cqn);
free:
	unirdma_area_destroy(dev, cq->area);
	return err;
}

static int unirdma_destroy_cq(struct ib_cq *ibcq, struct ib_udata *udata)
{
	struct unirdma_cq *cq = to_unirdma_cq(ibcq);
	struct unirdma_dev *dev = to_unirdma_dev(ibcq->device);
	int err;

	err = unirdma_cmd_destroy(dev, UNIRDMA_DESTROY_CQ, cq->cqn);
	if (err)
		return err;
	unirdma_target_remove(&dev->cqs, cq->cqn, &cq->target);
	unirdma_area_destroy(dev, cq->area);
	return 0;
}

/*
 * The process uses the new area once it has taken the completions that are left
 * in the old one. The process's mapping keeps the old area alive.
 */
static int unirdma_resize_cq(struct ib_cq *ibcq, unsigned int cqe,
			     struct ib_udata *udata)
{
	struct unirdma_cq *cq = to_unirdma_cq(ibcq);
	struct unirdma_dev *dev = to_unirdma_dev(ibcq->device);
	struct unirdma_cq_resp answer = {};
	struct unirdma_req_resize_cq req = {};
	struct unirdma_area *area;
	struct unirdma_ucontext *uc;
	u32 entries;
	int err;

	/* CQs of kernel users keep their size. */
	if (!udata)
		return -EOPNOTSUPP;
	err = unirdma_check_udata(udata, sizeof(answer));
	if (err)
		return err;
	if (!unirdma_cqe_ok(dev, cqe))
		return -EINVAL;
	uc = rdma_udata_to_drv_context(udata, struct unirdma_ucontext, ibuc);

	entries = roundup_pow_of_two(cqe);
	area = unirdma_area_create(dev, &uc->ibuc, unirdma_cq_size(entries));
	if (IS_ERR(area))
		return PTR_ERR(area);

	answer.offset = unirdma_area_offset(area);
	answer.size = unirdma_area_size(area);
	answer.ring_offset = UNIRDMA_CTRL_SIZE;
	answer.entries = entries;
	answer.cqn = cq->cqn;
	/* Before the command, which cannot be undone. */
	err = unirdma_answer(udata, &answer, sizeof(answer));
	if (err)
		goto free;

	req.cqn = cpu_to_le32(cq->cqn);
	req.cqe = cpu_to_le32(cqe);
	req.entries = cpu_to_le32(entries);
	req.ctrl_addr = cpu_to_le64(area->addr);
	req.ring_addr = cpu_to_le64(area->addr + UNIRDMA_CTRL_SIZE);
	mutex_lock(&cq->resize_lock);
	err = unirdma_cmd(dev, UNIRDMA_RESIZE_CQ, &req, sizeof(req), NULL, 0);
	if (!err) {
		swap(cq->area, area);
		ibcq->cqe = entries;
	}
	mutex_unlock(&cq->resize_lock);
free:
	/* The old area or, after an error, the new one. */
	unirdma_area_destroy(dev, area);
	return err;
}

static int unirdma_modify_cq(struct ib_cq *ibcq, u16 count, u16 period_us)
{
	struct unirdma_req_modify_cq req = {
		.cqn = cpu_to_le32(to_unirdma_cq(ibcq)->cqn),
		.count = cpu_to_le16(count),
		.period_us = cpu_to_le16(period_us),
	};

	return unirdma_cmd(to_unirdma_dev(ibcq->device), UNIRDMA_MODIFY_CQ,
			   &req, sizeof(req), NULL, 0);
}

/*
 * Processes arm their CQs in shared memory. They use this call to wake the
 * device when they find need_kick in the doorbell page.
 */
static int unirdma_req_notify_cq(struct ib_cq *ibcq,
				 enum ib_cq_notify_flags flags)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibcq->device);
	struct unirdma_cq *cq = to_unirdma_cq(ibcq);

	if (cq->ctrl)
		return unirdma_arm_cq(cq, flags);
	if (unirdma_is_lost(dev) || !virtqueue_notify(dev->wake))
		return -EIO;
	return 0;
}

#ifdef HAVE_CREATE_CQ_ATTRS
static int unirdma_create_cq_attrs(struct ib_cq *ibcq,
				   const struct ib_cq_init_attr *attr,
				   struct uverbs_attr_bundle *attrs)
{
	return unirdma_create_cq(ibcq, attr,
				 attrs ? &attrs->driver_udata : NULL);
}
#endif

#ifndef HAVE_RESIZE_USER_CQ
static int unirdma_resize_cq_int(struct ib_cq *ibcq, int cqe,
				 struct ib_udata *udata)
{
	return cqe < 0 ? -EINVAL : unirdma_resize_cq(ibcq, cqe, udata);
}
#endif

static const struct ib_device_ops unirdma_cq_ops = {
#ifdef HAVE_CREATE_CQ_ATTRS
	.create_cq = unirdma_create_cq_attrs,
#else
	.create_cq = unirdma_create_cq,
#endif
	.destroy_cq = unirdma_destroy_cq,
#ifdef HAVE_RESIZE_USER_CQ
	.resize_user_cq = unirdma_resize_cq,
#else
	.resize_cq = unirdma_resize_cq_int,
#endif
	.modify_cq = unirdma_modify_cq,
	.req_notify_cq = unirdma_req_notify_cq,
	.poll_cq = unirdma_poll_cq,

	INIT_RDMA_OBJ_SIZE(ib_cq, unirdma_cq, ibcq),
};

void unirdma_set_cq_ops(struct ib_device *ibdev)
{
	ib_set_device_ops(ibdev, &unirdma_cq_ops);
}
