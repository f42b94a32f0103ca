/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Opens and closes contexts of a vRNIC that has a VF, several at a time and one after the other, and checks the names
 * that it reads.
 *
 *   vf-contexts      as above
 *   vf-contexts N    open a context, register memory and close it, N times
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { ROUNDS = 4, CONTEXTS = 3, PSN = 5, BYTES = 1 << 20 };

static struct ibv_ah_attr path_to(union ibv_gid to)
{
	return (struct ibv_ah_attr){ .is_global = 1, .port_num = 1, .grh = { .dgid = to, .hop_limit = 64 } };
}

/* A QP that is connected to itself has the name of its destination that the program gave. */
static void use(struct ibv_context *ctx)
{
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_ah_attr path;
	union ibv_gid own, other;
	struct ibv_ah *ah;
	struct ibv_qp *qp;

	CHECK(pd && cq);
	qp = ibv_create_qp(pd, &init);
	CHECK(qp);
	CHECK(!ibv_query_gid(ctx, 1, 0, &own));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
				     .rq_psn = PSN, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
				     .ah_attr = path_to(own) };
	CHECK(!ibv_modify_qp(qp, &attr,
			     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	memset(&attr, 0, sizeof(attr));
	CHECK(!ibv_query_qp(qp, &attr, IBV_QP_AV | IBV_QP_STATE, &init));
	CHECK(attr.qp_state == IBV_QPS_RTR && qp->state == IBV_QPS_RTR);
	CHECK(!memcmp(&attr.ah_attr.grh.dgid, &own, sizeof(own)) && attr.ah_attr.grh.sgid_index == 0);

	path = path_to(own);
	ah = ibv_create_ah(pd, &path);
	CHECK(ah && !ibv_destroy_ah(ah));
	/* 10.9.9.9 is nobody's. */
	other = own;
	other.raw[13] = other.raw[14] = other.raw[15] = 9;
	path = path_to(other);
	CHECK(!ibv_create_ah(pd, &path) && errno == EHOSTUNREACH);

	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
}

static void open_and_close(int times)
{
	static char memory[BYTES];
	struct ibv_device **list = ibv_get_device_list(NULL);

	CHECK(list && *list);
	for (int i = 0; i < times; i++) {
		struct ibv_context *ctx = ibv_open_device(*list);
		struct ibv_pd *pd = ctx ? ibv_alloc_pd(ctx) : NULL;
		struct ibv_mr *mr = pd ? ibv_reg_mr(pd, memory, BYTES, IBV_ACCESS_LOCAL_WRITE) : NULL;

		CHECK(mr);
		CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	}
	ibv_free_device_list(list);
	printf("done\n");
}

int main(int argc, char **argv)
{
	CHECK(!ibv_fork_init());
	if (argc > 1) {
		open_and_close(atoi(argv[1]));
		return 0;
	}
	for (int round = 0; round < ROUNDS; round++) {
		struct ibv_device **list = ibv_get_device_list(NULL);
		struct ibv_context *all[CONTEXTS];
		struct ibv_device_attr attr;

		CHECK(list && *list);
		for (int i = 0; i < CONTEXTS; i++) {
			all[i] = ibv_open_device(*list);
			CHECK(all[i]);
			CHECK(!strcmp(ibv_get_device_name(all[i]->device), ibv_get_device_name(*list)));
			CHECK(ibv_get_device_guid(all[i]->device) == ibv_get_device_guid(*list));
			CHECK(!ibv_query_device(all[i], &attr));
			CHECK(attr.node_guid == ibv_get_device_guid(*list));
		}
		for (int i = 0; i < CONTEXTS; i++)
			use(all[i]);
		for (int i = 0; i < CONTEXTS; i++)
			CHECK(!ibv_close_device(all[i]));
		ibv_free_device_list(list);
	}
	printf("done\n");
	return 0;
}
