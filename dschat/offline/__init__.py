"""Batch generation and evaluation over local files.

flags     ``dschat generate`` and ``dschat eval``: flags, then one of the next two
generate  a data set -> its rows with answers, and their scores
evaluate  models and answer files -> metrics, intervals, paired differences
harness   tasks of lm-evaluation-harness, on dschat's models
rows      --data_path -> rows with tokenized prompts; the file of answers that a killed command
          continues
"""
