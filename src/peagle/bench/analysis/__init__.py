"""What results mean, as numbers.

gains     ratios of speeds with their intervals; what a setting gains over method none
tune      which method and K to run, what tokens cost, and the flags to use
compare   two results side by side: faster, slower or the same
series    what plots and tables show
"""
