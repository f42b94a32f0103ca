// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Events of the device. Completion events are handled in their interrupt,
 * asynchronous events in a work, because their handlers may sleep.
 */
#include <linux/bottom_half.h>
#include <linux/slab.h>

#include "unirdma.h"

/* Most buffers of an event queue. Events beyond them wait in the device. */
#define UNIRDMA_EVENTS 256

static int unirdma_event_add(struct unirdma_event_queue *q,
			     struct unirdma_event *event)
{
	struct scatterlist sg;

	sg_init_one(&sg, event, sizeof(*event));
	return virtqueue_add_inbuf(q->vq, &sg, 1, event, GFP_ATOMIC);
}

/* The caller frees q->events, after the virtqueues. */
int unirdma_event_queue_fill(struct unirdma_event_queue *q)
{
	unsigned int i, num = min_t(unsigned int, UNIRDMA_EVENTS,
				    virtqueue_get_vring_size(q->vq));
	int err;

	q->events = kcalloc(num, sizeof(*q->events), GFP_KERNEL);
	if (!q->events)
		return -ENOMEM;
	for (i = 0; i < num; i++) {
		err = unirdma_event_add(q, &q->events[i]);
		if (err)
			return err;
	}
	virtqueue_kick(q->vq);
	return 0;
}

/* Takes an event. The next kick gives its buffer back to the device. */
static bool unirdma_event_take(struct unirdma_event_queue *q, u32 *kind,
			       u32 *handle)
{
	struct unirdma_event *event;
	unsigned int len;

	while ((event = virtqueue_get_buf(q->vq, &len))) {
		*kind = le32_to_cpu(event->kind);
		*handle = le32_to_cpu(event->handle);
		unirdma_event_add(q, event);
		if (len >= sizeof(*event))
			return true;
	}
	return false;
}

int unirdma_target_add(struct xarray *xa, u32 number,
		       struct unirdma_target *target)
{
	refcount_set(&target->refs, 1);
	init_completion(&target->idle);
	return xa_err(xa_store_irq(xa, number, target, GFP_KERNEL));
}

static struct unirdma_target *unirdma_target_get(struct xarray *xa, u32 number)
{
	struct unirdma_target *target;
	unsigned long flags;

	xa_lock_irqsave(xa, flags);
	target = xa_load(xa, number);
	if (target)
		refcount_inc(&target->refs);
	xa_unlock_irqrestore(xa, flags);
	return target;
}

static void unirdma_target_put(struct unirdma_target *target)
{
	if (refcount_dec_and_test(&target->refs))
		complete(&target->idle);
}

/*
 * After this no event handler of the object runs. The device has destroyed the
 * object, so another object may have its number already.
 */
void unirdma_target_remove(struct xarray *xa, u32 number,
			   struct unirdma_target *target)
{
	xa_cmpxchg_irq(xa, number, target, NULL, 0);
	unirdma_target_put(target);
	wait_for_completion(&target->idle);
}

/* The callback of a completion event queue. */
void unirdma_comp_ready(struct virtqueue *vq)
{
	struct unirdma_dev *dev = vq->vdev->priv;
	struct unirdma_event_queue *q;
	struct unirdma_target *target;
	struct ib_cq *ibcq;
	u32 kind, handle;

	q = &dev->comp[vq->index - UNIRDMA_VQ_COMP];
	while (unirdma_event_take(q, &kind, &handle)) {
		if (kind != UNIRDMA_EVENT_COMPLETION)
			continue;
		target = unirdma_target_get(&dev->cqs, handle);
		if (!target)
			continue;
		ibcq = &container_of(target, struct unirdma_cq, target)->ibcq;
		if (ibcq->comp_handler)
			ibcq->comp_handler(ibcq, ibcq->cq_context);
		unirdma_target_put(target);
	}
	virtqueue_kick(vq);
}

static void unirdma_cq_event(struct unirdma_dev *dev, struct ib_event *event,
			     u32 cqn)
{
	struct unirdma_target *target = unirdma_target_get(&dev->cqs, cqn);

	if (!target)
		return;
	event->element.cq =
		&container_of(target, struct unirdma_cq, target)->ibcq;
	if (event->element.cq->event_handler)
		event->element.cq->event_handler(event,
						 event->element.cq->cq_context);
	unirdma_target_put(target);
}

static void unirdma_qp_event(struct unirdma_dev *dev, struct ib_event *event,
			     u32 qpn)
{
	struct unirdma_target *target = unirdma_target_get(&dev->qps, qpn);

	if (!target)
		return;
	event->element.qp =
		&container_of(target, struct unirdma_qp, target)->ibqp;
	if (event->element.qp->event_handler)
		event->element.qp->event_handler(event,
						 event->element.qp->qp_context);
	unirdma_target_put(target);
}

static void unirdma_srq_event(struct unirdma_dev *dev, struct ib_event *event,
			      u32 srqn)
{
	struct unirdma_target *target = unirdma_target_get(&dev->srqs, srqn);

	if (!target)
		return;
	event->element.srq =
		&container_of(target, struct unirdma_srq, target)->ibsrq;
	if (event->element.srq->event_handler)
		event->element.srq->event_handler(event,
						  event->element.srq->srq_context);
	unirdma_target_put(target);
}

static void unirdma_device_event(struct unirdma_dev *dev,
				 struct ib_event *event)
{
	event->element.port_num = UNIRDMA_PORT;
	if (test_bit(UNIRDMA_REGISTERED, &dev->flags))
		ib_dispatch_event(event);
}

static void unirdma_async_event(struct unirdma_dev *dev, u32 kind, u32 handle)
{
	struct ib_event event = { .device = &dev->ibdev, .event = kind };

	switch (kind) {
	case IB_EVENT_CQ_ERR:
		unirdma_cq_event(dev, &event, handle);
		break;
	case IB_EVENT_QP_FATAL:
	case IB_EVENT_QP_REQ_ERR:
	case IB_EVENT_QP_ACCESS_ERR:
	case IB_EVENT_COMM_EST:
	case IB_EVENT_SQ_DRAINED:
	case IB_EVENT_QP_LAST_WQE_REACHED:
		unirdma_qp_event(dev, &event, handle);
		break;
	case IB_EVENT_SRQ_ERR:
	case IB_EVENT_SRQ_LIMIT_REACHED:
		unirdma_srq_event(dev, &event, handle);
		break;
	case IB_EVENT_GID_CHANGE:
		/* If this fails the device is lost, or the old GIDs stay. */
		unirdma_read_gids(dev);
		queue_work(dev->wq, &dev->netdev_work);
		fallthrough;
	case IB_EVENT_PORT_ACTIVE:
	case IB_EVENT_PORT_ERR:
		unirdma_device_event(dev, &event);
		break;
	default:
		dev_dbg(&dev->vdev->dev, "event %u of %u\n", kind, handle);
	}
}

/*
 * The device is lost: makes kernel users poll, so that they find flushed
 * requests.
 */
static void unirdma_wake_pollers(struct unirdma_dev *dev)
{
	struct unirdma_target *target;
	struct unirdma_cq *cq;
	unsigned long cqn;

	xa_for_each(&dev->cqs, cqn, target) {
		/* The CQ may be gone meanwhile, or be another one. */
		target = unirdma_target_get(&dev->cqs, cqn);
		if (!target)
			continue;
		cq = container_of(target, struct unirdma_cq, target);
		local_bh_disable();
		/* A user that has never armed the CQ expects no call. */
		if (READ_ONCE(cq->arm_seq) && cq->ibcq.comp_handler)
			cq->ibcq.comp_handler(&cq->ibcq, cq->ibcq.cq_context);
		local_bh_enable();
		unirdma_target_put(target);
	}
}

static void unirdma_async_work(struct work_struct *work)
{
	struct unirdma_dev *dev = container_of(work, struct unirdma_dev,
					       async_work);
	struct ib_event fatal = {
		.device = &dev->ibdev,
		.event = IB_EVENT_DEVICE_FATAL,
	};
	u32 kind, handle;

	while (unirdma_event_take(&dev->async, &kind, &handle))
		unirdma_async_event(dev, kind, handle);
	virtqueue_kick(dev->async.vq);

	if (!unirdma_is_lost(dev))
		return;
	unirdma_wake_pollers(dev);
	if (!test_and_set_bit(UNIRDMA_LOST_TOLD, &dev->flags))
		unirdma_device_event(dev, &fatal);
}

/* The callback of the asynchronous event queue. */
void unirdma_async_ready(struct virtqueue *vq)
{
	struct unirdma_dev *dev = vq->vdev->priv;

	queue_work(dev->wq, &dev->async_work);
}

void unirdma_events_init(struct unirdma_dev *dev)
{
	xa_init_flags(&dev->cqs, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&dev->qps, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&dev->srqs, XA_FLAGS_LOCK_IRQ);
	INIT_WORK(&dev->async_work, unirdma_async_work);
}
