"""train.py: which steps run, on which machines, resumed or not, and supervised."""
