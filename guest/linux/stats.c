// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The vRNIC's counters and details of the driver's objects, for rdma(8). */
#include <net/netlink.h>
#include <rdma/rdma_netlink.h>
#include <rdma/restrack.h>

#include "unirdma.h"

/* In the order of QUERY_COUNTERS. */
static const struct rdma_stat_desc unirdma_counters[] = {
	{ .name = "sent_wrs" },
	{ .name = "sent_bytes" },
	{ .name = "received_wrs" },
	{ .name = "received_bytes" },
	{ .name = "rnr_waits" },
	{ .name = "timeouts" },
	{ .name = "errors" },
	{ .name = "dropped" },
	{ .name = "qkey_violations" },
	{ .name = "sent_pkts" },
	{ .name = "send_err" },
	{ .name = "link_downed" },
	{ .name = "rcvd_pkts" },
	{ .name = "retransmitted_pkts" },
	{ .name = "duplicate_request" },
	{ .name = "out_of_seq_request" },
	{ .name = "ack_deferred" },
	{ .name = "send_rnr_err" },
	{ .name = "rcvd_rnr_err" },
	{ .name = "rcvd_seq_err" },
	{ .name = "implied_nak" },
	{ .name = "completer_retry_err" },
	{ .name = "rdma_sends" },
	{ .name = "rdma_recvs" },
	{ .name = "np_ecn_marked_roce_packets" },
	{ .name = "np_cnp_sent" },
	{ .name = "rp_cnp_handled" },
	{ .name = "retry_exceeded_err" },
	{ .name = "retry_rnr_exceeded_err" },
};

static_assert(ARRAY_SIZE(unirdma_counters) == UNIRDMA_NUM_COUNTERS);

static struct rdma_hw_stats *unirdma_alloc_hw_port_stats(struct ib_device *ibdev,
							 u32 port_num)
{
	return rdma_alloc_hw_stats_struct(unirdma_counters,
					  ARRAY_SIZE(unirdma_counters),
					  RDMA_HW_STATS_DEFAULT_LIFESPAN);
}

/* One command returns all of them. */
static int unirdma_get_hw_stats(struct ib_device *ibdev,
				struct rdma_hw_stats *stats, u32 port_num,
				int index)
{
	struct unirdma_rsp_query_counters rsp;
	int err, i;

	if (!port_num)
		return -EINVAL;
	err = unirdma_cmd(to_unirdma_dev(ibdev), UNIRDMA_QUERY_COUNTERS, NULL,
			  0, &rsp, sizeof(rsp));
	if (err)
		return err;
	for (i = 0; i < UNIRDMA_NUM_COUNTERS; i++)
		stats->value[i] = le64_to_cpu(rsp.counters[i]);
	return UNIRDMA_NUM_COUNTERS;
}

/* A number and its name in the driver's part of a message. */
struct unirdma_detail {
	const char *name;
	u32 value;
};

static int unirdma_fill_res(struct sk_buff *msg,
			    const struct unirdma_detail *details, size_t num)
{
	struct nlattr *nest = nla_nest_start(msg, RDMA_NLDEV_ATTR_DRIVER);
	size_t i;

	if (!nest)
		return -EMSGSIZE;
	for (i = 0; i < num; i++) {
		if (rdma_nl_put_driver_u32(msg, details[i].name,
					   details[i].value)) {
			nla_nest_cancel(msg, nest);
			return -EMSGSIZE;
		}
	}
	nla_nest_end(msg, nest);
	return 0;
}

static int unirdma_fill_res_cq_entry(struct sk_buff *msg, struct ib_cq *ibcq)
{
	const struct unirdma_detail details[] = {
		{ "cqn", to_unirdma_cq(ibcq)->cqn },
	};

	return unirdma_fill_res(msg, details, ARRAY_SIZE(details));
}

static int unirdma_fill_res_qp_entry(struct sk_buff *msg, struct ib_qp *ibqp)
{
	struct unirdma_qp *qp = to_unirdma_qp(ibqp);
	const struct unirdma_detail details[] = {
		{ "device_qpn", qp->qpn },
		{ "db_slot", qp->db_slot },
		{ "max_send_wr", qp->cap.max_send_wr },
		{ "max_recv_wr", qp->cap.max_recv_wr },
	};

	return unirdma_fill_res(msg, details, ARRAY_SIZE(details));
}

static int unirdma_fill_res_mr_entry(struct sk_buff *msg, struct ib_mr *ibmr)
{
	const struct unirdma_detail details[] = {
		{ "mrn", to_unirdma_mr(ibmr)->mrn },
	};

	return unirdma_fill_res(msg, details, ARRAY_SIZE(details));
}

static const struct ib_device_ops unirdma_stats_ops = {
	.alloc_hw_port_stats = unirdma_alloc_hw_port_stats,
	.get_hw_stats = unirdma_get_hw_stats,
	.fill_res_cq_entry = unirdma_fill_res_cq_entry,
	.fill_res_qp_entry = unirdma_fill_res_qp_entry,
	.fill_res_mr_entry = unirdma_fill_res_mr_entry,
};

void unirdma_set_stats_ops(struct ib_device *ibdev)
{
	ib_set_device_ops(ibdev, &unirdma_stats_ops);
}
