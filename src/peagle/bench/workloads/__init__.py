"""What a backend is asked.

workload    a task (one conversation) and a workload, which is a named list of them
sources     names, files, dataset ids and `synthetic:IN,OUT` -> a workload
offline     the prompts of workload `offline`, which ship with the package
prompter    tasks -> messages, text or token ids, by one model's tokenizer and chat template
"""
