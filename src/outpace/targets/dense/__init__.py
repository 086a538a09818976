"""The fast dense decoder: known architectures by compiled kernels on a CPU, and by CUDA graphs on a GPU."""
