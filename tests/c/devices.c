/* Prints the number of RDMA devices. With a path, the library is opened by it, else it is the one that the program was
 * linked with. As a shared library, with -shared and -DNATIVE, it is the native part of a package of another language. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef void **list(int *number);

#ifndef OPEN_ONLY
void **ibv_get_device_list(int *number);
int devices(void) { int n = 0; ibv_get_device_list(&n); return n; }
#else
static int devices(void) { return -1; }
#endif

#ifndef NATIVE
int main(int argc, char **argv)
{
	int n = 0;
	if (argc < 2) {
		n = devices();
	} else {
		void *library = strcmp(argv[1], "new") ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL)
						       : dlmopen(LM_ID_NEWLM, argv[2], RTLD_NOW);
		list *get = library ? (list *)dlsym(library, "ibv_get_device_list") : NULL;
		if (!get) {
			puts(dlerror());
			return 2;
		}
		get(&n);
	}
	printf("%d\n", n);
	return 0;
}
#endif
