// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The addresses of the vRNIC, and the network interface that belongs to it.
 *
 * The virtual layer grants the vRNIC its addresses: the GID table of the
 * device. The ib core makes another table, from the addresses of the network
 * interface. The tables have in common the granted addresses that the guest has
 * configured; indices are translated by value. A GID that was not granted
 * cannot be a source.
 */
#include <linux/etherdevice.h>
#include <linux/module.h>
#include <linux/netdevice.h>
#include <linux/rtnetlink.h>
#include <net/ipv6.h>
#include <rdma/ib_cache.h>

#include "unirdma.h"

static char *netdev;
module_param(netdev, charp, 0444);
MODULE_PARM_DESC(netdev,
		 "Name of the network interface that belongs to the vRNIC (default: the virtio-net interface with its MAC address)");

int unirdma_read_gids(struct unirdma_dev *dev)
{
	struct unirdma_req_query_gid req = {
		.port = cpu_to_le32(UNIRDMA_PORT),
	};
	struct unirdma_rsp_query_gid rsp;
	u32 i;
	int err;

	for (i = 0; i < dev->gid_tbl_len; i++) {
		req.index = cpu_to_le32(i);
		err = unirdma_cmd(dev, UNIRDMA_QUERY_GID, &req, sizeof(req),
				  &rsp, sizeof(rsp));
		if (err)
			return err;
		spin_lock_irq(&dev->port_lock);
		memcpy(&dev->gids[i], rsp.gid, sizeof(rsp.gid));
		spin_unlock_irq(&dev->port_lock);
	}
	return 0;
}

/* The device's index of a GID, or -EINVAL. */
static int unirdma_gid_index(struct unirdma_dev *dev, const union ib_gid *gid)
{
	int index = -EINVAL;
	unsigned long flags;
	u32 i;

	if (rdma_is_zero_gid(gid))
		return -EINVAL;
	spin_lock_irqsave(&dev->port_lock, flags);
	for (i = 0; i < dev->gid_tbl_len && index < 0; i++)
		if (!memcmp(&dev->gids[i], gid, sizeof(*gid)))
			index = i;
	spin_unlock_irqrestore(&dev->port_lock, flags);

	if (index < 0)
		dev_warn_ratelimited(&dev->ibdev.dev,
				     "%pI6c is not an address of the vRNIC and cannot be a source\n",
				     gid->raw);
	return index;
}

/* Does not sleep. */
int unirdma_fill_route(struct unirdma_dev *dev, struct unirdma_route *to,
		       const struct rdma_ah_attr *from)
{
	const struct ib_global_route *grh;
	int index;

	if (!(rdma_ah_get_ah_flags(from) & IB_AH_GRH))
		return -EINVAL;
	grh = rdma_ah_read_grh(from);
	if (!grh->sgid_attr)
		return -EINVAL;
	index = unirdma_gid_index(dev, &grh->sgid_attr->gid);
	if (index < 0)
		return index;

	memcpy(to->dgid, grh->dgid.raw, sizeof(to->dgid));
	to->flow_label = cpu_to_le32(grh->flow_label);
	to->sgid_index = index;
	to->hop_limit = grh->hop_limit;
	to->traffic_class = grh->traffic_class;
	return 0;
}

int unirdma_fill_ah(struct unirdma_dev *dev, struct unirdma_ah_attr *to,
		    const struct rdma_ah_attr *from)
{
	int err = unirdma_fill_route(dev, &to->route, from);

	if (err)
		return err;
	to->sl = rdma_ah_get_sl(from);
	to->static_rate = rdma_ah_get_static_rate(from);
	to->port_num = UNIRDMA_PORT;
	to->is_global = 1;
	return 0;
}

/*
 * The MAC address of the vRNIC, which its link-local GID contains as a modified
 * EUI-64 (RFC 4291, appendix A).
 */
static bool unirdma_mac(struct unirdma_dev *dev, u8 *mac)
{
	struct in6_addr addr;
	bool found = false;
	const u8 *b;
	u32 i;

	spin_lock_irq(&dev->port_lock);
	for (i = 0; i < dev->gid_tbl_len && !found; i++) {
		memcpy(&addr, &dev->gids[i], sizeof(addr));
		b = addr.s6_addr;
		if (!(ipv6_addr_type(&addr) & IPV6_ADDR_LINKLOCAL) ||
		    b[11] != 0xff || b[12] != 0xfe)
			continue;
		memcpy(mac, b + 8, 3);
		memcpy(mac + 3, b + 13, 3);
		mac[0] ^= 2;
		found = true;
	}
	spin_unlock_irq(&dev->port_lock);
	return found;
}

/* Interfaces on top of a virtio-net interface may have its MAC address, too. */
static bool unirdma_is_virtio(const struct net_device *ndev)
{
	const struct device *parent = ndev->dev.parent;

	return parent && parent->bus && !strcmp(parent->bus->name, "virtio");
}

/*
 * Tells the ib core which interface belongs to the vRNIC. @rescan: the device
 * is registered, so the core has to look for the addresses of a new interface.
 */
void unirdma_netdev_pick(struct unirdma_dev *dev, bool rescan)
{
	struct net_device *ndev, *found = NULL;
	u8 mac[ETH_ALEN];
	bool have_mac;

	have_mac = unirdma_mac(dev, mac);

	rtnl_lock();
	for_each_netdev(&init_net, ndev) {
		if (ndev->reg_state != NETREG_REGISTERED)
			continue;
		if (netdev && *netdev ? !strcmp(ndev->name, netdev) :
		    have_mac && ndev->addr_len == ETH_ALEN &&
		    ether_addr_equal(ndev->dev_addr, mac) &&
		    unirdma_is_virtio(ndev)) {
			found = ndev;
			break;
		}
	}
	if (found == dev->netdev ||
	    ib_device_set_netdev(&dev->ibdev, found, UNIRDMA_PORT))
		rescan = false;
	else
		dev->netdev = found;
	rtnl_unlock();

	if (found && rescan)
		rdma_roce_rescan_device(&dev->ibdev);
}

static void unirdma_netdev_work(struct work_struct *work)
{
	struct unirdma_dev *dev = container_of(work, struct unirdma_dev,
					       netdev_work);

	if (test_bit(UNIRDMA_REGISTERED, &dev->flags))
		unirdma_netdev_pick(dev, true);
}

static int unirdma_netdev_event(struct notifier_block *nb, unsigned long event,
				void *ptr)
{
	struct unirdma_dev *dev = container_of(nb, struct unirdma_dev,
					       netdev_nb);

	switch (event) {
	case NETDEV_REGISTER:
	case NETDEV_UNREGISTER:
	case NETDEV_CHANGEADDR:
	case NETDEV_CHANGENAME:
		queue_work(dev->wq, &dev->netdev_work);
	}
	return NOTIFY_DONE;
}

void unirdma_netdev_init(struct unirdma_dev *dev)
{
	spin_lock_init(&dev->port_lock);
	INIT_WORK(&dev->netdev_work, unirdma_netdev_work);
	dev->netdev_nb.notifier_call = unirdma_netdev_event;
}
