"""OTPS of what nobody has measured, from step costs and acceptance.

predict      OTPS and gain by method, K and concurrency; checked against bench results
step_costs   seconds of a step, from a table of measured times
roofline     seconds of a step, from a model's shape and a GPU's peaks (gpus.json)
acceptance   a drafter's mean acceptance length by K
"""
