"""Batch generation and evaluation over local files.

flags        `GenerateConfig`, `EvalConfig`
commands     ``dschat generate`` and ``dschat eval``: flags, then one of the next two
generate     a data set -> its rows with answers
evaluate     models and answer files -> metrics
rows         --data_path -> rows with tokenized prompts, one by one
model        --path -> configuration, tokenizer, positions
scoring      answers -> scores by reward models, functions and endpoints
answer_lines rows, answers and scores -> output lines
answer_file  output lines -> a file that a killed command continues
settings     the flags and contents that such a file depends on
progress     a bar on a terminal, else log lines
items        rows -> references and choices
entrants     a model or an answer file -> one answer per item
judge        answers -> metrics of the tasks that generate
likelihood   given answers and texts -> log-probs
tasks        answers and log-probs -> values per row
metrics      exact match, numbers, token F1
statistics   values per row -> intervals, paired differences
results      the table and the JSON file
"""
