"""Where and how we run: device, the CPU stand-in for CUDA, process groups, seeds."""
