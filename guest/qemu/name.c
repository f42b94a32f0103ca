// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * QEMU's generic vhost-user device refuses virtio device numbers that have no
 * name in QEMU's table, and 42 has none. Preloaded into QEMU, this gives it one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>

#define VIRTIO_ID_RDMA 42

static void __attribute__((constructor)) name_device(void)
{
	const char **names = dlsym(RTLD_DEFAULT, "virtio_device_names");

	if (names && !names[VIRTIO_ID_RDMA])
		names[VIRTIO_ID_RDMA] = "virtio-rdma";
}
