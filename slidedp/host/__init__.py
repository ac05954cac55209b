"""Host side: memory, optimizer worker and its kernels."""
