"""`peagle bench` and what reads its results.

workloads   what a backend is asked
run         from a plan to results: grid, driver, clients, figures
results     the document that a grid leaves, and its folder
analysis    gains, advice, comparison
simulate    predictions where nothing was measured
report      one HTML file with plots
"""
