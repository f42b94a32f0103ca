// SPDX-License-Identifier: GPL-2.0 OR MIT
/* resize_cq() has become resize_user_cq(). */
#include <rdma/ib_verbs.h>

int probe(struct ib_cq *cq, unsigned int cqe, struct ib_udata *udata);

const struct ib_device_ops ops = { .resize_user_cq = probe };
