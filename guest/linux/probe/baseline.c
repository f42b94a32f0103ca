// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Must compile. If it does not, the other probes prove nothing. */
#include <linux/virtio_config.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>
#include <rdma/uverbs_ioctl.h>
