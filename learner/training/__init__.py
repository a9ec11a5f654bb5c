"""The numerical half of the learner: packing, the policy model, DeepSpeed and the training step.

Importing this package, or its `config` module, loads no torch.
"""
