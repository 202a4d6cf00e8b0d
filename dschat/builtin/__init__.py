"""The offline demo: a tiny model, data sets, an invented world and its gold scorer.

tiny_model   builtin/tiny: a random Llama of half a million weights and its tokenizer
world        the facts, phrases and questions that chat_rows and gold_scorer share
chat_rows    builtin/chat: preference rows about that world
gold_scorer  scores any answer to a question of that world by rule
arithmetic   builtin/arithmetic: sums and differences with verifiable answers, and an environment
             that allows another attempt after a wrong one
"""
