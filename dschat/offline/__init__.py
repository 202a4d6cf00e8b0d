"""Batch generation and evaluation over local files.

flags        ``dschat generate`` and ``dschat eval``: flags, then one of the next two
generate     a data set -> its rows with answers
evaluate     models and answer files -> metrics
harness      tasks of lm-evaluation-harness, on dschat's models
results      values per row -> intervals, paired differences, table and JSON file
rows         --data_path -> rows with tokenized prompts, one by one
scoring      answers -> scores by reward models, functions and endpoints
answer_file  rows, answers and scores -> lines of a file that a killed command continues
"""
