// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Memory regions and windows.
 *
 * An MR is a list of runs of guest memory. A long list goes to the device in
 * several commands. The device takes physical addresses, so the list consists
 * of pages, not of DMA mappings.
 *
 * Kernel users have MRs that get their pages by work requests (REG_MR), other
 * pages each time: see post.c.
 */
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <rdma/ib_umem.h>
#include <rdma/uverbs_ioctl.h>

#include "compat.h"
#include "unirdma.h"

/* Runs of one command: 64 KiB, or a page if 64 KiB cannot be allocated. */
#define UNIRDMA_RUNS		4096
#define UNIRDMA_FEW_RUNS	(PAGE_SIZE / sizeof(struct unirdma_run))
static_assert(UNIRDMA_RUNS <= UNIRDMA_MAX_MR_RUNS);

/* The runs of the next command. */
struct unirdma_runs {
	struct unirdma_run *runs;
	size_t room;
	size_t num;
	u64 length;		/* of all runs */
};

static int unirdma_runs_alloc(struct unirdma_runs *r, size_t most)
{
	r->num = 0;
	r->length = 0;
	r->room = min_t(size_t, most, UNIRDMA_RUNS);
	r->runs = kmalloc_array(r->room, sizeof(*r->runs),
				GFP_KERNEL | __GFP_NOWARN | __GFP_NORETRY);
	if (r->runs)
		return 0;
	r->room = min_t(size_t, r->room, UNIRDMA_FEW_RUNS);
	r->runs = kmalloc_array(r->room, sizeof(*r->runs), GFP_KERNEL);
	return r->runs ? 0 : -ENOMEM;
}

/* Returns false, and adds nothing, if there is no room. */
static bool unirdma_runs_add(struct unirdma_runs *r, u64 addr, u64 length)
{
	struct unirdma_run *last = r->num ? &r->runs[r->num - 1] : NULL;

	if (last && le64_to_cpu(last->addr) + le64_to_cpu(last->length) ==
		    addr) {
		le64_add_cpu(&last->length, length);
	} else {
		if (r->num == r->room)
			return false;
		r->runs[r->num].addr = cpu_to_le64(addr);
		r->runs[r->num].length = cpu_to_le64(length);
		r->num++;
	}
	r->length += length;
	return true;
}

/* Creates the MR from the runs or, if it exists, extends it. */
static int unirdma_runs_send(struct unirdma_dev *dev, struct unirdma_mr *mr,
			     struct unirdma_req_reg_mr_runs *reg,
			     struct unirdma_runs *r, bool *exists)
{
	struct unirdma_req_extend_mr extend = {};
	struct unirdma_rsp_mr rsp;
	int err;

	if (*exists) {
		extend.mrn = cpu_to_le32(mr->mrn);
		extend.num_runs = cpu_to_le32(r->num);
		extend.runs_addr = cpu_to_le64(virt_to_phys(r->runs));
		extend.length = cpu_to_le64(r->length);
		err = unirdma_cmd(dev, UNIRDMA_EXTEND_MR, &extend,
				  sizeof(extend), NULL, 0);
	} else {
		reg->num_runs = cpu_to_le32(r->num);
		reg->runs_addr = cpu_to_le64(virt_to_phys(r->runs));
		reg->length = cpu_to_le64(r->length);
		err = unirdma_cmd(dev, UNIRDMA_REG_MR_RUNS, reg, sizeof(*reg),
				  &rsp, sizeof(rsp));
		if (err)
			return err;
		*exists = true;
		mr->mrn = le32_to_cpu(rsp.mrn);
		mr->ibmr.lkey = le32_to_cpu(rsp.lkey);
		mr->ibmr.rkey = le32_to_cpu(rsp.rkey);
	}
	r->num = 0;
	r->length = 0;
	return err;
}

static int unirdma_reg_umem(struct unirdma_dev *dev, struct unirdma_mr *mr,
			    struct unirdma_req_reg_mr_runs *reg)
{
	struct ib_umem *umem = mr->umem;
	u64 skip = ib_umem_offset(umem), left = umem->length, addr, length;
	struct unirdma_runs runs;
	struct scatterlist *sg;
	bool exists = false;
	int err, i;

	err = unirdma_runs_alloc(&runs, umem->sgt_append.sgt.orig_nents);
	if (err)
		return err;

	for_each_sgtable_sg(&umem->sgt_append.sgt, sg, i) {
		addr = sg_phys(sg) + skip;
		length = min_t(u64, sg->length - skip, left);
		if (!length)
			break;
		skip = 0;
		left -= length;
		if (unirdma_runs_add(&runs, addr, length))
			continue;
		err = unirdma_runs_send(dev, mr, reg, &runs, &exists);
		if (err)
			goto out;
		unirdma_runs_add(&runs, addr, length);
	}
	err = left ? -EFAULT :
		     unirdma_runs_send(dev, mr, reg, &runs, &exists);
out:
	if (err && exists)
		unirdma_cmd_undo(dev, UNIRDMA_DEREG_MR, mr->mrn);
	kfree(runs.runs);
	return err;
}

static void unirdma_mr_free(struct unirdma_mr *mr)
{
	ib_umem_release(mr->umem);
	kfree(mr->pages);
	kfree(mr);
}

/* The device has no MR for it any more, or is lost. */
static void unirdma_mr_drop(struct unirdma_dev *dev, struct unirdma_mr *mr)
{
	if (unirdma_is_lost(dev))
		llist_add(&mr->kept, &dev->kept_mrs);
	else
		unirdma_mr_free(mr);
}

/* Called after the device was reset. */
void unirdma_free_kept_mrs(struct unirdma_dev *dev)
{
	struct unirdma_mr *mr, *next;

	llist_for_each_entry_safe(mr, next, llist_del_all(&dev->kept_mrs), kept)
		unirdma_mr_free(mr);
}

/* Pins a range of the process and makes an MR for it. */
static struct unirdma_mr *unirdma_make_mr(struct ib_pd *ibpd, u64 start,
					  u64 length, u64 virt_addr, int access)
{
	/* The other flags are hints, which the device does not need. */
	const int known = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE |
			  IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_ATOMIC |
			  IB_ACCESS_MW_BIND | UNIRDMA_ACCESS_FLUSH_GLOBAL;
	const int hints = IB_ACCESS_HUGETLB | IB_ACCESS_OPTIONAL;
	struct unirdma_dev *dev = to_unirdma_dev(ibpd->device);
	struct unirdma_req_reg_mr_runs reg = {
		.pdn = cpu_to_le32(to_unirdma_pd(ibpd)->pdn),
		.access_flags = cpu_to_le32(access & known),
		.virt_addr = cpu_to_le64(virt_addr),
	};
	struct unirdma_mr *mr;
	int err;

	if (access & ~(known | hints))
		return ERR_PTR(-EOPNOTSUPP);
	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->access = access;
	mr->umem = unirdma_umem_get(ibpd->device, start, length, access);
	if (IS_ERR(mr->umem)) {
		err = PTR_ERR(mr->umem);
		kfree(mr);
		return ERR_PTR(err);
	}
	err = unirdma_reg_umem(dev, mr, &reg);
	if (err) {
		unirdma_mr_drop(dev, mr);
		return ERR_PTR(err);
	}
	return mr;
}

static struct ib_mr *unirdma_reg_user_mr(struct ib_pd *ibpd, u64 start,
					 u64 length, u64 virt_addr,
					 int access, struct ib_udata *udata)
{
	struct unirdma_mr *mr;
	int err;

	err = unirdma_check_udata(udata, 0);
	if (err)
		return ERR_PTR(err);
	mr = unirdma_make_mr(ibpd, start, length, virt_addr, access);
	return IS_ERR(mr) ? ERR_CAST(mr) : &mr->ibmr;
}

/*
 * Makes another MR with the new properties, and exchanges the two in the
 * device: a failure changes nothing, and the keys stay.
 */
static struct ib_mr *unirdma_rereg_user_mr(struct ib_mr *ibmr, int flags,
					   u64 start, u64 length, u64 virt_addr,
					   int access, struct ib_pd *ibpd,
					   struct ib_udata *udata)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibmr->device);
	struct unirdma_mr *mr = to_unirdma_mr(ibmr), *by;
	struct unirdma_req_rereg_mr req;
	int err;

	err = unirdma_check_udata(udata, 0);
	if (err)
		return ERR_PTR(err);
	if (flags & ~IB_MR_REREG_SUPPORTED)
		return ERR_PTR(-EOPNOTSUPP);
	if (!(flags & IB_MR_REREG_TRANS)) {
		start = mr->umem->address;
		length = mr->umem->length;
		virt_addr = ibmr->iova;
	}
	if (!(flags & IB_MR_REREG_ACCESS))
		access = mr->access;
	if (!(flags & IB_MR_REREG_PD))
		ibpd = ibmr->pd;

	by = unirdma_make_mr(ibpd, start, length, virt_addr, access);
	if (IS_ERR(by))
		return ERR_CAST(by);
	req.mrn = cpu_to_le32(mr->mrn);
	req.by = cpu_to_le32(by->mrn);
	err = unirdma_cmd(dev, UNIRDMA_REREG_MR, &req, sizeof(req), NULL, 0);
	if (err) {
		unirdma_cmd_undo(dev, UNIRDMA_DEREG_MR, by->mrn);
	} else {
		swap(mr->umem, by->umem);
		mr->access = access;
	}
	/* Also drops the memory that is not used. */
	unirdma_mr_drop(dev, by);
	return ERR_PTR(err);
}

/*
 * An MR of the guest's memory by physical addresses, for kernel users, whose
 * addresses are translated when they post. Nobody translates addresses that a
 * peer names, so no peer gets such a key.
 */
static struct ib_mr *unirdma_get_dma_mr(struct ib_pd *ibpd, int access)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibpd->device);
	struct unirdma_req_get_dma_mr req = {
		.pdn = cpu_to_le32(to_unirdma_pd(ibpd)->pdn),
		.access_flags = cpu_to_le32(access),
	};
	struct unirdma_rsp_mr rsp;
	struct unirdma_mr *mr;
	int err;

	if (access & ~IB_ACCESS_LOCAL_WRITE)
		return ERR_PTR(-EOPNOTSUPP);
	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	err = unirdma_cmd(dev, UNIRDMA_GET_DMA_MR, &req, sizeof(req), &rsp,
			  sizeof(rsp));
	if (err) {
		kfree(mr);
		return ERR_PTR(err);
	}
	mr->mrn = le32_to_cpu(rsp.mrn);
	mr->ibmr.lkey = le32_to_cpu(rsp.lkey);
	mr->ibmr.rkey = le32_to_cpu(rsp.rkey);
	return &mr->ibmr;
}

static struct ib_mr *unirdma_alloc_mr(struct ib_pd *ibpd,
				      enum ib_mr_type type, u32 max_num_sg)
{
	struct unirdma_dev *dev = to_unirdma_dev(ibpd->device);
	struct unirdma_req_create_mr req = {
		.pdn = cpu_to_le32(to_unirdma_pd(ibpd)->pdn),
		.access_flags = cpu_to_le32(IB_ACCESS_LOCAL_WRITE |
					    IB_ACCESS_REMOTE_WRITE |
					    IB_ACCESS_REMOTE_READ |
					    IB_ACCESS_REMOTE_ATOMIC),
		.max_num_sg = cpu_to_le32(max_num_sg),
	};
	struct unirdma_rsp_mr rsp;
	struct unirdma_mr *mr;
	int err;

	if (type != IB_MR_TYPE_MEM_REG || !dev->has_fast_reg)
		return ERR_PTR(-EOPNOTSUPP);
	if (!max_num_sg || max_num_sg > le32_to_cpu(dev->attr.max_fast_reg_pages))
		return ERR_PTR(-EINVAL);
	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	/* The device reads the list, so it must be contiguous. */
	mr->pages = kcalloc(max_num_sg, sizeof(*mr->pages), GFP_KERNEL);
	mr->max_pages = max_num_sg;
	err = mr->pages ? unirdma_cmd(dev, UNIRDMA_CREATE_MR, &req, sizeof(req),
				      &rsp, sizeof(rsp)) :
			  -ENOMEM;
	if (err) {
		unirdma_mr_free(mr);
		return ERR_PTR(err);
	}
	mr->mrn = le32_to_cpu(rsp.mrn);
	mr->ibmr.lkey = le32_to_cpu(rsp.lkey);
	mr->ibmr.rkey = le32_to_cpu(rsp.rkey);
	return &mr->ibmr;
}

/* @addr is a DMA address of a user of this device: see post.c. */
static int unirdma_set_page(struct ib_mr *ibmr, u64 addr)
{
	struct unirdma_mr *mr = to_unirdma_mr(ibmr);
	void *page = (void *)(uintptr_t)addr;

	if (mr->num_pages == mr->max_pages)
		return -ENOMEM;
	if (!virt_addr_valid(page))
		return -EFAULT;
	mr->pages[mr->num_pages++] = cpu_to_le64(virt_to_phys(page));
	return 0;
}

static int unirdma_map_mr_sg(struct ib_mr *ibmr, struct scatterlist *sg,
			     int sg_nents, unsigned int *sg_offset)
{
	struct unirdma_mr *mr = to_unirdma_mr(ibmr);

	mr->num_pages = 0;
	return ib_sg_to_pages(ibmr, sg, sg_nents, sg_offset, unirdma_set_page);
}

static int unirdma_dereg_mr(struct ib_mr *ibmr, struct ib_udata *udata)
{
	struct unirdma_mr *mr = to_unirdma_mr(ibmr);
	struct unirdma_dev *dev = to_unirdma_dev(ibmr->device);
	int err;

	err = unirdma_cmd_destroy(dev, UNIRDMA_DEREG_MR, mr->mrn);
	if (!err)
		unirdma_mr_drop(dev, mr);
	return err;
}

static int unirdma_alloc_mw(struct ib_mw *ibmw, struct ib_udata *udata)
{
	struct unirdma_req_alloc_mw req = {
		.pdn = cpu_to_le32(to_unirdma_pd(ibmw->pd)->pdn),
		.mw_type = cpu_to_le32(ibmw->type),
	};
	struct unirdma_rsp_mr rsp;
	int err;

	err = unirdma_check_udata(udata, 0);
	if (err)
		return err;
	err = unirdma_cmd(to_unirdma_dev(ibmw->device), UNIRDMA_ALLOC_MW, &req,
			  sizeof(req), &rsp, sizeof(rsp));
	if (err)
		return err;
	to_unirdma_mw(ibmw)->mrn = le32_to_cpu(rsp.mrn);
	ibmw->rkey = le32_to_cpu(rsp.rkey);
	return 0;
}

static int unirdma_dealloc_mw(struct ib_mw *ibmw)
{
	return unirdma_cmd_destroy(to_unirdma_dev(ibmw->device),
				   UNIRDMA_DEALLOC_MW,
				   to_unirdma_mw(ibmw)->mrn);
}

#ifdef HAVE_REG_MR_DMAH
static struct ib_mr *unirdma_reg_user_mr_dmah(struct ib_pd *ibpd, u64 start,
					      u64 length, u64 virt_addr,
					      int access, struct ib_dmah *dmah,
					      struct ib_udata *udata)
{
	if (dmah)
		return ERR_PTR(-EOPNOTSUPP);
	return unirdma_reg_user_mr(ibpd, start, length, virt_addr, access,
				   udata);
}
#endif

static const struct ib_device_ops unirdma_mr_ops = {
#ifdef HAVE_REG_MR_DMAH
	.reg_user_mr = unirdma_reg_user_mr_dmah,
#else
	.reg_user_mr = unirdma_reg_user_mr,
#endif
	.rereg_user_mr = unirdma_rereg_user_mr,
	.get_dma_mr = unirdma_get_dma_mr,
	.alloc_mr = unirdma_alloc_mr,
	.map_mr_sg = unirdma_map_mr_sg,
	.dereg_mr = unirdma_dereg_mr,
	.alloc_mw = unirdma_alloc_mw,
	.dealloc_mw = unirdma_dealloc_mw,

	INIT_RDMA_OBJ_SIZE(ib_mw, unirdma_mw, ibmw),
};

void unirdma_set_mr_ops(struct ib_device *ibdev)
{
	ib_set_device_ops(ibdev, &unirdma_mr_ops);
}
