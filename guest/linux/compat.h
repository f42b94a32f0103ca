/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * Differences between kernels. For each HAVE_ macro there is a program in
 * probe/, which Kbuild tries to compile.
 */
#ifndef UNIRDMA_COMPAT_H
#define UNIRDMA_COMPAT_H

#include <linux/virtio_config.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>

#ifndef HAVE_VIRTQUEUE_INFO
struct virtqueue_info {
	const char *name;
	vq_callback_t *callback;
};
#endif

static inline int unirdma_find_vqs(struct virtio_device *vdev, unsigned int num,
				   struct virtqueue **vqs,
				   struct virtqueue_info *info)
{
#ifdef HAVE_VIRTQUEUE_INFO
	return virtio_find_vqs(vdev, num, vqs, info, NULL);
#else
	vq_callback_t *callbacks[16];
	const char *names[16];
	unsigned int i;

	if (num > ARRAY_SIZE(names))
		return -EINVAL;
	for (i = 0; i < num; i++) {
		names[i] = info[i].name;
		callbacks[i] = info[i].callback;
	}
	return virtio_find_vqs(vdev, num, vqs, callbacks, names, NULL);
#endif
}

static inline struct ib_umem *unirdma_umem_get(struct ib_device *ibdev,
					       u64 start, u64 length,
					       int access)
{
#ifdef HAVE_UMEM_GET_VA
	return ib_umem_get_va(ibdev, start, length, access);
#else
	return ib_umem_get(ibdev, start, length, access);
#endif
}

#ifdef HAVE_ACCESS_FLUSH
#define UNIRDMA_ACCESS_FLUSH_GLOBAL IB_ACCESS_FLUSH_GLOBAL
#else
#define UNIRDMA_ACCESS_FLUSH_GLOBAL 0
#endif

#endif
