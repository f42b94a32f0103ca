// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Verbs of the device, its port, processes, protection domains and AHs. */
#include <linux/module.h>
#include <linux/uaccess.h>
#include <rdma/ib_mad.h>
#include <rdma/uverbs_ioctl.h>

#include "unirdma.h"

#define UNIRDMA_CLOCK_KHZ 1000000	/* timestamps are nanoseconds */
#define UNIRDMA_MAX_PKEYS 16	/* the ib core asks for each */

/*
 * Requests of the provider have no data of their own. A later provider that
 * sends data means something that this driver does not know. There must be room
 * for the answer. Kernel users have no provider.
 */
int unirdma_check_udata(struct ib_udata *udata, size_t answer_len)
{
	if (!udata)
		return 0;
	if (udata->inlen && !ib_is_udata_cleared(udata, 0, udata->inlen))
		return -EOPNOTSUPP;
	return udata->outlen < answer_len ? -EINVAL : 0;
}

int unirdma_answer(struct ib_udata *udata, const void *answer, size_t len)
{
	if (copy_to_user(udata->outbuf, answer, len))
		return -EFAULT;
	if (udata->outlen > len &&
	    clear_user(udata->outbuf + len, udata->outlen - len))
		return -EFAULT;
	return 0;
}

/* The ib core's limits are int. */
static int unirdma_limit(__le32 limit)
{
	return min_t(u32, le32_to_cpu(limit), INT_MAX);
}

/* "1.2.3" as the number that verbs use. */
static u64 unirdma_fw_ver(const struct unirdma_rsp_query_device *a)
{
	unsigned int major = 0, minor = 0, patch = 0;
	char text[sizeof(a->fw_ver) + 1] = {};

	memcpy(text, a->fw_ver, sizeof(a->fw_ver));
	/* Missing numbers stay 0. */
	if (sscanf(text, "%u.%u.%u", &major, &minor, &patch) < 1)
		return 0;
	return (u64)major << 32 | (u64)(u16)minor << 16 | (u16)patch;
}

/* Answers a process that asks for the device's clock. */
static int unirdma_tell_time(struct unirdma_dev *dev, struct ib_udata *udata)
{
	struct unirdma_query_device_resp answer = {};
	struct unirdma_rsp_query_clock rsp;
	int err;

	err = unirdma_check_udata(udata, sizeof(answer));
	if (err)
		return err;
	err = unirdma_cmd(dev, UNIRDMA_QUERY_CLOCK, NULL, 0, &rsp, sizeof(rsp));
	if (err)
		return err;
	answer.clock_ns = le64_to_cpu(rsp.now_ns);
	return unirdma_answer(udata, &answer, sizeof(answer));
}

static int unirdma_query_device(struct ib_device *ibdev,
				struct ib_device_attr *to,
				struct ib_udata *udata)
{
	/* Capabilities that this driver does not support. */
	const u64 without = IB_DEVICE_RESIZE_MAX_WR;
	struct unirdma_dev *dev = to_unirdma_dev(ibdev);
	const struct unirdma_rsp_query_device *a = &dev->attr;
	const struct unirdma_limits *l = &a->limits;

	memset(to, 0, sizeof(*to));
	to->fw_ver = unirdma_fw_ver(a);
	to->sys_image_guid = cpu_to_be64(le64_to_cpu(l->sys_image_guid));
	to->max_mr_size = le64_to_cpu(l->max_mr_size);
	to->page_size_cap = le64_to_cpu(l->page_size_cap);
	to->vendor_id = le32_to_cpu(l->vendor_id);
	to->vendor_part_id = le32_to_cpu(l->vendor_part_id);
	to->hw_ver = le32_to_cpu(l->hw_ver);
	to->device_cap_flags = le64_to_cpu(l->device_cap_flags) & ~without;
	if (dev->has_fast_reg)
		to->max_fast_reg_page_list_len =
			unirdma_limit(a->max_fast_reg_pages);
	else
		to->device_cap_flags &= ~IB_DEVICE_MEM_MGT_EXTENSIONS;
	to->max_qp = unirdma_limit(l->max_qp);
	to->max_qp_wr = unirdma_limit(l->max_qp_wr);
	to->max_send_sge = unirdma_limit(l->max_sge);
	to->max_recv_sge = unirdma_limit(l->max_sge);
	to->max_sge_rd = unirdma_limit(a->max_sge_rd);
	to->max_cq = unirdma_limit(l->max_cq);
	to->max_cqe = unirdma_limit(l->max_cqe);
	to->max_mr = unirdma_limit(l->max_mr);
	to->max_mw = unirdma_limit(a->max_mw);
	to->max_pd = unirdma_limit(l->max_pd);
	to->max_qp_rd_atom = unirdma_limit(l->max_qp_rd_atom);
	to->max_res_rd_atom = unirdma_limit(a->max_res_rd_atom);
	to->max_qp_init_rd_atom = unirdma_limit(a->max_qp_init_rd_atom);
	to->atomic_cap = min_t(u8, l->atomic_cap, IB_ATOMIC_GLOB);
	to->max_mcast_grp = unirdma_limit(l->max_mcast_grp);
	to->max_mcast_qp_attach = unirdma_limit(l->max_mcast_qp_attach);
	to->max_total_mcast_qp_attach =
		unirdma_limit(a->max_total_mcast_qp_attach);
	to->max_ah = unirdma_limit(l->max_ah);
	to->max_srq = unirdma_limit(l->max_srq);
	to->max_srq_wr = unirdma_limit(a->max_srq_wr);
	to->max_srq_sge = unirdma_limit(a->max_srq_sge);
	to->max_pkeys = le16_to_cpu(l->max_pkeys);
	to->local_ca_ack_delay = l->local_ca_ack_delay;
	to->cq_caps.max_cq_moderation_count = le16_to_cpu(a->max_cq_count);
	to->cq_caps.max_cq_moderation_period = le16_to_cpu(a->max_cq_period_us);
	to->timestamp_mask = U64_MAX;
	to->hca_core_clock = UNIRDMA_CLOCK_KHZ;
	return udata && udata->outlen ? unirdma_tell_time(dev, udata) : 0;
}

static void unirdma_get_fw_str(struct ib_device *ibdev, char *str)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibdev);

	snprintf(str, IB_FW_VERSION_NAME_MAX, "%.*s",
		 (int)sizeof(dev->attr.fw_ver), dev->attr.fw_ver);
}

/* Asks the device or, if it is lost, returns its last answer. */
int unirdma_read_port(struct unirdma_dev *dev,
		      struct unirdma_rsp_query_port *port)
{
	struct unirdma_req_query_port req = {
		.port = cpu_to_le32(UNIRDMA_PORT),
	};
	int err;

	err = unirdma_cmd(dev, UNIRDMA_QUERY_PORT, &req, sizeof(req), port,
			  sizeof(*port));
	spin_lock_irq(&dev->port_lock);
	if (!err) {
		dev->port = *port;
	} else if (test_bit(UNIRDMA_REGISTERED, &dev->flags) &&
		   unirdma_is_lost(dev)) {
		*port = dev->port;
		port->state = IB_PORT_DOWN;
		port->phys_state = IB_PORT_PHYS_STATE_DISABLED;
		err = 0;
	}
	spin_unlock_irq(&dev->port_lock);
	return err;
}

static int unirdma_query_port(struct ib_device *ibdev, u32 port_num,
			      struct ib_port_attr *to)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibdev);
	struct unirdma_rsp_query_port port;
	int err;

	err = unirdma_read_port(dev, &port);
	if (err)
		return err;
	to->state = port.state;
	to->phys_state = port.phys_state;
	to->max_mtu = port.max_mtu;
	to->active_mtu = port.active_mtu;
	to->phys_mtu = le32_to_cpu(port.phys_mtu);
	to->gid_tbl_len = dev->gid_tbl_len;
	to->ip_gids = true;
	to->port_cap_flags = le32_to_cpu(port.port_cap_flags);
	to->max_msg_sz = le32_to_cpu(port.max_msg_sz);
	to->bad_pkey_cntr = le32_to_cpu(port.bad_pkey_cntr);
	to->qkey_viol_cntr = le32_to_cpu(port.qkey_viol_cntr);
	to->pkey_tbl_len = clamp_t(u16, le16_to_cpu(port.pkey_tbl_len), 1,
				   UNIRDMA_MAX_PKEYS);
	to->active_speed = le16_to_cpu(port.active_speed);
	to->active_width = port.active_width;
	return 0;
}

static int unirdma_get_port_immutable(struct ib_device *ibdev, u32 port_num,
				      struct ib_port_immutable *to)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibdev);
	struct ib_port_attr attr = {};
	int err;

	err = ib_query_port(ibdev, port_num, &attr);
	if (err)
		return err;
	to->pkey_tbl_len = attr.pkey_tbl_len;
	to->gid_tbl_len = attr.gid_tbl_len;
	/* MADs, and so the CM, need a QP for the general services. */
	to->core_cap_flags = RDMA_CORE_CAP_PROT_ROCE_UDP_ENCAP |
			     RDMA_CORE_CAP_ETH_AH;
	if (dev->has_gsi) {
		to->core_cap_flags = RDMA_CORE_PORT_IBA_ROCE_UDP_ENCAP;
		to->max_mad_size = IB_MGMT_MAD_SIZE;
	}
	return 0;
}

static enum rdma_link_layer unirdma_get_link_layer(struct ib_device *ibdev,
						   u32 port_num)
{
	return IB_LINK_LAYER_ETHERNET;
}

static int unirdma_query_pkey(struct ib_device *ibdev, u32 port_num, u16 index,
			      u16 *pkey)
{
	struct unirdma_req_query_pkey req = {
		.port = cpu_to_le32(UNIRDMA_PORT),
		.index = cpu_to_le16(index),
	};
	struct unirdma_rsp_query_pkey rsp;
	int err;

	err = unirdma_cmd(to_unirdma_dev(ibdev), UNIRDMA_QUERY_PKEY, &req,
			  sizeof(req), &rsp, sizeof(rsp));
	if (!err)
		*pkey = le16_to_cpu(rsp.pkey);
	return err;
}

/*
 * The ib core keeps its own table. A GID that the vRNIC does not have is
 * refused where it is used: an error here would leave a hole in the table, and
 * be reported again at every change.
 */
static int unirdma_add_gid(const struct ib_gid_attr *attr, void **context)
{
	return 0;
}

static int unirdma_del_gid(const struct ib_gid_attr *attr, void **context)
{
	return 0;
}

static int unirdma_alloc_ucontext(struct ib_ucontext *ibuc,
				  struct ib_udata *udata)
{
	struct unirdma_ucontext *uc = to_unirdma_ucontext(ibuc);
	struct unirdma_dev *dev = to_unirdma_dev(ibuc->device);
	struct unirdma_ucontext_resp answer = {
		.max_inline = le32_to_cpu(unirdma_limits(dev)->max_inline),
	};
	struct unirdma_req_create_doorbell req;
	struct unirdma_handle rsp;
	int err;

	err = unirdma_check_udata(udata, sizeof(answer));
	if (err)
		return err;

	uc->db = unirdma_area_create(dev, ibuc, UNIRDMA_DB_SIZE);
	if (IS_ERR(uc->db))
		return PTR_ERR(uc->db);
	req.addr = cpu_to_le64(uc->db->addr);
	err = unirdma_cmd(dev, UNIRDMA_CREATE_DOORBELL, &req, sizeof(req),
			  &rsp, sizeof(rsp));
	if (err)
		goto free;
	uc->doorbell = le32_to_cpu(rsp.handle);

	answer.db_offset = unirdma_area_offset(uc->db);
	err = unirdma_answer(udata, &answer, sizeof(answer));
	if (err)
		goto destroy;
	return 0;
destroy:
	unirdma_cmd_undo(dev, UNIRDMA_DESTROY_DOORBELL, uc->doorbell);
free:
	unirdma_area_destroy(dev, uc->db);
	return err;
}

static void unirdma_dealloc_ucontext(struct ib_ucontext *ibuc)
{
	struct unirdma_ucontext *uc = to_unirdma_ucontext(ibuc);
	struct unirdma_dev *dev = to_unirdma_dev(ibuc->device);

	unirdma_cmd_undo(dev, UNIRDMA_DESTROY_DOORBELL, uc->doorbell);
	unirdma_area_destroy(dev, uc->db);
}

/*
 * Its presence lets the driver be unbound while processes have the device open.
 * Their mappings need nothing from the driver; see area.c.
 */
static void unirdma_disassociate_ucontext(struct ib_ucontext *ibuc)
{
}

static int unirdma_alloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibpd->device);
	struct unirdma_handle rsp;
	int err;

	err = unirdma_check_udata(udata, 0);
	if (err)
		return err;
	err = unirdma_cmd(dev, UNIRDMA_CREATE_PD, NULL, 0, &rsp, sizeof(rsp));
	if (!err)
		to_unirdma_pd(ibpd)->pdn = le32_to_cpu(rsp.handle);
	return err;
}

static int unirdma_dealloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	return unirdma_cmd_destroy(to_unirdma_dev(ibpd->device),
				   UNIRDMA_DESTROY_PD, to_unirdma_pd(ibpd)->pdn);
}

/*
 * The kernel's CM makes AHs where it must not sleep, so no command can be
 * issued. WQEs contain the address itself.
 */
static int unirdma_create_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *attr,
			     struct ib_udata *udata)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibah->device);

	if (!dev->has_gsi)
		return -EOPNOTSUPP;
	to_unirdma_ah(ibah)->level_and_rate =
		cpu_to_le32(rdma_ah_get_sl(attr->ah_attr) << 8 |
			    rdma_ah_get_static_rate(attr->ah_attr));
	return unirdma_fill_route(dev, &to_unirdma_ah(ibah)->route,
				  attr->ah_attr);
}

static int unirdma_create_user_ah(struct ib_ah *ibah,
				  struct rdma_ah_init_attr *attr,
				  struct ib_udata *udata)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibah->device);
	struct unirdma_create_ah_resp answer = {};
	struct unirdma_req_create_ah req = {
		.pdn = cpu_to_le32(to_unirdma_pd(ibah->pd)->pdn),
	};
	struct unirdma_handle rsp;
	int err;

	/* Commands sleep. */
	if (!(attr->flags & RDMA_CREATE_AH_SLEEPABLE))
		return -EOPNOTSUPP;
	err = unirdma_check_udata(udata, sizeof(answer));
	if (err)
		return err;
	err = unirdma_fill_ah(dev, &req.attr, attr->ah_attr);
	if (err)
		return err;
	err = unirdma_cmd(dev, UNIRDMA_CREATE_AH, &req, sizeof(req), &rsp,
			  sizeof(rsp));
	if (err)
		return err;
	to_unirdma_ah(ibah)->is_user = true;
	to_unirdma_ah(ibah)->ahn = le32_to_cpu(rsp.handle);

	answer.ah = to_unirdma_ah(ibah)->ahn;
	err = unirdma_answer(udata, &answer, sizeof(answer));
	if (err)
		unirdma_cmd_destroy(dev, UNIRDMA_DESTROY_AH, answer.ah);
	return err;
}

static int unirdma_destroy_ah(struct ib_ah *ibah, u32 flags)
{
	if (!to_unirdma_ah(ibah)->is_user)
		return 0;
	return unirdma_cmd_destroy(to_unirdma_dev(ibah->device),
				   UNIRDMA_DESTROY_AH,
				   to_unirdma_ah(ibah)->ahn);
}

static const struct ib_device_ops unirdma_device_ops = {
	.owner = THIS_MODULE,
	.driver_id = RDMA_DRIVER_UNKNOWN,
	.uverbs_abi_ver = UNIRDMA_UVERBS_ABI_VERSION,

	.query_device = unirdma_query_device,
	.get_dev_fw_str = unirdma_get_fw_str,
	.query_port = unirdma_query_port,
	.get_port_immutable = unirdma_get_port_immutable,
	.get_link_layer = unirdma_get_link_layer,
	.query_pkey = unirdma_query_pkey,
	.add_gid = unirdma_add_gid,
	.del_gid = unirdma_del_gid,

	.alloc_ucontext = unirdma_alloc_ucontext,
	.dealloc_ucontext = unirdma_dealloc_ucontext,
	.disassociate_ucontext = unirdma_disassociate_ucontext,
	.mmap = unirdma_mmap,
	.mmap_free = unirdma_mmap_free,
	.alloc_pd = unirdma_alloc_pd,
	.dealloc_pd = unirdma_dealloc_pd,
	.create_ah = unirdma_create_ah,
	.create_user_ah = unirdma_create_user_ah,
	.destroy_ah = unirdma_destroy_ah,

	INIT_RDMA_OBJ_SIZE(ib_ucontext, unirdma_ucontext, ibuc),
	INIT_RDMA_OBJ_SIZE(ib_pd, unirdma_pd, ibpd),
	INIT_RDMA_OBJ_SIZE(ib_ah, unirdma_ah, ibah),
};

void unirdma_set_device_ops(struct ib_device *ibdev)
{
	ib_set_device_ops(ibdev, &unirdma_device_ops);
}
