// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * uniRDMA: driver of the virtio RDMA device (ID 42) of a virtual machine.
 * README.md lists its features and limits.
 */
#include <linux/module.h>
#include <linux/netdevice.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>
#include <rdma/ib_verbs.h>

#include "compat.h"
#include "unirdma.h"

#define UNIRDMA_MAX_GIDS 256	/* an address vector's index is a u8 */

/* Reads the configuration space, once: each access costs the host some time. */
static int unirdma_read_config(struct unirdma_dev *dev)
{
	struct device *parent = &dev->vdev->dev;
	struct unirdma_config config;
	u32 magic;
	u16 version;

	if (!virtio_has_feature(dev->vdev, VIRTIO_F_VERSION_1)) {
		dev_err(parent, "The device is no virtio 1 device\n");
		return -ENODEV;
	}
	__virtio_cread_many(dev->vdev, 0, &config,
			    sizeof(config) / sizeof(u32), sizeof(u32));
	magic = le32_to_cpu(config.limits.magic);
	version = le16_to_cpu(config.limits.version);
	dev->max_doorbells = le32_to_cpu(config.max_doorbells);

	if (magic != UNIRDMA_CONFIG_MAGIC) {
		dev_err(parent, "This is no uniRDMA device: magic %#x\n", magic);
		return -ENODEV;
	}
	if (version != UNIRDMA_CONFIG_VERSION) {
		dev_err(parent,
			"The device has version %u, this driver knows version %u\n",
			version, UNIRDMA_CONFIG_VERSION);
		return -ENODEV;
	}
	/* Bytes beyond the end read as ones. */
	if (dev->max_doorbells == U32_MAX) {
		dev_err(parent,
			"The configuration space is too small: it takes %zu bytes (QEMU: config_size=%zu)\n",
			sizeof(config), sizeof(config));
		return -ENODEV;
	}
	if (!dev->max_doorbells) {
		dev_err(parent,
			"The device is too old for virtual machines: it makes no doorbell pages\n");
		return -ENODEV;
	}
	dev->attr.limits = config.limits;
	return 0;
}

static int unirdma_try_vqs(struct unirdma_dev *dev, unsigned int num_comp)
{
	struct virtqueue_info info[UNIRDMA_VQ_COMP + UNIRDMA_MAX_COMP] = {
		[UNIRDMA_VQ_CONTROL] = { "control", unirdma_control_done },
		[UNIRDMA_VQ_ASYNC] = { "async", unirdma_async_ready },
		[UNIRDMA_VQ_WAKE] = { "wake", NULL },
	};
	struct virtqueue *vqs[ARRAY_SIZE(info)];
	unsigned int i;
	int err;

	for (i = 0; i < num_comp; i++)
		info[UNIRDMA_VQ_COMP + i] =
			(struct virtqueue_info){ "comp", unirdma_comp_ready };
	err = unirdma_find_vqs(dev->vdev, UNIRDMA_VQ_COMP + num_comp, vqs,
			       info);
	if (err)
		return err;

	dev->control.vq = vqs[UNIRDMA_VQ_CONTROL];
	dev->async.vq = vqs[UNIRDMA_VQ_ASYNC];
	dev->wake = vqs[UNIRDMA_VQ_WAKE];
	for (i = 0; i < num_comp; i++)
		dev->comp[i].vq = vqs[UNIRDMA_VQ_COMP + i];
	dev->num_comp = num_comp;
	return 0;
}

/* A transport may have fewer virtqueues than the device could serve. */
static int unirdma_find_queues(struct unirdma_dev *dev)
{
	unsigned int num_comp;
	int err;

	num_comp = min3(num_online_cpus(), (unsigned int)UNIRDMA_MAX_COMP,
			le32_to_cpu(unirdma_limits(dev)->num_comp_queues));
	for (err = -ENOENT; num_comp; num_comp /= 2) {
		err = unirdma_try_vqs(dev, num_comp);
		if (err != -EINVAL && err != -ENOENT)
			break;
	}
	if (err == -EINVAL || err == -ENOENT)
		dev_err(&dev->vdev->dev,
			"The device has too few virtqueues: it takes %u (QEMU: num_vqs=), control, async, wake and a completion queue\n",
			UNIRDMA_VQ_COMP + 1);
	else if (err)
		dev_err(&dev->vdev->dev, "No virtqueues: %pe\n", ERR_PTR(err));
	return err;
}

/*
 * Frees all event buffers, after the virtqueues are gone or if none was filled.
 */
static void unirdma_free_events(struct unirdma_dev *dev)
{
	unsigned int i;

	kfree(dev->async.events);
	for (i = 0; i < dev->num_comp; i++)
		kfree(dev->comp[i].events);
}

static int unirdma_fill_event_queues(struct unirdma_dev *dev)
{
	unsigned int i;
	int err;

	err = unirdma_event_queue_fill(&dev->async);
	for (i = 0; i < dev->num_comp && !err; i++)
		err = unirdma_event_queue_fill(&dev->comp[i]);
	return err;
}

static int unirdma_new_session(struct unirdma_dev *dev)
{
	const u64 known = UNIRDMA_FEATURE_INVALIDATE | UNIRDMA_FEATURE_GSI |
			  UNIRDMA_FEATURE_FAST_REG;
	struct unirdma_req_new_session req = {
		.features = unirdma_limits(dev)->features & cpu_to_le64(known),
	};
	struct unirdma_rsp_new_session rsp;
	int err;

	err = unirdma_cmd(dev, UNIRDMA_NEW_SESSION, &req, sizeof(req), &rsp,
			  sizeof(rsp));
	if (err)
		return err;
	dev->generation = le32_to_cpu(rsp.generation);
	dev->has_gsi = le64_to_cpu(rsp.features) & UNIRDMA_FEATURE_GSI;
	dev->has_fast_reg = le64_to_cpu(rsp.features) &
			    UNIRDMA_FEATURE_FAST_REG;
	return 0;
}

/* Makes the doorbell page for the QPs of kernel users. */
static int unirdma_set_doorbell(struct unirdma_dev *dev)
{
	struct unirdma_req_create_doorbell req;
	struct unirdma_area *db;
	int err;

	db = unirdma_area_create(dev, NULL, UNIRDMA_DB_SIZE);
	if (IS_ERR(db))
		return PTR_ERR(db);
	req.addr = cpu_to_le64(db->addr);
	err = unirdma_cmd(dev, UNIRDMA_SET_DOORBELL, &req, sizeof(req), NULL, 0);
	if (err)
		unirdma_area_destroy(dev, db);
	else
		dev->db = db;
	return err;
}

/*
 * Issues the first commands. After them all properties of the device are known.
 */
static int unirdma_start_session(struct unirdma_dev *dev)
{
	struct device *parent = &dev->vdev->dev;
	struct unirdma_rsp_query_port port;
	int err;

	err = unirdma_new_session(dev);
	if (err) {
		dev_err(parent, "The device refuses a session: %pe\n",
			ERR_PTR(err));
		return err;
	}
	err = unirdma_cmd(dev, UNIRDMA_QUERY_DEVICE, NULL, 0, &dev->attr,
			  sizeof(dev->attr));
	if (err) {
		dev_err(parent, "The device refuses QUERY_DEVICE: %pe\n",
			ERR_PTR(err));
		return err;
	}
	err = unirdma_set_doorbell(dev);
	if (err) {
		dev_err(parent, "No doorbell page: %pe\n", ERR_PTR(err));
		return err;
	}
	err = unirdma_read_port(dev, &port);
	if (err) {
		dev_err(parent, "The device refuses QUERY_PORT: %pe\n",
			ERR_PTR(err));
		return err;
	}
	dev->gid_tbl_len = clamp_t(u32, le32_to_cpu(port.gid_tbl_len), 1,
				   UNIRDMA_MAX_GIDS);
	dev->gids = kcalloc(dev->gid_tbl_len, sizeof(*dev->gids), GFP_KERNEL);
	if (!dev->gids)
		return -ENOMEM;
	err = unirdma_read_gids(dev);
	if (err)
		dev_err(parent, "The device refuses QUERY_GID: %pe\n",
			ERR_PTR(err));
	return err;
}

static int unirdma_register(struct unirdma_dev *dev)
{
	struct ib_device *ibdev = &dev->ibdev;
	int err;

	ibdev->node_type = RDMA_NODE_IB_CA;
	ibdev->node_guid =
		cpu_to_be64(le64_to_cpu(unirdma_limits(dev)->node_guid));
	ibdev->phys_port_cnt = 1;
	ibdev->num_comp_vectors = dev->num_comp;
	ibdev->dev.parent = dev->vdev->dev.parent;
	strscpy(ibdev->node_desc, dev->attr.name,
		min(sizeof(ibdev->node_desc), sizeof(dev->attr.name)));
	/* By this command a process wakes the device. */
	ibdev->uverbs_cmd_mask |= BIT_ULL(IB_USER_VERBS_CMD_REQ_NOTIFY_CQ);

	unirdma_set_device_ops(ibdev);
	unirdma_set_cq_ops(ibdev);
	unirdma_set_srq_ops(ibdev);
	unirdma_set_qp_ops(ibdev);
	unirdma_set_mr_ops(ibdev);
	unirdma_set_stats_ops(ibdev);

	unirdma_netdev_pick(dev, false);
	/* No DMA device: the device takes physical addresses. See post.c. */
	err = ib_register_device(ibdev, "unirdma%d", NULL);
	if (err) {
		dev_err(&dev->vdev->dev, "Not registered: %pe\n", ERR_PTR(err));
		return err;
	}
	set_bit(UNIRDMA_REGISTERED, &dev->flags);
	/* The notifier is called for all existing interfaces. */
	err = register_netdevice_notifier(&dev->netdev_nb);
	if (err) {
		clear_bit(UNIRDMA_REGISTERED, &dev->flags);
		ib_unregister_device(ibdev);
		return err;
	}
	dev_info(&dev->vdev->dev, "%s, completion vectors: %u\n",
		 dev_name(&ibdev->dev), dev->num_comp);
	return 0;
}

static void unirdma_unregister(struct unirdma_dev *dev)
{
	unregister_netdevice_notifier(&dev->netdev_nb);
	clear_bit(UNIRDMA_REGISTERED, &dev->flags);
	/* These works report events to the ib core while the bit is set. */
	flush_work(&dev->async_work);
	flush_work(&dev->netdev_work);
	ib_unregister_device(&dev->ibdev);
}

/* Another generation means that the device has lost all its objects. */
static void unirdma_config_work(struct work_struct *work)
{
	struct unirdma_dev *dev = container_of(work, struct unirdma_dev,
					       config_work);
	u32 generation;

	generation = virtio_cread32(dev->vdev,
				    offsetof(struct unirdma_config, generation));
	if (generation != dev->generation)
		unirdma_lost(dev, "The device has lost all objects");
}

static void unirdma_config_changed(struct virtio_device *vdev)
{
	struct unirdma_dev *dev = vdev->priv;

	queue_work(dev->wq, &dev->config_work);
}

static int unirdma_validate(struct virtio_device *vdev)
{
	/* Rings, commands and WQEs contain physical addresses. */
	if (virtio_has_feature(vdev, VIRTIO_F_ACCESS_PLATFORM)) {
		dev_err(&vdev->dev,
			"The device is to be used through an IOMMU, but takes physical addresses (QEMU: leave out iommu_platform=on)\n");
		return -EOPNOTSUPP;
	}
	return 0;
}

static int unirdma_probe(struct virtio_device *vdev)
{
	struct unirdma_dev *dev;
	int err;

	dev = ib_alloc_device(unirdma_dev, ibdev);
	if (!dev)
		return -ENOMEM;
	dev->vdev = vdev;
	vdev->priv = dev;
	unirdma_events_init(dev);
	unirdma_netdev_init(dev);
	INIT_WORK(&dev->config_work, unirdma_config_work);

	err = unirdma_read_config(dev);
	if (err)
		goto dealloc;
	dev->wq = alloc_workqueue("unirdma_rdma", WQ_UNBOUND, 0);
	if (!dev->wq) {
		err = -ENOMEM;
		goto dealloc;
	}
	err = unirdma_find_queues(dev);
	if (err)
		goto destroy_wq;
	unirdma_control_init(dev);
	virtio_device_ready(vdev);

	err = unirdma_fill_event_queues(dev);
	if (err)
		goto stop;
	err = unirdma_start_session(dev);
	if (err)
		goto stop;
	err = unirdma_register(dev);
	if (err)
		goto stop;
	unirdma_beat(dev);
	return 0;
stop:
	unirdma_stop(dev);
	drain_workqueue(dev->wq);
	vdev->config->del_vqs(vdev);
	unirdma_free_events(dev);
destroy_wq:
	destroy_workqueue(dev->wq);
dealloc:
	kfree(dev->gids);
	ib_dealloc_device(&dev->ibdev);
	vdev->priv = NULL;
	return err;
}

static void unirdma_remove(struct virtio_device *vdev)
{
	struct unirdma_dev *dev = vdev->priv;

	/* The device did not come back from a sleep. */
	if (!dev)
		return;
	/* Destroys, by commands, the objects that processes have left. */
	unirdma_unregister(dev);
	unirdma_stop(dev);
	destroy_workqueue(dev->wq);
	vdev->config->del_vqs(vdev);
	unirdma_free_events(dev);
	kfree(dev->gids);
	ib_dealloc_device(&dev->ibdev);
	vdev->priv = NULL;
}

#ifdef CONFIG_PM_SLEEP
/*
 * Peers do not wait for a guest that sleeps, and its host may end meanwhile. So
 * no object is kept: users are told as when the driver is unbound, and find a
 * new device afterwards.
 */
static int unirdma_freeze(struct virtio_device *vdev)
{
	unirdma_remove(vdev);
	return 0;
}

static int unirdma_restore(struct virtio_device *vdev)
{
	return unirdma_probe(vdev);
}
#endif

static const struct virtio_device_id unirdma_ids[] = {
	{ UNIRDMA_VIRTIO_ID, VIRTIO_DEV_ANY_ID },
	{}
};
MODULE_DEVICE_TABLE(virtio, unirdma_ids);

static struct virtio_driver unirdma_driver = {
	.driver.name = "unirdma_rdma",
	.driver.owner = THIS_MODULE,
	.id_table = unirdma_ids,
	.validate = unirdma_validate,
	.probe = unirdma_probe,
	.remove = unirdma_remove,
	.config_changed = unirdma_config_changed,
#ifdef CONFIG_PM_SLEEP
	.freeze = unirdma_freeze,
	.restore = unirdma_restore,
#endif
};
module_virtio_driver(unirdma_driver);

MODULE_DESCRIPTION("uniRDMA virtio RDMA device");
MODULE_LICENSE("Dual MIT/GPL");
