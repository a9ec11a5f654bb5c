"""Training data from files: where records come from, and what they become: examples, preference pairs, distillation.

path -> sources.read_records -> examples | preferences | distillation -> token ids and loss masks
"""
