"""Plain torch twins of the GPU kernels: same names, same signatures, any device."""
