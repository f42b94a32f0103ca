// SPDX-License-Identifier: GPL-2.0 OR MIT
/* reg_user_mr() takes a DMA handle. */
#include <rdma/ib_verbs.h>

struct ib_mr *probe(struct ib_pd *pd, u64 start, u64 length, u64 virt_addr,
		    int access, struct ib_dmah *dmah, struct ib_udata *udata);

const struct ib_device_ops ops = { .reg_user_mr = probe };
