"""Virtual RDMA NICs for tests: the `unirdma` program, and fixtures of pytest (`unirdma.pytest_plugin`)."""
