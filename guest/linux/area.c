// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Areas: rings, control blocks and doorbell pages, which the device shares with
 * one process, or with the kernel. An area is a few pieces of contiguous pages.
 * If there is more than one piece, the area gets a bus address range by
 * MAP_RUNS and, if it is the kernel's, a virtual one by vmap().
 *
 * A process's pages are mapped one by one, each mapping with a reference. So a
 * process that keeps its mapping after the object is gone reaches pages that
 * nobody else uses, and nothing has to be taken from it when the driver goes.
 */
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "unirdma.h"

static void unirdma_area_free(struct unirdma_area *area)
{
	unsigned int i;

	if (is_vmalloc_addr(area->ptr))
		vunmap(area->ptr);
	for (i = 0; i < area->num_pages; i++)
		__free_page(area->pages[i]);
	kvfree(area);
}

/* Allocates the pages, in pieces as large as possible. */
static struct unirdma_area *unirdma_area_alloc(size_t size, gfp_t gfp)
{
	const size_t num = DIV_ROUND_UP(size, PAGE_SIZE);
	size_t piece = min_t(size_t, num, MAX_ORDER_NR_PAGES);
	struct unirdma_area *area;
	size_t i;
	void *p;

	area = kvzalloc(struct_size(area, pages, num), gfp);
	if (!area)
		return NULL;

	while (area->num_pages < num) {
		piece = min(piece, num - area->num_pages);
		p = alloc_pages_exact(piece << PAGE_SHIFT, piece == 1 ?
				      gfp | __GFP_ZERO :
				      gfp | __GFP_ZERO | __GFP_NOWARN |
				      __GFP_NORETRY);
		if (!p && piece == 1) {
			unirdma_area_free(area);
			return NULL;
		}
		if (!p) {
			piece = DIV_ROUND_UP(piece, 2);
			continue;
		}
		for (i = 0; i < piece; i++)
			area->pages[area->num_pages++] =
				virt_to_page(p + (i << PAGE_SHIFT));
	}
	return area;
}

/*
 * Writes the contiguous pieces to @runs, if it has room. Returns their number.
 */
static unsigned int unirdma_area_runs(const struct unirdma_area *area,
				      struct unirdma_run *runs,
				      unsigned int room)
{
	unsigned int i, n = 0;
	u64 addr, end = 0;

	for (i = 0; i < area->num_pages; i++) {
		addr = page_to_phys(area->pages[i]);
		if (n && addr == end) {
			if (n <= room)
				le64_add_cpu(&runs[n - 1].length, PAGE_SIZE);
		} else {
			if (n < room) {
				runs[n].addr = cpu_to_le64(addr);
				runs[n].length = cpu_to_le64(PAGE_SIZE);
			}
			n++;
		}
		end = addr + PAGE_SIZE;
	}
	return n;
}

/* Gives the area a bus address. */
static int unirdma_area_map(struct unirdma_dev *dev, struct unirdma_area *area)
{
	struct unirdma_rsp_map_runs rsp;
	struct unirdma_req_map_runs req = {};
	struct unirdma_run *runs;
	unsigned int n;
	int err;

	n = unirdma_area_runs(area, NULL, 0);
	if (n == 1) {
		area->addr = page_to_phys(area->pages[0]);
		return 0;
	}
	if (n > UNIRDMA_MAX_MAP_RUNS)
		return -ENOMEM;

	runs = kcalloc(n, sizeof(*runs), GFP_KERNEL);
	if (!runs)
		return -ENOMEM;
	unirdma_area_runs(area, runs, n);
	req.runs_addr = cpu_to_le64(virt_to_phys(runs));
	req.num_runs = cpu_to_le32(n);
	req.length = cpu_to_le64(unirdma_area_size(area));
	err = unirdma_cmd(dev, UNIRDMA_MAP_RUNS, &req, sizeof(req), &rsp,
			  sizeof(rsp));
	kfree(runs);
	if (err)
		return err;
	area->addr = le64_to_cpu(rsp.addr);
	area->map = le32_to_cpu(rsp.handle);
	area->mapped = true;
	return 0;
}

static void unirdma_area_unmap(struct unirdma_dev *dev,
			       struct unirdma_area *area)
{
	/* No object uses the range, so a refusal has no consequence. */
	if (area->mapped)
		unirdma_cmd_destroy(dev, UNIRDMA_UNMAP_RUNS, area->map);
}

/* Makes the area known to the process of @ibuc, or, if NULL, to the kernel. */
static int unirdma_area_show(struct unirdma_area *area,
			     struct ib_ucontext *ibuc)
{
	if (ibuc)
		return rdma_user_mmap_entry_insert(ibuc, &area->entry,
						   unirdma_area_size(area));
	if (unirdma_area_runs(area, NULL, 0) == 1)
		area->ptr = page_address(area->pages[0]);
	else
		area->ptr = vmap(area->pages, area->num_pages, VM_MAP,
				 PAGE_KERNEL);
	return area->ptr ? 0 : -ENOMEM;
}

/* Makes a zeroed area for a process or, without @ibuc, for the kernel. */
struct unirdma_area *unirdma_area_create(struct unirdma_dev *dev,
					 struct ib_ucontext *ibuc, size_t size)
{
	struct unirdma_area *area;
	int err;

	area = unirdma_area_alloc(size, ibuc ? GFP_KERNEL_ACCOUNT : GFP_KERNEL);
	if (!area)
		return ERR_PTR(-ENOMEM);
	err = unirdma_area_map(dev, area);
	if (err)
		goto free;
	err = unirdma_area_show(area, ibuc);
	if (err)
		goto unmap;
	return area;
unmap:
	unirdma_area_unmap(dev, area);
free:
	unirdma_area_free(area);
	return ERR_PTR(err);
}

static void unirdma_area_drop(struct unirdma_dev *dev,
			      struct unirdma_area *area)
{
	if (unirdma_is_lost(dev))
		llist_add(&area->kept, &dev->kept_areas);
	else
		unirdma_area_free(area);
}

/* The device's objects that use it are gone, or the device is lost. */
void unirdma_area_destroy(struct unirdma_dev *dev, struct unirdma_area *area)
{
	unirdma_area_unmap(dev, area);
	if (unirdma_is_user_area(area))
		rdma_user_mmap_entry_remove(&area->entry);
	else
		unirdma_area_drop(dev, area);
}

/* Copies between the pages, however both areas are mapped. */
void unirdma_area_copy(struct unirdma_area *to, size_t to_offset,
		       const struct unirdma_area *from, size_t from_offset,
		       size_t length)
{
	size_t n;

	for (; length; length -= n) {
		n = min3(length, PAGE_SIZE - offset_in_page(to_offset),
			 PAGE_SIZE - offset_in_page(from_offset));
		memcpy(page_address(to->pages[to_offset >> PAGE_SHIFT]) +
		       offset_in_page(to_offset),
		       page_address(from->pages[from_offset >> PAGE_SHIFT]) +
		       offset_in_page(from_offset), n);
		to_offset += n;
		from_offset += n;
	}
}

/* Called when the last reference of the object or of an mmap is gone. */
void unirdma_mmap_free(struct rdma_user_mmap_entry *entry)
{
	struct unirdma_area *area = container_of(entry, struct unirdma_area,
						 entry);

	unirdma_area_drop(to_unirdma_dev(entry->ucontext->device), area);
}

/* Called after the device was reset. */
void unirdma_free_kept_areas(struct unirdma_dev *dev)
{
	struct unirdma_area *area, *next;

	llist_for_each_entry_safe(area, next, llist_del_all(&dev->kept_areas),
				  kept)
		unirdma_area_free(area);
}

int unirdma_mmap(struct ib_ucontext *ibuc, struct vm_area_struct *vma)
{
	struct rdma_user_mmap_entry *entry;
	struct unirdma_area *area;
	int err;

	/* Finds only areas of this process, by their whole size. */
	entry = rdma_user_mmap_entry_get(ibuc, vma);
	if (!entry)
		return -EINVAL;
	area = container_of(entry, struct unirdma_area, entry);
	err = vm_map_pages_zero(vma, area->pages, area->num_pages);
	rdma_user_mmap_entry_put(entry);
	return err;
}
