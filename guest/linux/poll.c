// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Completions of kernel users.
 *
 * A lost device writes no completions, but users wait for the completions of
 * all their requests before they release the device. So poll_cq() itself then
 * flushes the requests that are left in the QPs of the CQ. A CQ's lock is taken
 * before a ring's lock.
 */
#include <linux/string.h>

#include "unirdma.h"

/* The next CQE, or NULL if there is none. */
static const struct unirdma_cqe *unirdma_next_cqe(struct unirdma_cq *cq)
{
	const u32 entries = cq->ibcq.cqe;
	struct unirdma_cqe *cqe = &cq->cqes[cq->cons & (entries - 1)];
	/* 1 on the first lap of the ring, 0 on the second, and so on. */
	const u32 valid = !(cq->cons & entries);

	/* Before the rest of the CQE is read. */
	return le32_to_cpu(virt_load_acquire(&cqe->valid)) == valid ? cqe : NULL;
}

/* Returns NULL if the QP is gone: then nobody waits for its completions. */
static struct unirdma_qp *unirdma_qp_of(struct unirdma_dev *dev, u32 qpn)
{
	struct unirdma_target *target = xa_load(&dev->qps, qpn);

	return target ? container_of(target, struct unirdma_qp, target) : NULL;
}

static void unirdma_put_wc(struct ib_wc *wc, const struct unirdma_cqe *cqe,
			   struct unirdma_qp *qp)
{
	const u16 flags = le16_to_cpu(cqe->wc_flags);

	memset(wc, 0, sizeof(*wc));
	wc->wr_id = le64_to_cpu(cqe->wr_id);
	wc->status = cqe->status;
	wc->opcode = cqe->opcode == UNIRDMA_WC_REG_MR ? IB_WC_REG_MR :
							cqe->opcode;
	wc->vendor_err = le32_to_cpu(cqe->vendor_err);
	wc->byte_len = le32_to_cpu(cqe->byte_len);
	wc->qp = &qp->ibqp;
	wc->src_qp = le32_to_cpu(cqe->src_qp);
	wc->pkey_index = le16_to_cpu(cqe->pkey_index);
	wc->port_num = UNIRDMA_PORT;
	if (flags & UNIRDMA_WC_WITH_IMM) {
		wc->wc_flags |= IB_WC_WITH_IMM;
		wc->ex.imm_data = (__force __be32)cqe->imm;
	}
	if (flags & UNIRDMA_WC_WITH_INV) {
		wc->wc_flags |= IB_WC_WITH_INVALIDATE;
		wc->ex.invalidate_rkey = le32_to_cpu(cqe->imm);
	}
	if (flags & UNIRDMA_WC_GRH) {
		wc->wc_flags |= IB_WC_GRH | IB_WC_WITH_NETWORK_HDR_TYPE;
		wc->network_hdr_type = cqe->sl == UNIRDMA_SL_IPV4 ?
				       RDMA_NETWORK_IPV4 : RDMA_NETWORK_IPV6;
	}
}

/* An index that does not fit is from before a reset. */
static void unirdma_ring_polled(struct unirdma_ring *ring, u32 index)
{
	if (READ_ONCE(ring->prod) - index <= ring->entries)
		ring->polled = index;
}

static int unirdma_poll_ring(struct unirdma_cq *cq, int num, struct ib_wc *wc)
{
	struct unirdma_dev *dev = to_unirdma_dev(cq->ibcq.device);
	const struct unirdma_cqe *cqe;
	struct unirdma_qp *qp;
	u32 begin = cq->cons;
	int n = 0;

	while (n < num) {
		cqe = unirdma_next_cqe(cq);
		if (!cqe)
			break;
		cq->cons++;
		qp = unirdma_qp_of(dev, le32_to_cpu(cqe->qp_num));
		if (!qp)
			continue;
		unirdma_ring_polled(cqe->opcode & IB_WC_RECV ? &qp->rq : &qp->sq,
				    le32_to_cpu(cqe->wqe_index));
		unirdma_put_wc(&wc[n++], cqe, qp);
	}
	if (cq->cons == begin)
		return 0;
	/* After the CQEs were read. */
	virt_store_release(&cq->ctrl->cons, cpu_to_le32(cq->cons));
	return n;
}

/* True for a send that was executed and has no completion. */
static bool unirdma_is_silent(struct unirdma_qp *qp,
			      const struct unirdma_sq_wqe *wqe, u32 cons)
{
	return (s32)(qp->sq.polled - cons) < 0 &&
	       qp->sig_type != IB_SIGNAL_ALL_WR &&
	       !(wqe->send_flags & cpu_to_le32(IB_SEND_SIGNALED));
}

/* Completes the WQEs that a lost device has left in a ring. */
static int unirdma_flush_ring(struct unirdma_qp *qp, struct unirdma_ring *ring,
			      int num, struct ib_wc *wc)
{
	const bool is_sq = ring == &qp->sq;
	unsigned long flags;
	__le64 *wr_id;
	u32 cons;
	int n = 0;

	if (!ring->slots)
		return 0;
	spin_lock_irqsave(&ring->lock, flags);
	cons = le32_to_cpu(READ_ONCE(*ring->cons_word));
	/* WQEs before these were overwritten. */
	if (ring->prod - ring->polled > ring->entries)
		ring->polled = ring->prod - ring->entries;
	for (; n < num && ring->polled != ring->prod; ring->polled++) {
		/* Both kinds of WQEs begin with wr_id. */
		wr_id = ring->slots + (size_t)(ring->polled &
					       (ring->entries - 1)) *
				      ring->stride;
		if (is_sq && unirdma_is_silent(qp, (void *)wr_id, cons))
			continue;
		memset(&wc[n], 0, sizeof(wc[n]));
		wc[n].wr_id = le64_to_cpu(*wr_id);
		wc[n].status = IB_WC_WR_FLUSH_ERR;
		wc[n].opcode = is_sq ? IB_WC_SEND : IB_WC_RECV;
		wc[n].qp = &qp->ibqp;
		n++;
	}
	spin_unlock_irqrestore(&ring->lock, flags);
	return n;
}

static int unirdma_flush(struct unirdma_cq *cq, int num, struct ib_wc *wc)
{
	struct unirdma_qp *qp;
	int n = 0;

	list_for_each_entry(qp, &cq->senders, sender)
		n += unirdma_flush_ring(qp, &qp->sq, num - n, wc + n);
	list_for_each_entry(qp, &cq->receivers, receiver)
		n += unirdma_flush_ring(qp, &qp->rq, num - n, wc + n);
	return n;
}

int unirdma_poll_cq(struct ib_cq *ibcq, int num_entries, struct ib_wc *wc)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibcq->device);
	struct unirdma_cq *cq = to_unirdma_cq(ibcq);
	unsigned long flags;
	int n;

	spin_lock_irqsave(&cq->lock, flags);
	n = unirdma_poll_ring(cq, num_entries, wc);
	if (unirdma_is_lost(dev))
		n += unirdma_flush(cq, num_entries - n, wc + n);
	spin_unlock_irqrestore(&cq->lock, flags);
	return n;
}

/* Returns 1 if there are completions already and the user asks for that. */
int unirdma_arm_cq(struct unirdma_cq *cq, enum ib_cq_notify_flags notify)
{
	u32 arm = (notify & IB_CQ_SOLICITED_MASK) == IB_CQ_SOLICITED ?
		  UNIRDMA_ARM_SOLICITED : UNIRDMA_ARM_NEXT;
	unsigned long flags;
	bool missed;

	spin_lock_irqsave(&cq->lock, flags);
	arm += ++cq->arm_seq * UNIRDMA_ARM_FLAGS;
	WRITE_ONCE(cq->ctrl->arm, cpu_to_le32(arm));
	/* The device reads the word after each CQE. */
	virt_mb();
	missed = notify & IB_CQ_REPORT_MISSED_EVENTS && unirdma_next_cqe(cq);
	spin_unlock_irqrestore(&cq->lock, flags);
	return missed;
}

/* WQEs that a lost device leaves in the QP are flushed in these CQs. */
void unirdma_qp_enter(struct unirdma_qp *qp, struct ib_cq *send_cq,
		      struct ib_cq *recv_cq)
{
	struct unirdma_cq *cq = to_unirdma_cq(send_cq);

	spin_lock_irq(&cq->lock);
	list_add_tail(&qp->sender, &cq->senders);
	spin_unlock_irq(&cq->lock);

	cq = to_unirdma_cq(recv_cq);
	spin_lock_irq(&cq->lock);
	list_add_tail(&qp->receiver, &cq->receivers);
	spin_unlock_irq(&cq->lock);
}

/* The QP cannot be found any more. After this nobody uses it. */
void unirdma_qp_leave(struct unirdma_qp *qp)
{
	struct unirdma_cq *cq = to_unirdma_cq(qp->ibqp.send_cq);

	spin_lock_irq(&cq->lock);
	list_del(&qp->sender);
	spin_unlock_irq(&cq->lock);

	cq = to_unirdma_cq(qp->ibqp.recv_cq);
	spin_lock_irq(&cq->lock);
	list_del(&qp->receiver);
	spin_unlock_irq(&cq->lock);
}

static void unirdma_ring_reset(struct unirdma_cq *cq, struct unirdma_ring *ring)
{
	if (!ring->slots)
		return;
	spin_lock_irq(&cq->lock);
	spin_lock(&ring->lock);
	ring->prod = 0;
	ring->polled = 0;
	WRITE_ONCE(*ring->prod_word, 0);
	spin_unlock(&ring->lock);
	spin_unlock_irq(&cq->lock);
}

/* The device has set the QP's indices to 0. */
void unirdma_qp_reset(struct unirdma_qp *qp)
{
	unirdma_ring_reset(to_unirdma_cq(qp->ibqp.send_cq), &qp->sq);
	unirdma_ring_reset(to_unirdma_cq(qp->ibqp.recv_cq), &qp->rq);
}
