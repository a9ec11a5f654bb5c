"""The verifier `code`: runs a completion as a program in the sandbox and judges what it does."""
