"""What was measured.

document    results.json: its dataclasses, written and read
store       the folder of a grid, which an interrupted grid goes on with
settings    cells by what is compared (method and K) and by where (workload and load)
intervals   percentiles and confidence intervals
"""
