"""The fast dense decoder: known architectures on packed weights, by compiled kernels on a CPU."""
