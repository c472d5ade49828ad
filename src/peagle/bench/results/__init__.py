"""What was measured.

document    results.json: its dataclasses, written and read
store       the folder of a grid, which an interrupted grid goes on with
settings    cells by what is compared (method and K) and by where (workload and load)
intervals   medians, percentiles and confidence intervals
figures     how figures are written: digits, thousands, spreads
"""
