// SPDX-License-Identifier: GPL-2.0 OR MIT
/* ib_umem_get() has become ib_umem_get_va(). */
#include <rdma/ib_umem.h>

struct ib_umem *probe(struct ib_device *ibdev);
struct ib_umem *probe(struct ib_device *ibdev)
{
	return ib_umem_get_va(ibdev, 0, 0, 0);
}
