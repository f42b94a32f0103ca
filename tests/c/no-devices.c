/* A libibverbs that a program brings and that knows no device. A version script gives the symbol its version. */
static void *none[1];

void **ibv_get_device_list(int *number) { *number = 0; return none; }
