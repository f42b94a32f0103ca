// SPDX-License-Identifier: GPL-2.0 OR MIT
/* MRs may grant FLUSH. */
#include <rdma/ib_verbs.h>

const int probe = IB_ACCESS_FLUSH_GLOBAL;
