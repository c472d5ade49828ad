"""Measuring: workloads, clients that drive a backend, the grid, and the results they leave."""
