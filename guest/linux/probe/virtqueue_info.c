// SPDX-License-Identifier: GPL-2.0 OR MIT
/* virtio_find_vqs() takes an array of virtqueue_info. */
#include <linux/virtio_config.h>

int probe(struct virtio_device *vdev, struct virtqueue **vqs);
int probe(struct virtio_device *vdev, struct virtqueue **vqs)
{
	struct virtqueue_info info[] = { { .name = "probe" } };

	return virtio_find_vqs(vdev, 1, vqs, info, NULL);
}
