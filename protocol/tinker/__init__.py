"""The wire of the Tinker API as the SDK `tinker` 0.38 speaks it: JSON bodies, and protobuf where tensors travel.

The learner alone imports it: it needs the package `protobuf`, but neither a protobuf compiler nor the SDK.
"""
