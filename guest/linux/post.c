// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Work requests of kernel users.
 *
 * The device is registered without a DMA device, so the DMA addresses of its
 * users are kernel addresses of linearly mapped memory. They become physical
 * addresses here. The DMA API could not provide physical addresses: it returns
 * addresses for an IOMMU, which this device does not pass, and it may give a
 * device a copy (swiotlb), while an MR of a process must be the memory itself.
 * If the key of an SGE belongs to a DMA MR, which no peer can use, the device
 * takes the physical address. If it belongs to an MR that was registered by
 * REG_MR, the SGE's address lies in the address range of that MR, so it is not
 * translated.
 *
 * Rings are read by another machine's processors, so the barriers are also
 * needed in a guest with one processor.
 */
#include <linux/bitops.h>
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/mm.h>

#include "unirdma.h"

static_assert(IB_WR_REG_MR == UNIRDMA_WR_REG_MR);

void unirdma_ring_init(struct unirdma_ring *ring, void *slots, u32 entries,
		       u32 stride, u32 max_sge, __le32 *prod_word,
		       __le32 *cons_word)
{
	spin_lock_init(&ring->lock);
	ring->slots = slots;
	ring->entries = entries;
	ring->stride = stride;
	ring->max_sge = max_sge;
	ring->prod_word = prod_word;
	ring->cons_word = cons_word;
}

/* The slot for the next WQE, or NULL if the ring is full. */
static void *unirdma_ring_slot(struct unirdma_ring *ring)
{
	u32 cons;

	/* A slot is free only after the device has read its contents. */
	cons = le32_to_cpu(virt_load_acquire(ring->cons_word));
	if (ring->prod - cons >= ring->entries)
		return NULL;
	return ring->slots + (size_t)(ring->prod & (ring->entries - 1)) *
			     ring->stride;
}

static void unirdma_ring_publish(struct unirdma_ring *ring)
{
	/* A reader that sees the index sees the WQEs. */
	virt_store_release(ring->prod_word, cpu_to_le32(ring->prod));
}

static void unirdma_doorbell(struct unirdma_dev *dev, u32 slot)
{
	struct unirdma_doorbell *db = dev->db->ptr;

	/* A reader that finds the QP's bit finds the index. */
	virt_mb__before_atomic();
	set_bit_le(slot, db->bits);
	/* A reader that finds the word's bit finds the QP's. */
	virt_mb__before_atomic();
	set_bit_le(slot / 64, &db->summary);
	/* The device stores need_kick before it reads @summary again. */
	virt_mb();
	if (READ_ONCE(db->need_kick) && !unirdma_is_lost(dev))
		virtqueue_notify(dev->wake);
}

/* A lost device completes nothing. poll.c flushes the requests. */
static void unirdma_posted_in_vain(struct unirdma_dev *dev)
{
	queue_work(dev->wq, &dev->async_work);
}

static int unirdma_put_sges(const struct ib_pd *pd, struct unirdma_sge *to,
			    const struct ib_sge *from, int num)
{
	u64 addr;
	void *ptr;
	int i;

	for (i = 0; i < num; i++) {
		addr = from[i].addr;
		if (!from[i].length) {
			addr = 0;
		} else if (from[i].lkey == pd->local_dma_lkey) {
			ptr = (void *)(uintptr_t)addr;
			if (!virt_addr_valid(ptr))
				return -EFAULT;
			addr = virt_to_phys(ptr);
		}
		to[i].addr = cpu_to_le64(addr);
		to[i].length = cpu_to_le32(from[i].length);
		to[i].lkey = cpu_to_le32(from[i].lkey);
	}
	return 0;
}

/* Returns the number of bytes, or an error if there is no room. */
static int unirdma_put_inline(void *to, u32 room, const struct ib_sge *from,
			      int num)
{
	u32 length = 0;
	int i;

	for (i = 0; i < num; i++) {
		if (from[i].length > room - length)
			return -EINVAL;
		memcpy(to + length, (const void *)(uintptr_t)from[i].addr,
		       from[i].length);
		length += from[i].length;
	}
	return length;
}

static int unirdma_put_datagram(struct unirdma_qp *qp,
				struct unirdma_sq_wqe *wqe,
				const struct ib_send_wr *wr, u32 *flags)
{
	const struct ib_ud_wr *ud = ud_wr(wr);

	if (wr->opcode != IB_WR_SEND && wr->opcode != IB_WR_SEND_WITH_IMM)
		return -EINVAL;
	if (!ud->ah || ud->ah->pd != qp->ibqp.pd)
		return -EINVAL;
	wqe->route = to_unirdma_ah(ud->ah)->route;
	wqe->ah = to_unirdma_ah(ud->ah)->level_and_rate;
	wqe->dest_qpn = cpu_to_le32(ud->remote_qpn);
	wqe->qkey = cpu_to_le32(ud->remote_qkey);
	*flags |= UNIRDMA_SEND_ADDRESS;
	return 0;
}

/* The device reads the list of pages when it executes the request. */
static int unirdma_put_reg_mr(struct unirdma_sq_wqe *wqe,
			      const struct ib_reg_wr *reg)
{
	struct unirdma_mr *mr = to_unirdma_mr(reg->mr);

	if (!mr->pages)
		return -EINVAL;
	wqe->imm = cpu_to_le32(reg->access);
	wqe->rkey = cpu_to_le32(reg->key);
	wqe->remote_addr = cpu_to_le64(reg->mr->iova);
	wqe->compare_add = cpu_to_le64(reg->mr->length);
	wqe->swap = cpu_to_le64(virt_to_phys(mr->pages));
	wqe->ah = cpu_to_le32(ilog2(reg->mr->page_size));
	wqe->dest_qpn = cpu_to_le32(mr->num_pages);
	return 0;
}

/* Fills in the part of a WQE that depends on the operation. */
static int unirdma_put_operation(struct unirdma_sq_wqe *wqe,
				 const struct ib_send_wr *wr)
{
	switch (wr->opcode) {
	case IB_WR_SEND:
	case IB_WR_SEND_WITH_IMM:
	case IB_WR_SEND_WITH_INV:
	case IB_WR_LOCAL_INV:
		return 0;
	case IB_WR_RDMA_WRITE:
	case IB_WR_RDMA_WRITE_WITH_IMM:
	case IB_WR_RDMA_READ:
		wqe->remote_addr = cpu_to_le64(rdma_wr(wr)->remote_addr);
		wqe->rkey = cpu_to_le32(rdma_wr(wr)->rkey);
		return 0;
	case IB_WR_ATOMIC_CMP_AND_SWP:
	case IB_WR_ATOMIC_FETCH_AND_ADD:
		wqe->remote_addr = cpu_to_le64(atomic_wr(wr)->remote_addr);
		wqe->rkey = cpu_to_le32(atomic_wr(wr)->rkey);
		wqe->compare_add = cpu_to_le64(atomic_wr(wr)->compare_add);
		wqe->swap = cpu_to_le64(atomic_wr(wr)->swap);
		return 0;
	case IB_WR_REG_MR:
		return unirdma_put_reg_mr(wqe, reg_wr(wr));
	default:
		return -EOPNOTSUPP;
	}
}

static int unirdma_put_send(struct unirdma_qp *qp, struct unirdma_sq_wqe *wqe,
			    const struct ib_send_wr *wr)
{
	const u32 known = IB_SEND_FENCE | IB_SEND_SIGNALED | IB_SEND_SOLICITED |
			  IB_SEND_INLINE;
	u32 flags = wr->send_flags;
	int err;

	if (flags & ~known || wr->num_sge < 0 || wr->num_sge > qp->sq.max_sge)
		return -EINVAL;
	memset(wqe, 0, sizeof(*wqe));
	if (qp->ibqp.qp_type == IB_QPT_UD || qp->ibqp.qp_type == IB_QPT_GSI)
		err = unirdma_put_datagram(qp, wqe, wr, &flags);
	else
		err = unirdma_put_operation(wqe, wr);
	if (err)
		return err;

	switch (wr->opcode) {
	case IB_WR_SEND_WITH_IMM:
	case IB_WR_RDMA_WRITE_WITH_IMM:
		/* The four bytes are not converted. */
		wqe->imm = (__force __le32)wr->ex.imm_data;
		break;
	case IB_WR_SEND_WITH_INV:
	case IB_WR_LOCAL_INV:
		wqe->imm = cpu_to_le32(wr->ex.invalidate_rkey);
		break;
	default:
		break;
	}
	if (flags & IB_SEND_INLINE) {
		err = unirdma_put_inline(wqe + 1, qp->cap.max_inline_data,
					 wr->sg_list, wr->num_sge);
		if (err < 0)
			return err;
		wqe->inline_len = cpu_to_le16(err);
	} else {
		err = unirdma_put_sges(qp->ibqp.pd,
				       (struct unirdma_sge *)(wqe + 1),
				       wr->sg_list, wr->num_sge);
		if (err)
			return err;
		wqe->num_sge = wr->num_sge;
	}
	wqe->wr_id = cpu_to_le64(wr->wr_id);
	wqe->opcode = wr->opcode;
	wqe->send_flags = cpu_to_le32(flags);
	return 0;
}

int unirdma_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr,
		      const struct ib_send_wr **bad_wr)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibqp->device);
	struct unirdma_qp *qp = to_unirdma_qp(ibqp);
	struct unirdma_ring *sq = &qp->sq;
	struct unirdma_sq_wqe *wqe;
	unsigned long flags;
	int err = 0;

	spin_lock_irqsave(&sq->lock, flags);
	for (; wr; wr = wr->next) {
		wqe = unirdma_ring_slot(sq);
		err = wqe ? unirdma_put_send(qp, wqe, wr) : -ENOMEM;
		if (err) {
			*bad_wr = wr;
			break;
		}
		sq->prod++;
	}
	unirdma_ring_publish(sq);
	unirdma_doorbell(dev, qp->db_slot);
	spin_unlock_irqrestore(&sq->lock, flags);

	if (unirdma_is_lost(dev))
		unirdma_posted_in_vain(dev);
	return err;
}

/* Posts to an RQ or an SRQ. */
static int unirdma_post_recvs(const struct ib_pd *pd, struct unirdma_ring *rq,
			      const struct ib_recv_wr *wr,
			      const struct ib_recv_wr **bad_wr)
{
	struct unirdma_rq_wqe *wqe;
	unsigned long flags;
	int err = 0;

	spin_lock_irqsave(&rq->lock, flags);
	for (; wr; wr = wr->next) {
		wqe = unirdma_ring_slot(rq);
		if (!wqe)
			err = -ENOMEM;
		else if (wr->num_sge < 0 || wr->num_sge > rq->max_sge)
			err = -EINVAL;
		else
			err = unirdma_put_sges(pd,
					       (struct unirdma_sge *)(wqe + 1),
					       wr->sg_list, wr->num_sge);
		if (err) {
			*bad_wr = wr;
			break;
		}
		wqe->wr_id = cpu_to_le64(wr->wr_id);
		wqe->num_sge = cpu_to_le32(wr->num_sge);
		wqe->reserved = 0;
		rq->prod++;
	}
	unirdma_ring_publish(rq);
	spin_unlock_irqrestore(&rq->lock, flags);
	return err;
}

int unirdma_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr,
		      const struct ib_recv_wr **bad_wr)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibqp->device);
	struct unirdma_qp *qp = to_unirdma_qp(ibqp);
	int err;

	if (ibqp->srq) {
		*bad_wr = wr;
		return -EINVAL;
	}
	err = unirdma_post_recvs(ibqp->pd, &qp->rq, wr, bad_wr);
	/*
	 * The device either finds them by itself, or has asked for a doorbell.
	 */
	virt_mb();
	if (READ_ONCE(qp->ctrl->rq_notify))
		unirdma_doorbell(dev, qp->db_slot);
	if (unirdma_is_lost(dev))
		unirdma_posted_in_vain(dev);
	return err;
}

int unirdma_post_srq_recv(struct ib_srq *ibsrq, const struct ib_recv_wr *wr,
			  const struct ib_recv_wr **bad_wr)
{
	return unirdma_post_recvs(ibsrq->pd, &to_unirdma_srq(ibsrq)->rq, wr,
				  bad_wr);
}
