/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Connects RC QPs of one process, and waits for their requests.
 */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <string.h>

#include "check.h"

/* Brings `qp` to RTS, connected to QP `peer` of the port whose GID is `gid`. */
static inline void connect_qp(struct ibv_qp *qp, uint32_t peer, union ibv_gid gid)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .max_dest_rd_atomic = 1,
		.min_rnr_timer = 12, .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 64 } } };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };

	CHECK(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	CHECK(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				       IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Writes or reads `len` bytes between two MRs, at `from` in `own` and in `peer`, and waits for the completion. */
static inline void transfer(struct ibv_qp *qp, enum ibv_wr_opcode op, struct ibv_mr *own, struct ibv_mr *peer, size_t from, uint32_t len)
{
	struct ibv_sge sge = { (uintptr_t)own->addr + from, len, own->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { (uintptr_t)peer->addr + from, peer->rkey } };
	struct ibv_send_wr *bad;
	struct ibv_wc wc;
	int n;

	CHECK(!ibv_post_send(qp, &wr, &bad));
	while (!(n = ibv_poll_cq(qp->send_cq, 1, &wc)))
		;
	errno = n == 1 ? (int)wc.status : errno;
	CHECK(n == 1 && wc.status == IBV_WC_SUCCESS);
}
