"""Report on the compiled CUDA kernels: registers, spills, and the instructions of the hottest loops."""
