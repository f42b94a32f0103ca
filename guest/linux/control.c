// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Control commands. Any number of threads may issue them; each sleeps until the
 * device has answered its command.
 *
 * A device is lost if it leaves a command unanswered for the time of the
 * parameter "timeout", or if it has lost its objects. A process that only polls
 * issues no commands, and a VMM does not report that the virtual layer is gone,
 * so the driver itself sends a command now and then. The virtqueues of a lost
 * device are broken, and all commands fail with -EIO. The device is not reset
 * before the driver is unbound, because QEMU, and the guest with it, waits for
 * a device that hangs. So the device may still write to memory that it knew:
 * commands in flight, areas and MRs stay until the reset.
 */
#include <linux/kref.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "unirdma.h"

static unsigned int unirdma_timeout_s = 30;
module_param_named(timeout, unirdma_timeout_s, uint, 0444);
MODULE_PARM_DESC(timeout,
		 "Seconds without an answer after which a device counts as lost (3 to 600, default 30)");

static unsigned long unirdma_timeout(void)
{
	return clamp(unirdma_timeout_s, 3U, 600U) * HZ;
}

/*
 * A command in flight. The virtqueue has a reference while the device may write
 * into @message, whether or not the caller still waits.
 */
struct unirdma_pending {
	struct kref ref;
	struct list_head list;		/* unirdma_control.pending */
	struct completion done;
	unsigned int written;		/* bytes of the response */
	bool failed;			/* the device is lost */
	size_t req_len, rsp_len;	/* with the headers */
	u8 message[] __aligned(8);	/* the request, then the response */
};

static void unirdma_pending_free(struct kref *ref)
{
	kfree(container_of(ref, struct unirdma_pending, ref));
}

static void unirdma_pending_put(struct unirdma_pending *p)
{
	kref_put(&p->ref, unirdma_pending_free);
}

/* The errno of a status code (section 6.1 of the specification). */
static int unirdma_errno(u8 status)
{
	static const int errnos[] = {
		0, -EOPNOTSUPP, -EINVAL, -ENOENT, -EINVAL, -ENOMEM, -EBUSY,
		-EFAULT, -EINVAL, -EHOSTUNREACH, -EPERM, -EADDRINUSE, -ENODEV,
	};

	return status < ARRAY_SIZE(errnos) ? errnos[status] : -EIO;
}

/* The callback of the control queue. */
void unirdma_control_done(struct virtqueue *vq)
{
	struct unirdma_dev *dev = vq->vdev->priv;
	struct unirdma_control *control = &dev->control;
	struct unirdma_pending *p;
	unsigned long flags;
	unsigned int len;

	spin_lock_irqsave(&control->lock, flags);
	while ((p = virtqueue_get_buf(vq, &len))) {
		list_del(&p->list);
		p->written = len;
		complete(&p->done);
		unirdma_pending_put(p);
	}
	spin_unlock_irqrestore(&control->lock, flags);
}

/* Fails the commands in flight, and later ones. Returns true the first time. */
static bool unirdma_give_up(struct unirdma_dev *dev)
{
	struct unirdma_control *control = &dev->control;
	struct unirdma_pending *p;
	bool first;

	spin_lock_irq(&control->lock);
	first = !test_and_set_bit(UNIRDMA_LOST, &dev->flags);
	if (first) {
		list_for_each_entry(p, &control->pending, list) {
			p->failed = true;
			complete(&p->done);
		}
	}
	spin_unlock_irq(&control->lock);
	return first;
}

void unirdma_lost(struct unirdma_dev *dev, const char *why)
{
	if (!unirdma_give_up(dev))
		return;
	dev_err(&dev->vdev->dev,
		"%s: the device counts as lost until the driver is bound again\n",
		why);
	virtio_break_device(dev->vdev);
	/* The work tells the users. */
	queue_work(dev->wq, &dev->async_work);
}

/* Checks whether the device still answers, unless it is lost already. */
static void unirdma_beat_work(struct work_struct *work)
{
	struct unirdma_dev *dev = container_of(to_delayed_work(work),
					       struct unirdma_dev, beat);
	struct unirdma_rsp_query_port port;

	unirdma_read_port(dev, &port);
	if (!unirdma_is_lost(dev))
		unirdma_beat(dev);
}

/* Schedules the next check. A processor that sleeps is not woken for it. */
void unirdma_beat(struct unirdma_dev *dev)
{
	queue_delayed_work(dev->wq, &dev->beat, unirdma_timeout() / 3);
}

/*
 * Resets the device, so that it touches no memory, and frees waiting commands.
 */
void unirdma_stop(struct unirdma_dev *dev)
{
	struct unirdma_pending *p;

	unirdma_give_up(dev);
	cancel_delayed_work_sync(&dev->beat);
	virtio_break_device(dev->vdev);
	virtio_reset_device(dev->vdev);
	virtio_synchronize_cbs(dev->vdev);

	while ((p = virtqueue_detach_unused_buf(dev->control.vq)))
		unirdma_pending_put(p);
	/* The device is lost by now, so the area was kept until now. */
	if (dev->db)
		unirdma_area_destroy(dev, dev->db);
	unirdma_free_kept_areas(dev);
	unirdma_free_kept_mrs(dev);
}

/* Called when the virtqueue exists. */
void unirdma_control_init(struct unirdma_dev *dev)
{
	struct unirdma_control *control = &dev->control;

	spin_lock_init(&control->lock);
	INIT_LIST_HEAD(&control->pending);
	INIT_DEFERRABLE_WORK(&dev->beat, unirdma_beat_work);
	/* A command takes two descriptors: a request and a response. */
	sema_init(&control->room,
		  max(virtqueue_get_vring_size(control->vq) / 2, 1U));
}

static int unirdma_submit(struct unirdma_dev *dev, struct unirdma_pending *p)
{
	struct unirdma_control *control = &dev->control;
	struct scatterlist req, rsp, *sgs[] = { &req, &rsp };
	bool notify = false;
	int err = -EIO;

	sg_init_one(&req, p->message, p->req_len);
	sg_init_one(&rsp, p->message + p->req_len, p->rsp_len);

	spin_lock_irq(&control->lock);
	if (!unirdma_is_lost(dev))
		err = virtqueue_add_sgs(control->vq, sgs, 1, 1, p, GFP_ATOMIC);
	if (!err) {
		kref_get(&p->ref);
		list_add_tail(&p->list, &control->pending);
		notify = virtqueue_kick_prepare(control->vq);
	}
	spin_unlock_irq(&control->lock);

	if (notify && !virtqueue_notify(control->vq))
		err = -EIO;
	return err;
}

/* Returns 0 when the device has answered, or -EIO. */
static int unirdma_call(struct unirdma_dev *dev, struct unirdma_pending *p)
{
	struct unirdma_control *control = &dev->control;
	int err;

	if (down_timeout(&control->room, unirdma_timeout())) {
		unirdma_lost(dev, "Commands were not answered");
		return -EIO;
	}
	err = unirdma_submit(dev, p);
	if (err)
		unirdma_lost(dev, "The virtqueues are broken");
	else if (!wait_for_completion_timeout(&p->done, unirdma_timeout()))
		unirdma_lost(dev, "A command was not answered");
	up(&control->room);
	return err || p->failed ? -EIO : 0;
}

/**
 * unirdma_cmd - execute a command
 * @dev: the device
 * @command: its code
 * @req: what follows the header of the request
 * @req_len: its bytes
 * @rsp: what follows the header of the response; untouched after a failure
 * @rsp_len: its bytes
 *
 * Sleeps. Returns 0, the errno of the device's status, or -EIO if the device
 * is lost.
 */
int unirdma_cmd(struct unirdma_dev *dev, enum unirdma_command command,
		const void *req, size_t req_len, void *rsp, size_t rsp_len)
{
	const size_t head = sizeof(struct unirdma_header);
	struct unirdma_header *header;
	struct unirdma_pending *p;
	u8 status;
	int err;

	if (WARN_ON_ONCE(max(req_len, rsp_len) + head > UNIRDMA_MAX_MESSAGE))
		return -EINVAL;

	p = kzalloc(struct_size(p, message, 2 * head + req_len + rsp_len),
		    GFP_KERNEL);
	if (!p)
		return -ENOMEM;
	kref_init(&p->ref);
	init_completion(&p->done);
	p->req_len = head + req_len;
	p->rsp_len = head + rsp_len;
	header = (struct unirdma_header *)p->message;
	header->code = command;
	if (req_len)
		memcpy(p->message + head, req, req_len);

	err = unirdma_call(dev, p);
	if (err)
		goto out;

	header = (struct unirdma_header *)(p->message + p->req_len);
	status = header->code;
	err = unirdma_errno(status);
	if (p->written < head || (!err && p->written < p->rsp_len)) {
		/* The state of the device is unknown. */
		unirdma_lost(dev, "An answer is too short");
		err = -EIO;
	} else if (err) {
		dev_dbg(&dev->vdev->dev, "command %u: status %u\n", command,
			status);
	} else if (rsp_len) {
		memcpy(rsp, p->message + p->req_len + head, rsp_len);
	}
out:
	unirdma_pending_put(p);
	return err;
}

/*
 * Destroys an object of the device. Succeeds if the device is lost: the memory
 * of the object is kept then, see above.
 */
int unirdma_cmd_destroy(struct unirdma_dev *dev, enum unirdma_command command,
			u32 handle)
{
	struct unirdma_handle req = { .handle = cpu_to_le32(handle) };
	int err = unirdma_cmd(dev, command, &req, sizeof(req), NULL, 0);

	return unirdma_is_lost(dev) ? 0 : err;
}

/*
 * Destroys an object whose memory will be freed, whatever the device answers.
 */
void unirdma_cmd_undo(struct unirdma_dev *dev, enum unirdma_command command,
		      u32 handle)
{
	if (unirdma_cmd_destroy(dev, command, handle))
		unirdma_lost(dev, "An object cannot be destroyed");
}
