"""Triton kernels. Only imported where there is a GPU (or Triton's interpreter, in tests)."""
