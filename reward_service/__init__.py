"""The process that turns completions into rewards: verifiers, their workers, and `POST /v1/score`.

Write a verifier with `reward_service.verifier`; name it in the configuration by its import path.
"""
