// SPDX-License-Identifier: GPL-2.0 OR MIT
/* CQs of processes have a function of their own. */
#include <rdma/ib_verbs.h>

int probe(struct ib_cq *cq, const struct ib_cq_init_attr *attr,
	  struct uverbs_attr_bundle *attrs);

const struct ib_device_ops ops = { .create_user_cq = probe };
