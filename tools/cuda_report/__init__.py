"""What the compiler made of the CUDA kernels: registers, spills, and the instructions of the hottest loops."""
