// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Queue pairs and multicast. */
#include <linux/log2.h>
#include <rdma/uverbs_ioctl.h>

#include "unirdma.h"

/* Layout of a QP's area (section 7.2 of the specification). */
struct unirdma_qp_layout {
	u32 sq_entries, sq_stride, rq_entries, rq_stride;
	size_t sq_offset, rq_offset, size;
};

static void unirdma_qp_layout(struct unirdma_qp_layout *l,
			      const struct ib_qp_cap *cap)
{
	l->sq_entries = roundup_pow_of_two(max(cap->max_send_wr, 1U));
	l->sq_stride = ALIGN(UNIRDMA_SQ_HEAD +
			     max3(cap->max_send_sge * UNIRDMA_SGE_SIZE,
				  cap->max_inline_data, 8U), 64);
	l->rq_entries = roundup_pow_of_two(max(cap->max_recv_wr, 1U));
	l->rq_stride = UNIRDMA_RQ_HEAD +
		       max(cap->max_recv_sge, 1U) * UNIRDMA_SGE_SIZE;
	l->sq_offset = UNIRDMA_CTRL_SIZE;
	l->rq_offset = l->sq_offset + (size_t)l->sq_entries * l->sq_stride;
	l->size = l->rq_offset + (size_t)l->rq_entries * l->rq_stride;
}

static bool unirdma_qp_cap_ok(struct unirdma_dev *dev,
			      const struct ib_qp_cap *cap)
{
	const struct unirdma_limits *l = unirdma_limits(dev);

	return unirdma_within(cap->max_send_wr, l->max_qp_wr,
			      UNIRDMA_MAX_ENTRIES) &&
	       unirdma_within(cap->max_recv_wr, l->max_qp_wr,
			      UNIRDMA_MAX_ENTRIES) &&
	       unirdma_within(cap->max_send_sge, l->max_sge, UNIRDMA_MAX_SGE) &&
	       unirdma_within(cap->max_recv_sge, l->max_sge, UNIRDMA_MAX_SGE) &&
	       unirdma_within(cap->max_inline_data, l->max_inline,
			      UNIRDMA_MAX_INLINE);
}

static void unirdma_put_cap(struct unirdma_qp_cap *to,
			    const struct ib_qp_cap *from)
{
	to->max_send_wr = cpu_to_le32(from->max_send_wr);
	to->max_recv_wr = cpu_to_le32(from->max_recv_wr);
	to->max_send_sge = cpu_to_le32(from->max_send_sge);
	to->max_recv_sge = cpu_to_le32(from->max_recv_sge);
	to->max_inline_data = cpu_to_le32(from->max_inline_data);
}

/* Returns CREATE_QP's errors, and -EIO for an impossible answer. */
static int unirdma_qp_command(struct unirdma_dev *dev, struct unirdma_qp *qp,
			      const struct ib_qp_init_attr *init,
			      const struct unirdma_qp_layout *l, u32 doorbell,
			      struct unirdma_rsp_create_qp *rsp)
{
	struct unirdma_req_create_qp req = {
		.qp_type = init->qp_type,
		.sq_sig_all = init->sq_sig_type == IB_SIGNAL_ALL_WR,
		.has_srq = !!init->srq,
		.ctrl_addr = cpu_to_le64(qp->area->addr),
		.sq_addr = cpu_to_le64(qp->area->addr + l->sq_offset),
		.rq_addr = cpu_to_le64(qp->area->addr + l->rq_offset),
		.doorbell = cpu_to_le32(doorbell),
	};
	int err;

	if (init->qp_type == IB_QPT_XRC_TGT) {
		req.xrcdn = cpu_to_le32(to_unirdma_xrcd(init->xrcd)->xrcdn);
	} else {
		req.pdn = cpu_to_le32(to_unirdma_pd(qp->ibqp.pd)->pdn);
		req.send_cqn = cpu_to_le32(to_unirdma_cq(init->send_cq)->cqn);
		req.recv_cqn = req.send_cqn;
	}
	if (init->recv_cq)
		req.recv_cqn = cpu_to_le32(to_unirdma_cq(init->recv_cq)->cqn);
	if (init->srq)
		req.srqn = cpu_to_le32(to_unirdma_srq(init->srq)->srqn);
	unirdma_put_cap(&req.cap, &qp->cap);
	err = unirdma_cmd(dev, UNIRDMA_CREATE_QP, &req, sizeof(req), rsp,
			  sizeof(*rsp));
	if (err)
		return err;

	qp->qpn = le32_to_cpu(rsp->qpn);
	qp->ibqp.qp_num = init->qp_type == IB_QPT_GSI ? 1 : qp->qpn;
	qp->db_slot = le32_to_cpu(rsp->db_slot);
	err = -EIO;
	if (qp->db_slot < UNIRDMA_DB_SLOTS)
		err = unirdma_target_add(&dev->qps, qp->qpn, &qp->target);
	if (err)
		unirdma_cmd_undo(dev, UNIRDMA_DESTROY_QP, qp->qpn);
	return err;
}

/* Initializes the rings to which kernel users post. */
static void unirdma_kernel_qp(struct unirdma_qp *qp,
			      const struct unirdma_qp_layout *l, bool has_srq)
{
	void *ptr = qp->area->ptr;
	struct unirdma_qp_ctrl *ctrl = ptr;

	qp->ctrl = ctrl;
	unirdma_ring_init(&qp->sq, ptr + l->sq_offset, l->sq_entries,
			  l->sq_stride, qp->cap.max_send_sge, &ctrl->sq_prod,
			  &ctrl->sq_cons);
	if (!has_srq)
		unirdma_ring_init(&qp->rq, ptr + l->rq_offset, l->rq_entries,
				  l->rq_stride, qp->cap.max_recv_sge,
				  &ctrl->rq_prod, &ctrl->rq_cons);
}

/*
 * Only the kernel has the QP for the general services, if there is one. Only
 * processes have XRC. For an XRC target, which is shared, the ib core hides the
 * process from the driver.
 */
static bool unirdma_qp_type_ok(struct unirdma_dev *dev, enum ib_qp_type type,
			       bool is_user)
{
	switch (type) {
	case IB_QPT_RC:
	case IB_QPT_UC:
	case IB_QPT_UD:
	case IB_QPT_XRC_TGT:
		return true;
	case IB_QPT_XRC_INI:
		return is_user;
	case IB_QPT_GSI:
		return dev->has_gsi && !is_user;
	default:
		return false;
	}
}

/*
 * True if all objects that the QP's type needs are given, and no size is too
 * large.
 */
static bool unirdma_qp_init_ok(struct unirdma_dev *dev, const struct ib_qp *ibqp,
			       const struct ib_qp_init_attr *init)
{
	bool complete;

	if (init->qp_type == IB_QPT_XRC_TGT)
		complete = init->xrcd;
	else
		complete = ibqp->pd && init->send_cq &&
			   (init->recv_cq || init->qp_type == IB_QPT_XRC_INI);
	return complete && unirdma_qp_cap_ok(dev, &init->cap);
}

/* Queues to which nothing is posted here take no room. */
static void unirdma_qp_trim(struct ib_qp_init_attr *init)
{
	const bool is_target = init->qp_type == IB_QPT_XRC_TGT;

	if (init->srq || is_target || init->qp_type == IB_QPT_XRC_INI) {
		init->cap.max_recv_wr = 0;
		init->cap.max_recv_sge = 0;
	}
	if (is_target) {
		init->cap.max_send_wr = 0;
		init->cap.max_send_sge = 0;
		init->cap.max_inline_data = 0;
	}
}

static int unirdma_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *init,
			     struct ib_udata *udata)
{
	struct unirdma_qp *qp = to_unirdma_qp(ibqp);
	struct unirdma_dev *dev = to_unirdma_dev(ibqp->device);
	struct unirdma_create_qp_resp answer = {};
	struct unirdma_rsp_create_qp rsp;
	struct unirdma_qp_layout layout;
	const bool is_target = init->qp_type == IB_QPT_XRC_TGT;
	struct ib_ucontext *ibuc = NULL;
	u32 doorbell = 0;
	bool has_rq;
	int err;

	if (!unirdma_qp_type_ok(dev, init->qp_type, udata))
		return -EOPNOTSUPP;
	if (init->create_flags || init->rwq_ind_tbl)
		return -EOPNOTSUPP;
	err = unirdma_check_udata(udata, sizeof(answer));
	if (err)
		return err;
	unirdma_qp_trim(init);
	if (!unirdma_qp_init_ok(dev, ibqp, init))
		return -EINVAL;
	/*
	 * An XRC target belongs to its domain, and may outlive the process,
	 * which posts nothing to it. So it uses the kernel's memory and
	 * doorbell page.
	 */
	if (udata && !is_target) {
		ibuc = &rdma_udata_to_drv_context(udata, struct unirdma_ucontext,
						  ibuc)->ibuc;
		doorbell = to_unirdma_ucontext(ibuc)->doorbell;
	}

	qp->cap = init->cap;
	qp->sig_type = init->sq_sig_type;
	unirdma_qp_layout(&layout, &qp->cap);
	qp->area = unirdma_area_create(dev, ibuc, layout.size);
	if (IS_ERR(qp->area))
		return PTR_ERR(qp->area);
	has_rq = !init->srq && !is_target && init->qp_type != IB_QPT_XRC_INI;
	if (!udata && !is_target)
		unirdma_kernel_qp(qp, &layout, init->srq);
	err = unirdma_qp_command(dev, qp, init, &layout, doorbell, &rsp);
	if (err)
		goto free;

	/* The capacity of the rings. */
	if (has_rq)
		qp->cap.max_recv_wr = layout.rq_entries;
	if (!is_target) {
		qp->cap.max_send_wr = layout.sq_entries;
		qp->cap.max_inline_data =
			min(layout.sq_stride - UNIRDMA_SQ_HEAD,
			    le32_to_cpu(rsp.cap.max_inline_data));
	}
	init->cap = qp->cap;
	/* The process maps nothing of a target: the answer is all zeros. */
	if (is_target)
		return 0;
	if (!udata) {
		unirdma_qp_enter(qp, init->send_cq, init->recv_cq);
		return 0;
	}

	answer.offset = unirdma_area_offset(qp->area);
	answer.size = unirdma_area_size(qp->area);
	answer.sq_offset = layout.sq_offset;
	answer.rq_offset = layout.rq_offset;
	answer.sq_entries = layout.sq_entries;
	answer.sq_stride = layout.sq_stride;
	answer.rq_entries = layout.rq_entries;
	answer.rq_stride = layout.rq_stride;
	answer.db_slot = qp->db_slot;
	answer.max_inline = qp->cap.max_inline_data;
	answer.max_send_sge = qp->cap.max_send_sge;
	answer.max_recv_sge = qp->cap.max_recv_sge;
	err = unirdma_answer(udata, &answer, sizeof(answer));
	if (err)
		goto destroy;
	return 0;
destroy:
	unirdma_target_remove(&dev->qps, qp->qpn, &qp->target);
	unirdma_cmd_undo(dev, UNIRDMA_DESTROY_QP, qp->qpn);
free:
	unirdma_area_destroy(dev, qp->area);
	return err;
}

static int unirdma_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata)
{
	struct unirdma_qp *qp = to_unirdma_qp(ibqp);
	struct unirdma_dev *dev = to_unirdma_dev(ibqp->device);
	int err;

	err = unirdma_cmd_destroy(dev, UNIRDMA_DESTROY_QP, qp->qpn);
	if (err)
		return err;
	unirdma_target_remove(&dev->qps, qp->qpn, &qp->target);
	if (qp->ctrl)
		unirdma_qp_leave(qp);
	unirdma_area_destroy(dev, qp->area);
	return 0;
}

static int unirdma_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *from,
			     int mask, struct ib_udata *udata)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibqp->device);
	struct unirdma_qp *qp = to_unirdma_qp(ibqp);
	struct unirdma_req_modify_qp req = {
		.qpn = cpu_to_le32(qp->qpn),
		.attr_mask = cpu_to_le32(mask),
	};
	struct unirdma_qp_attr *to = &req.attr;
	int err;

	/* The size of a QP cannot be changed. */
	if (mask & ~(IB_QP_ATTR_STANDARD_BITS | IB_QP_RATE_LIMIT) ||
	    mask & IB_QP_CAP)
		return -EOPNOTSUPP;

	/*
	 * The device checks which attributes go together, and when they may
	 * change.
	 */
	to->qp_state = from->qp_state;
	to->cur_qp_state = from->cur_qp_state;
	to->path_mtu = from->path_mtu;
	to->path_mig_state = from->path_mig_state;
	to->qkey = cpu_to_le32(from->qkey);
	to->rq_psn = cpu_to_le32(from->rq_psn);
	to->sq_psn = cpu_to_le32(from->sq_psn);
	to->dest_qp_num = cpu_to_le32(from->dest_qp_num);
	to->qp_access_flags = cpu_to_le32(from->qp_access_flags);
	to->pkey_index = cpu_to_le16(from->pkey_index);
	to->alt_pkey_index = cpu_to_le16(from->alt_pkey_index);
	to->en_sqd_async_notify = from->en_sqd_async_notify;
	to->max_rd_atomic = from->max_rd_atomic;
	to->max_dest_rd_atomic = from->max_dest_rd_atomic;
	to->min_rnr_timer = from->min_rnr_timer;
	to->port_num = from->port_num;
	to->timeout = from->timeout;
	to->retry_cnt = from->retry_cnt;
	to->rnr_retry = from->rnr_retry;
	to->alt_port_num = from->alt_port_num;
	to->alt_timeout = from->alt_timeout;
	to->rate_limit = cpu_to_le32(from->rate_limit);
	if (mask & IB_QP_AV) {
		err = unirdma_fill_ah(dev, &to->ah_attr, &from->ah_attr);
		if (err)
			return err;
	}
	if (mask & IB_QP_ALT_PATH) {
		err = unirdma_fill_ah(dev, &to->alt_ah_attr,
				      &from->alt_ah_attr);
		if (err)
			return err;
	}

	err = unirdma_cmd(dev, UNIRDMA_MODIFY_QP, &req, sizeof(req), NULL, 0);
	/*
	 * Requests that kernel users have posted to a lost device are flushed
	 * anyway.
	 */
	if (err && qp->ctrl && mask & IB_QP_STATE &&
	    from->qp_state == IB_QPS_ERR && unirdma_is_lost(dev))
		return 0;
	if (err)
		return err;
	if (mask & IB_QP_AV)
		qp->sgid_index = rdma_ah_read_grh(&from->ah_attr)->sgid_index;
	if (qp->ctrl && mask & IB_QP_STATE && from->qp_state == IB_QPS_RESET)
		unirdma_qp_reset(qp);
	return 0;
}

static void unirdma_get_ah(struct rdma_ah_attr *to, u8 sgid_index,
			   const struct unirdma_ah_attr *from)
{
	to->type = RDMA_AH_ATTR_TYPE_ROCE;
	rdma_ah_set_sl(to, from->sl);
	rdma_ah_set_static_rate(to, from->static_rate);
	rdma_ah_set_port_num(to, from->port_num);
	if (!from->is_global)
		return;
	rdma_ah_set_grh(to, NULL, le32_to_cpu(from->route.flow_label),
			sgid_index, from->route.hop_limit,
			from->route.traffic_class);
	rdma_ah_set_dgid_raw(to, (void *)from->route.dgid);
}

static int unirdma_query_qp(struct ib_qp *ibqp, struct ib_qp_attr *to,
			    int mask, struct ib_qp_init_attr *init)
{
	struct unirdma_qp *qp = to_unirdma_qp(ibqp);
	struct unirdma_req_query_qp req = {
		.qpn = cpu_to_le32(qp->qpn),
		.attr_mask = cpu_to_le32(mask),
	};
	struct unirdma_qp_attr from;
	int err;

	err = unirdma_cmd(to_unirdma_dev(ibqp->device), UNIRDMA_QUERY_QP, &req,
			  sizeof(req), &from, sizeof(from));
	if (err)
		return err;

	to->qp_state = from.qp_state;
	to->cur_qp_state = from.cur_qp_state;
	to->path_mtu = from.path_mtu;
	to->path_mig_state = from.path_mig_state;
	to->qkey = le32_to_cpu(from.qkey);
	to->rq_psn = le32_to_cpu(from.rq_psn);
	to->sq_psn = le32_to_cpu(from.sq_psn);
	to->dest_qp_num = le32_to_cpu(from.dest_qp_num);
	to->qp_access_flags = le32_to_cpu(from.qp_access_flags);
	to->pkey_index = le16_to_cpu(from.pkey_index);
	to->alt_pkey_index = le16_to_cpu(from.alt_pkey_index);
	to->en_sqd_async_notify = from.en_sqd_async_notify;
	to->sq_draining = from.sq_draining;
	to->max_rd_atomic = from.max_rd_atomic;
	to->max_dest_rd_atomic = from.max_dest_rd_atomic;
	to->min_rnr_timer = from.min_rnr_timer;
	to->port_num = from.port_num;
	to->timeout = from.timeout;
	to->retry_cnt = from.retry_cnt;
	to->rnr_retry = from.rnr_retry;
	to->alt_port_num = from.alt_port_num;
	to->alt_timeout = from.alt_timeout;
	to->rate_limit = le32_to_cpu(from.rate_limit);
	to->cap = qp->cap;
	unirdma_get_ah(&to->ah_attr, qp->sgid_index, &from.ah_attr);

	init->event_handler = ibqp->event_handler;
	init->qp_context = ibqp->qp_context;
	init->send_cq = ibqp->send_cq;
	init->recv_cq = ibqp->recv_cq;
	init->srq = ibqp->srq;
	init->cap = qp->cap;
	init->sq_sig_type = qp->sig_type;
	init->qp_type = ibqp->qp_type;
	return 0;
}

static int unirdma_mcast(struct ib_qp *ibqp, enum unirdma_command command,
			 const union ib_gid *gid)
{
	struct unirdma_req_mcast req = {
		.qpn = cpu_to_le32(to_unirdma_qp(ibqp)->qpn),
	};

	memcpy(req.gid, gid->raw, sizeof(req.gid));
	return unirdma_cmd(to_unirdma_dev(ibqp->device), command, &req,
			   sizeof(req), NULL, 0);
}

static int unirdma_attach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	return unirdma_mcast(ibqp, UNIRDMA_ATTACH_MCAST, gid);
}

static int unirdma_detach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	int err = unirdma_mcast(ibqp, UNIRDMA_DETACH_MCAST, gid);

	return unirdma_is_lost(to_unirdma_dev(ibqp->device)) ? 0 : err;
}

static const struct ib_device_ops unirdma_qp_ops = {
	.create_qp = unirdma_create_qp,
	.modify_qp = unirdma_modify_qp,
	.query_qp = unirdma_query_qp,
	.destroy_qp = unirdma_destroy_qp,
	.post_send = unirdma_post_send,
	.post_recv = unirdma_post_recv,
	.attach_mcast = unirdma_attach_mcast,
	.detach_mcast = unirdma_detach_mcast,

	INIT_RDMA_OBJ_SIZE(ib_qp, unirdma_qp, ibqp),
};

void unirdma_set_qp_ops(struct ib_device *ibdev)
{
	ib_set_device_ops(ibdev, &unirdma_qp_ops);
}
